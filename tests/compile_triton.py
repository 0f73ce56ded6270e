"""Compile every kernel for an Ampere and a Hopper GPU; run by test_triton.py in a process of its own."""

import sys

import triton.language as tl
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_kvcache import triton_decode

POINTERS = {"acc_out": "*fp32", "stats_out": "*fp32", "acc_in": "*fp32", "stats_in": "*fp32", "scales": "*fp32"}
SHARED_MEMORY = {80: 166912, 90: 232448}  # bytes that one program may have


def build(kernel, pointers, constants, capability, warps=4):
    """Compile with integers for whatever is neither a pointer nor a constant."""
    pointers = {**POINTERS, **pointers}
    signature, values = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(index,)] = "constexpr", constants[name]
        else:
            signature[name] = pointers.get(name, "fp32" if name in ("scaling", "softcap", "limit") else "i32")
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    built = compile(source, GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": 3})
    assert built.metadata.shared <= SHARED_MEMORY[capability], built.metadata.shared
    print(kernel.__name__, constants, built.metadata.shared)


def build_partial(formats, width, rows, capability, mask, softcap):
    """The first kernel for a bfloat16 model with its batches of one token."""
    planes = [1 if name == "full" else 4 for name in formats]
    itemsize = 2 if "full" in formats else 1
    tiles = triton_decode.tile_sizes(width, width, *planes, itemsize, rows)
    plain = ["*bf16" if name == "full" else "*i32" for name in formats]
    scales = ["*bf16" if name == "full" else "*fp32" for name in formats]
    pointers = dict(zip(("keys", "values", "key_scales", "value_scales"), plain + scales, strict=True))
    pointers |= {"query": "*bf16", "mask": "*bf16" if mask == "none" else "*u8"}
    constants = {"WIDTH_K": width, "WIDTH_V": width, "PLANES_K": planes[0], "PLANES_V": planes[1]}
    constants |= {"BLOCK_K": tiles.block_k, "BLOCK_V": tiles.block_v, "BLOCK_N": tiles.block_n, "ROWS": tiles.rows}
    constants |= {"FORMAT_K": formats[0], "FORMAT_V": formats[1], "MASK": mask, "SOFTCAP": softcap}
    for side, name in zip("KV", formats, strict=True):
        constants[f"DTYPE_{side}"] = tl.bfloat16 if name == "full" else tl.float16
    build(triton_decode._partial_kernel, pointers, constants, capability, tiles.warps)


if __name__ == "__main__":
    assert not triton_decode.INTERPRETED
    build_partial(("int8", "int8"), 128, 4, 90, "none", False)
    build_partial(("fp8_e4m3", "fp8_e5m2"), 64, 8, 80, "rows", True)
    build_partial(("full", "full"), 128, 4, 90, "keys", False)
    append = {"x": "*bf16", "codes": "*i8"}
    for name in ("int8", "fp8_e4m3"):
        shape = {"WIDTH": 128, "BLOCK_D": 128, "BLOCK_R": 8, "FORMAT": name, "RECIPROCAL": True}
        build(triton_decode._append_kernel, append, shape, 90)
    merge = {"WIDTH": 80, "BLOCK_D": 128, "BLOCK_S": 32, "AUX": True}
    build(triton_decode._merge_kernel, {"out": "*bf16", "s_aux": "*fp32"}, merge, 90)
    sys.exit(0)
