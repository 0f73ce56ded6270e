"""What does ``update`` return? The stored form of all tokens, and which of them each query may see.

A model that hands both handles to our attention has them read as they are; one that does anything else with a handle
(expands latents, casts, slices) gets the dequantized tensor: a handle turns into it at the first touch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .masked import MaskedStates, View, refusals, undoes
from .part import Part, repeat_rows
from .plan import Visible


class Moved(NamedTuple):
    """The first slots are ``sinks``, which queries beyond ``edge`` see as if they stood at ``edge`` (``rope.py``)."""

    sinks: int
    edge: int
    query: int | torch.Tensor  # token number of the first query; or of all of them, [B, Q], where rows differ
    queries: int
    rope: Any

    def deltas(self, queries: int, device: torch.device) -> torch.Tensor | None:
        """How far each of the last ``queries`` queries is to be turned, [Q] or [B, Q], all <= 0; ``None``: none is."""
        p = self.query if isinstance(self.query, torch.Tensor) else torch.arange(self.query, self.query + self.queries)
        p = p[..., p.shape[-1] - queries :]
        return (p.clamp_max(self.edge) - p).to(device) if queries and int(p.max()) > self.edge else None


class History(NamedTuple):
    """What one ``update`` returns, in stored form: the parts, and which of their keys each query may attend to."""

    parts: list[Part]
    rules: Callable[[], Visible] | None  # of the parts' slots; None: there is an observer, which is asked
    needed: bool  # False: without a mask, queries see all keys up to their own token
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    doubled: bool = False  # some tokens have two slots
    watch: bool = False  # somebody has to look at the mask
    pads: Callable[[], None] | None = None  # told of tokens that the mask hides from all queries
    moved: Moved | None = None
    window: tuple[int, int] | None = None  # (sinks, window), where tokens leave
    positions: torch.Tensor | None = None  # of the queries, where they are known
    columns: int | None = None  # that a mask may have beside those of all tokens; 0: any number
    observer: Any = None  # of importance eviction: gives the mask, and is told what attention saw
    batch: int | None = None  # rows; a part may hold fewer, each for several of them next to each other
    chunk: Any = None  # new tokens of which only the mask says which are pads (``padded.Chunk``)
    again: Callable[[torch.Tensor], History] | None = None  # store the one new token anew, now that some rows' are pads
    by_row: bool = False  # pads are not stored: rules without a mask are the rows' own
    real: torch.Tensor | None = None  # then: which tokens fed were no pads, [B, tokens] bool
    fed: int = 0  # tokens fed before
    queries: int = 0

    def decode(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Plain keys and values, [B, H, n, D]; views where nothing needs decoding. They carry their mask where a plain
        causal one is not enough, or has to be looked at."""
        return self.decode_side(0), self.decode_side(1)

    def plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``decode`` without a mask."""
        return self._plain(0), self._plain(1)

    def decode_side(self, side: int) -> torch.Tensor:
        """The keys (0) or the values (1) of ``decode``."""
        return self.masked(self._plain(side), side)

    def _plain(self, side: int) -> torch.Tensor:
        if self.moved is not None:
            raise ValueError(
                "reposition=True turns queries, so keys have to reach attention as they are: use eval() (no dropout), "
                "or leave out reposition"
            )
        if side == 0:
            pieces = [part.key_codec.decode(part.keys, self.key_dtype) for part in self.parts]
        else:
            pieces = [part.value_codec.decode(part.values, self.value_dtype) for part in self.parts]
        pieces = [repeat_rows(piece, self.batch or piece.shape[0]) for piece in pieces]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)

    def masked(self, states: torch.Tensor, side: int) -> torch.Tensor:
        """Plain states that carry their mask."""
        carries = self.needed or (self.watch and side == 0)
        if not carries or self.rules is None or (side == 1 and not self.doubled):
            return states
        view = View(
            self.rules(), self.fed, self.needed, self.doubled, self.pads, self.window, self.positions, self.columns
        )
        return MaskedStates.wrap(states, view, ("keys", "values")[side])


class Stored:
    """Keys or values that are still encoded; any use other than our attention decodes them first."""

    def __init__(self, history: History, side: int) -> None:
        self.history, self._side = history, side
        self._plain: torch.Tensor | None = None
        self.undo: Callable[[], None] | None = None  # what is refused now has not happened

    def plain(self) -> torch.Tensor:
        """The dequantized tensor, [B, H, n, D]; keys carry their mask where a plain causal one is not enough."""
        if self._plain is None:
            chunk = self.history.chunk
            history = self.history if chunk is None else chunk.resolve(None)
            self._plain = history._replace(watch=history.pads is not None).decode_side(self._side)
            undoes(self._plain, self.undo)
        return self._plain

    def touched(self) -> torch.Tensor:
        """What a model gets that does something else with it than our attention: plain, but it looks for pads."""
        with refusals(self.undo):
            if self.history.observer is not None:
                self.history.observer.refuse_touch()
            return self.plain()

    @property
    def shape(self) -> torch.Size:
        history = self.history
        if history.chunk is not None:
            return history.chunk.shape(self._side)
        state = history.parts[0].keys if self._side == 0 else history.parts[0].values
        n = sum(part.tokens for part in history.parts)
        n = n if history.rules is None else min(n, history.fed + history.queries)
        return torch.Size((history.batch or state[0].shape[0], state[0].shape[1], n, state[0].shape[-1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.history.key_dtype if self._side == 0 else self.history.value_dtype

    @property
    def device(self) -> torch.device:
        chunk = self.history.chunk
        return self.history.parts[0].keys[0].device if chunk is None else chunk.keys.device

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Itself where this changes nothing: layers that share keys bring them to their device first."""
        out = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **kwargs)
        same = (out.dtype, out.device) == (self.dtype, self.device)
        return self if same else self.touched().to(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.touched(), name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.touched()[index]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(map(plain, value))
            return value.touched() if isinstance(value, Stored) else value

        return func(*map(plain, args), **{k: plain(v) for k, v in (kwargs or {}).items()})
