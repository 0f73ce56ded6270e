"""How are bits stored? One codec per number format; each row below is one token of one head.

A codec turns the keys (or values) of a run of tokens into a *state*: a ``NamedTuple`` of tensors that all carry
batch, heads and tokens in front, ``[B, H, n / group, ...]``, so that whoever stores, reorders, copies
or saves them maps one function over the tuple and never asks which codec wrote it.

    int8      codes = round(x / s),  s = amax|x| / 127            one float32 scale per token and head
    fp8       codes = fp8(x / s),    s = amax|x| / max(fp8)       the same, 448 for e4m3 and 57344 for e5m2
    full      codes = x

Bytes per token and head: ``head_dim + 4`` for the 8-bit codecs (0.531 of bfloat16 at head_dim 64).

Attention never decodes the history. With per-token scales, ``q . (s_j c_j) = s_j (q . c_j)``: the key scale multiplies
a column of scores, and the value scale multiplies that token's probability before the product with the value codes.
``scores`` and ``mix`` are these two folds; ``decode`` serves whoever needs plain tensors.

Per-token scales keep appending exact: a token's bytes depend on that token alone, so they never change afterwards and
do not depend on the batch, the padding or the schedule (FP8 formats: Micikevicius et al., arXiv:2209.05433).

Rows of the head sizes in ``rotated`` are multiplied by an orthonormal matrix first: ``q . k = (q R) . (k R)``.
That spreads a few large channels over all of them (QuaRot, Ashkboos et al., arXiv:2404.00456). Keys have such channels,
and one scale per token pays for them: rotating keys divides the KL divergence of ``int8`` on SmolLM2 by 4, and that of
``fp8`` by 1.5. The query is rotated once per step, at the cost of one [D, D] product.

Finite in, finite out. A rounded value may pass the largest float16, and is brought back (``fit``). Sums of a rotation
may pass the largest float32: rows are divided by a power of two before (``turn_in``), and stored as no more than
``FARTHEST``, so that no sum of any reader overflows.
"""

from __future__ import annotations

import math
import sys
from copy import copy
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch

State = tuple[torch.Tensor, ...]
NEVER, ALWAYS = range(0), range(1, sys.maxsize)  # as ``rotated``
FARTHEST = 2.0**100  # what rotated rows and groups of low bits hold at most: 1.3e30
LARGEST = torch.finfo(torch.bfloat16).max  # the same of rows as they are: finite in bfloat16, too


class Plain(NamedTuple):
    """State of the ``full`` codec."""

    values: torch.Tensor  # [B, H, n, D]


class Scaled(NamedTuple):
    """State of the codecs with one scale per token and head."""

    codes: torch.Tensor  # [B, H, n, D] int8 or float8
    scale: torch.Tensor  # [B, H, n, 1] float32


class Codec(Protocol):
    """What a number format must bring. ``x`` is ``[B, H, n, D]`` in any float dtype."""

    name: str
    lossless: bool
    group: int  # tokens per row of the state: 1, or as many as are encoded together

    def encode(self, x: torch.Tensor) -> State: ...

    def decode(self, state: Any, dtype: torch.dtype) -> torch.Tensor: ...

    def scores(self, query: torch.Tensor, state: Any) -> torch.Tensor:
        """``query`` [B, H, M, D] float32 -> unscaled logits [B, H, M, n] float32."""

    def mix(self, probs: torch.Tensor, state: Any) -> torch.Tensor:
        """``probs`` [B, H, M, n] float32 -> [B, H, M, D] float32."""


class Full:
    """Tokens as they came, in the dtype of the model."""

    name, lossless, group = "full", True, 1

    def encode(self, x: torch.Tensor) -> Plain:
        return Plain(x)

    def decode(self, state: Plain, dtype: torch.dtype) -> torch.Tensor:
        return state.values.to(dtype)

    def scores(self, query: torch.Tensor, state: Plain) -> torch.Tensor:
        return query @ state.values.to(query.dtype).transpose(-1, -2)

    def mix(self, probs: torch.Tensor, state: Plain) -> torch.Tensor:
        return probs @ state.values.to(probs.dtype)


class PerToken:
    """Eight bits per value and one float32 scale per token and head: ``x ~ scale * codes``."""

    name: str
    lossless, group, rotated = False, 1, NEVER
    limit: float  # largest code

    @lru_cache  # noqa: B019 (one entry per format and head size, for good)
    def rotating(self, rotated: range) -> PerToken:
        """The same codec, rows of these head sizes rotated."""
        other = copy(self)
        other.rotated = rotated
        return other

    def encode(self, x: torch.Tensor) -> Scaled:
        given, (x, unit) = x, turn_in(x, self.rotated)
        scale = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True)) / self.limit * unit
        # A row of zeros, or one whose scale underflows float32, is stored as zeros; the scale stays a plain 1.
        scale = torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)
        step = scale / unit
        codes = self.to_codes(x / step if x is given else x.div_(step))  # a prompt is long: no copy more than needed
        half = given.dtype == torch.float16
        return Scaled(codes, scale if half else bounded(scale, self.largest_scale(x.shape[-1])))

    def largest_scale(self, width: int) -> float:
        """The scale of a row that holds as much as a row of ``width`` may."""
        return (FARTHEST if width in self.rotated else LARGEST) / self.limit

    def decode(self, state: Scaled, dtype: torch.dtype) -> torch.Tensor:
        x = self.to_float(state.codes).mul_(self.unit_scale(state))
        if x.shape[-1] not in self.rotated:
            return x.to(dtype)  # no larger than the largest of the row that was encoded
        return fit(turn(x, self.rotated, back=True), dtype)

    def scores(self, query: torch.Tensor, state: Scaled) -> torch.Tensor:
        dots = turn(query, self.rotated) @ self.to_float(state.codes).transpose(-1, -2)
        return dots.mul_(self.unit_scale(state).transpose(-1, -2))

    def mix(self, probs: torch.Tensor, state: Scaled) -> torch.Tensor:
        weighted = probs * self.unit_scale(state).transpose(-1, -2)
        return turn(weighted @ self.to_float(state.codes), self.rotated, back=True)

    def to_codes(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def to_float(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes as a fresh float32 tensor, up to the power of two that ``unit_scale`` puts back."""
        return codes.float()

    def unit_scale(self, state: Scaled) -> torch.Tensor:
        """What ``to_float`` has to be multiplied with, [B, H, n, 1]."""
        return state.scale


class Int8(PerToken):
    """Symmetric, round to nearest even, 127 on either side."""

    name, limit = "int8", 127.0

    def to_codes(self, x: torch.Tensor) -> torch.Tensor:
        return x.round_().clamp_(-127, 127).to(torch.int8)


class Float8(PerToken):
    """8-bit floating point, kept as bytes: not every tensor operation knows the float8 types.

    Clamped before the cast: what a cast does beyond the maximum differs by device.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.dtype, self.limit = name, dtype, torch.finfo(dtype).max

    def to_codes(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp_(-self.limit, self.limit).to(self.dtype).view(torch.uint8)

    def to_float(self, codes: torch.Tensor) -> torch.Tensor:
        if codes.device.type != "cpu":
            return codes.view(self.dtype).float()
        # The CPU cast is scalar code. Both formats are a float16 with bits missing, so bits are moved instead: e5m2
        # lacks the low eight; e4m3 also has a bias smaller by 8, which leaves the value times 2**-8 (subnormals too).
        bits = codes.view(torch.int8).to(torch.int16)
        if self.dtype == torch.float8_e5m2:
            return bits.bitwise_left_shift_(8).view(torch.float16).float()
        return bits.bitwise_left_shift_(7).bitwise_and_(-16512).view(torch.float16).float()

    def unit_scale(self, state: Scaled) -> torch.Tensor:
        moved = self.dtype == torch.float8_e4m3fn and state.codes.device.type == "cpu"
        return state.scale * 256.0 if moved else state.scale


@lru_cache(maxsize=32)
def _rotation(width: int) -> torch.Tensor:
    """Orthonormal [width, width] float32: Hadamard for the power of two in ``width``, a DCT for the odd rest."""
    odd = width // (width & -width)
    t = torch.arange(odd, dtype=torch.float64)
    dct = torch.cos(math.pi / odd * (t[None, :] + 0.5) * t[:, None]) * math.sqrt(2 / odd)
    dct[0] /= math.sqrt(2)
    matrix = dct if odd > 1 else torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0) / math.sqrt(2)
    return matrix.float()


@lru_cache(maxsize=64)
def rotation(width: int, device: torch.device | str) -> torch.Tensor:
    """The orthonormal matrix ``[width, width]`` float32 that rows are multiplied with."""
    with torch.inference_mode(False):
        return _rotation(width).to(device)


def turn(x: torch.Tensor, rotated: range, back: bool = False) -> torch.Tensor:
    """``x`` [..., D] float32 rotated (or turned back); ``x`` itself where D is not in ``rotated``."""
    if x.shape[-1] not in rotated:
        return x
    matrix = rotation(x.shape[-1], x.device)
    return x @ (matrix.T if back else matrix)


@lru_cache(maxsize=64)
def _entrance(width: int, device: torch.device | str) -> tuple[torch.Tensor, float]:
    """``rotation`` divided by a power of two of at least 2 sqrt(width), and that: no sum is larger than its terms."""
    unit = 2.0 ** (((width - 1).bit_length() + 1) // 2 + 1)
    with torch.inference_mode(False):
        return rotation(width, device) / unit, unit


def turn_in(x: torch.Tensor, rotated: range) -> tuple[torch.Tensor, float]:
    """Rows ``x`` [..., D] to be encoded, in any float dtype: rotated as ``turn`` does, float32, divided by ``unit``;
    and ``unit``, a power of two (1 where D is not in ``rotated``). Bits are those of ``turn``, but for the exponent."""
    if x.shape[-1] not in rotated:
        return x.float(), 1.0
    matrix, unit = _entrance(x.shape[-1], x.device)
    return x.float() @ matrix, unit


def bounded(x: torch.Tensor, most: float) -> torch.Tensor:
    """``x`` within -most .. most; NaN and infinity, which a caller did not refuse, stay to be seen."""
    return torch.where(x.isinf(), x, x.clamp(-most, most))


def fit(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x``, float32 and not used any more, as ``dtype``: what was rounded out of float16's range comes back in."""
    return (x.clamp_(-65504.0, 65504.0) if dtype == torch.float16 else x).to(dtype)


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Full(),
        Int8(),
        Float8("fp8_e4m3", torch.float8_e4m3fn),
        Float8("fp8_e5m2", torch.float8_e5m2),
    )
}
ALIASES = {"fp8": "fp8_e4m3"}


def find_codec(name: str) -> Codec:
    """The codec called ``name``; ``ValueError`` that lists the known ones otherwise."""
    codec = CODECS.get(ALIASES.get(name, name))
    if codec is None:
        known = ", ".join([*CODECS, *ALIASES, "int4", "int2", "k4v2 and the like"])
        raise ValueError(f"unknown storage {name!r}: known are {known}")
    return codec
