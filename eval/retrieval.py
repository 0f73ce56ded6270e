"""`python -m eval retrieval`: does the cache still hold what the question at the end asks for?

    python -m eval retrieval --specs int8 "sink(4,252)" "snapkv(budget=0.25)" --lengths 1024 2048 --items 50

Ten people have a five-digit pass key each. The ten sentences that say so lie evenly scattered in a filler that
repeats itself, and the question at the end asks for one of them:

    ... The pass key of Nora is 52817. ... What is the pass key of Nora? The pass key of Nora is

The answer is the most likely of the ten keys. All ten occur in the context, so a cache that only knows what a key looks
like is right one time in ten; one key among made-up ones would be found by any cache that kept some of its digits.

The context is prefilled once per item, through the cache and in a fixed schedule (`--chunk 0`: one forward), for some
policies depend on the schedule. The question belongs to the prefill, so that a policy with an observation window
sees it. The prompt's last token is held back and fed with each candidate through a fork of the cache: every logit that
is scored comes from a forward that read what was stored.

One record is one (spec, length, depth): accuracy with its standard error, and what became of every item. The items of
a length and depth are the same for every spec, so that specs are compared item by item.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eval import contenders, models, proofs, quality, records, scoring
from eval.models import cache_argument

TASK = "retrieval"
SPECS = ["full", "int8", "int4", "int2", "sink(4,252)"]
DEPTHS = [0.1, 0.3, 0.5, 0.7, 0.9]

NAMES = (
    "Nora Felix Greta Oskar Ines Hugo Clara Bruno Edith Jonas Martha Anton Paula Victor Rosa Simon Helen Arthur Irene "
    "Walter Agnes Ralph Olive Edgar Vera Conrad Lydia Leonard Sylvia Gilbert Thelma Roland Amelia Norman Judith"
).split()
INTRODUCTION = "Each person in this text has a pass key of five digits."
FACT = " The pass key of {name} is {key}."
FILLER = (  # of the pass key test of Mohtashami and Jaggi (arXiv:2305.16300), which most others use too
    " The grass is green.",
    " The sky is blue.",
    " The sun is yellow.",
    " Here we go.",
    " There and back again.",
)
QUESTION = "\nWhat is the pass key of {name}? The pass key of {name} is"
ANSWER = " {key}"


class Item(NamedTuple):
    """One question: a prompt, and the keys that could answer it, the right one first."""

    prompt: str
    answers: list[str]


class Encoded(NamedTuple):
    """An item in tokens: what is prefilled, and for each answer the last prompt token and the answer's own."""

    prefill: torch.Tensor  # [1, n]
    answers: list[torch.Tensor]  # [1 + tokens of the answer]


class Found(NamedTuple):
    """What became of one item."""

    rank: int  # keys that were likelier than the right one; 0 is right
    log_share: float  # log of the right key's share of the probability of all keys
    tokens: int
    tokens_kept: int
    nbytes: int


# ---- items -------------------------------------------------------------------------------------------------


def make_item(count: Callable[[str], int], length: int, depth: float, keys: int, seed: str) -> Item:
    """The longest item of at most `length` tokens, its fact at `depth` (0: start, 1: end) of the context."""
    draw = random.Random(seed)
    names, codes = draw.sample(NAMES, keys), [str(code) for code in draw.sample(range(10_000, 100_000), keys)]
    facts = [FACT.format(name=name, key=code) for name, code in zip(names, codes, strict=True)]
    others = facts[1:]
    place = min(int(depth * keys), keys - 1)
    facts = [*others[:place], facts[0], *others[place:]]
    start = draw.randrange(len(FILLER))

    def prompt(sentences: int) -> str:
        filler = [FILLER[(start + i) % len(FILLER)] for i in range(sentences)]
        cuts = [round(sentences * (2 * i + 1) / (2 * keys)) for i in range(keys)]  # before each fact
        pieces = [filler[a:b] for a, b in zip([0, *cuts], [*cuts, sentences], strict=True)]
        body = [sentence for piece, fact in zip(pieces, [*facts, ""], strict=True) for sentence in [*piece, fact]]
        return INTRODUCTION + "".join(body) + QUESTION.format(name=names[0])

    room = length - max(count(ANSWER.format(key=code)) for code in codes)
    return Item(prompt(_most_sentences(lambda n: count(prompt(n)) <= room, length)), codes)


def _most_sentences(fits: Callable[[int], bool], length: int) -> int:
    """The largest number of filler sentences that still fits, by bisection."""
    low, high = -1, length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low < 1:
        raise ValueError(
            f"--lengths {length} has no room for the pass keys and a filler; use more tokens or fewer --keys"
        )
    return low


def encode(tokenizer: Any, item: Item) -> Encoded:
    """Cut each prompt with its answer where all of them are still alike, at the latest where the prompt ends."""
    whole = [tokenizer(item.prompt + ANSWER.format(key=key))["input_ids"] for key in item.answers]
    alike = 0
    while alike < min(map(len, whole)) and len({ids[alike] for ids in whole}) == 1:
        alike += 1
    cut = min(alike, len(tokenizer(item.prompt)["input_ids"])) - 1  # one token back: its logits are scored
    return Encoded(torch.tensor([whole[0][:cut]]), [torch.tensor(ids[cut:]) for ids in whole])


# ---- asking ------------------------------------------------------------------------------------------------


def prefill(model: Any, ids: torch.Tensor, cache: Any, chunk: int) -> None:
    """Feed tokens [1, n] in one forward, or `chunk` at a time; no logits are kept."""
    options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(type(model).forward).parameters else {}
    for piece in ids.split(chunk or ids.shape[1], dim=1):
        model(piece, use_cache=True, **{cache_argument(model): cache}, **options)


def log_likelihoods(model: Any, answers: list[torch.Tensor], cache: Any, rows: int) -> list[float]:
    """Log-likelihood of every answer after what the cache holds; the cache itself stays as it is.

    Answers of one token count share a forward, `rows` at most: a fork of the cache, repeated.
    """
    found: dict[int, float] = {}
    for indices in _alike(answers, rows):
        ids = torch.stack([answers[i] for i in indices]).to(model.device)  # [R, 1 + a]
        fork = cache.fork() if hasattr(cache, "fork") else copy.deepcopy(cache)
        if len(indices) > 1:
            fork.batch_repeat_interleave(len(indices))
        logits = model(ids[:, :-1], use_cache=True, **{cache_argument(model): fork}).logits  # [R, a, V]
        each = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].sum(-1)
        found.update(zip(indices, each.tolist(), strict=True))
    return [found[i] for i in range(len(answers))]


def _alike(answers: list[torch.Tensor], rows: int) -> Iterator[list[int]]:
    """Indices of answers of equal length, `rows` at a time."""
    for size in sorted({len(answer) for answer in answers}):
        indices = [i for i, answer in enumerate(answers) if len(answer) == size]
        for start in range(0, len(indices), rows):
            yield indices[start : start + rows]


@torch.inference_mode()
def ask(model: Any, item: Encoded, spec: str, *, chunk: int = 0, attn: str = "kvcache") -> Found:
    """Prefill one item through a fresh cache and rank its answers."""
    contenders.use_attention(model, spec, attn)
    cache = contenders.make_cache(spec, model.config)
    prefill(model, item.prefill.to(model.device), cache, chunk)
    nbytes, kept = contenders.stored_bytes(cache), contenders.tokens_kept(cache)
    # Stock quantized caches do not repeat their packed part: one answer at a time there.
    rows = len(item.answers) if contenders.is_ours(spec) else 1
    scores = torch.tensor(log_likelihoods(model, item.answers, cache, rows), dtype=torch.float64)
    rank = int((scores[1:] >= scores[0]).sum())  # a tie is not an answer
    return Found(rank, float(scores.log_softmax(0)[0]), item.prefill.shape[1], kept, nbytes)


# ---- command -----------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    quality.add_model_arguments(parser, text=False)
    parser.add_argument("--specs", nargs="+", default=SPECS, help=f"caches to ask ({' '.join(SPECS)})")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048], help="tokens (1024 2048)")
    parser.add_argument("--items", type=int, default=50, help="questions per length, over all depths (%(default)s)")
    depths = " ".join(map(str, DEPTHS))
    parser.add_argument("--depths", nargs="+", type=float, default=DEPTHS, help=f"where the answer lies ({depths})")
    parser.add_argument("--keys", type=int, default=10, help="people with a pass key in each context (%(default)s)")
    parser.add_argument("--chunk", type=int, default=0, help="tokens prefilled at a time; 0: all (%(default)s)")
    parser.add_argument("--attn", choices=["sdpa", "eager", "kvcache"], default="kvcache", help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/retrieval.jsonl"), help="(%(default)s)")
    parser.add_argument("--no-proofs", action="store_true", help="skip the harness's proofs of itself")


def check(args: argparse.Namespace) -> None:
    """Refuse what has no meaning before a model is loaded."""
    if any(not 0 <= depth <= 1 for depth in args.depths):
        raise ValueError(f"--depths {args.depths}: a depth is between 0 (start) and 1 (end)")
    if args.items < 1 or args.items % len(args.depths):
        raise ValueError(f"--items {args.items} cannot be shared among {len(args.depths)} depths; use a multiple")
    if not 2 <= args.keys <= len(NAMES):
        raise ValueError(f"--keys {args.keys}: ranking needs at least 2 keys, and there are {len(NAMES)} names")
    if args.chunk < 0:
        raise ValueError(f"--chunk {args.chunk}: give tokens per forward, or 0 for one forward")


def run(args: argparse.Namespace) -> None:
    """Ask what `--out` does not hold yet, and print the table."""
    check(args)
    done = {records.identity(record): record for record in records.read(args.out)}
    loaded = models.load_model(args.model, args.device, args.dtype)
    limit = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and max(args.lengths) > limit:
        raise ValueError(f"--lengths {max(args.lengths)} exceeds the context of {loaded.name}, {limit}")
    specs = contenders.with_controls(["full", *args.specs], loaded.model.config)
    if not args.no_proofs:
        first = encode(loaded.tokenizer, _items(loaded, args, args.lengths[0], args.depths[0])[0])
        ids = first.prefill.to(loaded.model.device)
        print(proofs.line(proofs.prove(loaded.model, ids, attn=args.attn)), flush=True)
    cells = [(length, depth) for length in dict.fromkeys(args.lengths) for depth in dict.fromkeys(args.depths)]
    results = [record for cell in cells for record in _cells(args, loaded, specs, *cell, done)]
    print("\n" + table(results))


def _cells(
    args: argparse.Namespace,
    loaded: models.Loaded,
    specs: list[str],
    length: int,
    depth: float,
    done: dict[str, records.Record],
) -> list[records.Record]:
    """The records of all specs at one length and depth, measured where `done` lacks them."""
    from tqdm import tqdm

    frames = {spec: frame(loaded, spec, length, depth, args) for spec in specs}
    found = {spec: done[records.identity(f)] for spec, f in frames.items() if records.identity(f) in done}
    pending = [spec for spec in specs if spec not in found]
    items = [encode(loaded.tokenizer, item) for item in _items(loaded, args, length, depth)] if pending else []
    for spec in specs:
        if spec in found:
            print(f"skipped {spec} at {length}, depth {depth}: {args.out.name} has it already")
            continue
        torch.manual_seed(args.seed)
        bar = tqdm(items, desc=f"{spec} {length} {depth}", unit="item", leave=False)
        measured = metrics([ask(loaded.model, item, spec, chunk=args.chunk, attn=args.attn) for item in bar])
        base = found["full"]["metrics"]["nbytes"] if spec != "full" else measured["nbytes"]
        scoring.compressed(spec, int(measured["nbytes"]), int(base), length)
        found[spec] = {**frames[spec], "metrics": measured}
        records.append(args.out, found[spec])
        print(line(found[spec]), flush=True)
    return [found[spec] for spec in specs]


def _items(loaded: models.Loaded, args: argparse.Namespace, length: int, depth: float) -> list[Item]:
    """The items of one length and depth: the same whatever else is asked in this run."""
    count = lambda text: len(loaded.tokenizer(text)["input_ids"])  # noqa: E731
    return [
        make_item(count, length, depth, args.keys, f"{args.seed} {length} {depth} {args.keys} {index}")
        for index in range(args.items // len(args.depths))
    ]


def frame(loaded: models.Loaded, spec: str, length: int, depth: float, args: argparse.Namespace) -> records.Record:
    """A record before its metrics."""
    text = models.Text("\n".join([INTRODUCTION, FACT, *FILLER, QUESTION, ANSWER, *NAMES]), "generated pass keys")
    return {
        "task": TASK,
        "model": loaded.name,
        "spec": spec,
        "settings": {
            **quality.setting(loaded, text, args.seed),
            "length": length,
            "depth": depth,
            "items": args.items // len(args.depths),
            "keys": args.keys,
            "chunk": args.chunk,
            "attn": args.attn,
        },
        "versions": records.versions(),
        "machine": records.machine(),
    }


def metrics(found: list[Found]) -> dict[str, Any]:
    """What became of the items, as the numbers of a record."""
    right = [int(item.rank == 0) for item in found]
    mean = lambda values: sum(values) / len(found)  # noqa: E731
    return {
        "accuracy": mean(right),
        "accuracy_se": standard_error(right),
        "right": right,
        "log_share": mean([item.log_share for item in found]),
        "tokens_seen": mean([item.tokens for item in found]),
        "tokens_kept": mean([item.tokens_kept for item in found]),
        "nbytes": mean([item.nbytes for item in found]),
    }


def standard_error(right: list[int]) -> float:
    """Of a share, after adding two right and two wrong answers: ten of ten is no proof of always (Agresti, Coull)."""
    n = len(right) + 4
    share = (sum(right) + 2) / n
    return math.sqrt(share * (1 - share) / n)


def paired(right: list[int], other: list[int]) -> tuple[float, float]:
    """Difference of two accuracies on the same items, and its standard error (Agresti, Min: half an item a cell)."""
    wins = sum(a > b for a, b in zip(right, other, strict=True))
    losses = sum(a < b for a, b in zip(right, other, strict=True))
    n = len(right) + 2
    return (wins - losses) / len(right), math.sqrt(wins + losses + 1 - (wins - losses) ** 2 / n) / n


def line(record: records.Record) -> str:
    """One record for a reader."""
    m, s = record["metrics"], record["settings"]
    return (
        f"{record['spec']:<28} {s['length']:>6} tokens, depth {s['depth']:.2f}: accuracy {m['accuracy']:.2f} "
        f"+- {m['accuracy_se']:.2f}  kept {m['tokens_kept']:.0f}/{m['tokens_seen']:.0f}  {m['nbytes'] / 1e6:.2f} MB"
    )


def table(results: list[records.Record]) -> str:
    """Accuracy by cache and depth, a block for each length, beside the full cache and luck."""
    first = results[0]["settings"]
    lines = [f"Retrieval of 1 of {first['keys']} pass keys (chance {1 / first['keys']:.2f})"]
    for length in dict.fromkeys(record["settings"]["length"] for record in results):
        mine = [record for record in results if record["settings"]["length"] == length]
        depths = list(dict.fromkeys(record["settings"]["depth"] for record in mine))
        lines += ["", f"{length} tokens"]
        lines += [f"{'cache':<28}{'accuracy':>14}{'against full':>15}{'kept':>11}{'MB':>8}  depth"]
        lines[-1] += "".join(f"{depth:>6.2f}" for depth in depths)
        by_spec = {spec: [r for r in mine if r["spec"] == spec] for spec in dict.fromkeys(r["spec"] for r in mine)}
        lines += [_row(spec, by_spec) for spec in by_spec]
    return "\n".join(lines)


def _row(spec: str, by_spec: dict[str, list[records.Record]]) -> str:
    right = {name: [x for record in mine for x in record["metrics"]["right"]] for name, mine in by_spec.items()}
    mean = lambda key: sum(r["metrics"][key] for r in by_spec[spec]) / len(by_spec[spec])  # noqa: E731
    accuracy = sum(right[spec]) / len(right[spec])
    against = "" if spec == "full" else "{:+.2f} +- {:.2f}".format(*paired(right[spec], right["full"]))
    own = f"{accuracy:.2f} +- {standard_error(right[spec]):.2f}"
    kept = f"{mean('tokens_kept'):.0f}/{mean('tokens_seen'):.0f}"
    row = f"{spec:<28}{own:>14}{against:>15}{kept:>11}{mean('nbytes') / 1e6:>8.2f}       "
    row += "".join(f"{record['metrics']['accuracy']:>6.2f}" for record in by_spec[spec])
    luck = contenders.random_beside(spec)
    loses = luck in right and accuracy < sum(right[luck]) / len(right[luck])
    return row + ("  loses to random" if loses else "")
