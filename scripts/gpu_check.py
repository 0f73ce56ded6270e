"""Does it hold on a GPU? One command, no network, under 9 minutes; writes JSON.

    python scripts/gpu_check.py                 # a CUDA machine
    python scripts/gpu_check.py --dry-run       # the same code on a CPU with a tiny model, in seconds

1. Kernels against the reference on fresh random inputs, and the fused append against the codec.
2. Kernel times against the bytes that must move, beside the measured bandwidth of a plain copy.
3. ``generate`` with a Llama-8B-shaped model of random weights: tokens per second and peak memory of DynamicCache,
   stock QuantizedCache where its backend is installed, and ours, at (batch, context) = (1, 8K), (8, 8K), (8, 32K).

A random model's history is random too: context is filled with random keys and values, which costs no prefill. Caches
take turns; medians are quoted. A cache that does not fit is recorded as such, not left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

CASES = [(1, 8192), (8, 8192), (8, 32768)]
SPECS = ["dynamic", "stock:fp8", "stock:hqq8", "full", "int8", "fp8", "int8+sink(4,1020)"]
LLAMA_8B = dict(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=131072, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
TINY = {**LLAMA_8B, "vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(fn: Any, device: torch.device, rounds: int = 20) -> float:
    """Median time of one call."""
    times = []
    for turn in range(rounds + 3):
        sync(device)
        start = time.perf_counter()
        fn()
        sync(device)
        if turn >= 3:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def check_kernels(device: torch.device, dtype: torch.dtype, tokens: int) -> list[dict[str, Any]]:
    """Largest error of the kernel against the reference, beside that of plain torch in the same dtype."""
    from hf_kvcache.attention import Part, attend_reference
    from hf_kvcache.codecs import CODECS
    from hf_kvcache.triton_decode import attend_triton

    rows = []
    for name, codec in CODECS.items():
        for batch, groups, width, queries in ((1, 4, 128, 1), (3, 1, 64, 1), (2, 3, 96, 4), (1, 8, 256, 1)):
            keys, values = (torch.randn(batch, 2, tokens, width, device=device, dtype=dtype) for _ in range(2))
            query = torch.randn(batch, 2 * groups, queries, width, device=device, dtype=dtype)
            part = Part(codec, codec.encode(keys), codec, codec.encode(values))
            exact = attend_reference(query.float(), [part], width**-0.5)
            plain_k, plain_v = (codec.decode(state, dtype) for state in (part.keys, part.values))
            plain = torch.nn.functional.scaled_dot_product_attention(query, plain_k, plain_v, enable_gqa=True)
            error = (attend_triton(query, [part], width**-0.5).float() - exact).abs().max().item()
            allowed = 2 * (plain.float() - exact).abs().max().item() + 1e-5
            shape = {"batch": batch, "groups": groups, "head_dim": width, "queries": queries, "tokens": tokens}
            rows.append({"storage": name, **shape, "error": error, "allowed": allowed, "ok": error <= allowed})
    return rows


def check_append(device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """The fused append writes the very bits of ``codec.encode``."""
    from hf_kvcache.codecs import CODECS, Scaled
    from hf_kvcache.triton_decode import append_quantized

    rows = []
    for name in ("int8", "fp8_e4m3", "fp8_e5m2"):
        x = torch.randn(4, 8, 5, 128, device=device, dtype=dtype)
        state = CODECS[name].encode(x)
        empty = Scaled(*(torch.zeros_like(t.repeat(1, 1, 2, 1)) for t in state))
        append_quantized(x, empty, 3, CODECS[name])
        same = all(torch.equal(mine[:, :, 3:8], t) for mine, t in zip(empty, state, strict=True))
        rows.append({"storage": name, "ok": same})
    return rows


def time_kernels(device: torch.device, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    """Decode attention of one layer: time, bytes that must move, achieved GB/s; and a copy's GB/s."""
    from hf_kvcache.attention import Part, attend
    from hf_kvcache.codecs import CODECS

    source = torch.empty(tokens * 8 * 128 * 64, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / seconds(lambda: target.copy_(source), device) / 1e9
    source = target = torch.empty(0)
    rows = []
    for batch in (1, 8):
        keys, values = (torch.randn(batch, 8, tokens, 128, device=device, dtype=dtype) for _ in range(2))
        query = torch.randn(batch, 32, 1, 128, device=device, dtype=dtype)
        stock = seconds(
            lambda q=query, k=keys, v=values: torch.nn.functional.scaled_dot_product_attention(
                q, k, v, enable_gqa=True
            ),
            device,
        )
        for name, codec in CODECS.items():
            part = Part(codec, codec.encode(keys), codec, codec.encode(values))
            size = sum(t.nbytes for state in (part.keys, part.values) for t in state)
            spent = seconds(lambda q=query, p=part: attend(q, [p], 128**-0.5), device)
            rows.append({"storage": name, "batch": batch, "tokens": tokens, "us": spent * 1e6, "bytes": size,
                         "gb_per_second": size / spent / 1e9, "sdpa_us": stock * 1e6})  # fmt: skip
    return {"copy_gb_per_second": copy, "rows": rows}


def filled(model: Any, spec: str, batch: int, context: int) -> Any:
    """A cache that holds ``context`` random tokens of each row."""
    from eval import contenders

    cache, config = contenders.make_cache(spec, model.config), model.config
    shape = (batch, config.num_key_value_heads, 512, config.hidden_size // config.num_attention_heads)
    for _ in range(context // 512):
        for index in range(config.num_hidden_layers):
            states = [torch.randn(shape, device=model.device, dtype=model.dtype) for _ in range(2)]
            cache.update(*states, index)
    return cache


@torch.inference_mode()
def race(model: Any, specs: list[str], batch: int, context: int, new: int) -> list[dict[str, Any]]:
    """``generate`` of ``new`` tokens after ``context``, each cache in turn, twice; the better turn counts."""
    from eval import contenders
    from hf_kvcache import compat

    rows: dict[str, dict[str, Any]] = {}
    device, name = model.device, compat.cache_argument(model.forward)
    ids = torch.randint(1, 500, (batch, context + 1), device=device)
    for _ in range(2):
        for spec in specs:
            row = rows.setdefault(spec, {"spec": spec, "batch": batch, "context": context, "tokens_per_second": 0.0})
            try:
                contenders.use_attention(model, spec, "kvcache")
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                cache = filled(model, spec, batch, context)
                options = {name: cache, "do_sample": False, "max_new_tokens": new, "min_new_tokens": new}
                sync(device)
                start = time.perf_counter()
                model.generate(ids, attention_mask=torch.ones_like(ids), **options)
                sync(device)
                speed = batch * new / (time.perf_counter() - start)
                row["tokens_per_second"] = max(row["tokens_per_second"], speed)
                row["cache_bytes"] = contenders.stored_bytes(cache)
                row["peak_bytes"] = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
            except torch.cuda.OutOfMemoryError:
                row["error"] = "out of memory"
            cache = None
    return list(rows.values())


def main() -> None:
    """Check, measure, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU, kernels interpreted")
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), help="(%(default)s)")
    args = parser.parse_args()
    if not args.dry_run and not torch.cuda.is_available():
        raise SystemExit("error: no CUDA device; run on a CUDA machine, or with --dry-run")
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM

    import hf_kvcache
    from eval import contenders, records

    torch.manual_seed(0)
    hf_kvcache.register()
    device = torch.device("cpu" if args.dry_run else "cuda")
    dtype = torch.float32 if args.dry_run else torch.bfloat16
    result: dict[str, Any] = {"machine": records.machine(), "versions": records.versions(), "dry_run": args.dry_run}
    result["kernels"] = check_kernels(device, dtype, 63 if args.dry_run else 8191)
    result["append"] = check_append(device, dtype)
    result["times"] = time_kernels(device, dtype, 64 if args.dry_run else 8192)
    with torch.device(device):
        torch.set_default_dtype(dtype)
        model = LlamaForCausalLM(LlamaConfig(**(TINY if args.dry_run else LLAMA_8B))).eval()  # type: ignore[arg-type]
        torch.set_default_dtype(torch.float32)
    transformers.logging.set_verbosity_error()
    specs = contenders.available(SPECS, model.config)
    result["generate"] = []
    for batch, context in [(2, 512)] if args.dry_run else CASES:
        result["generate"] += race(model, specs, batch, context, 4 if args.dry_run else 64)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / ("dry_run.json" if args.dry_run else f"{torch.cuda.get_device_name().replace(' ', '_')}.json")
    path.write_text(json.dumps(result, indent=1) + "\n")
    failed = [row for row in result["kernels"] + result["append"] if not row["ok"]]
    for row in result["times"]["rows"] + result["generate"]:
        print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()})
    print(f"{len(failed)} of {len(result['kernels'] + result['append'])} checks failed; written to {path}")
    if failed:
        raise SystemExit(f"error: {failed}")


if __name__ == "__main__":
    main()
