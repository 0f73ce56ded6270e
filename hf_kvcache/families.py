"""What is known of model families? Which were tried, which go their own way, and what that rules out.

A cache asks one of two things of a model:

    nothing       one slot per token, all of them, in order: 'full' or 8 bits without a plain tail, retention 'all'
    masks         windows, eviction, storages that keep recent tokens plain: a slot is no token number, and within one
                  forward each query sees its own slots, through a mask that ``layers.py`` brings along

The second only holds where attention applies the mask that it is handed and makes none of its own. No config says so:
``scripts/family_sweep.py`` tries every family that transformers can build, and writes those that are right into
``tested.json``. Others are refused for such caches until ``trust`` says that someone has looked.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

# What a cache may need: windows ("sink"), eviction head by head ("importance"), storages that keep recent tokens plain
# and so give a token two slots while a chunk is running ("tail").
NEEDS = ("sink", "importance", "tail")
IMAGE_KEYS = "keeps the keys of its images in layers of the same cache, which are no tokens"
# Families that are wrong with some of it, and why.
OWN_WAYS: dict[str, tuple[tuple[str, ...], str]] = {
    "gpt_neo": (NEEDS, "cuts its local windows out of slots, not of tokens"),
    "diffllama": (("importance", "tail"), "joins the values of two heads, which have to lie in the same slots"),
    "mllama": (NEEDS, IMAGE_KEYS),
    "mllama_text_model": (NEEDS, IMAGE_KEYS),
    "prophetnet": (NEEDS, "takes relative positions from slots"),
    "doge": (NEEDS, "adds a mask that it makes of the values in all slots"),
    "cpmant": (NEEDS, "counts slots, with 32 of its own before them"),
}
# Families that do not hand keys and values to a cache as others do: no cache of this library is right.
NO_CACHE = {
    "recurrent_gemma": "keeps its recurrent state in the model itself, where it outlives a sequence",
    "openai-gpt": "has no cache and computes all tokens anew",
    "xlnet": "keeps memories of its own",
    "xlstm": "keeps a recurrent state of its own",
    "rwkv": "keeps a recurrent state of its own",
    "reformer": "keeps buckets and hidden states in a cache of its own",
    "minimax": "takes no cache but its own MiniMaxCache",
}
# Families that want an additive mask, never left out: their attention is their own although the model takes names of
# others (GIT, for its images), or says that it is not causal, and is (BigBird-Pegasus).
ADD_MASKS = ("bigbird_pegasus", "git")
_trusted: set[str] = set()


@lru_cache
def tested() -> frozenset[str]:
    """Model types that ``scripts/family_sweep.py`` found right."""
    return frozenset(json.loads(Path(__file__).with_name("tested.json").read_text())["model_types"])


def trust(*model_types: str) -> None:
    """Let models of these types have every cache, from now on in this process: someone has checked them.

    Args:
        *model_types: ``config.model_type`` of a family made after this version, or of remote code.

    Raises:
        ValueError: no name, or a family that is known to go wrong.
    """
    for name in model_types:
        if not isinstance(name, str) or not name:
            raise ValueError(f"trust({name!r}): give the model_type of a config, such as 'llama'")
        why = NO_CACHE.get(name) or OWN_WAYS.get(name, ((), ""))[1]
        if why:
            raise ValueError(f"trust({name!r}): this family was tried, and {why}")
    _trusted.update(model_types)


def refuse(configs: tuple[Any, ...], spec: str, needs: set[str]) -> None:
    """Raise where a cache cannot be right.

    Args:
        configs: of the whole model and of its decoder.
        spec: of the cache, for the message.
        needs: what it asks of the model, of ``NEEDS``; none for storages of one slot per token and retention "all".

    Raises:
        ValueError: the family goes its own way, or nobody has tried it with such caches.
    """
    out = "use retention 'all' with storage 'full', 'int8' or 'fp8'"
    for config in configs:
        kind, name = getattr(config, "model_type", ""), type(config).__name__
        if kind in NO_CACHE:
            raise ValueError(f"{name} hands nothing to a cache of this library that it could use: it {NO_CACHE[kind]}")
        wrong, why = OWN_WAYS.get(kind, ((), ""))
        if needs & set(wrong):
            raise ValueError(f"{spec!r} is not supported for {name}: this family {why}; {out}")
        if needs and kind not in tested() and kind not in _trusted:
            raise ValueError(
                f"{spec!r} was never tried with model_type {kind!r} ({name}), which has to apply the masks that this "
                f"cache brings: check it as docs/support.md says and call hf_kvcache.trust({kind!r}), or {out}"
            )
