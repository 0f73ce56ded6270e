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
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

State = tuple[torch.Tensor, ...]


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
    lossless, group = False, 1
    limit: float  # largest code

    def encode(self, x: torch.Tensor) -> Scaled:
        x = x.float()
        scale = x.abs().amax(-1, keepdim=True) / self.limit
        # A row of zeros, or one whose scale underflows float32, is stored as zeros; the scale stays a plain 1.
        scale = torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)
        return Scaled(self.to_codes(x / scale), scale)

    def decode(self, state: Scaled, dtype: torch.dtype) -> torch.Tensor:
        codes, unit = self.to_float(state.codes)
        return codes.mul_(state.scale * unit).to(dtype)

    def scores(self, query: torch.Tensor, state: Scaled) -> torch.Tensor:
        codes, unit = self.to_float(state.codes)
        return (query @ codes.transpose(-1, -2)).mul_((state.scale * unit).transpose(-1, -2))

    def mix(self, probs: torch.Tensor, state: Scaled) -> torch.Tensor:
        codes, unit = self.to_float(state.codes)
        return (probs * (state.scale * unit).transpose(-1, -2)) @ codes

    def to_codes(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def to_float(self, codes: torch.Tensor) -> tuple[torch.Tensor, float]:
        """A fresh float32 tensor and the number to multiply it with to get the codes' values, exactly."""
        return codes.float(), 1.0


class Int8(PerToken):
    """Symmetric, round to nearest even, 127 on either side."""

    name, limit = "int8", 127.0

    def to_codes(self, x: torch.Tensor) -> torch.Tensor:
        return x.round_().clamp_(-127, 127).to(torch.int8)


class Float8(PerToken):
    """8-bit floating point. Clamped before the cast: what a cast does beyond the maximum differs by device."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.dtype, self.limit = name, dtype, torch.finfo(dtype).max

    def to_codes(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp_(-self.limit, self.limit).to(self.dtype)

    def to_float(self, codes: torch.Tensor) -> tuple[torch.Tensor, float]:
        if codes.device.type != "cpu":
            return codes.float(), 1.0
        # The CPU cast is scalar code. Both formats are a float16 with bits missing, so bits are moved instead: e5m2
        # lacks the low eight; e4m3 also has a bias smaller by 8, which leaves the value times 2**-8 (subnormals too).
        bits = codes.view(torch.int8).to(torch.int16)
        if self.dtype == torch.float8_e5m2:
            return bits.bitwise_left_shift_(8).view(torch.float16).float(), 1.0
        return bits.bitwise_left_shift_(7).bitwise_and_(-16512).view(torch.float16).float(), 256.0


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
