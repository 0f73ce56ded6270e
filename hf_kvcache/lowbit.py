"""How are four and two bits stored? In groups of values that share a step and an offset.

KIVI (Liu et al., arXiv:2402.02750) with smaller metadata:

    x ~ step * (code + zero),   code in 0 .. 2^bits - 1

    keys     per channel:  one (step, zero) for each channel over ``group`` consecutive tokens
    values   per token:    one (step, zero) for each token over ``group`` consecutive channels

Key channels differ from each other by orders of magnitude and are alike over time (a bias on ``k_proj`` makes it
extreme), so keys are grouped along time; a value's error is then averaged by the attention over tokens.

Metadata is small and still exact to half a step: the step is rounded *up* to bfloat16 before any code is computed, and
the offset is stored as an int16, in steps for 4 bits and in eighths of a step for 2. 32 bits per group of 32, one bit
per value: 5.0 bits for int4, 3.0 for int2. A group whose values sit far from zero gets a step of at least amax / 32000
(2 bits: amax / 4000), so that its offset fits.

Four codes are few. Put on both ends of a group's range they are range / 3 apart, and in the middles of its quarters
range / 4: still at most half a step from any value, with a smaller step. A group takes the second grid where its summed
squared error is smaller; a lone outlier above many equal values, and zeros, keep the first. (KL divergence of ``int2``
on SmolLM2: 0.056 with the first grid alone, 0.043 with the second, 0.042 with the choice. In 4 bits the steps differ by
1/16, and the choice gains nothing.)

    state, for m groups of tokens:   codes [B, H, m, group * bits / 8, D] uint8: byte r holds tokens r, r + rows, ...
                                     step, zero [B, H, m, 1, D] (keys) or [B, H, m, group, ceil(D / group)] (values)

``rotated`` is as in ``codecs``. Attention folds steps and offsets:

    q . k_t = sum_d (q_d step_d) code_td + sum_d q_d step_d zero_d                            (once per group)
    sum_t p_t v_td = sum_t (p_t step_t) code_td + sum_t p_t step_t zero_t                      (once per channel group)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from .codecs import FARTHEST, NEVER, bounded, fit, turn, turn_in

FAR = 32000.0  # largest stored offset; int16 holds 32767
PER_STEP = {4: 1, 2: 8}  # bits -> units of a stored offset in a step


class Grouped(NamedTuple):
    """State of the low-bit codecs; one row is one group of tokens."""

    codes: torch.Tensor  # [B, H, m, group * bits / 8, D] uint8
    scale: torch.Tensor  # [B, H, m, 1 | group, D | C] bfloat16: the step
    zero: torch.Tensor  # same shape, int16, in steps / PER_STEP[bits]


class GroupedCodec:
    """``bits`` per value in groups of ``group``.

    Args:
        axis: "channel": a group is one channel over time; "token": a group is neighbouring channels of one token.
        rotated: rows of these head sizes are multiplied by an orthonormal matrix first.

    Raises:
        ValueError: ``bits`` is not 4 or 2, or ``group`` does not fill whole bytes.
    """

    lossless = False

    def __init__(self, bits: int, group: int = 32, axis: str = "channel", rotated: range = NEVER) -> None:
        per_byte = 8 // bits if bits in (2, 4) else 0
        if not per_byte:
            raise ValueError(f"bits={bits}: known are 4 and 2")
        if isinstance(group, bool) or not isinstance(group, int) or group < per_byte or group % per_byte:
            raise ValueError(f"group={group!r} with {bits} bits: choose a multiple of {per_byte}")
        if axis not in ("channel", "token"):
            raise ValueError(f"key_axis={axis!r}: known are 'channel' and 'token'")
        self.name = f"int{bits}"
        self.bits, self.group, self.axis, self.rotated = bits, group, axis, rotated
        self.top, self.per_step = 2**bits - 1, PER_STEP[bits]

    # -- storing -----------------------------------------------------------------------------------------------------

    def encode(self, x: torch.Tensor) -> Grouped:
        batch, heads, tokens, width = x.shape
        if tokens % self.group:
            raise ValueError(f"{tokens} tokens are not whole groups of {self.group}")
        half = x.dtype == torch.float16
        x, unit = turn_in(x, self.rotated)
        x = x.reshape(batch, heads, tokens // self.group, self.group, width)
        low, high = self._fold(x, torch.amin), self._fold(x, torch.amax)
        if not half:  # what lies beyond gets the first or the last code
            low, high = bounded(low, FARTHEST / unit), bounded(high, FARTHEST / unit)
        step, zero = self._ends(low, high)
        if self.bits == 4:
            codes = self._exact(x, step, zero).round_().clamp_(0, self.top).to(torch.uint8)
        else:
            codes, error = self._codes(x, step, zero)
            other_step, other_zero = self._middles(low, high)
            other_codes, other_error = self._codes(x, other_step, other_zero)
            other = other_error < error
            step, zero = torch.where(other, other_step, step), torch.where(other, other_zero, zero)
            codes = torch.where(self._spread(other, width), other_codes, codes)
        zero = (zero * self.per_step).to(torch.int16)
        return Grouped(self._pack(codes), (step * unit).to(torch.bfloat16), zero)

    def _ends(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Step and offset (in steps) of the grid whose first and last codes are whole steps nearest the ends."""
        step = self._step(low, high, (high - low) / self.top)
        return step, (low / step).round_()

    def _middles(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of the grid whose codes are the middles of top + 1 equal parts; one unit of offset is left over, for
        the offset's own rounding."""
        step = self._step(low, high, (high - low) / (self.top + 1 - 1 / self.per_step))
        return step, (((high + low) / (2 * step) - self.top / 2) * self.per_step).round_() / self.per_step

    def _step(self, low: torch.Tensor, high: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        step = torch.maximum(step, torch.maximum(low.abs(), high.abs()) * (self.per_step / FAR))
        return _ceil_bfloat16(torch.where(step < 1e-37, 1.0, step))

    def _exact(self, x: torch.Tensor, step: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """Where values lie on a grid, in steps from its first code. (A prompt is long: no metadata is spread out.)"""
        if self.axis == "channel":
            return (x / step).sub_(zero)
        out = x.clone(memory_format=torch.contiguous_format)
        for c, (start, stop) in enumerate(self._channels(x.shape[-1])):
            out[..., start:stop].div_(step[..., c : c + 1]).sub_(zero[..., c : c + 1])
        return out

    def _codes(self, x: torch.Tensor, step: torch.Tensor, zero: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes, and each group's squared error: in float64, for its additions come in any order, and the same tokens
        must choose the same grid however many groups are encoded at once."""
        exact = self._exact(x, step, zero)
        codes = exact.round().clamp_(0, self.top).to(torch.uint8)
        missed = self._fold(exact.sub_(codes).square_(), partial(torch.sum, dtype=torch.float64))
        return codes, missed * step.double().square()

    def decode(self, state: Grouped, dtype: torch.dtype) -> torch.Tensor:
        codes = self._unpack(state.codes)
        batch, heads, groups, group, width = codes.shape
        x = codes.add_(self._spread(self._zero(state), width)).mul_(self._spread(state.scale.float(), width))
        return fit(turn(x.view(batch, heads, groups * group, width), self.rotated, back=True), dtype)

    # -- attending ---------------------------------------------------------------------------------------------------

    def scores(self, query: torch.Tensor, state: Grouped) -> torch.Tensor:
        codes = self._unpack(state.codes)  # [B, H, m, group, D]
        batch, heads, groups, group, width = codes.shape
        rows, query = query.shape[2], turn(query, self.rotated)
        scale, zero = state.scale.float(), self._zero(state)
        if self.axis == "channel":
            folded = query[:, :, None] * scale  # [B, H, m, M, D]
            out = folded @ codes.transpose(-1, -2)
            out.add_(folded @ zero.transpose(-1, -2))  # [B, H, m, M, 1]
            return out.transpose(2, 3).reshape(batch, heads, rows, groups * group)
        codes = codes.view(batch, heads, groups * group, width)
        step, offset = scale.flatten(2, 3), zero.flatten(2, 3)  # [B, H, n, C]
        out = query.new_zeros(batch, heads, rows, groups * group)
        for c, (start, stop) in enumerate(self._channels(width)):
            part = query[..., start:stop]
            dots = part @ codes[..., start:stop].transpose(-1, -2)
            dots.add_(part.sum(-1, keepdim=True) * offset[..., c].unsqueeze(2))
            out.add_(dots.mul_(step[..., c].unsqueeze(2)))
        return out

    def mix(self, probs: torch.Tensor, state: Grouped) -> torch.Tensor:
        if self.axis == "channel":
            return probs @ self.decode(state, torch.float32)
        codes = self._unpack(state.codes).flatten(2, 3)  # [B, H, n, D]
        rows, width = probs.shape[2], codes.shape[-1]
        scale, zero = state.scale.float(), self._zero(state)
        step, offset = (t.flatten(2, 3).transpose(-1, -2) for t in (scale, zero))  # [B, H, C, n]
        weighted = (probs.unsqueeze(2) * step.unsqueeze(3)).flatten(2, 3)  # [B, H, C * M, n]
        # One product for all channel groups, of which each keeps its own columns: faster than C strided ones.
        mixed = (weighted @ codes).unflatten(2, (-1, rows))  # [B, H, C, M, D]
        shift = (weighted.unflatten(2, (-1, rows)) * offset.unsqueeze(3)).sum(-1, keepdim=True)
        pieces = [
            mixed[:, :, c, :, start:stop] + shift[:, :, c] for c, (start, stop) in enumerate(self._channels(width))
        ]
        return turn(torch.cat(pieces, -1), self.rotated, back=True)

    # -- layout ------------------------------------------------------------------------------------------------------

    def _zero(self, state: Grouped) -> torch.Tensor:
        """The offsets in steps, float32."""
        return state.zero.float() / self.per_step

    def _fold(self, x: torch.Tensor, reduce: Callable[..., torch.Tensor]) -> torch.Tensor:
        """[B, H, m, group, D] -> the metadata's shape."""
        if self.axis == "channel":
            return reduce(x, dim=3, keepdim=True)
        return torch.stack([reduce(x[..., start:stop], dim=-1) for start, stop in self._channels(x.shape[-1])], -1)

    def _channels(self, width: int) -> list[tuple[int, int]]:
        """Channel groups; the last one is smaller where ``group`` does not divide the head size."""
        return [(start, min(start + self.group, width)) for start in range(0, width, self.group)]

    def _spread(self, meta: torch.Tensor, width: int) -> torch.Tensor:
        """Metadata at the shape of the values."""
        return meta if self.axis == "channel" else meta.repeat_interleave(self.group, -1)[..., :width]

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        """[B, H, m, group, D] -> [B, H, m, group * bits / 8, D]."""
        pieces = codes.chunk(8 // self.bits, dim=3)
        packed = pieces[0].clone()
        for index, piece in enumerate(pieces[1:], 1):
            packed |= piece << (index * self.bits)
        return packed

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Codes as float32, [B, H, m, group, D]."""
        batch, heads, groups, rows, width = packed.shape
        out = torch.empty(batch, heads, groups, self.group, width, device=packed.device)
        for index in range(8 // self.bits):
            piece = packed >> (index * self.bits) if index else packed
            out[:, :, :, index * rows : (index + 1) * rows] = piece & self.top
        return out


def _ceil_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """The smallest bfloat16 that is at least x (x > 0, float32), as float32."""
    bits = x.view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)
