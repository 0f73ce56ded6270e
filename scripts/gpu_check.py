"""Does it hold on a GPU? One command, no network, under 9 minutes; writes JSON.

    python scripts/gpu_check.py                 # a CUDA machine
    python scripts/gpu_check.py --sweep         # also: which constants of the kernels are best
    python scripts/gpu_check.py --dry-run       # the same code on a CPU with a tiny model, in minutes

1. Kernels against the reference on fresh random inputs, with the attention that each key got, and the fused append
   against the codec, bit for bit.
2. Kernel times against the bytes that must move, beside the measured bandwidth of a plain copy. Calls are captured in
   one CUDA graph over enough different inputs that none is found in the L2 cache: ``us`` is the device's time alone,
   ``call_us`` that of one call from Python, as an eager model pays it.
3. ``generate`` with a Llama-8B-shaped model of random weights: tokens per second and peak memory of DynamicCache,
   stock QuantizedCache where its backend is installed, and ours, at (batch, context) = (1, 8K), (8, 8K), (8, 32K).

4. Offloaded caches: 200 runs of the host-memory tier with random delays on both streams, each against the same calls
   without delays and with every copy waited for. Copies that were not ordered would give other bits.

A random model's history is random too: context is filled with random keys and values, which costs no prefill. Caches
take turns, and the first turn compiles what is to be compiled: the median step of the later ones is quoted. A cache
that does not fit is recorded as such, not left out; so is a turn that the time limit took away.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

CASES = [(1, 8192), (8, 8192), (8, 32768)]
SPECS = ["dynamic", "stock:fp8", "stock:hqq8", "stock:quanto4", "full", "int8", "fp8", "int4", "int2", "k4v2",
         "int8+sink(4,1020)"]  # fmt: skip
STORAGES = ["full", "int8", "fp8_e4m3", "fp8_e5m2", "int4", "int2", "k4v2"]  # that are timed
MORE_STORAGES = ["k8v4", "k4v8", "k2v4", "int4(key_axis=token)", "int2(group=16)", "int4(group=128)", "int4(group=24)",
                 "int4(rotate=off)"]  # that are checked too  # fmt: skip
LLAMA_8B = dict(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=131072, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
TINY = {**LLAMA_8B, "vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
L2_BYTES = 1 << 29  # inputs of a timed run: several times any L2 cache
TURNS = 3
Row = dict[str, Any]


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(fn: Callable[[], Any], device: torch.device) -> float:
    """Median time of one call and of what it started."""
    rounds, warmup = (20, 3) if device.type == "cuda" else (1, 0)  # interpreted kernels: to see that it runs
    times = []
    for turn in range(warmup + rounds):
        sync(device)
        start = time.perf_counter()
        fn()
        sync(device)
        if turn >= warmup:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def device_seconds(fns: list[Callable[[], Any]], device: torch.device) -> float:
    """Time of one of ``fns`` on the device alone: all of them replayed as one graph, without Python between them."""
    if device.type != "cuda":
        return seconds(lambda: [fn() for fn in fns], device) / len(fns)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compile before capturing
        for fn in fns[:2]:
            fn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for fn in fns:
            fn()
    times = []
    for turn in range(13):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        if turn >= 3:
            times.append(start.elapsed_time(stop) / 1e3 / len(fns))
    return statistics.median(times)


# -- 1: right? -------------------------------------------------------------------------------------------------------


def make_part(key: Any, value: Any, shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype) -> Any:
    """Random keys and values as two codecs store them; rows differ in size by a factor of 30."""
    from hf_kvcache.part import Part

    def states() -> torch.Tensor:
        sizes = torch.rand(*shape[:3], 1, device=device) * 3 + 0.1
        return (torch.randn(shape, device=device) * sizes).to(dtype)

    return Part(key, key.encode(states()), value, value.encode(states()))


def codecs_of(name: str) -> tuple[Any, Any, int]:
    """(key codec, value codec, tokens that are encoded together) of a storage."""
    from hf_kvcache.spec import storage

    _, keys, values, *_ = chosen = storage(name)
    return keys, values, chosen.group


def check_kernels(
    device: torch.device, dtype: torch.dtype, lengths: list[int], storages: list[str] | None = None
) -> list[Row]:
    """Largest error of the kernel against the reference; allowed is twice that of plain torch in the same dtype."""
    from hf_kvcache.codecs import CODECS
    from hf_kvcache.triton_decode import supports

    many = 4 if dtype == torch.float32 else 16
    shapes = [(1, 4, 128, 1), (3, 1, 64, 1), (2, 3, 96, 4), (1, 8, 256, 1), (1, 8, 128, many), (2, 1, 36, 1)]
    rows: list[Row] = []
    for turn, name in enumerate(storages or ["int8(rotate=on)", *STORAGES, *MORE_STORAGES]):
        key, value, group = codecs_of(name)
        # A kernel is compiled for every shape, and one of low bits takes its seconds: one shape in turn for most.
        for number in range(len(shapes)) if group == 1 or name == "int4" else (turn % len(shapes),):
            batch, groups, width, queries = shapes[number]
            tokens = -(-lengths[number % len(lengths)] // group) * group
            parts = [make_part(CODECS["full"], CODECS["full"], (batch, 2, 4, width), device, dtype)]
            parts.append(make_part(key, value, (batch, 2, tokens, width), device, dtype))
            query = torch.randn(batch, 2 * groups, queries, width, device=device, dtype=dtype)
            mask = torch.rand(batch, 1, queries, tokens + 4, device=device) > 0.3 if number % 2 else None
            if mask is not None:
                mask[..., 0] = True  # plain torch makes NaN of a row that sees nothing
            shape = {"batch": batch, "groups": groups, "head_dim": width, "queries": queries, "tokens": tokens}
            if not supports(query, parts, mask):
                rows.append({"storage": name, **shape, "ok": False, "why": "not supported"})
                continue
            rows.append({"storage": name, **shape, **compare(query, parts, mask)})
    return rows


def compare(query: torch.Tensor, parts: list[Any], mask: torch.Tensor | None) -> Row:
    """The kernel's largest error, and twice that of plain torch on decoded states of the query's dtype; the largest in
    the attention that each key got."""
    from hf_kvcache.reference import attend_reference, attend_torch
    from hf_kvcache.triton_decode import attend_triton

    dtype, scaling = query.dtype, query.shape[-1] ** -0.5
    exact = attend_reference(query.float(), parts, scaling, mask)
    plain_k = torch.cat([p.key_codec.decode(p.keys, dtype) for p in parts], 2)
    plain_v = torch.cat([p.value_codec.decode(p.values, dtype) for p in parts], 2)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    plain = sdpa(query, plain_k, plain_v, attn_mask=mask, enable_gqa=True)
    mass, wanted = (query.new_zeros(*plain_k.shape[:3], dtype=torch.float32) for _ in range(2))
    attend_torch(query.float(), parts, scaling, mask, mass=wanted)
    error = (attend_triton(query, parts, scaling, mask, mass=mass).float() - exact).abs().max().item()
    allowed = 2 * (plain.float() - exact).abs().max().item() + 1e-5 * exact.abs().max().item()
    # A score is as wrong as the numbers of a product are coarse, and attention by that share of itself.
    scores = (query.float().norm(dim=-1).max() * plain_k.float().norm(dim=-1).max() * scaling).item()
    mass_error, mass_allowed = (mass - wanted).abs().max().item(), torch.finfo(dtype).eps * scores * query.shape[2]
    ok = error <= allowed and mass_error <= mass_allowed  # NaN is not <= anything
    return {"error": error, "allowed": allowed, "mass_error": mass_error, "mass_allowed": mass_allowed, "ok": ok}


def check_large(device: torch.device, dtype: torch.dtype) -> list[Row]:
    """More than 2**31 keys: the last row and head of a batch, whose offsets do not fit into 32 bits."""
    from hf_kvcache.part import Part, map_state
    from hf_kvcache.reference import attend_reference
    from hf_kvcache.triton_decode import attend_triton

    batch, heads, tokens, width = 3, 8, 1 << 20, 128
    rows = []
    for name in ("full", "int8", "int4"):
        key, value, _ = codecs_of(name)
        one = make_part(key, value, (1, 1, tokens, width), device, dtype)
        keys, values = (
            map_state(state, lambda t: t.repeat(batch, heads, *[1] * (t.dim() - 2))) for state in (one.keys, one.values)
        )
        query = torch.randn(batch, heads, 1, width, device=device, dtype=dtype)
        got = attend_triton(query, [Part(key, keys, value, values)], 0.3)[-1:, -1:]
        exact = attend_reference(query[-1:, -1:].float(), [one], 0.3)
        error, allowed = (got.float() - exact).abs().max().item(), 0.02 * exact.abs().max().item()
        rows.append({"storage": name, "values": keys[0].numel(), "error": error, "allowed": allowed})
        rows[-1]["ok"] = error <= allowed
        del keys, values
    return rows


def check_append(device: torch.device, dtype: torch.dtype) -> list[Row]:
    """The fused append writes the very bits of ``codec.encode``."""
    from hf_kvcache.codecs import CODECS, Scaled
    from hf_kvcache.triton_decode import append_quantized

    rows = []
    for name in ("int8", "fp8_e4m3", "fp8_e5m2"):
        x = torch.randn(4, 8, 5, 128, device=device, dtype=dtype)
        x *= torch.logspace(-6, 4, 8, device=device, dtype=dtype)[:, None, None]
        x[0, 0, 0] = 0
        state = CODECS[name].encode(x)
        empty = Scaled(*(torch.zeros_like(t.repeat(1, 1, 2, 1)) for t in state))
        append_quantized(x, empty, 3, CODECS[name])
        same = all(torch.equal(mine[:, :, 3:8], t) for mine, t in zip(empty, state, strict=True))
        rows.append({"storage": name, "ok": same})
    return rows


# -- 2: fast? --------------------------------------------------------------------------------------------------------


def copy_bandwidth(device: torch.device, size: int) -> float:
    """GB/s, reads and writes counted."""
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / device_seconds([lambda: target.copy_(source)] * 4, device) / 1e9


def time_kernel(name: str, batch: int, heads: int, tokens: int, device: torch.device, dtype: torch.dtype) -> Row:
    """Decode attention of one layer over different inputs in turn."""
    from hf_kvcache.triton_decode import attend_triton

    key, value, _ = codecs_of(name)
    width = 128
    first = make_part(key, value, (batch, heads, tokens, width), device, dtype)
    size = sum(t.nbytes for state in (first.keys, first.values) for t in state)
    copies = 1 if device.type != "cuda" else max(2, min(32, L2_BYTES // size))
    parts = [first, *(make_part(key, value, (batch, heads, tokens, width), device, dtype) for _ in range(copies - 1))]
    query = torch.randn(batch, 4 * heads, 1, width, device=device, dtype=dtype)
    spent = device_seconds([lambda p=part: attend_triton(query, [p], width**-0.5) for part in parts], device)  # type: ignore[misc]
    call = seconds(lambda: attend_triton(query, [first], width**-0.5), device)
    row = {"storage": name, "batch": batch, "tokens": tokens, "us": spent * 1e6, "call_us": call * 1e6}
    row |= {"bytes": size, "gb_per_second": size / spent / 1e9}
    if name == "full":
        sdpa = torch.nn.functional.scaled_dot_product_attention
        row["sdpa_us"] = 1e6 * device_seconds(
            [lambda p=p: sdpa(query, p.keys[0], p.values[0], enable_gqa=True) for p in parts],  # type: ignore[misc]
            device,
        )
    return row


def time_kernels(device: torch.device, dtype: torch.dtype, cases: list[tuple[int, int]], heads: int) -> Row:
    """Time, bytes that must move and achieved GB/s, beside the GB/s of a copy."""
    copy = copy_bandwidth(device, 1 << 30 if device.type == "cuda" else 1 << 20)
    rows = [time_kernel(name, batch, heads, tokens, device, dtype) for batch, tokens in cases for name in STORAGES]
    for row in rows:
        row["share_of_copy"] = row["gb_per_second"] / copy
    return {"copy_gb_per_second": copy, "rows": rows}


def sweep(device: torch.device, dtype: torch.dtype, cases: list[tuple[int, int]], heads: int) -> list[Row]:
    """The same times for other constants of the kernels."""
    from hf_kvcache import triton_decode

    names = ("WARPS_PER_SM", "BLOCK_BYTES", "MIN_BLOCKS")
    kept = {name: getattr(triton_decode, name) for name in names}
    rows = []
    for changed in ({}, *({"WARPS_PER_SM": n} for n in (8, 16, 24, 48)), {"BLOCK_BYTES": 1 << 12}, {"MIN_BLOCKS": 4}):
        for name, value in {**kept, **changed}.items():
            setattr(triton_decode, name, value)
        triton_decode.tile_sizes.cache_clear()
        for batch, tokens in cases:
            for storage in ("full", "int8", "fp8_e4m3", "int4"):
                rows.append({**changed, **time_kernel(storage, batch, heads, tokens, device, dtype)})
    for name, value in kept.items():
        setattr(triton_decode, name, value)
    triton_decode.tile_sizes.cache_clear()
    return rows


# -- 3: faster? ------------------------------------------------------------------------------------------------------


class Clock:
    """A stopping criterion that never stops: it notes when each token is there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: list[float] = []

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        sync(self.device)
        self.times.append(time.perf_counter())
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

    def steps(self) -> list[float]:
        """Seconds between tokens; the first one carries what is set up once."""
        return [later - earlier for earlier, later in zip(self.times[1:], self.times[2:], strict=False)]


def filled(model: Any, spec: str, batch: int, context: int) -> Any:
    """A cache that holds ``context`` random tokens of each row, the same ones for every cache."""
    from eval import contenders

    cache, config = contenders.make_cache(spec, model.config), model.config
    shape = (batch, config.num_key_value_heads, context, config.hidden_size // config.num_attention_heads)
    generator = torch.Generator(model.device).manual_seed(1)
    for index in range(config.num_hidden_layers):  # whole layers: stock caches quantize all they hold at every update
        keys, values = (
            torch.randn(shape, device=model.device, dtype=model.dtype, generator=generator) for _ in range(2)
        )
        cache.update(keys, values, index)
    return cache


@torch.inference_mode()
def turn(model: Any, spec: str, ids: torch.Tensor, new: int) -> Row:
    """One ``generate`` of ``new`` tokens on a cache that is already filled."""
    from transformers import StoppingCriteriaList

    from eval import contenders
    from hf_kvcache import compat

    device = model.device
    contenders.use_attention(model, spec, "kvcache")
    cache = filled(model, spec, ids.shape[0], ids.shape[1] - 1)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock = Clock(device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new,
        min_new_tokens=new,
        stopping_criteria=StoppingCriteriaList([clock]),
        **{compat.cache_argument(model.forward): cache},
    )
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {
        "steps": clock.steps(),
        "cache_bytes": contenders.stored_bytes(cache),
        "peak_bytes": peak,
        "tokens": out[:, -new:].tolist(),
    }


def race(model: Any, specs: list[str], batch: int, context: int, new: int, deadline: float) -> list[Row]:
    """Each cache in turn, ``TURNS`` times; the first turn warms up and is not timed."""
    device = model.device
    ids = torch.randint(1, 500, (batch, context + 1), device=device)
    rows: dict[str, Row] = {spec: {"spec": spec, "batch": batch, "context": context} for spec in specs}
    steps: dict[str, list[float]] = {spec: [] for spec in specs}
    tokens: dict[str, Any] = {}
    for number in range(TURNS):
        for spec in specs:
            row = rows[spec]
            if "error" in row:
                continue
            if time.perf_counter() > deadline:
                row["cut"] = f"{number} of {TURNS} turns in the time given"
                continue
            try:
                done = turn(model, spec, ids, new)
                measured = done.pop("steps")
                steps[spec] += measured if number else []
                tokens[spec] = done.pop("tokens")
                row |= done
            except torch.cuda.OutOfMemoryError:
                row["error"] = "out of memory"
            except Exception as error:  # a stock cache may fail on this machine: that is a result too
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            if device.type == "cuda":
                torch.cuda.empty_cache()
    for spec, row in rows.items():
        if steps[spec]:
            row["step_ms"] = statistics.median(steps[spec]) * 1e3
            row["step_ms_p90"] = sorted(steps[spec])[int(0.9 * len(steps[spec]))] * 1e3
            row["tokens_per_second"] = batch / statistics.median(steps[spec])
        if spec in tokens and specs[0] in tokens:
            pairs = zip(sum(tokens[spec], []), sum(tokens[specs[0]], []), strict=True)
            row["same_tokens"] = sum(mine == theirs for mine, theirs in pairs) / (batch * new)
    return list(rows.values())


# -- 4: ordered? -----------------------------------------------------------------------------------------------------


def delay(device: torch.device, most: int = 2_000_000) -> None:
    """Keep the current stream busy for up to a millisecond or so."""
    if device.type == "cuda" and torch.rand(()).item() < 0.5:
        torch.cuda._sleep(int(torch.rand(()).item() * most))


def offloaded_steps(spec: str, seed: int, late: bool, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """Attention outputs of a prompt and some decode steps through an offloaded cache of four layers.

    ``late``: delays before copies and before attention. Otherwise everything is waited for at once.
    """
    from transformers import LlamaConfig

    from hf_kvcache import OffloadedCache, transfer
    from hf_kvcache.attention import attend
    from hf_kvcache.spec import split

    config = LlamaConfig(**{**TINY, "num_hidden_layers": 4})  # type: ignore[arg-type]
    config._attn_implementation = "kvcache"
    axes: Row = dict(split(spec))
    cache = OffloadedCache(config, keep_recent=seed % 2 * 16, _stage=True, **axes)
    generator, out = torch.Generator(device).manual_seed(seed), []
    run = transfer.CudaLane.run

    def delayed(lane: Any, start: Any, job: Callable[[], None]) -> Any:
        def slow_job() -> None:
            delay(device)
            job()

        ticket = run(lane, start, slow_job if late else job)
        return ticket if late else (lane.drain(), ticket)[1]

    stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
    setattr(transfer.CudaLane, "run", delayed)  # noqa: B010
    try:
        with stream:  # not the default one
            for tokens in (512, 1, 1, 1, 7, 1, 1):
                for index in range(4):
                    shape = (2, 2, tokens, 128)
                    keys, values, query = (
                        torch.randn(shape, device=device, dtype=dtype, generator=generator) for _ in range(3)
                    )
                    handle, _ = cache.update(keys, values, index)
                    if late:
                        delay(device)
                    out.append(attend(query[:, :, -1:], handle.history.parts, 128**-0.5))
            sync(device)
    finally:
        setattr(transfer.CudaLane, "run", run)  # noqa: B010
    return out


def check_offloading(device: torch.device, dtype: torch.dtype, runs: int) -> list[Row]:
    """The same bits with delays as without."""
    specs = ("full", "int8", "int8+sink(4,100)", "int4")
    rows = []
    for seed in range(runs):
        spec = specs[seed % len(specs)]
        expected, got = (offloaded_steps(spec, seed, late, device, dtype) for late in (False, True))
        rows.append({"storage": spec, "seed": seed, "ok": all(map(torch.equal, expected, got))})
    return rows


def build_model(tiny: bool, device: torch.device, dtype: torch.dtype) -> Any:
    """Random weights, made where they are used."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(LlamaConfig(**(TINY if tiny else LLAMA_8B))).eval()  # type: ignore[arg-type]
    finally:
        torch.set_default_dtype(torch.float32)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU, kernels interpreted")
    parser.add_argument("--sweep", action="store_true", help="also time other constants of the kernels")
    parser.add_argument("--limit", type=float, default=480, help="seconds after which no turn begins (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), help="(%(default)s)")
    return parser.parse_args(argv)


def measure(args: argparse.Namespace) -> Row:
    """All sections."""
    import transformers

    import hf_kvcache
    from eval import contenders, records

    deadline = time.perf_counter() + args.limit
    device = torch.device("cpu" if args.dry_run else "cuda")
    dtype = torch.float32 if args.dry_run else torch.bfloat16
    heads, timed = (1, [(1, 64)]) if args.dry_run else (8, CASES)
    result: Row = {"machine": records.machine(), "versions": records.versions(), "dry_run": args.dry_run}
    result["kernels"] = check_kernels(device, dtype, [1, 63] if args.dry_run else [1, 63, 129, 1000, 8191])
    if not args.dry_run:
        result["kernels"] += check_kernels(device, torch.float16, [1, 63, 129, 1000, 8191], STORAGES[:4])
        if torch.cuda.mem_get_info()[1] > 40e9:
            result["kernels"] += check_large(device, dtype)
    result["append"] = check_append(device, dtype)
    result["offloading"] = check_offloading(device, dtype, 8 if args.dry_run else 200)
    result["times"] = time_kernels(device, dtype, timed, heads)
    if args.sweep:
        result["sweep"] = sweep(device, dtype, timed, heads)
    hf_kvcache.register()
    transformers.logging.set_verbosity_error()
    model = build_model(args.dry_run, device, dtype)
    specs = contenders.available(SPECS, model.config)
    result["generate"] = []
    for batch, context in [(2, 256)] if args.dry_run else CASES:
        result["generate"] += race(model, specs, batch, context, 4 if args.dry_run else 32, deadline)
    return result


def report(result: Row) -> None:
    """For a reader; the file holds the same."""
    for row in result["times"]["rows"] + result.get("sweep", []) + result["generate"]:
        print({k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in row.items()})
    print(f"copy: {result['times']['copy_gb_per_second']:.0f} GB/s")


def main() -> None:
    """Check, measure, write."""
    args = parse()
    if not args.dry_run and not torch.cuda.is_available():
        raise SystemExit("error: no CUDA device; run on a CUDA machine, or with --dry-run")
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    torch.manual_seed(time.time_ns() % 2**31)  # fresh inputs every time
    result = measure(args)
    args.out.mkdir(parents=True, exist_ok=True)
    name = "dry_run" if args.dry_run else torch.cuda.get_device_name().replace(" ", "_")
    path = args.out / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    report(result)
    checks = result["kernels"] + result["append"] + result["offloading"]
    failed = [row for row in checks if not row["ok"]]
    print(f"{len(failed)} of {len(checks)} checks failed; written to {path}")
    if failed:
        raise SystemExit(f"error: {failed}")


if __name__ == "__main__":
    main()
