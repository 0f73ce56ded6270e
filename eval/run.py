"""`python -m eval run`: what does a cache cost in right answers?

    python -m eval run --config eval/configs/answers.yaml --data FOLDER --limit 50

A YAML file names models, caches and tasks; every combination is a cell, and a cell is one JSON line in `out`. A run
that is started again skips the cells it finds. Answers are scored through the cache (`hf_kvcache/likelihood.py`), the
same items for every cache, so that each is compared with the stock full-precision cache (`dynamic`, always there) in
pairs: difference, its standard error, and a sign test (`paired.py`). A cell whose cache promised fewer bytes and holds
as many is refused: no compression happened, so its score would say nothing.

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


def run(args: argparse.Namespace) -> None:
    """Measure every cell that the results do not hold yet."""
    config = settle(args)
    folder, out = tasks.data_folder(args.data), Path(config["out"])
    for asked in config["tasks"]:
        reason = tasks.why_not(asked["name"], folder)
        if reason:
            raise ValueError(f"task {asked['name']!r} cannot run here: {reason}")
    done = {records.identity(record): record for record in records.read(out)}
    refused = []
    for name in config["models"]:
        loaded = models.load_model(name, config["device"], config["dtype"])
        specs = contenders.available(config["specs"], loaded.model.config)
        for asked in config["tasks"]:
            items = tasks.load(asked["name"], folder, made(loaded, asked, config))
            refused += _task(loaded, asked, items, specs, config, done, out)
    if refused:
        raise ValueError(f"{len(refused)} cells gave no result: {'; '.join(refused)}")


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


def _task(
    loaded: models.Loaded,
    asked: dict[str, Any],
    items: list[tasks.Item],
    specs: list[str],
    config: dict[str, Any],
    done: dict[str, records.Record],
    out: Path,
) -> list[str]:
    """One task for every cache, the baseline first. Returns what was refused."""
    kind, baseline, refused = tasks.task(asked["name"]).kind, None, []
    for spec in specs:
        record = frame(loaded, asked, items, spec, config)
        known = done.get(records.identity(record))
        if known is None:
            try:
                answers = measure(loaded, kind, items, spec, config)
                known = {**record, "metrics": metrics(kind, spec, answers, baseline)}
            except ValueError as error:
                refused.append(f"{asked['name']} with {spec}: {error}")
                print(f"refused {refused[-1]}", flush=True)
                if baseline is None:
                    break
                continue
            records.append(out, known)
            done[records.identity(known)] = known
        baseline = baseline or known["metrics"]
        print(line(known), flush=True)
    return refused


def frame(
    loaded: models.Loaded, asked: dict[str, Any], items: list[tasks.Item], spec: str, config: dict[str, Any]
) -> records.Record:
    """A record before its metrics."""
    return {
        "task": asked["name"],
        "model": loaded.name,
        "spec": spec,
        "settings": {
            "weights": models.fingerprint(loaded.model),
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            "device": loaded.model.device.type,
            "items": len(items),
            "items_sha256": tasks.digest(items),
            **{key: value for key, value in asked.items() if key == "length"},
            **{key: config[key] for key in ("step", "batch", "attn", "seed")},
        },
        "versions": records.versions(),
        "machine": records.machine(),
    }


# ---- answers -----------------------------------------------------------------------------------------------


def measure(loaded: models.Loaded, kind: str, items: list[tasks.Item], spec: str, config: dict[str, Any]) -> Answers:
    """Answer all items through caches of that name."""
    from tqdm import tqdm

    torch.manual_seed(config["seed"])
    contenders.use_attention(loaded.model, spec, config["attn"])
    stored = Stored()
    make = lambda: contenders.make_cache(spec, loaded.model.config)  # noqa: E731
    with tqdm(total=len(items), desc=spec, unit="item", leave=False) as bar:
        if kind == GENERATE:
            right = [generated(loaded, item, make(), stored, bar.update) for item in items]
            return Answers(right, [], stored.nbytes, stored.tokens)
        asks = [[likelihood.Request(*map(tuple, pair)) for pair in tasks.encode(loaded.tokenizer, i)] for i in items]
        bar.total = sum(map(len, asks))
        flat = [ask for own in asks for ask in own]
        options = {"step": config["step"], "batch_size": config["batch"], "dtype": torch.float32}
        scored = iter(likelihood.score(loaded.model, flat, make, filled=stored.add, tick=bar.update, **options))
    judged = [judge(kind, [next(scored) for _ in own], item.gold) for own, item in zip(asks, items, strict=True)]
    right, logprob = map(list, zip(*judged, strict=True))
    return Answers(right, logprob, stored.nbytes, stored.tokens)


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
