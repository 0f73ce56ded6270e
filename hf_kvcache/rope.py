"""How far apart do a query and a key seem? Rotary positions, moved after the fact.

RoPE (Su et al., arXiv:2104.09864) turns pairs of channels by an angle proportional to the position, so that a score
depends on the distance only: (R(p) q) . (R(t) k) = q . R(t - p) k. Rotations add up, R(a) R(b) = R(a + b), therefore a
query that was rotated for position p is rotated for position p + d by one more turn with d, and keys that are stored
never have to change:

    reposition   sinks seem at most ``window`` away:   q' = R(d) q for the sinks' scores, d <= 0
    expected     queries before rotation:              q0 = R(-p) q

Which pairs, what angles (scaling: linear, yarn, llama3; partial, interleaved; per layer type) only the
model's own code knows: its rotary module and its ``apply_rotary_pos_emb`` are called with the distance as position.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from . import compat

LENGTH_DEPENDENT = ("dynamic", "longrope")  # angles change while the sequence grows


class Rope:
    """The rotation of one layer.

    Args:
        config: the decoder's config.
        layer: the layer's number.

    Raises:
        ValueError: the model has no rotary positions, or positions that cannot be moved (dynamic scaling, M-RoPE).
    """

    _embed: Any  # the model's rotary module, None while it is not needed

    def __init__(self, config: Any, layer: int) -> None:
        self._config, self._layer = config, layer
        self._embed, self._apply, self._layer_type, kind = compat.rotary(config, layer)
        if kind in LENGTH_DEPENDENT:
            raise ValueError(f"rope type {kind!r} of {type(config).__name__} depends on the length: it cannot be moved")
        try:
            self._angles(torch.zeros(1, 1, dtype=torch.int64))
        except (IndexError, RuntimeError, TypeError):
            raise ValueError(f"{type(config).__name__} has rotary positions of a form that is not known here") from None
        self.clear()

    def clear(self) -> None:
        """Let go of the tables, which are made again when they are needed."""
        self._embed = None
        self._mean: dict[tuple[int, int], torch.Tensor] = {}

    def __reduce__(self) -> Any:
        return Rope, (self._config, self._layer)  # the model's own functions cannot be pickled

    def __deepcopy__(self, memo: Any) -> Rope:
        return self  # holds nothing of a sequence

    def tensors(self) -> list[torch.Tensor]:
        """All it holds."""
        return [*(self._embed.buffers() if self._embed is not None else ()), *self._mean.values()]

    def turn(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """``x`` [B, H, n, D] float32, each token turned ``delta`` [n] or [B, n] positions on."""
        cos, sin = self._angles(delta if delta.dim() == 2 else delta[None])
        width = cos.shape[-1]
        try:
            return self._apply(x, cos, sin)
        except RuntimeError:  # partial rotary that the attention module cuts off itself
            if width >= x.shape[-1]:
                raise
            return torch.cat([self._apply(x[..., :width], cos, sin), x[..., width:]], -1)

    def _angles(self, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, without the factor that some scalings put on both."""
        if self._embed is None:
            self._embed = compat.rotary(self._config, self._layer)[0]
        self._embed.to(delta.device)
        probe = torch.zeros(1, dtype=torch.float32, device=delta.device)
        extra = () if self._layer_type is None else (self._layer_type,)
        with torch.no_grad():
            cos, sin = self._embed(probe, delta, *extra)
        factor = (cos[..., :1].square() + sin[..., :1].square()).sqrt()
        return cos / factor, sin / factor

    def mean_turn(self, count: int, width: int, device: torch.device) -> torch.Tensor:
        """The mean of R(0), ..., R(count - 1) as a matrix [width, width]: column vectors are turned."""
        if (count, width) not in self._mean:
            total = torch.zeros(width, width, device=device)
            for delta in torch.arange(count, device=device).split(64):
                basis = torch.eye(width, device=device)[None, :, None].expand(1, width, len(delta), width)
                total += self.turn(basis, delta)[0].sum(1)  # of [1, basis, deltas, D]; rows: R e_i
            self._mean[count, width] = total.T / count
        return self._mean[count, width].to(device)

    def matrix(self, delta: int, width: int, device: torch.device) -> torch.Tensor:
        """R(delta) as a matrix [width, width]: row vectors are turned. Made once for all layers that turn alike."""

        def make() -> torch.Tensor:
            basis = torch.eye(width, device=device)[None, None]
            return self.turn(basis, torch.full((width,), delta, device=device))[0, 0]

        return _shared(self._config, (self._layer_type, delta, 0, width, device), make)

    def ahead(self, delta: int, count: int, width: int, device: torch.device) -> torch.Tensor:
        """The mean of R(delta), ..., R(delta + count - 1), as it is used on keys: ``turn``, then ``@ mean_turn``."""

        def make() -> torch.Tensor:
            return self.matrix(delta, width, device) @ self.mean_turn(count, width, device)

        return _shared(self._config, (self._layer_type, delta, count, width, device), make)


_made: list[tuple[weakref.ref[Any], tuple[Any, ...], torch.Tensor]] = []


def _shared(config: Any, key: tuple[Any, ...], make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What the layers of one model have in common in one step of decode."""
    for owner, known, found in _made:
        if known == key and owner() is config:
            return found
    with torch.inference_mode(False), torch.no_grad():
        made = make()
    _made.insert(0, (weakref.ref(config), key, made))
    del _made[8:]
    return made


def find_rope(config: Any, layer: int) -> Rope | None:
    """The rotation of a layer, ``None`` for a layer that has none in a model that has (NoPE).

    Raises:
        ValueError: positions are learned, ALiBi, dependent on the length, or of a form that is not known.
    """
    if not compat.uses_rotary(config, layer) and getattr(config, "rope_parameters", None):
        return None
    try:
        return Rope(config, layer)
    except ValueError as error:
        raise ValueError(f"reposition=True moves positions, but {error}: leave out reposition") from None
