"""`python -m eval quality`: what does a cache cost in predictions, and save in bytes?

    python -m eval quality --specs full int8 fp8 "sink(4,508)" --tokens 2048 --step 32

First the harness proves itself (see `proofs.py`), then every spec is scored beside `DynamicCache` and
appended to `--out` as one JSON line. Specs run one after the other, so that two caches at most are in
memory and a killed run loses one spec.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from eval import contenders, models, proofs, records, scoring

TASK = "quality"
SPECS = ["full", "int8", "fp8", "sink(4,508)", "int8+sink(4,508)"]


def add_model_arguments(parser: argparse.ArgumentParser, text: bool = True) -> None:
    """The options every measurement needs; without `--text` where the text is generated."""
    aliases = ", ".join(models.EMBEDDED)
    parser.add_argument(
        "--model",
        default=models.DEFAULT_MODEL,
        help=f"a hub name, a folder, or one of {aliases} (%(default)s)",
    )
    if text:
        parser.add_argument(
            "--text",
            default=models.DEFAULT_TEXT,
            help="a file, dataset:NAME[:CONFIG[:SPLIT[:COLUMN]]], or %(default)s: Python's own help topics",
        )
    parser.add_argument("--device", help='"cpu", "cuda", "cuda:1", ..., "auto" (auto where there is CUDA, else cpu)')
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (as the checkpoint)")
    parser.add_argument("--seed", type=int, default=0, help="of caches that draw at random (%(default)s)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    add_model_arguments(parser)
    parser.add_argument("--specs", nargs="+", default=SPECS, help=f"caches to score ({' '.join(SPECS)})")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens to score (%(default)s)")
    parser.add_argument("--step", type=int, default=32, help="tokens fed at a time (%(default)s)")
    parser.add_argument("--attn", choices=["sdpa", "eager", "kvcache"], default="sdpa", help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/quality.jsonl"), help="(%(default)s)")
    parser.add_argument("--no-proofs", action="store_true", help="skip the harness's proofs of itself")


def run(args: argparse.Namespace) -> None:
    """Score what `--out` does not hold yet, and print a line for each spec."""
    from tqdm import tqdm

    done = {records.identity(record): record for record in records.read(args.out)}
    loaded = models.load_model(args.model, args.device, args.dtype)
    text = models.load_text(args.text)
    ids = models.token_ids(loaded, text, args.tokens + 1)
    specs = contenders.with_controls(args.specs, loaded.model.config)
    frames = {spec: frame(loaded, text, ids, spec, args.step, args.attn, args.seed) for spec in specs}
    pending = [spec for spec in specs if records.identity(frames[spec]) not in done]
    if pending and not args.no_proofs:
        print(proofs.line(proofs.prove(loaded.model, ids, step=args.step, attn=args.attn)), flush=True)
    results = []
    for spec in specs:
        if spec not in pending:
            record = done[records.identity(frames[spec])]
            made_with = record["versions"]["transformers"]
            print(f"skipped {spec}: {args.out.name} has it already (transformers {made_with})")
        else:
            with tqdm(total=args.tokens, desc=spec, unit="tok", leave=False) as bar:
                record = measure(loaded.model, ids, {spec: frames[spec]}, bar.update)[0]
            records.append(args.out, record)
        results.append(record)
        print(line(record))
    print(beside_random(results), end="")


def frame(
    loaded: models.Loaded, text: models.Text, ids: torch.Tensor, spec: str, step: int, attn: str, seed: int
) -> records.Record:
    """A record before its metrics: what is measured, with what, on what."""
    return {
        "task": TASK,
        "model": loaded.name,
        "spec": spec,
        "settings": {**setting(loaded, text, seed), "tokens": ids.shape[1] - 1, "step": step, "attn": attn},
        "versions": records.versions(),
        "machine": records.machine(),
    }


def setting(loaded: models.Loaded, text: models.Text, seed: int) -> dict[str, Any]:
    """What any two comparable measurements share. Weights and text are told apart by content, not by name."""
    return {
        **models.about(loaded.model),
        "text": text.name,
        "text_sha256": models.text_digest(text),
        "seed": seed,
    }


def measure(model: Any, ids: torch.Tensor, frames: dict[str, records.Record], tick: Any) -> list[records.Record]:
    """Score the specs of these frames, all in lockstep, and fill the frames in."""
    settings = next(iter(frames.values()))["settings"]
    torch.manual_seed(settings["seed"])
    outcomes = scoring.score(model, ids, list(frames), step=settings["step"], attn=settings["attn"], tick=tick)
    return [{**frames[spec], "metrics": metrics(outcome, ids.shape[1] - 1)} for spec, outcome in outcomes.items()]


def metrics(outcome: scoring.Outcome, tokens: int) -> dict[str, Any]:
    """An outcome as the flat numbers of a record."""
    return {
        **outcome.score._asdict(),
        "baseline_perplexity": outcome.baseline_perplexity,
        "nbytes": outcome.nbytes,
        "baseline_nbytes": outcome.baseline_nbytes,
        "bytes_ratio": outcome.nbytes / outcome.baseline_nbytes,
        "bytes_per_token": outcome.nbytes / tokens,
        "tokens_seen": tokens,
        "tokens_kept": outcome.tokens_kept,
    }


def line(record: records.Record) -> str:
    """One result for a reader."""
    m = record["metrics"]
    return (
        f"{record['spec']:<22} perplexity {m['perplexity']:8.3f} "
        f"({100 * (m['perplexity'] / m['baseline_perplexity'] - 1):+.2f} %)  KL {m['kl_mean']:.2e} "
        f"(p99.9 {m['kl_p999']:.2e})  top-1 {m['top1_agreement']:.4f}  "
        f"{m['nbytes'] / 1e6:.2f} MB ({m['bytes_ratio']:.3f})  kept {m['tokens_kept']}/{m['tokens_seen']}"
    )


def beside_random(results: list[records.Record]) -> str:
    """Policies by KL, each beside tokens kept at random under the same budget; "" where there are none."""
    kl = {record["spec"]: record["metrics"]["kl_mean"] for record in results}
    luck = {record["spec"]: contenders.random_beside(record["spec"]) for record in results}
    lines = []
    for record in sorted(results, key=lambda record: record["metrics"]["kl_mean"]):
        spec, m = record["spec"], record["metrics"]
        control = luck[spec]
        if control in kl:
            verdict = "  loses to random" if kl[spec] > kl[control] else ""
            kept = m["tokens_kept"] / m["tokens_seen"]
            lines.append(f"{spec:<40}{kept:>7.2f}{kl[spec]:>11.2e}{kl[control]:>11.2e}{verdict}")
    head = f"\n{'policy':<40}{'kept':>7}{'mean KL':>11}{'random':>11}"
    return "\n".join([head, *lines, ""]) if lines else ""
