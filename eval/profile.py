"""`python -m eval profile`: what does my workload cost, request by request?

    python -m eval profile --model smollm2 --prompts requests.jsonl --spec int8 "int8+sink(4,1020)"

A line of the file is one request: `{"prompt": "..."}`, or `{"messages": [...]}` for the model's chat template, and
perhaps `"new_tokens"`. Without a file the embedded text is asked, at a few lengths. Every request starts with an empty
cache and decodes greedily, always as many tokens as asked for, so that all caches take the same number of steps. It
runs twice: watched for its peak memory, which is slow on a CPU and warms up, then timed. Per request:

    time to first token    from the prompt's first byte to the first token's choice
    tokens per second      of the steps after it
    peak bytes             beside the weights: cache, activations, and whatever a step copies for a moment
    steps                  of each the context, the time, and the bytes it has to move: weights and stored bytes

If a step only moved those bytes, its time would grow with context as they do. Machines drift, so between two steps one
is taken on an almost empty cache, and what is looked at is the ratio of the two, r, against the bytes' own ratio:

    warning  where  slope of r > 1.5 (slope of bytes moved / bytes of the weights),  and beyond the noise of r

Slopes are medians over pairs of bins, bins are medians over steps, so that a stall of the machine is no finding.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eval import contenders, models, records, speed, tasks
from eval.memory import PeakBytes
from eval.quality import add_model_arguments

TASK = "profile"
LENGTHS = (128, 512, 1024)  # of the requests that are made from the embedded text
BINS, FEW = 8, 4  # bins at most; steps in one at least
RENEW = 8  # steps after which an almost empty cache is emptied
FASTER = 1.5


class Request(NamedTuple):
    """A prompt [1, T], and how many tokens are decoded after it."""

    ids: torch.Tensor
    new: int


class Course(NamedTuple):
    """One request through one cache; lists are over the steps after the first token."""

    tokens: list[int]
    first: float  # seconds to the first token
    seconds: list[float]
    floor: list[float]  # seconds of a step on an almost empty cache, right after
    stored: list[int]
    contexts: list[int]


class Growth(NamedTuple):
    """How a step's time grows, in steps on an empty cache per token of context."""

    measured: float
    explained: float  # by the bytes it moves
    context: float  # the longest
    spread: float  # of steps at one context: 10th to 90th percentile

    @property
    def faster(self) -> bool:
        """Whether time grows faster than bytes explain, and more than steps at one context differ."""
        return self.measured > FASTER * self.explained and (self.measured - self.explained) * self.context > self.spread


# ---- the command -------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    add_model_arguments(parser, text=False)
    parser.add_argument("--prompts", type=Path, help="a JSON Lines file of requests (the embedded text)")
    parser.add_argument("--spec", nargs="+", default=["full", "int8"], help="caches, one after the other (full int8)")
    parser.add_argument("--new-tokens", type=int, default=64, help="of a request that does not say (%(default)s)")
    parser.add_argument("--limit", type=int, help="requests, at most")
    parser.add_argument("--attn", choices=["sdpa", "eager", "kvcache"], default="kvcache", help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/profile.jsonl"), help="(%(default)s)")


def run(args: argparse.Namespace) -> None:
    """Measure every request that `--out` does not hold yet; print a line for each, and a verdict for each cache."""
    done = {records.identity(record): record for record in records.read(args.out)}
    loaded = models.load_model(args.model, args.device, args.dtype)
    requests = (
        embedded(loaded, args.new_tokens) if args.prompts is None else read(loaded, args.prompts, args.new_tokens)
    )
    requests = requests[: args.limit]
    if not requests:
        raise ValueError("there are no requests; give a file with some, or a larger --limit")
    for spec in dict.fromkeys(contenders.canonical(spec, loaded.model.config) for spec in args.spec):
        found = []
        print(f"\n{spec}\n{HEAD}")
        for number, request in enumerate(requests):
            record = frame(loaded, number, request, spec, args.attn, args.seed)
            if records.identity(record) in done:
                record = done[records.identity(record)]
            else:
                record = {**record, "metrics": measure(loaded.model, request, spec, args.attn, args.seed)}
                records.append(args.out, record)
            found.append(record)
            print(line(record), flush=True)
        print(verdict(found))


def read(loaded: models.Loaded, path: Path, new: int) -> list[Request]:
    """The requests of a file."""
    if not path.is_file():
        raise FileNotFoundError(f"--prompts {str(path)!r} is not a file; give JSON Lines, or leave it out")
    found = []
    for number, asked in enumerate(tasks.read_lines(path), 1):
        known = isinstance(asked, dict) and set(asked) <= {"prompt", "messages", "new_tokens"}
        if not known or ("prompt" in asked) == ("messages" in asked):
            raise ValueError(f"{path.name}:{number}: a request is a prompt or messages, and perhaps new_tokens")
        if "prompt" in asked:
            ids = loaded.tokenizer(asked["prompt"], return_tensors="pt")["input_ids"]
        else:
            options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
            ids = loaded.tokenizer.apply_chat_template(asked["messages"], **options)["input_ids"]
        found.append(checked(loaded, ids, asked.get("new_tokens", new), f"{path.name}:{number}"))
    return found


def embedded(loaded: models.Loaded, new: int) -> list[Request]:
    """The start of the embedded text, at those lengths for which the model has room."""
    limit = longest(loaded)
    lengths = [length for length in LENGTHS if length + new <= limit] or [max(limit - new, 1)]
    ids = models.token_ids(loaded, models.load_text(), max(lengths))
    return [checked(loaded, ids[:, :length], new, f"the text's first {length}") for length in lengths]


def longest(loaded: models.Loaded) -> int:
    """The tokens that the model was made for."""
    return getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None) or 2**31


def checked(loaded: models.Loaded, ids: torch.Tensor, new: Any, name: str) -> Request:
    """A request that the model has room for."""
    if not isinstance(new, int) or isinstance(new, bool) or new < 2:
        raise ValueError(f"{name}: new_tokens={new!r} leaves no step to time; use 2 or more")
    if not ids.shape[1] or ids.shape[1] + new > longest(loaded):
        limit = longest(loaded)
        raise ValueError(f"{name}: {ids.shape[1]} tokens and {new} new ones; {loaded.name} takes 1 to {limit} in all")
    return Request(ids.to(loaded.model.device), new)


# ---- measuring ---------------------------------------------------------------------------------------------


def frame(loaded: models.Loaded, number: int, request: Request, spec: str, attn: str, seed: int) -> records.Record:
    """A record before its metrics."""
    return {
        "task": TASK,
        "model": loaded.name,
        "spec": spec,
        "settings": {
            **models.about(loaded.model),
            "attn": attn,
            "seed": seed,
            "request": number,
            "prompt_sha256": hashlib.sha256(json.dumps(request.ids.tolist()).encode()).hexdigest()[:12],
            "prompt_tokens": request.ids.shape[1],
            "new_tokens": request.new,
        },
        "versions": records.versions(),
        "machine": records.machine(),
    }


def measure(model: Any, request: Request, spec: str, attn: str, seed: int) -> dict[str, Any]:
    """One request, watched and then timed, as the numbers of a record."""
    torch.manual_seed(seed)
    contenders.use_attention(model, spec, attn)
    make = functools.partial(contenders.make_cache, spec, model.config)
    with PeakBytes(model.device) as peak:
        course(model, request, make)
    timed = course(model, request, make, floor=True)
    seconds, weights = torch.tensor(timed.seconds, dtype=torch.float64), speed.weight_bytes(model)
    low, median, high = seconds.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    return {
        "time_to_first_token_s": timed.first,
        "tokens_per_second": len(seconds) / seconds.sum().item(),
        "step_ms": 1e3 * median,
        "step_ms_p10": 1e3 * low,
        "step_ms_p90": 1e3 * high,
        "peak_bytes": peak.bytes,
        "nbytes": timed.stored[-1],
        "weight_bytes": weights,
        "steps": {
            "context": timed.contexts,
            "ms": [round(1e3 * second, 4) for second in timed.seconds],
            "empty_ms": [round(1e3 * second, 4) for second in timed.floor],
            "bytes_moved": [weights + stored for stored in timed.stored],
        },
    }


@torch.inference_mode()
def course(model: Any, request: Request, make: Callable[[], Any], floor: bool = False) -> Course:
    """Feed a prompt, then decode greedily, token by token; with `floor` also on an almost empty cache, in turns."""
    cache = make()
    first, token = speed.timed(model, request.ids, cache)
    made = Course([token], first, [], [], [], [])
    for step in range(request.new - 1):
        ids = torch.tensor([[token]], device=request.ids.device)
        if floor and step % RENEW == 0:
            empty = make()
            speed.timed(model, ids, empty)
        spent, token = speed.timed(model, ids, cache)
        if floor:
            made.floor.append(speed.timed(model, ids, empty)[0])
        made.tokens.append(token)
        made.seconds.append(spent)
        made.stored.append(contenders.stored_bytes(cache))
        made.contexts.append(request.ids.shape[1] + step + 1)
    return made


# ---- what it says ------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One step: its context, its time, that on an empty cache, and the bytes moved."""

    context: float
    seconds: float
    floor: float
    moved: float


class Bin(NamedTuple):
    """Steps at about one context: medians, and from the 10th to the 90th percentile of the ratio."""

    context: float
    seconds: float
    moved: float
    ratio: float  # to a step on an empty cache
    spread: float


def bins(steps: Sequence[Step]) -> list[Bin]:
    """Steps in the order of their contexts, in a few groups of one size."""
    steps, size = sorted(steps), max(FEW, -(-len(steps) // BINS))
    found = []
    for group in (steps[start : start + size] for start in range(0, len(steps), size)):
        context, seconds, _, moved = map(statistics.median, zip(*group, strict=True))
        ratios = torch.tensor([step.seconds / step.floor for step in group], dtype=torch.float64)
        low, ratio, high = ratios.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
        found.append(Bin(context, seconds, moved, ratio, high - low))
    return found


def growth(found: Sequence[Bin], weights: int) -> Growth:
    """How time and bytes grow from an empty cache (1 and 1) over the bins."""
    time = [(0.0, 1.0), *((one.context, one.ratio) for one in found)]
    moved = [(0.0, 1.0), *((one.context, one.moved / weights) for one in found)]
    return Growth(slope(time), slope(moved), found[-1].context, statistics.median(one.spread for one in found))


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The median over all pairs (Theil and Sen)."""
    return statistics.median(
        (y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(points, 2) if x2 > x1
    )


COLUMNS = {"request": 7, "prompt": 8, "new": 6, "first s": 9, "tok/s": 8, "step ms": 9, "p10-p90": 16, "peak MB": 9}
HEAD = "".join(name.rjust(width) for name, width in COLUMNS.items()) + "MB".rjust(8)


def line(record: records.Record) -> str:
    """One request for a reader."""
    s, m = record["settings"], record["metrics"]
    between = f"{m['step_ms_p10']:.1f}-{m['step_ms_p90']:.1f}"
    return (
        f"{s['request']:>7}{s['prompt_tokens']:>8}{s['new_tokens']:>6}{m['time_to_first_token_s']:>9.2f}"
        f"{m['tokens_per_second']:>8.1f}{m['step_ms']:>9.1f}{between:>16}{m['peak_bytes'] / 1e6:>9.1f}"
        f"{m['nbytes'] / 1e6:>8.1f}"
    )


def verdict(found: list[records.Record]) -> str:
    """Step time against context over all requests of a cache, and whether the bytes explain it."""
    steps: list[Step] = []
    for record in found:
        own = record["metrics"]["steps"]
        columns = (own["context"], own["ms"], own["empty_ms"], own["bytes_moved"])
        steps += [Step(n, ms / 1e3, empty / 1e3, moved) for n, ms, empty, moved in zip(*columns, strict=True)]
    groups = bins(steps)
    lines = [
        f"  at {one.context:>8.0f} tokens {1e3 * one.seconds:8.2f} ms, {one.ratio:5.2f} of an empty cache's; "
        f"{one.moved / 1e6:9.1f} MB, {one.moved / one.seconds / 1e9:6.1f} GB/s"
        for one in groups
    ]
    grown = growth(groups, found[0]["metrics"]["weight_bytes"])
    lines.append(
        f"  per 1,000 tokens of context a step takes {100e3 * grown.measured:+.1f} % of an empty cache's; "
        f"the bytes explain {100e3 * grown.explained:+.1f} %"
    )
    if grown.faster:
        remedy = "" if found[0]["settings"]["attn"] == "kvcache" else "; try --attn kvcache"
        lines.append(
            "  warning: step time grows faster than its bytes explain: in every step the history is copied, decoded, "
            f"or computed with more than it is read{remedy}"
        )
    return "\n".join(lines)
