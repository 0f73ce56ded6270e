"""Compile every kernel for an Ampere and a Hopper GPU; run by test_triton.py in a process of its own.

python tests/compile_triton.py          # one of each kind
python tests/compile_triton.py --all    # every storage for both GPUs: minutes

Prints what each needs, as the tools that ship with triton say: registers of a thread, bytes that it spills,
shared memory of a program. Heads of up to 128 values may not spill; where a side has 2 bits, of up to 64 (of 128 they
spill 72 to 208 bytes).
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_kvcache import spec as specs
from hf_kvcache import triton_decode

POINTERS = {"acc_out": "*fp32", "stats_out": "*fp32", "acc_in": "*fp32", "stats_in": "*fp32", "scales": "*fp32"}
POINTERS |= dict.fromkeys(("scores", "scores_out", "lse", "lse_out", "mass"), "*fp32")
READER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SHARED_MEMORY = {80: 166912, 90: 232448}  # bytes that one program may have


NUMBERS = ("scaling", "softcap", "limit", "unit", "most")
STRIDES = ("qb", "qh", "qq", "kb", "kh", "vb", "vh", "xb", "xh", "xn", "cb", "ch", "cn")


def _is_aligned(name, signature):
    """Whether a launch finds this argument to be a multiple of 16, in bytes or in elements, and tells the compiler."""
    return signature[name].startswith("*") or name in STRIDES


def build(kernel, pointers, constants, capability, warps=4):
    """Compile with integers for whatever is neither a pointer nor a constant."""
    pointers = {**POINTERS, **pointers}
    signature, values = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(index,)] = "constexpr", constants[name]
        else:
            signature[name] = pointers.get(name, "fp32" if name in NUMBERS else "i32")
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if _is_aligned(name, signature)
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    built = compile(source, GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": 3})
    assert built.metadata.shared <= SHARED_MEMORY[capability], built.metadata.shared
    registers, spilled = resources(built.asm["cubin"])
    width = constants.get("WIDTH_K", 0)
    allowed = 2**31 if width > 128 else 256 if width > 64 and constants["TOKENS"] == 4 else 0
    assert spilled <= allowed, (kernel.__name__, constants, spilled)
    print(
        f"{kernel.__name__} sm_{capability} {registers} registers, {spilled} spilled, {built.metadata.shared} shared",
        constants,
    )


def resources(cubin):
    """(registers of a thread, bytes of local memory: what it spills)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        told = subprocess.run([READER, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def build_partial(
    storage, width, rows, capability, mask="none", softcap=False, query=torch.bfloat16, ragged=False, scores=False
):
    """The first kernel as ``_launch_part`` calls it for a storage."""
    codecs = specs.storage(storage)[1:3]
    forms = [triton_decode.form_of(codec, width) for codec in codecs]
    plain = "*fp32" if query == torch.float32 else "*bf16"
    itemsize = 4 if query == torch.float32 else 2 if storage == "full" else 1
    group = max(codec.group for codec in codecs)
    tiles = triton_decode.tile_sizes(*forms, itemsize, rows, group, mask == "rows")
    pointers = {"query": plain, "mask": plain if mask == "none" else "*u8"}
    pointers |= dict.fromkeys(("starts", "sizes"), "*i64" if ragged else "*fp32")
    constants = {"TOKENS": tiles.tokens, "LINES": tiles.lines, "NEAR": tiles.near, "BLOCK_N": tiles.block_n}
    constants |= {"BLOCK_K": tiles.block_k, "BLOCK_V": tiles.block_v, "ROWS": tiles.rows}
    constants |= {"MASK": mask, "SOFTCAP": softcap, "RAGGED": ragged, "SCORES": scores}
    for side, sides, form in zip("KV", ("key", "value"), forms, strict=True):
        pointers[f"{sides}s"] = plain if form.name == "full" else "*i32"
        pointers[f"{sides}_scales"] = plain if form.name == "full" else "*bf16" if form.codes > 1 else "*fp32"
        pointers[f"{sides}_zeros"] = "*i16" if form.codes > 1 else pointers[f"{sides}_scales"]
        constants |= {f"STRIDE_{side}": form.words, f"WIDTH_{side}": width, f"PLANES_{side}": form.planes}
        constants |= {f"GROUPS_{side}": form.groups, f"SPAN_{side}": form.span, f"CODES_{side}": form.codes}
        dtype = triton_decode.FLOATS[query] if form.name == "full" or query == torch.float32 else tl.float16
        constants |= {f"FORMAT_{side}": form.name, f"DTYPE_{side}": dtype}
    build(triton_decode._partial_kernel, pointers, constants, capability, tiles.warps)


if __name__ == "__main__":
    assert not triton_decode.INTERPRETED
    build_partial("int8", 128, 4, 90)
    build_partial("fp8_e5m2", 64, 8, 80, "rows", True)
    build_partial("full", 128, 4, 90, "keys")
    build_partial("int8", 64, 4, 90, "rows", ragged=True, scores=True)
    build_partial("int4", 128, 4, 90)
    build_partial("k8v2", 32, 4, 80, "keys", scores=True)
    if "--all" in sys.argv:  # minutes
        for storage in ("int8", "fp8_e4m3", "int4", "int2", "k4v2", "k8v4", "k4v8", "int4(group=64)"):
            for capability in SHARED_MEMORY:
                build_partial(storage, 128, 4, capability)
                build_partial(storage, 64, 12, capability, "keys")
        build_partial("k4v2(group=64)", 64, 8, 80, "rows", True)
        build_partial("int4", 256, 8, 80)
        build_partial("int2(group=16)", 96, 4, 80)
        build_partial("int2(key_axis=token)", 64, 4, 90)
        build_partial("int4", 128, 128, 90)
        build_partial("int4", 128, 32, 80, query=torch.float32)
    append = {"x": "*bf16", "codes": "*i8"}
    for name in ("int8", "fp8_e4m3"):
        shape = {"WIDTH": 128, "BLOCK_D": 128, "BLOCK_R": 8, "FORMAT": name, "RECIPROCAL": True}
        build(triton_decode._append_kernel, append, shape, 90)
    merge = {"WIDTH": 80, "BLOCK_D": 128, "BLOCK_S": 32, "AUX": True}
    for out, turn, half, lse, capability in (
        ("*bf16", False, False, True, 90), ("*fp16", False, True, False, 90), ("*fp32", True, False, True, 80),
    ):  # fmt: skip
        flags = {"TURN": turn, "HALF": half, "LSE": lse}
        build(triton_decode._merge_kernel, {"out": out, "s_aux": "*fp32"}, {**merge, **flags}, capability)
    for rows, capability in ((16, 90), (128, 80)):
        build(triton_decode._mass_kernel, {}, {"ROWS": rows, "BLOCK_N": 4096 // rows}, capability)
    sys.exit(0)
