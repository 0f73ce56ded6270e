"""Which model families are right? Builds every decoder of this transformers at tiny size and tries it.

python scripts/family_sweep.py                        everything; writes docs/support.md and hf_kvcache/tested.json
python scripts/family_sweep.py --record sweep.jsonl   the same, going on where a run with this file stopped
python scripts/family_sweep.py --families llama blip  print these only

Exits non-zero where a cell is wrong. The checks are those of ``tests/zoo.py``.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import logging
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import transformers

ROOT = Path(__file__).resolve().parent.parent
PAGE, TESTED = ROOT / "docs" / "support.md", ROOT / "hf_kvcache" / "tested.json"
sys.path.insert(0, str(ROOT / "tests"))
zoo = importlib.import_module("zoo")  # the tests' own checks

SHORT = {"equal": "=", "within codec error": "≈"}
LONG = {short: kind for kind, short in SHORT.items()}
WRONG = ("wrong", "raw error")
HEAD = """# Which cache works with which model

Written by `python scripts/family_sweep.py`, which builds every decoder of transformers {version} at tiny size from its
default config (`tests/zoo.py`); do not edit. [support_caches.md](support_caches.md) has all caches, with 35 families.

- `=`: **equal** to an oracle: the same model under stock attention with a cache of plain tensors, from which attention
  leaves out what the spec drops (`full`: `DynamicCache`).
- `≈`: **within codec error**: the oracle also rounds each key and value once; the logits are at most a tenth of what
  this rounding changes away from the oracle's.
- A number: **refused**, before any wrong token, with the message below. A number beside a sign: a remark.

Two rows of twelve random tokens go through each model: eleven at once and then one, in chunks of 7, 4 and 1, and one
by one; text only. The oracle of a lossy cache and of `sink` is fed one by one, and every way of feeding must agree.
Differences of a logit are at most 1e-5 (`full` under stock attention) or 2e-4 (all else; more in proportion above 10).

- "stock" is "sdpa", or "eager" where a model has no other; "kvcache" is ours; "both" is one row for two alike.
- `type:decoder` is the decoder alone of an encoder-decoder type. Those with cross-attention have
  `EncoderDecoderCache(cache, DynamicCache())`.
- Where all layers of a model have a native window or a recurrent state, they keep it, whatever the spec.

## A family that is not here

A model type that this table does not hold, such as one of remote code, or of a later transformers, has `full`, `int8`
and `fp8` with retention `all`, which ask nothing of a model but that it hands its keys to the cache. All else is
refused: it rests on masks that the model has to apply, and families exist that make their own. To check one:

1. If transformers has it: `python scripts/family_sweep.py --families NAME`.
2. Otherwise with the model itself: the same 300 tokens at once and one by one through `KVCache.from_spec(config, spec)`
   must give the same logits, but for what the codec costs; and `sink(4,60)` those of a forward with that window as
   mask.
3. Then `hf_kvcache.trust("NAME")`, once per process, before the cache is made.

## Every family
"""


def measure(names: list[str], record: Path | None) -> dict[str, dict[str, Any]]:
    """What was found, by family; ``record`` gets a line after each, and those that it holds are not run again."""
    found: dict[str, dict[str, Any]] = {}
    if record is not None and record.exists():
        found = {row["family"]: row for row in map(json.loads, record.read_text().splitlines())}
    for name in names:
        if name not in found:
            found[name] = one(name)
            if record is not None:
                with record.open("a") as file:
                    print(json.dumps(found[name]), file=file)
        row = found[name]
        counts = Counter(kind for kind, _ in row["cells"].values())
        print(f"{name:28}", row["unbuilt"] or ", ".join(f"{n} {kind}" for kind, n in counts.items()), flush=True)
        for cell, (kind, message) in row["cells"].items():
            if kind in WRONG:
                print("   ", cell, kind, message)
    return {name: found[name] for name in names}


def one(name: str) -> dict[str, Any]:
    row: dict[str, Any] = {"family": name, "unbuilt": "", "types": [], "cells": {}}
    try:
        for attention in zoo.ATTENTIONS:
            for spec in zoo.SPECS:
                row["cells"][f"{attention} {spec}"] = list(zoo.check(name, spec, attention))
        row["types"] = zoo.family(name).types
    except zoo.Unbuilt as error:
        row.update(unbuilt=str(error), cells={})
    gc.collect()
    return row


def render(found: dict[str, dict[str, Any]]) -> str:
    """The page."""
    notes: dict[str, int] = {}
    lines = [HEAD.format(version=transformers.__version__)]
    lines += [_row("model", "attention", *(f"`{spec}`" for spec in zoo.SPECS)), "|---" * (len(zoo.SPECS) + 2) + "|"]
    for name, row in found.items():
        if row["unbuilt"]:
            continue
        rows = {a: [_cell(row["cells"][f"{a} {spec}"], notes) for spec in zoo.SPECS] for a in zoo.ATTENTIONS}
        if rows["stock"] == rows["kvcache"]:
            rows = {"both": rows["stock"]}
        lines += [_row(name, attention, *cells) for attention, cells in rows.items()]
    lines += ["", "Refused, and remarks:", "", *(f"{number}. {message}" for message, number in notes.items())]
    unbuilt = {name: row["unbuilt"] for name, row in found.items() if row["unbuilt"]}
    lines += ["", "## Not tried", "", *(f"- {name}: {why}" for name, why in unbuilt.items())]
    lines += ["", f"With transformers {transformers.__version__}."]
    return "\n".join(lines) + "\n"


def _cell(verdict: list[str], notes: dict[str, int]) -> str:
    kind, message = verdict
    number = f"{notes.setdefault(message, len(notes) + 1)}" if message else ""
    return " ".join(filter(None, (SHORT.get(kind, ""), number)))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def read(page: str) -> dict[tuple[str, str, str], tuple[str, str]]:
    """(kind, message) by (family, spec, attention), as the page says."""
    notes = dict(re.findall(r"^(\d+)\. (.*)$", page[page.index("Refused, and remarks") :], re.M))
    specs: list[str] = []
    cells = {}
    for line in page.splitlines():
        row = [cell.strip() for cell in line.strip("|").split("|")]
        if row[:2] == ["model", "attention"]:
            specs = [cell.strip("`") for cell in row[2:]]
        elif specs and len(row) == len(specs) + 2 and not row[0].startswith("-"):
            for attention in zoo.ATTENTIONS if row[1] == "both" else row[1:2]:
                for spec, cell in zip(specs, row[2:], strict=True):
                    sign, _, number = cell.rpartition(" ") if not cell.isdigit() and " " in cell else (cell, "", "")
                    kind = LONG.get(sign, "refused")
                    cells[row[0], spec, attention] = (kind, notes.get(number or cell, ""))
    return cells


def not_tried(page: str) -> dict[str, str]:
    """Why, by family."""
    return dict(re.findall(r"^- (\S+): (.*)$", page[page.index("## Not tried") :], re.M))


def tested(found: dict[str, dict[str, Any]]) -> list[str]:
    """Model types whose every cell is right or refused, those that go by the name of such a part included."""
    wrong = {name for name, row in found.items() if row["unbuilt"] or any(k in WRONG for k, _ in row["cells"].values())}
    types = {kind for name, row in found.items() if name not in wrong for kind in row["types"]}
    types -= {kind for name in wrong for kind in found[name]["types"]}
    return sorted(types | {whole for whole, part in zoo.BY_PART.items() if part in types})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--families", nargs="+", choices=list(zoo.names()), metavar="NAME")
    parser.add_argument("--record", type=Path, help="JSON Lines: what was found so far")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    found = measure(args.families or list(zoo.names()), args.record)
    wrong = [name for name, row in found.items() if any(kind in WRONG for kind, _ in row["cells"].values())]
    print(len(found), "families, wrong:", ", ".join(wrong) or "none")
    if not args.families and not wrong:
        PAGE.write_text(render(found))
        data = {"transformers": transformers.__version__, "model_types": tested(found)}
        TESTED.write_text(json.dumps(data, indent=1) + "\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
