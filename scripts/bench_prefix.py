"""What does a stored prefix save? Time to the first token of an answer, from a store and recomputed.

    python scripts/bench_prefix.py                          # the embedded model, 4,000 tokens, memory and disk
    python scripts/bench_prefix.py --prefix 2000 --specs full int4

Every round asks another question about one document, in turn: with the document's cache from memory, from a file (a new
store on the same folder, checksums included), and with everything recomputed. The answers are compared token by token,
the first token's logits bit by bit. ``forks`` is what eight forks of the document's cache cost: time, and bytes beyond
the cache itself (storages are counted once), also after one more token in each.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import hf_kvcache
from eval import models, quality, records
from hf_kvcache import KVCache, PrefixStore
from hf_kvcache.prefix import storages

TASK = "prefix"
WAYS = ("memory", "disk", "recomputed")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    quality.add_model_arguments(parser)
    parser.add_argument("--specs", nargs="+", default=["full", "int8"], help="(full int8)")
    parser.add_argument("--prefix", type=int, default=4000, help="tokens of the document (%(default)s)")
    parser.add_argument("--question", type=int, default=20, help="tokens of a question (%(default)s)")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="questions (%(default)s)")
    parser.add_argument("--attn", choices=["sdpa", "eager", "kvcache"], default="kvcache", help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/prefix.jsonl"), help="(%(default)s)")
    return parser.parse_args(argv)


@torch.no_grad()
def ask(model: Any, cache: KVCache, ids: torch.Tensor) -> torch.Tensor:
    """Logits [1, vocabulary] after the tokens that the cache has not seen yet."""
    seen = cache.get_seq_length()
    return model(ids[:, seen:], **{models.cache_argument(model): cache}, logits_to_keep=1).logits[:, -1]


def first_token(
    model: Any, way: str, spec: str, folder: Path, store: PrefixStore, ids: torch.Tensor, prefix: int
) -> Any:
    """(seconds, cache, logits) of one question."""
    start = time.perf_counter()
    cache: Any
    if way == "recomputed":
        cache = KVCache.from_spec(model.config, spec)
        ask(model, cache, ids[:, :prefix])
    else:
        source = store if way == "memory" else PrefixStore(1 << 40, folder, config=model.config)
        cache, matched = source.match(ids)
        assert matched == prefix, (way, matched)
    logits = ask(model, cache, ids)
    logits.argmax(-1).cpu()
    return time.perf_counter() - start, cache, logits


@torch.no_grad()
def answer(model: Any, cache: KVCache, logits: torch.Tensor, tokens: int) -> list[int]:
    """Greedy tokens from here."""
    out = [int(logits.argmax(-1))]
    while len(out) < tokens:
        step = torch.tensor([[out[-1]]], device=logits.device)
        out.append(int(model(step, **{models.cache_argument(model): cache}).logits[:, -1].argmax(-1)))
    return out


def fork_cost(model: Any, cache: KVCache, ids: torch.Tensor) -> dict[str, float]:
    """Time and bytes of eight forks, as a share of the cache's bytes."""
    alone = cache.nbytes
    start = time.perf_counter()
    forks = [cache.fork() for _ in range(8)]
    seconds = time.perf_counter() - start
    shared = union([cache, *forks])
    for fork in forks:
        ask(model, fork, ids[:, : fork.get_seq_length() + 1])
    after = union([cache, *forks])
    return {"forks_ms": seconds * 1e3, "forks_bytes": shared / alone - 1, "forks_after_one_token": after / alone - 1}


def union(caches: list[KVCache]) -> int:
    return sum({pointer: size for cache in caches for pointer, size in storages(cache)}.values())


def measure(args: argparse.Namespace, loaded: models.Loaded, ids: torch.Tensor, spec: str) -> dict[str, float]:
    """Everything about one spec."""
    model, prefix = loaded.model, args.prefix
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    bits = tokens = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "store"
        store = PrefixStore(1 << 40, folder, config=model.config)
        document = KVCache.from_spec(model.config, spec)
        ask(model, document, ids[:, :prefix])
        store.put(ids[:, :prefix], document)
        store.flush()
        for number in range(args.rounds):
            start = prefix + number * args.question
            prompt = torch.cat([ids[:, :prefix], ids[:, start : start + args.question]], 1)
            said = {}
            for way in WAYS:
                took, cache, logits = first_token(model, way, spec, folder, store, prompt, prefix)
                seconds[way].append(took)
                said[way] = (logits, answer(model, cache, logits, args.answer))
            bits += sum(torch.equal(said[way][0], said["recomputed"][0]) for way in WAYS[:2])
            tokens += sum(said[way][1] == said["recomputed"][1] for way in WAYS[:2])
        forks = fork_cost(model, document, ids)
    medians = {f"{way}_s": statistics.median(times) for way, times in seconds.items()}
    ratios = {f"{way}_ratio": medians[f"{way}_s"] / medians["recomputed_s"] for way in WAYS[:2]}
    asked = 2 * args.rounds
    return {**medians, **ratios, "equal_answers": tokens / asked, "equal_logits": bits / asked, **forks}


def main(argv: list[str] | None = None) -> None:
    """Measure, file, print."""
    args = parse(argv)
    hf_kvcache.register()
    try:
        loaded = models.load_model(args.model, args.device, args.dtype)
        loaded.model.set_attn_implementation(args.attn)
        text = models.load_text(args.text)
        ids = models.token_ids(loaded, text, args.prefix + args.question * args.rounds)
        for spec in args.specs:
            metrics = measure(args, loaded, ids, spec)
            frame = quality.frame(loaded, text, ids, spec, 1, args.attn, args.seed)
            frame["task"], frame["settings"] = TASK, {**frame["settings"], "prefix": args.prefix, "rounds": args.rounds}
            records.append(args.out, {**frame, "metrics": metrics})
            print(f"{spec:<12}", "  ".join(f"{name} {value:.4g}" for name, value in metrics.items()), flush=True)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
