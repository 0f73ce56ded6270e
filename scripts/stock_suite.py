"""Does ``KVCache`` do what ``DynamicCache`` does, wherever ``generate`` touches a cache?

    python scripts/stock_suite.py                      every family (minutes); exits non-zero on a difference
    python scripts/stock_suite.py --families llama t5

Each mode runs on a tiny random model with ``DynamicCache``, with ``KVCache`` under stock attention, and with
``KVCache`` under "kvcache": the same tokens (=), an error from all (x), or a difference.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from hf_kvcache import KVCache

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
families = importlib.import_module("families")  # the tests' own models

Make = Callable[[], Any]


def generate(case: Any, make: Make, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    return case.generate(make(), **options).sequences


def assisted(case: Any, make: Make) -> torch.Tensor:
    """A draft model that is wrong now and then."""
    draft = families.Case(case.family).model
    with torch.no_grad():
        next(draft.parameters()).add_(0.3 * torch.randn_like(next(draft.parameters())))
    return generate(case, make, rows=1, assistant_model=draft)


def second_turn(case: Any, make: Make) -> torch.Tensor:
    """The tokens of one turn and some more, on the cache of that turn."""
    cache = make()
    first = case.generate(cache).sequences
    ids = torch.cat([first, families.prompt(5, 2, 90, seed=3)], 1)
    inputs = dict(attention_mask=torch.ones_like(ids), past_key_values=cache)
    return case.model.generate(ids, do_sample=False, max_new_tokens=6, min_new_tokens=6, **inputs)


def by_hand(case: Any, make: Make) -> torch.Tensor:
    """Forwards without ``generate``: a prompt in chunks."""
    return case.feed(families.sequence(case.family), make(), "chunks").argmax(-1)


def reset(case: Any, make: Make) -> torch.Tensor:
    """A cache that another sequence has used."""
    cache = make()
    case.feed(families.sequence(case.family), cache, "once")
    cache.layers = make().layers if type(cache) is DynamicCache else cache.layers  # before 5.24 its reset is not one
    cache.reset()
    return case.generate(cache).sequences


def rows(case: Any, make: Make) -> torch.Tensor:
    """Rows swapped, repeated and selected by hand."""
    ids, cache = families.sequence(case.family), make()
    case.feed(ids, cache, "once")
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))
    with torch.no_grad():
        return case.model(ids[:, :4], past_key_values=cache).logits.argmax(-1)


CROP = (
    "TypeError: `crop` is only defined for dynamic cache"  # EncoderDecoderCache takes back DynamicCache's tokens only
)
LETTERS = "= same tokens; x error from both; r ours refused by EncoderDecoderCache; - not a mode of this model"
TEXT = ("second turn", "rows")  # a second forward of the others would need its own sound or image
MODES: dict[str, tuple[Callable[..., torch.Tensor], dict[str, Any]]] = {
    "greedy": (generate, {}),
    "sample": (generate, dict(do_sample=True, temperature=1.5, top_k=20)),
    "several": (generate, dict(do_sample=True, num_return_sequences=3)),
    "beams": (generate, dict(num_beams=3)),
    "beam sample": (generate, dict(num_beams=3, do_sample=True)),
    "best beams": (generate, dict(num_beams=4, num_return_sequences=2, length_penalty=0.5)),
    "no repeats": (generate, dict(no_repeat_ngram_size=2, repetition_penalty=1.3)),
    "chunks": (generate, dict(prefill_chunk_size=5)),
    "lookup": (generate, dict(prompt_lookup_num_tokens=3, rows=1)),
    "assisted": (assisted, {}),
    "contrastive": (generate, dict(penalty_alpha=0.6, top_k=4)),
    "second turn": (second_turn, {}),
    "by hand": (by_hand, {}),
    "reset": (reset, {}),
    "rows": (rows, {}),
}


def outcome(case: Any, mode: str, attention: str, make: Make) -> torch.Tensor | str:
    """The tokens, or the kind of error."""
    run, options = MODES[mode]
    with case.attention(attention), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return run(case, make, **options)
        except Exception as error:  # noqa: BLE001 (whatever a mode or model raises: both caches must)
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def compare(family: str, mode: str) -> str:
    """One letter (``LETTERS``), or what differs."""
    case = families.case(family)
    if mode in TEXT and (case.encodes or case.extra):
        return "-"
    config = case.model.config
    right = outcome(case, mode, "stock", lambda: DynamicCache(config=config))
    for attention in families.ATTENTIONS:
        mine = outcome(case, mode, attention, lambda: KVCache(config))
        if isinstance(right, str) or isinstance(mine, str):
            if case.encodes and str(mine).startswith(CROP):
                return "r"
            if not (isinstance(right, str) and isinstance(mine, str)):
                shown = [out if isinstance(out, str) else "tokens" for out in (right, mine)]
                return f"{attention}: DynamicCache gives {shown[0]}, KVCache {shown[1]}"
        elif not torch.equal(mine, right):
            return f"{attention}: other tokens"
    return "x" if isinstance(right, str) else "="


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=families.FAMILIES, metavar="NAME")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    differences = []
    print(" " * 14, *(f"{mode:>11}" for mode in MODES))
    for family in args.families or families.FAMILIES:
        found = {mode: compare(family, mode) for mode in MODES}
        print(f"{family:14}", *(f"{cell if len(cell) == 1 else 'DIFFERS':>11}" for cell in found.values()), flush=True)
        differences += [f"{family}, {mode}: {cell}" for mode, cell in found.items() if len(cell) > 1]
    print(
        "= the same tokens; x both refuse; r only ours is refused, by EncoderDecoderCache; - no such mode of this model"
    )
    print(*differences, sep="\n")
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
