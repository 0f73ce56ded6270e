"""How are four and two bits stored? In groups of values that share a step and an offset.

KIVI (Liu et al., arXiv:2402.02750) with smaller metadata:

    x ~ step * (code + zero),   code in 0 .. 2^bits - 1,   zero an integer number of steps

    keys     per channel:  one (step, zero) for each channel over ``group`` consecutive tokens
    values   per token:    one (step, zero) for each token over ``group`` consecutive channels

Key channels differ from each other by orders of magnitude and are alike over time (a bias on ``k_proj`` makes it
extreme), so keys are grouped along time; a value's error is then averaged by the attention over tokens.

Metadata is small and still exact to half a step: the step is rounded *up* to bfloat16 before any code is computed, and
the offset is stored as int16 steps. 32 bits per group of 32, one bit per value: 5.0 bits for int4, 3.0 for int2.
A group whose values sit far from zero gets a step of at least amax / 32000, so that its offset fits.

    state, for m groups of tokens:   codes [B, H, m, group * bits / 8, D] uint8: byte r holds tokens r, r + rows, ...
                                     step, zero [B, H, m, 1, D] (keys) or [B, H, m, group, ceil(D / group)] (values)

``rotate_from`` is as in ``codecs``. Attention folds steps and offsets:

    q . k_t = sum_d (q_d step_d) code_td + sum_d q_d step_d zero_d                            (once per group)
    sum_t p_t v_td = sum_t (p_t step_t) code_td + sum_t p_t step_t zero_t                      (once per channel group)
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .codecs import NEVER, turn

FAR = 32000.0  # largest offset in steps; int16 holds 32767


class Grouped(NamedTuple):
    """State of the low-bit codecs; one row is one group of tokens."""

    codes: torch.Tensor  # [B, H, m, group * bits / 8, D] uint8
    scale: torch.Tensor  # [B, H, m, 1 | group, D | C] bfloat16: the step
    zero: torch.Tensor  # same shape, int16, in steps


class GroupedCodec:
    """``bits`` per value in groups of ``group``.

    Args:
        axis: "channel": a group is one channel over time; "token": a group is neighbouring channels of one token.
        rotate_from: from this head size on, rows are multiplied by an orthonormal matrix first.

    Raises:
        ValueError: ``bits`` is not 4 or 2, or ``group`` does not fill whole bytes.
    """

    lossless = False

    def __init__(self, bits: int, group: int = 32, axis: str = "channel", rotate_from: float = NEVER) -> None:
        per_byte = 8 // bits if bits in (2, 4) else 0
        if not per_byte:
            raise ValueError(f"bits={bits}: known are 4 and 2")
        if isinstance(group, bool) or not isinstance(group, int) or group < per_byte or group % per_byte:
            raise ValueError(f"group={group!r} with {bits} bits: choose a multiple of {per_byte}")
        if axis not in ("channel", "token"):
            raise ValueError(f"key_axis={axis!r}: known are 'channel' and 'token'")
        self.name = f"int{bits}"
        self.bits, self.group, self.axis, self.rotate_from = bits, group, axis, rotate_from
        self.top = 2**bits - 1

    # -- storing -----------------------------------------------------------------------------------------------------

    def encode(self, x: torch.Tensor) -> Grouped:
        batch, heads, tokens, width = x.shape
        if tokens % self.group:
            raise ValueError(f"{tokens} tokens are not whole groups of {self.group}")
        x = turn(x.float(), self.rotate_from).reshape(batch, heads, tokens // self.group, self.group, width)
        low, high = self._range(x)
        step = torch.maximum((high - low) / self.top, torch.maximum(low.abs(), high.abs()) / FAR)
        step = _ceil_bfloat16(torch.where(step < 1e-37, 1.0, step))
        zero = (low / step).round_()
        codes = (x / self._spread(step, width)).round_().sub_(self._spread(zero, width)).clamp_(0, self.top)
        return Grouped(self._pack(codes.to(torch.uint8)), step.to(torch.bfloat16), zero.to(torch.int16))

    def decode(self, state: Grouped, dtype: torch.dtype) -> torch.Tensor:
        codes = self._unpack(state.codes)
        batch, heads, groups, group, width = codes.shape
        x = codes.add_(self._spread(state.zero.float(), width)).mul_(self._spread(state.scale.float(), width))
        return turn(x.view(batch, heads, groups * group, width), self.rotate_from, back=True).to(dtype)

    # -- attending ---------------------------------------------------------------------------------------------------

    def scores(self, query: torch.Tensor, state: Grouped) -> torch.Tensor:
        codes = self._unpack(state.codes)  # [B, H, m, group, D]
        batch, heads, groups, group, width = codes.shape
        rows, query = query.shape[2], turn(query, self.rotate_from)
        scale, zero = state.scale.float(), state.zero.float()
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
        step, offset = (t.float().flatten(2, 3).transpose(-1, -2) for t in (state.scale, state.zero))  # [B, H, C, n]
        weighted = (probs.unsqueeze(2) * step.unsqueeze(3)).flatten(2, 3)  # [B, H, C * M, n]
        # One product for all channel groups, of which each keeps its own columns: faster than C strided ones.
        mixed = (weighted @ codes).unflatten(2, (-1, rows))  # [B, H, C, M, D]
        shift = (weighted.unflatten(2, (-1, rows)) * offset.unsqueeze(3)).sum(-1, keepdim=True)
        pieces = [
            mixed[:, :, c, :, start:stop] + shift[:, :, c] for c, (start, stop) in enumerate(self._channels(width))
        ]
        return turn(torch.cat(pieces, -1), self.rotate_from, back=True)

    # -- layout ------------------------------------------------------------------------------------------------------

    def _range(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.axis == "channel":
            return x.amin(3, keepdim=True), x.amax(3, keepdim=True)
        pieces = [x[..., start:stop] for start, stop in self._channels(x.shape[-1])]
        low = torch.stack([piece.amin(-1) for piece in pieces], -1)
        return low, torch.stack([piece.amax(-1) for piece in pieces], -1)

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
