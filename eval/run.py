"""`python -m eval run`: what does a cache cost in right answers?

    python -m eval run --config eval/configs/answers.yaml --data FOLDER --limit 50

A YAML file names models, caches and tasks; every combination is a cell, and a cell is one JSON line in `out`. A run
that is started again skips the cells it finds. Answers are scored through the cache (`hf_kvcache/likelihood.py`), the
same items for every cache, so that each is compared with the stock full-precision cache (`dynamic`, always there) in
pairs: difference, its standard error, and a sign test (`paired.py`). A cell whose cache promised fewer bytes and holds
as many is refused: no compression happened, so its score would say nothing.

    accelerate launch --multi_gpu -m eval run --config FILE     the items of a cell, shared by processes (`ranks.py`)
    python -m eval run --config FILE --ray ADDRESS              the cells, spread over a Ray cluster (`cluster.py`)

Either way the records are those of this process alone.

    models: [smollm2]                              # hub names, folders, or embedded ones
    specs: [full, int8, "sink(4,60)"]              # names of eval/contenders.py
    tasks: [lambada, {name: kv, length: 1024}]     # names of eval/tasks.py; length: of generated contexts, in tokens
    items: 200                                     # of each task; also out, step, batch, attn, dtype, device, seed
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eval import contenders, models, records, tasks
from eval.paired import mean_se, paired
from eval.ranks import Ranks, join
from eval.tasks import CHOICE, COPY, GENERATE, WORD
from hf_kvcache import likelihood

LISTS = ("models", "specs", "tasks")
DEFAULTS: dict[str, Any] = {
    "out": "results/answers.jsonl",
    "items": 100,
    "step": 1,
    "batch": 16,
    "attn": "sdpa",
    "dtype": None,
    "device": None,
    "seed": 0,
}
LENGTH = 1024  # tokens of a generated context
NEW_TOKENS = 256  # of a generated answer
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Answers(NamedTuple):
    """Per item a score and the log-probability of the right answer; and what was stored for them."""

    right: list[float]
    logprob: list[float]
    nbytes: int
    tokens: int


# ---- the command -------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("--config", type=Path, required=True, help="a YAML file: models, specs, tasks, and how")
    parser.add_argument("--data", help="a folder with local data ($HF_KVCACHE_DATA)")
    parser.add_argument("--limit", type=int, help="items of each task, at most")
    parser.add_argument("--out", type=Path, help="results, instead of the file's `out`")
    for name in LISTS:
        parser.add_argument(f"--{name}", nargs="+", help=f"instead of the file's `{name}`")
    about = "spread the cells over the Ray cluster at ADDRESS (the one this machine is in; local: a new one here)"
    parser.add_argument("--ray", nargs="?", const="auto", metavar="ADDRESS", help=about)
    parser.add_argument(
        "--ray-cpus", type=int, default=1, help="CPUs of a cell, in a cluster without GPUs (%(default)s)"
    )


def run(args: argparse.Namespace) -> None:
    """Measure every cell that the results do not hold yet."""
    config = settle(args)
    folder, out = tasks.data_folder(args.data), Path(config["out"])
    for asked in config["tasks"]:
        reason = tasks.why_not(asked["name"], folder)
        if reason:
            raise ValueError(f"task {asked['name']!r} cannot run here: {reason}")
    ranks = join()
    if args.ray is None:
        with ranks.one_voice():
            refused = here(config, folder, out, ranks)
    elif ranks.size > 1:
        raise ValueError(f"--ray spreads the cells by itself: start one process, not {ranks.size}")
    else:
        from eval import cluster

        refused = cluster.sweep(config, folder, out, args.ray, args.ray_cpus)
    if refused and not ranks.main:
        raise SystemExit(1)
    if refused:
        raise ValueError(f"{len(refused)} cells gave no result: {'; '.join(refused)}")


def here(config: dict[str, Any], folder: Path | None, out: Path, ranks: Ranks) -> list[str]:
    """Measure cell by cell, with all the processes of this launch. Returns what was refused."""
    done = {records.identity(record): record for record in records.read(out)} if ranks.main else None
    done, refused = ranks.from_main(done), []
    for name in config["models"]:
        loaded = models.load_model(name, ranks.device_of(config["device"]), config["dtype"])
        specs = contenders.available(config["specs"], loaded.model.config)
        for asked in config["tasks"]:
            kind, items = tasks.task(asked["name"]).kind, tasks.load(asked["name"], folder, made(loaded, asked, config))
            framed = [frame(loaded, asked, items, spec, config) for spec in specs]
            book = Book(asked, framed, done, out if ranks.main else None)
            for cell in book.missing():
                if not book.closed:
                    try:
                        book.add(cell, measure(loaded, kind, items, cell["spec"], config, ranks))
                    except ValueError as error:
                        book.add(cell, str(error))
            refused += book.refused
    return refused


def settle(args: argparse.Namespace) -> dict[str, Any]:
    """The configuration: the file's, with what the command line says instead, checked and filled up."""
    config = {**DEFAULTS, **read_config(args.config)}
    for name in ("out", *LISTS):
        if getattr(args, name) is not None:
            config[name] = getattr(args, name)
    config["tasks"] = [{"name": task} if isinstance(task, str) else dict(task) for task in config["tasks"]]
    for asked in config["tasks"]:
        unknown = set(asked) - {"name", "length", "items"}
        if unknown or "name" not in asked:
            raise ValueError(f"task {asked!r}: give a name, and perhaps length and items")
        asked.setdefault("items", config["items"])
        if args.limit is not None:
            asked["items"] = min(asked["items"], args.limit)
        if asked["items"] < 1:
            raise ValueError(f"task {asked['name']!r}: {asked['items']} items answer nothing; use at least 1")
        if tasks.task(asked["name"]).file is None:
            asked.setdefault("length", LENGTH)
    return config


def read_config(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, with known names only."""
    try:
        import yaml
    except ImportError as error:
        raise ValueError("--config needs the package pyyaml, which is not installed; pip install pyyaml") from error
    if not path.is_file():
        raise FileNotFoundError(f"--config {str(path)!r} is not a file; see eval/configs for examples")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"--config {path.name} is not YAML: {' '.join(str(error).split())}") from error
    known = [*LISTS, *DEFAULTS]
    if not isinstance(config, dict) or set(config) - set(known):
        raise ValueError(f"--config {path.name} must be a mapping with some of {', '.join(known)}")
    missing = [name for name in LISTS if not isinstance(config.get(name), list) or not config[name]]
    if missing:
        raise ValueError(f"--config {path.name} needs a list under {', '.join(missing)}")
    return config


def made(loaded: models.Loaded, asked: dict[str, Any], config: dict[str, Any]) -> tasks.Made:
    """What a task's items are made from."""
    return tasks.Made(loaded.tokenizer, asked["items"], asked.get("length", 0), config["seed"])


class Book:
    """The cells of one task and model, as their answers come in: others wait for the baseline's.

    Args:
        out: where records go; None: nowhere.
    """

    def __init__(
        self, asked: dict[str, Any], frames: list[records.Record], done: dict[str, records.Record], out: Path | None
    ) -> None:
        self.task, self.kind = asked["name"], tasks.task(asked["name"]).kind
        self.frames, self.done, self.out = frames, done, out
        self.baseline: dict[str, Any] | None = None
        self.closed = False  # without a baseline there is nothing to compare with
        self.refused: list[str] = []
        self._early: list[tuple[records.Record, Answers]] = []

    def missing(self) -> list[records.Record]:
        """The cells to be measured; the others are known, and printed."""
        found = []
        for frame in self.frames:
            known = self.done.get(records.identity(frame))
            if known is None:
                found.append(frame)
            else:
                self._settle(known)
        return found

    def add(self, frame: records.Record, found: Answers | str) -> None:
        """Take the answers of a cell, or the reason why there are none."""
        if self.closed:
            return
        if self.baseline is None and frame["spec"] != contenders.BASELINE and not isinstance(found, str):
            self._early.append((frame, found))
            return
        try:
            if isinstance(found, str):
                raise ValueError(found)
            known = {**frame, "metrics": metrics(self.kind, frame["spec"], found, self.baseline)}
        except ValueError as error:
            self.refused.append(f"{self.task} with {frame['spec']}: {error}")
            print(f"refused {self.refused[-1]}", flush=True)
            self.closed = frame["spec"] == contenders.BASELINE
            return
        if self.out is not None:
            records.append(self.out, known)
        self.done[records.identity(known)] = known
        self._settle(known)

    def _settle(self, known: records.Record) -> None:
        print(line(known), flush=True)
        if known["spec"] == contenders.BASELINE:
            self.baseline, early, self._early = known["metrics"], self._early, []
            for frame, found in early:
                self.add(frame, found)


def frame(
    loaded: models.Loaded, asked: dict[str, Any], items: list[tasks.Item], spec: str, config: dict[str, Any]
) -> records.Record:
    """A record before its metrics."""
    return {
        "task": asked["name"],
        "model": loaded.name,
        "spec": spec,
        "settings": {
            **models.about(loaded.model),
            "items": len(items),
            "items_sha256": tasks.digest(items),
            **{key: value for key, value in asked.items() if key == "length"},
            **{key: config[key] for key in ("step", "batch", "attn", "seed")},
        },
        "versions": records.versions(),
        "machine": records.machine(),
    }


# ---- answers -----------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """What one process answered: by number a `Scored` of a request, or the score of an item; and what was stored."""

    scored: dict[int, Any]
    nbytes: int
    tokens: int


def measure(
    loaded: models.Loaded,
    kind: str,
    items: list[tasks.Item],
    spec: str,
    config: dict[str, Any],
    ranks: Ranks = Ranks(),  # noqa: B008 (a constant)
) -> Answers:
    """Answer all items through caches of that name, each process a part of them."""
    asks = [
        [likelihood.Request(*map(tuple, pair)) for pair in tasks.encode(loaded.tokenizer, item)]
        for item in (items if kind != GENERATE else [])
    ]
    try:
        mine: Share | str = share(loaded, kind, items, asks, spec, config, ranks)
    except ValueError as error:  # the others wait for this process
        mine = str(error)
    nbytes = tokens = 0
    scored: dict[int, Any] = {}
    for part in ranks.gather(mine):
        if isinstance(part, str):
            raise ValueError(part)
        scored |= part.scored
        nbytes, tokens = nbytes + part.nbytes, tokens + part.tokens
    ordered = iter([scored[index] for index in range(len(scored))])
    if kind == GENERATE:
        return Answers(list(ordered), [], nbytes, tokens)
    judged = [judge(kind, [next(ordered) for _ in own], item.gold) for own, item in zip(asks, items, strict=True)]
    right, logprob = map(list, zip(*judged, strict=True))
    return Answers(right, logprob, nbytes, tokens)


def share(
    loaded: models.Loaded,
    kind: str,
    items: list[tasks.Item],
    asks: list[list[likelihood.Request]],
    spec: str,
    config: dict[str, Any],
    ranks: Ranks,
) -> Share:
    """Answer what is this process's part."""
    from tqdm import tqdm

    torch.manual_seed(config["seed"])
    contenders.use_attention(loaded.model, spec, config["attn"])
    stored = Stored()
    make = lambda: contenders.make_cache(spec, loaded.model.config)  # noqa: E731
    if kind == GENERATE:
        mine = list(range(ranks.rank, len(items), ranks.size))
        with tqdm(total=len(mine), desc=spec, unit="item", leave=False) as bar:
            scored = [generated(loaded, items[index], make(), stored, bar.update) for index in mine]
        return Share(dict(zip(mine, scored, strict=True)), stored.nbytes, stored.tokens)
    flat = [ask for own in asks for ask in own]
    mine = likelihood.part(flat, make(), config["batch"], ranks.rank, ranks.size)
    options = {"step": config["step"], "batch_size": config["batch"], "dtype": torch.float32}
    with tqdm(total=len(mine), desc=spec, unit="item", leave=False) as bar:
        found = likelihood.score(
            loaded.model, [flat[i] for i in mine], make, filled=stored.add, tick=bar.update, **options
        )
    return Share(dict(zip(mine, found, strict=True)), stored.nbytes, stored.tokens)


class Stored:
    """Bytes and tokens of all contexts that caches held."""

    def __init__(self) -> None:
        self.nbytes = self.tokens = 0

    def add(self, cache: Any, tokens: int) -> None:
        """Count a cache that was fed so many tokens."""
        self.nbytes += contenders.stored_bytes(cache)
        self.tokens += tokens


def judge(kind: str, scored: list[likelihood.Scored], gold: int) -> tuple[float, float]:
    """(score of an item, log-probability of its right answer)."""
    sums = [one.logprobs.double().sum().item() for one in scored]
    if kind == CHOICE:
        return float(max(range(len(sums)), key=sums.__getitem__) == gold), sums[gold]
    greedy = scored[gold].greedy
    assert kind in (WORD, COPY)
    return (float(greedy.all()) if kind == WORD else greedy.double().mean().item()), sums[gold]


@torch.inference_mode()
def generated(
    loaded: models.Loaded, item: tasks.Item, cache: Any, stored: Stored, tick: Callable[[int], object]
) -> float:
    """Whether the last number that is generated is the item's answer."""
    ids = loaded.tokenizer(item.context, return_tensors="pt").to(loaded.model.device)
    options: dict[str, Any] = {models.cache_argument(loaded.model): cache, "do_sample": False}
    options |= {"max_new_tokens": NEW_TOKENS, "stop_strings": ["\n\n", "Question:"], "tokenizer": loaded.tokenizer}
    out = loaded.model.generate(**ids, **options)
    text = loaded.tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    stored.add(cache, out.shape[1] - 1)
    tick(1)
    return float(last_number(text) == last_number(item.answers[item.gold]))


def last_number(text: str) -> float | None:
    """The last number of the first paragraph; None if there is none."""
    found = NUMBER.findall(text.strip().split("\n\n")[0].split("Question:")[0])
    return float(found[-1].replace(",", "")) if found else None


# ---- records -----------------------------------------------------------------------------------------------


def metrics(kind: str, spec: str, answers: Answers, baseline: dict[str, Any] | None) -> dict[str, Any]:
    """Answers as the numbers of a record; `baseline` is the record of the stock cache, None for itself."""
    accuracy, error = mean_se(answers.right)
    per_token = answers.nbytes / max(answers.tokens, 1)
    found: dict[str, Any] = {
        "accuracy": accuracy,
        "accuracy_se": error,
        "right": answers.right,
        "logprob": [round(x, 6) for x in answers.logprob],
        "bytes_per_token": per_token,
        "bytes_ratio": 1.0 if baseline is None else per_token / baseline["bytes_per_token"],
    }
    if baseline is not None and contenders.should_compress(spec) and found["bytes_ratio"] >= 1:
        raise ValueError(
            f"holds {per_token:.0f} bytes per token of these contexts, the full-precision cache "
            f"{baseline['bytes_per_token']:.0f}: no compression happened, so this is not a result"
        )
    if kind == WORD:
        found["perplexity"] = math.exp(min(-mean_se(answers.logprob)[0], 700))  # of the whole word, as lm-eval has it
    against = baseline or found
    found |= paired(answers.right, against["right"])._asdict()
    if answers.logprob:
        difference, error = paired(found["logprob"], against["logprob"])[:2]
        found |= {"logprob_difference": difference, "logprob_difference_se": error}
    return found


def line(record: records.Record) -> str:
    """One result for a reader."""
    m = record["metrics"]
    text = f"{record['task']:<10} {record['spec']:<28} {100 * m['accuracy']:6.2f} +- {100 * m['accuracy_se']:.2f} %"
    text += f"   {100 * m['difference']:+6.2f} +- {100 * m['difference_se']:.2f}"
    text += f" ({m['better']} better, {m['worse']} worse, p {m['sign_p']:.2f})   {m['bytes_ratio']:.3f} of the bytes"
    return text + (f"   perplexity {m['perplexity']:.4f}" if "perplexity" in m else "")
