"""`python -m eval tasks`: which questions can be asked here, and why not the others?

    python -m eval tasks --data FOLDER

Nothing here needs a hub. Tasks of the first kind read JSON Lines from a folder (`--data`, or `$HF_KVCACHE_DATA`):

| task | file | a line holds | right is |
|---|---|---|---|
| `lambada` | `lambada_openai.jsonl` | context, continuation | the last word, token by token the likeliest |
| `arc_easy`, `piqa` | `arc_easy.jsonl`, `piqa.jsonl` | query, choices, gold | the right choice is the likeliest |
| `gsm8k` | `gsm8k.jsonl` | context, chain_of_thought, answer | the last number that is generated |

Tasks of the second kind are generated, the same items for the same seed and tokenizer. Their answers stand in the
context, so that only a cache that kept them can tell:

| task | the question | right is | chance |
|---|---|---|---|
| `kv` | the value of one key of a JSON object (arXiv:2307.03172) | the likeliest of ten values | 0.1 |
| `tracking` | a variable at the end of a chain of assignments (arXiv:2404.06654) | the likeliest of five | 0.2 |
| `copy` | the same random words again | share of tokens that are the likeliest | 0 |
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from eval import models

WORD, CHOICE, COPY, GENERATE = "word", "choice", "copy", "generate"
SHOTS = 4  # worked examples before a question of gsm8k; they are the file's first lines, and are not asked
KEYS, CHAINS, HOPS = 10, 5, 3


class Item(NamedTuple):
    """One question: its context, the answers that are scored (as they follow it), and which of them is right."""

    context: str
    answers: tuple[str, ...]
    gold: int = 0


class Made(NamedTuple):
    """What a generated task is made from."""

    tokenizer: Any
    items: int
    length: int  # tokens of a context, about
    seed: int


class Task(NamedTuple):
    """A kind of question, and where its items come from: a file of a data folder, or a generator."""

    kind: str
    file: str | None
    make: Callable[[Any], list[Item]]  # from the file's lines, or from `Made`
    chance: float | None = None


# ---- tasks from files --------------------------------------------------------------------------------------


def lambada(lines: list[dict[str, Any]]) -> list[Item]:
    """Passages whose last word is missing."""
    return [Item(line["context"], (" " + line["continuation"],)) for line in lines]


def choices(lines: list[dict[str, Any]]) -> list[Item]:
    """Questions with answers to choose from."""
    return [
        Item(line["query"].rstrip("\n") + "\nAnswer:", tuple(" " + choice for choice in line["choices"]), line["gold"])
        for line in lines
    ]


def gsm8k(lines: list[dict[str, Any]]) -> list[Item]:
    """Word problems after a few worked ones; the answer is a number."""
    shots = [f"Question: {x['context']}\nAnswer: {x['chain_of_thought']} #### {x['answer']}\n\n" for x in lines[:SHOTS]]
    start = "".join(shots)
    return [Item(f"{start}Question: {line['context']}\nAnswer:", (line["answer"],)) for line in lines[SHOTS:]]


# ---- generated tasks ---------------------------------------------------------------------------------------


def kv(made: Made) -> list[Item]:
    """A JSON object of random keys and values; one key is asked for, its depth going evenly through the object."""

    def item(draw: random.Random, pairs: int, index: int) -> Item:
        words = [f"{draw.randrange(16**8):08x}" for _ in range(2 * pairs)]
        keys, values = words[:pairs], words[pairs:]
        asked = index * (pairs - 1) // max(made.items - 1, 1)
        others = draw.sample([value for value in values if value != values[asked]], KEYS - 1)
        lines = ",\n".join(f'"{key}": "{value}"' for key, value in zip(keys, values, strict=True))
        context = f'A JSON object:\n{{{lines}}}\n\nThe value of "{keys[asked]}" in this object is "'
        return Item(context, (values[asked], *others))

    return _fill(made, item, least=KEYS)


def tracking(made: Made) -> list[Item]:
    """Chains of assignments between lines of filler; asked is the value at the end of one chain."""

    def item(draw: random.Random, filler: int, index: int) -> Item:
        names = [f"X{number}" for number in draw.sample(range(100, 1000), CHAINS * HOPS)]
        chains = [names[start : start + HOPS] for start in range(0, len(names), HOPS)]
        values = [str(value) for value in draw.sample(range(10_000, 100_000), CHAINS)]
        lines = [f"VAR {chain[0]} = {value}." for chain, value in zip(chains, values, strict=True)]
        lines += [f"VAR {chain[hop]} = VAR {chain[hop - 1]}." for hop in range(1, HOPS) for chain in chains]
        lines = _scatter(lines, ["The grass is green and the sky is blue."] * filler, draw)
        asked = draw.randrange(CHAINS)
        context = "\n".join(lines) + f"\nThe number that is the value of VAR {chains[asked][-1]} is"
        return Item(context, tuple(f" {value}" for value in [values[asked], *values[:asked], *values[asked + 1 :]]))

    return _fill(made, item, least=1)


@functools.cache
def vocabulary() -> list[str]:
    """A few thousand English words: those of Python's own help topics."""
    return sorted(set(re.findall(r"\b[a-z]{4,9}\b", models.load_text().content)))


def copy(made: Made) -> list[Item]:
    """Random words, and the same words again: every one but the first few is known to whoever kept them."""

    def item(draw: random.Random, words: int, index: int) -> Item:
        known = vocabulary()
        rounds = [draw.sample(known, len(known)) for _ in range(-(-words // len(known)))]  # no word twice in a round
        text = " ".join([word for one in rounds for word in one][:words])
        start = " ".join(text.split()[:4])
        return Item(f"{text}.\n\n{start}", (text.removeprefix(start),))

    return _fill(made, item, least=8)


def _fill(made: Made, item: Callable[[random.Random, int, int], Item], least: int) -> list[Item]:
    """Items of about the length: `item(draw, size, index)`; the size is the largest that fits the first one."""

    def tokens(size: int) -> int:
        one = item(random.Random(made.seed), size, 0)
        return len(made.tokenizer(one.context + one.answers[0])["input_ids"])

    low, high = least, max(made.length, least + 1)
    if tokens(low) > made.length:
        raise ValueError(f"length {made.length} has no room for this task, which needs {tokens(low)} tokens at least")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tokens(middle) <= made.length else (low, middle)
    return [item(random.Random(f"{made.seed} {index}"), low, index) for index in range(made.items)]


def _scatter(lines: list[str], filler: list[str], draw: random.Random) -> list[str]:
    """Lines in their order, with the filler between them at random."""
    slots = sorted(draw.sample(range(len(lines) + len(filler)), len(lines)))
    mixed = list(filler)
    for slot, text in zip(slots, lines, strict=True):
        mixed.insert(slot, text)
    return mixed


TASKS = {
    "lambada": Task(WORD, "lambada_openai.jsonl", lambada),
    "arc_easy": Task(CHOICE, "arc_easy.jsonl", choices, 0.25),
    "piqa": Task(CHOICE, "piqa.jsonl", choices, 0.5),
    "gsm8k": Task(GENERATE, "gsm8k.jsonl", gsm8k, 0.0),
    "kv": Task(CHOICE, None, kv, 1 / KEYS),
    "tracking": Task(CHOICE, None, tracking, 1 / CHAINS),
    "copy": Task(COPY, None, copy, 0.0),
}
# Tasks of the lm-evaluation-harness that download what they ask
HUB_TASKS = ("wikitext", "longbench", "ruler")


# ---- where they come from ----------------------------------------------------------------------------------


def data_folder(given: str | os.PathLike[str] | None) -> Path | None:
    """The folder with local data: as given, or `$HF_KVCACHE_DATA`; None if neither is there."""
    named = given or os.environ.get("HF_KVCACHE_DATA")
    if named and not Path(named).is_dir():
        raise FileNotFoundError(f"data folder {str(named)!r} does not exist; give --data FOLDER or $HF_KVCACHE_DATA")
    return Path(named) if named else None


def why_not(name: str, folder: Path | None) -> str:
    """Why a task cannot run here; "" if it can."""
    file = task(name).file
    if file is None or (folder and (folder / file).is_file()):
        return ""
    return f"needs --data FOLDER or $HF_KVCACHE_DATA with {file}" if folder is None else f"{file} is not in the folder"


def task(name: str) -> Task:
    """The task of that name."""
    if name not in TASKS:
        raise ValueError(f"task {name!r} is unknown; use one of {', '.join(TASKS)}")
    return TASKS[name]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file."""
    lines = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path.name}:{number} is not JSON ({error}); repair or remove that line") from error
    return lines


def load(name: str, folder: Path | None, made: Made) -> list[Item]:
    """The first `made.items` items of a task (0: all that a file has)."""
    reason = why_not(name, folder)
    if reason:
        raise ValueError(f"task {name!r} cannot run here: {reason}")
    found = task(name)
    if found.file is None:
        return found.make(made)
    assert folder is not None  # or there was a reason
    try:
        items = found.make(read_lines(folder / found.file))
    except KeyError as error:
        raise ValueError(f"{found.file} has a line without {error}, which task {name!r} reads") from error
    return items[: made.items] if made.items else items


def digest(items: list[Item]) -> str:
    """Twelve hex digits that differ between two sets of items."""
    return hashlib.sha256(json.dumps(items).encode()).hexdigest()[:12]


def encode(tokenizer: Any, item: Item) -> list[tuple[list[int], list[int]]]:
    """(context ids, answer ids) per answer. Spaces at the context's end belong to the answer, as in lm-eval.

    The answer's tokens are those that context and answer together have more than the context alone.
    """
    context, space = item.context.rstrip(), item.context[len(item.context.rstrip()) :]
    head = tokenizer(context)["input_ids"]
    pairs = []
    for answer in item.answers:
        whole = tokenizer(context + space + answer)["input_ids"]
        pairs.append((whole[: len(head)], whole[len(head) :]))
    return pairs


# ---- the command -------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("--data", help="a folder with local data ($HF_KVCACHE_DATA)")


def run(args: argparse.Namespace) -> None:
    """Print a line for each task."""
    folder = data_folder(args.data)
    for name, found in TASKS.items():
        reason = why_not(name, folder)
        source = found.file or "generated"
        print(f"{name:<10} {found.kind:<9} {source:<22} {'not here: ' + reason if reason else 'ready'}")
    reason = no_hub()
    for name in HUB_TASKS:
        print(f"{name:<10} {'lm-eval':<9} {'hub':<22} {'not here: ' + reason if reason else 'ready: lm_eval_kvcache'}")
    print("\nrun the ready ones on models x caches: python -m eval run --config FILE")


def no_hub() -> str:
    """Why tasks of the harness that download their data cannot run; "" if they can."""
    import huggingface_hub

    if importlib.util.find_spec("lm_eval") is None:
        return "lm-eval is not installed; pip install 'hf-kvcache[eval]'"
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=3)
    except Exception as error:  # the hub's client raises many kinds
        return f"no model hub is reachable ({type(error).__name__})"
    return ""
