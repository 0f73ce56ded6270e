"""`python -m eval streaming`: how well is a stream predicted that is far longer than the window?

    python -m eval streaming --specs "sink(4,1020)" "sink(0,1024)" --tokens 12288 --bucket 2048 --step 64

Text is fed through each cache in steps, from its first token to its last, and perplexity is taken over buckets of
consecutive tokens. With `--streams N` that is done with N stretches of the text, one after the other and each with an
empty cache; the n-th buckets of all of them are one number. Buckets are different text, some harder than others, so a
bucket is compared with the same bucket of another cache, never with another bucket. Two caches are always there:

    full      everything is kept: the best there is, until the stream leaves the length the model was trained on
    fresh     recomputation: for each bucket an empty full cache is fed the `--context` tokens before the bucket, then
              the bucket, which is thereby predicted from 1,024 to 3,072 tokens of context at positions the model knows

`fresh(C,R)` among the specs recomputes anew after each R tokens, from the C before: with C + R = 1,024 it reads at most
what a window of 1,024 tokens does, which tells the loss by the window's length from that by reusing old states.

A window that works stays near `full` within the trained length and near `fresh` beyond it. Stored bytes are taken at
the end of each bucket: those of a window do not grow.

A ratio of two perplexities is exp of a mean difference of log probabilities of the same tokens. Its standard error is
that of this mean over the steps of the bucket, for neighbouring tokens depend on each other.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eval import contenders, models, proofs, quality, records, scoring
from eval.charts import plot

TASK = "streaming"
FRESH = "fresh"
SPECS = ["full", "sink(4,1020)", "sink(0,1024)"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    quality.add_model_arguments(parser)
    parser.add_argument("--specs", nargs="+", default=SPECS, help=f"caches to stream through ({' '.join(SPECS)})")
    parser.add_argument("--tokens", type=int, default=12288, help="tokens of a stream (%(default)s)")
    parser.add_argument("--streams", type=int, default=1, help="stretches of the text to stream (%(default)s)")
    parser.add_argument("--bucket", type=int, default=2048, help="tokens of a bucket (%(default)s)")
    parser.add_argument("--step", type=int, default=64, help="tokens fed at a time (%(default)s)")
    parser.add_argument("--context", type=int, default=1024, help="tokens before a bucket for `fresh` (%(default)s)")
    parser.add_argument("--attn", choices=["sdpa", "eager", "kvcache"], default="kvcache", help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/streaming.jsonl"), help="(%(default)s)")
    parser.add_argument("--no-proofs", action="store_true", help="skip the harness's proofs of itself")


def check(args: argparse.Namespace) -> None:
    """Refuse what has no meaning before a model is loaded."""
    for name in ("tokens", "streams", "bucket", "step", "context"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: give at least 1")
    if args.tokens % args.bucket:
        raise ValueError(f"--tokens {args.tokens} is no multiple of --bucket {args.bucket}; use whole buckets")
    if args.bucket % args.step:
        raise ValueError(f"--bucket {args.bucket} is no multiple of --step {args.step}; a step belongs to one bucket")
    for spec in args.specs:
        every = (recomputed(spec, args) or (0, args.bucket))[1]
        if not every or args.bucket % every or every % args.step:
            raise ValueError(
                f"{spec}: give C and R of fresh(C,R) so that R divides --bucket {args.bucket} "
                f"and --step {args.step} divides R"
            )


def run(args: argparse.Namespace) -> None:
    """Stream what `--out` does not hold yet, print the table, and draw it beside `--out`."""
    from tqdm import tqdm

    check(args)
    done = {records.identity(record): record for record in records.read(args.out)}
    loaded = models.load_model(args.model, args.device, args.dtype)
    trained = trained_length(loaded, args.tokens)
    text = models.load_text(args.text)
    ids = models.stream_ids(loaded, text, args.streams * args.tokens + 1)
    config = loaded.model.config
    canonical = [
        s.replace(" ", "") if recomputed(s, args) else contenders.canonical(s, config) for s in ["full", *args.specs]
    ]
    specs = list(dict.fromkeys([FRESH, *canonical]))
    frames = {spec: frame(loaded, text, spec, args) for spec in specs}
    pending = [spec for spec in specs if records.identity(frames[spec]) not in done]
    if pending and not args.no_proofs:
        print(proofs.line(proofs.prove(loaded.model, ids, step=args.step, attn=args.attn)), flush=True)
    results = []
    for spec in specs:
        if spec not in pending:
            print(f"skipped {spec}: {args.out.name} has it already")
            results.append(done[records.identity(frames[spec])])
            continue
        torch.manual_seed(args.seed)
        with tqdm(total=args.streams * args.tokens, desc=spec, unit="tok", leave=False) as bar:
            measured = measure(loaded.model, ids, spec, args, bar.update)
        results.append({**frames[spec], "metrics": {**measured, "trained_length": trained}})
        records.append(args.out, results[-1])
    print("\n" + table(results))
    draw(args.out)


def recomputed(spec: str, args: argparse.Namespace) -> tuple[int, int] | None:
    """(tokens of context, tokens after which it starts anew) of a `fresh` spec; ``None`` for a cache."""
    if spec.startswith(FRESH + "("):
        numbers = re.fullmatch(FRESH + r"\((\d+),(\d+)\)", spec.replace(" ", ""))
        return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)  # refused by ``check``
    return (args.context, args.bucket) if spec == FRESH else None


def trained_length(loaded: models.Loaded, tokens: int) -> int | None:
    """Tokens the model was trained on; a model that has no positions beyond them cannot stream past them."""
    config = loaded.model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_theta", None)
    if limit is not None and tokens > limit and not rotary:
        raise ValueError(f"{tokens} tokens: {loaded.name} has learned positions, {limit} of them; lower --tokens")
    return limit


def frame(loaded: models.Loaded, text: models.Text, spec: str, args: argparse.Namespace) -> records.Record:
    """A record before its metrics."""
    own = {"context": args.context} if spec == FRESH else {}
    names = ("streams", "tokens", "bucket", "step", "attn")
    return {
        "task": TASK,
        "model": loaded.name,
        "spec": spec,
        "settings": {
            **quality.setting(loaded, text, args.seed),
            **{name: getattr(args, name) for name in names},
            **own,
        },
        "versions": records.versions(),
        "machine": records.machine(),
    }


def measure(
    model: Any, ids: torch.Tensor, spec: str, args: argparse.Namespace, tick: Callable[[int], object]
) -> dict[str, list[Any]]:
    """Perplexity, stored bytes and tokens kept by bucket of tokens [1, streams * T + 1]; ``nll`` is the mean -log
    probability of each step, a list for each stream."""
    fresh = recomputed(spec, args)
    context, every = fresh or (0, args.bucket)
    contenders.use_attention(model, "full" if fresh else spec, args.attn)
    surprises, held = [], []
    for first in range(0, args.streams * args.tokens, args.tokens):
        cache = None if fresh else contenders.make_cache(spec, model.config)
        for start in range(first, first + args.tokens, every):
            if fresh:
                cache, before = contenders.make_cache("full", model.config), max(start - context, first)
                surprise(model, ids[:, before : start + 1], args.step, cache)
            surprises.append(surprise(model, ids[:, start : start + every + 1], args.step, cache, tick))
            held.append((contenders.stored_bytes(cache), contenders.tokens_kept(cache)))
    nll = torch.cat(surprises).double().view(args.streams, -1, args.bucket)
    buckets = nll.shape[1]
    most = torch.tensor(held).view(args.streams, buckets, -1, 2).amax((0, 2)).tolist()
    return {
        "perplexity": [scoring.perplexity(nll[:, bucket]) for bucket in range(buckets)],
        "nbytes": [nbytes for nbytes, _ in most],
        "tokens_kept": [kept for _, kept in most],
        "nll": [[round(x, 5) for x in stream] for stream in nll.view(args.streams, -1, args.step).mean(-1).tolist()],
    }


@torch.inference_mode()
def surprise(
    model: Any, ids: torch.Tensor, step: int, cache: Any, tick: Callable[[int], object] = lambda tokens: None
) -> torch.Tensor:
    """Feed all but the last of tokens [1, n + 1]; -log probability of each next one, [n] float32."""
    pieces = [torch.empty(0)]
    for fed, targets in scoring.steps(ids, step):
        logits = scoring.forward(model, fed, cache).float()
        pieces.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none").cpu())
        tick(len(targets))
    return torch.cat(pieces)


def table(results: list[records.Record]) -> str:
    """Perplexity of every bucket, and below it the ratio to `fresh` and to `full` in the same bucket."""
    settings, trained = results[0]["settings"], results[0]["metrics"]["trained_length"]
    starts = range(0, settings["tokens"], settings["bucket"])
    lines = [f"Perplexity by bucket of {settings['bucket']} tokens (trained length {trained})", ""]
    lines += [f"{'first token':<36}" + "".join(f"{start:>9}" for start in starts) + f"{'MB, first':>12}{'last':>8}"]
    known = {record["spec"]: record for record in results}
    for record in results:
        spec, m = record["spec"], record["metrics"]
        lines.append(f"{spec:<36}" + "".join(f"{x:>9.2f}" for x in m["perplexity"]))
        lines[-1] += f"{m['nbytes'][0] / 1e6:>12.2f}{m['nbytes'][-1] / 1e6:>8.2f}"
        for other in (FRESH, "full"):
            if other != spec:
                pairs = [ratio(record, known[other], bucket) for bucket in range(len(starts))]
                lines.append(f"{'':<6}{'against ' + other:<30}" + "".join(f"{x:>8.3f}x" for x, _ in pairs))
                lines.append(
                    f"{'':<6}{'standard error':<30}"
                    + "".join(f"{error:>8.3f} " for _, error in pairs).replace("nan", "  -")
                )
    return "\n".join(lines)


def ratio(record: records.Record, other: records.Record, bucket: int) -> tuple[float, float]:
    """Perplexity of a bucket over that of another cache, and its standard error."""
    settings = record["settings"]
    steps = settings["bucket"] // settings["step"]
    own, its = (
        torch.tensor(r["metrics"]["nll"], dtype=torch.float64)[:, bucket * steps : (bucket + 1) * steps].flatten()
        for r in (record, other)
    )
    value = record["metrics"]["perplexity"][bucket] / other["metrics"]["perplexity"][bucket]
    return value, value * float((own - its).std()) / math.sqrt(len(own))


def draw(out: Path) -> None:
    """The picture of the records in `out`, beside it; a note where matplotlib is missing."""
    try:
        for path in plot(records.read(out), out.parent):
            print(f"drew {path}")
    except ValueError as error:
        print(f"note: no picture: {error}")
