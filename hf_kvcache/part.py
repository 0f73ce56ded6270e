"""What is a run of tokens? Keys and values as two codecs store them: what containers hold, and what kernels read.

A *state* is the named tuple of tensors that a codec's ``encode`` gives, each [B, H, n / group, ...]: the helpers here
work on any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .codecs import Codec


def map_state(state: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``fn`` over every tensor of a state, keeping its type."""
    return type(state)(*(fn(t) for t in state))


def narrow(state: Any, start: int, stop: int) -> Any:
    """Tokens ``start:stop`` of a state, as views."""
    return map_state(state, lambda t: t[:, :, start:stop])


def concat(states: list[Any]) -> Any:
    """States of one codec joined along the tokens."""
    return type(states[0])(*(torch.cat(parts, dim=2) for parts in zip(*states, strict=True)))


def repeat_rows(t: torch.Tensor, batch: int) -> torch.Tensor:
    """[b, ...] -> [batch, ...], each row ``batch / b`` times next to each other; ``t`` itself where it has them all."""
    return t if t.shape[0] == batch else t.repeat_interleave(batch // t.shape[0], 0)


class Part(NamedTuple):
    """A run of tokens: keys [B, H, n, Dk] and values [B, H, n, Dv] as their codecs store them."""

    key_codec: Codec
    keys: Any
    value_codec: Codec
    values: Any
    # Where heads hold different numbers of tokens (``slots.RaggedPart``): each head's first row and its rows, [B, H].
    starts: torch.Tensor | None = None
    sizes: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.keys[0].shape[2] * self.key_codec.group

    @property
    def group(self) -> int:
        """Tokens that cannot be told apart by slicing."""
        return max(self.key_codec.group, self.value_codec.group)

    def whole(self) -> Part:
        """All tokens, dense."""
        return self

    def row(self, index: int, batch: int) -> Part:
        """One of ``batch`` rows."""
        at = index * self.keys[0].shape[0] // batch
        keys, values = (map_state(s, lambda t: t[at : at + 1]) for s in (self.keys, self.values))
        return Part(self.key_codec, keys, self.value_codec, values)

    def block(self, start: int, stop: int) -> Part:
        """Tokens ``start:stop``, whole groups, as views."""
        k, v = self.key_codec.group, self.value_codec.group
        keys, values = narrow(self.keys, start // k, stop // k), narrow(self.values, start // v, stop // v)
        return Part(self.key_codec, keys, self.value_codec, values)

    def expand(self, batch: int) -> Part:
        """One row that stands for all of a batch, as a view of them all; anything else as it is."""
        if self.keys[0].shape[0] != 1 or batch == 1:
            return self
        keys, values = (map_state(s, lambda t: t.expand(batch, *t.shape[1:])) for s in (self.keys, self.values))
        return Part(self.key_codec, keys, self.value_codec, values)
