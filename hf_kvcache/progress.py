"""Did the last forward reach every layer? One that died midway (out of memory, Ctrl-C) leaves layers that differ.

Attention layers count their tokens. Recurrent ones cannot: of those it is noted which the current forward has reached,
where transformers asks the cache for their states in every forward (``compat.ASKS_FOR_STATES``; before, only what is
updated is known). Every forward begins at the first layer, so what the one before has left behind is seen there, before
anything changes.

A forward that died after its last attention, in the head for one, left nothing half done: its tokens are cached.
"""

from __future__ import annotations

from typing import Any

from . import compat
from .layers import KVLayer, WindowLayer

RESET = "reset() the cache, or go on from a fork() made before that forward"


class Progress:
    """Where the current forward of one cache is.

    Args:
        layers: of the cache.
        beside: layers that hold something else than the text (cross-attention to images).
        kinds: the type of every layer, as configs name it; layers of one type are asked for the same states.
    """

    def __init__(self, layers: list[Any], beside: tuple[int, ...] = (), kinds: list[str] | None = None) -> None:
        self.kinds = list(kinds or [""] * len(layers))
        own = [i for i in range(len(layers)) if i not in beside]
        self.attention = [i for i in own if isinstance(layers[i], (KVLayer, WindowLayer))]
        self.recurrent = [i for i in own if isinstance(layers[i], compat.LinearAttentionCacheLayerMixin)]
        self.first = min([*self.attention, *self.recurrent], default=0)
        self.forwards = 0  # begun, or made as if they had not
        self.begin(0)

    def begin(self, before: int) -> None:
        """No layer is reached; ``before``: tokens that all of them have seen."""
        self.last: tuple[set[tuple[int, str]], int] = (getattr(self, "reached", set()), getattr(self, "before", 0))
        self.reached: set[tuple[int, str]] = set()
        self.before = before
        self.forwards += 1

    def take_back(self, undone: bool = False) -> None:
        """The forward that has begun is refused before it changes anything, or what it changed is ``undone``."""
        if undone or all(what in ("conv", "recurrent") for _, what in self.reached):
            self.reached, self.before = self.last
            self.forwards += 1

    def fork(self) -> Progress:
        """Another one at the same place."""
        new = object.__new__(Progress)
        vars(new).update(vars(self))
        new.reached = set(self.reached)
        return new

    def starts_at(self, index: int, what: str) -> bool:
        """Whether a call for ``what`` of layer ``index`` begins a forward, rather than going on with one."""
        again = (index, what) in self.reached or any(other != index for other, _ in self.reached)
        return index == self.first and (again or not self.reached)

    def seen(self, layers: list[Any]) -> dict[int, int | None]:
        """Tokens seen by every layer; ``None``: a recurrent layer has gone an unknown way ahead of the others."""
        seen: dict[int, int | None] = {i: layers[i].get_seq_length() - self._waiting(i, layers) for i in self.attention}
        if not self.recurrent or self._reached_all({i for i, n in seen.items() if n != self.before}):
            return seen
        most, met = max(self.before, *(n or 0 for n in seen.values())), {i for i, _ in self.reached}
        gone = most if most > self.before else None
        return dict(sorted((seen | {i: gone if i in met else self.before for i in self.recurrent}).items()))

    def _waiting(self, index: int, layers: list[Any]) -> int:
        """Tokens of this layer whose attention never came, where that of other layers did."""
        layer = layers[index]
        if not layer.waiting or layer.touched:
            return 0
        others = (layers[i] for i in self.attention if isinstance(layers[i], KVLayer))
        stored = any(other.defers and not other.waiting and not other.blind for other in others)
        return int(layer.waiting) if stored else 0

    def _reached_all(self, attended: set[int]) -> bool:
        """Whether the current forward has been everywhere (or nowhere): at all attention layers, ``attended``, too."""
        asked: dict[int, set[str]] = {i: set() for i in self.recurrent}
        for index, what in self.reached:
            asked.setdefault(index, set()).add(what)
        for first in self.recurrent:
            if any(asked[first] != asked[i] for i in self.recurrent if self.kinds[i] == self.kinds[first]):
                return False
        if not self.reached or not compat.ASKS_FOR_STATES:
            return True
        return all(asked[i] for i in self.recurrent) and len(attended) == len(self.attention)

    def torn(self, layers: list[Any]) -> list[int]:
        """Layers that were interrupted while they stored tokens."""
        return [index for index in self.attention if layers[index].torn]

    def uneven(self, layers: list[Any]) -> str | None:
        """What is wrong where layers differ."""
        torn = self.torn(layers)
        if torn:
            return f"layer {torn[0]} was interrupted while it stored tokens"
        seen = self.seen(layers)
        if len(set(seen.values())) < 2:
            return None
        return f"the last forward stopped midway, and the layers differ: {_by_length(seen)}"


class Undo:
    """How to take back the forward that has begun, should attention refuse its mask or its arguments.

    Layers of a kind are asked alike, so what the first one of each kind takes, all take: nobody keeps more than what
    was before those, and that only until their attention has come (``KVCache._guard``).
    """

    def __init__(self, number: int, facts: dict[str, Any], offloader: Any) -> None:
        self.number, self.facts, self.offloader = number, facts, offloader
        self.counters = {name: getattr(offloader, name) for name in COUNTERS} if offloader else {}
        self.marks: list[tuple[Any, Any]] = []  # layers, and where they were

    def __call__(self) -> None:
        """The layers are where they were, or torn."""
        for layer, mark in reversed(self.marks):
            if hasattr(layer, "recall"):
                layer.recall(mark)
            else:
                vars(layer).update(mark)
        if self.offloader is not None:
            vars(self.offloader).update(self.counters)


COUNTERS = ("bytes_out", "bytes_in", "waits", "forwards")


def _by_length(seen: dict[int, int | None]) -> str:
    """``"layers 0-3 have seen 17 tokens, layers 4, 6 have seen 5 tokens"``."""
    groups: dict[int | None, list[int]] = {}
    for index, tokens in seen.items():
        groups.setdefault(tokens, []).append(index)
    texts = []
    for tokens, found in groups.items():
        whole = len(found) > 2 and found == list(range(found[0], found[-1] + 1))
        numbers = f"{found[0]}-{found[-1]}" if whole else ", ".join(map(str, found))
        name = f"layer {numbers} has" if len(found) == 1 else f"layers {numbers} have"
        texts.append(f"{name} seen {'more' if tokens is None else f'{tokens} tokens'}")
    return ", ".join(texts)
