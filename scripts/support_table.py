"""Which cache works with which model? Runs the checks of ``tests/families.py`` and writes ``docs/support_caches.md``.

python scripts/support_table.py                     every cell (minutes); exits non-zero where one is wrong
python scripts/support_table.py --families llama    print these only
"""

from __future__ import annotations

import argparse
import importlib
import logging
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import transformers

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "support_caches.md"
sys.path.insert(0, str(ROOT / "tests"))
families = importlib.import_module("families")  # the tests' own checks

SHORT = {"equal": "=", "within codec error": "≈"}
LONG = {short: kind for kind, short in SHORT.items()}
HEAD = """# All caches, with 35 families

Written by `python scripts/support_table.py` from the checks that the tests run (`tests/families.py`); do not edit.
[support.md](support.md) has every family of transformers, with six caches.

- `=`: **equal** to an oracle: the same model under stock attention with a cache of plain tensors that drops tokens by
  the rules of the spec, written a second time.
- `≈`: **within codec error**: the oracle also rounds each key and value once; the logits are at most a tenth of what
  this rounding changes away from the oracle's.
- A number: **refused**, before any wrong token, with the message below.

Each model is tiny and random (head size 8; float32). Twenty tokens in two rows go through `generate` after a prompt of
twelve, and through forwards token by token, in chunks of seven, and at once; largest difference of a logit 1e-5
(stock attention, storage `full`, also far away) or 2e-4 (anything else; more in proportion where logits are above 10).

- `full`, `cpu`, `disk`: the oracle is `DynamicCache`, fed in the same way.
- `sink`, and what is rounded: one oracle, fed token by token; every way of feeding must agree with it.
- Importance policies (`random` to `adaptive`): what is kept depends on the forwards by definition. Here the oracle
  plays back which tokens each head says that it holds: their number must be the budget, and attention must be what it
  is over exactly these tokens. Whether a policy chooses well is tested elsewhere (`tests/test_eviction.py`).
- "stock" is "sdpa", or "eager" where a model has no other; "kvcache" is `hf_kvcache.register()` and
  `model.set_attn_implementation("kvcache")`. {own}
  take no attention function: their rows are both their own attention.
- Encoder-decoder models have `EncoderDecoderCache(cache, DynamicCache())`. Models with images get one in their prompt.
- Beams, sampling, assisted generation, further turns and the like: `python scripts/stock_suite.py` compares `KVCache`
  with `DynamicCache` in each model. Both agree, except that `EncoderDecoderCache` takes back tokens of a `DynamicCache`
  only: assisted generation with an encoder-decoder model is an error.
- Where all layers of a model have a native window (here Mistral, Llama 4), they keep it, whatever the spec.
"""


def measure(names: list[str]) -> dict[tuple[str, str, str], Any]:
    """Verdicts by (family, cache, attention); a cell that is wrong holds the error."""
    cells = {}
    for family in names:
        for attention in families.ATTENTIONS:
            for name in families.CACHES:
                try:
                    cells[family, name, attention] = families.check(family, name, attention)
                except Exception as error:  # noqa: BLE001 (whatever a model raises: the cell is wrong, and says why)
                    cells[family, name, attention] = error
        found = [cell for key, cell in cells.items() if key[0] == family]
        counts = Counter(getattr(cell, "kind", "WRONG") for cell in found)
        print(f"{family:14}", ", ".join(f"{count} {kind}" for kind, count in counts.items()), flush=True)
    return cells


def render(cells: dict[tuple[str, str, str], Any]) -> str:
    """The page."""
    notes: dict[str, int] = {}
    rows, names = list(dict.fromkeys(key[0] for key in cells)), list(families.CACHES)
    own = ", ".join(f"`{family}`" for family in rows if not families.case(family).takes_ours)
    lines = [HEAD.format(own=own), _row("model", "attention", *(f"`{name}`" for name in names))]
    lines.append("|---" * (len(names) + 2) + "|")
    for family in rows:
        for attention in families.ATTENTIONS:
            row = []
            for name in names:
                verdict = cells[family, name, attention]
                note = verdict.message and str(notes.setdefault(verdict.message, len(notes) + 1))
                row.append(note or SHORT[verdict.kind])
            lines.append(_row(family, attention, *row))
    lines += ["", "Refused:", "", *(f"{number}. {message}" for message, number in notes.items())]
    specs = ", ".join(f"`{name}` is `{spec}`" for name, spec in families.CACHES.items() if name != spec)
    lines += ["", f"The specs are tiny, too: {specs}.", "", f"With transformers {transformers.__version__}."]
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def read(page: str) -> dict[tuple[str, str, str], tuple[str, str]]:
    """(kind, message) by (family, cache, attention), as the page says."""
    notes = dict(re.findall(r"^(\d+)\. (.*)$", page, re.M))
    names: list[str] = []
    cells = {}
    for line in page.splitlines():
        row = [cell.strip() for cell in line.strip("|").split("|")]
        if row[:2] == ["model", "attention"]:
            names = [cell.strip("`") for cell in row[2:]]
        elif names and len(row) == len(names) + 2 and not row[0].startswith("-"):
            for name, cell in zip(names, row[2:], strict=True):
                cells[row[0], name, row[1]] = (LONG[cell], "") if cell in LONG else ("refused", notes[cell])
    return cells


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--families", nargs="+", choices=families.FAMILIES, metavar="NAME")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    cells = measure(args.families or families.FAMILIES)
    wrong = {key: error for key, error in cells.items() if isinstance(error, Exception)}
    for key, error in wrong.items():
        print(*key, "is wrong:", type(error).__name__, str(error).split("\n")[0])
    if not wrong and not args.families:
        PAGE.write_text(render(cells))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
