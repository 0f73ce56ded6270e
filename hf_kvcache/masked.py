"""How does a window get through stock attention? Keys that bring their own mask.

transformers builds one causal mask from two numbers, a key length and an offset. That cannot say that, inside one chunk
of queries, each query has its own window. Where a chunk needs that, ``update`` hands out its keys as ``MaskedKeys``: a
tensor that behaves as any other, except that the place where it turns into scores applies the missing part of the mask.

    sdpa    scaled_dot_product_attention(q, K, v, mask)   ->  mask & visible
    eager   softmax(q @ K^T * scale + mask)               ->  hidden scores are -inf before the softmax

A decode step needs none of this (one query sees all that is held) and gets plain tensors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

KEEPS_KEYS = set("__getitem__ expand reshape view transpose permute contiguous unsqueeze flatten to float".split())
KEEPS_KEYS |= set("half bfloat16 repeat_interleave mT.__get__ __get__".split())
MAKES_SCORES = set("matmul __matmul__ bmm baddbmm".split())
KEEPS_SCORES = set("mul __mul__ __rmul__ div __truediv__ true_divide add __add__ __radd__ tanh to float".split())


class MaskedKeys(torch.Tensor):
    """Keys ``[B, H, n, D]``, or scores ``[.., q, n]`` made from them, with ``visible`` ``[q, n]`` bool."""

    visible: torch.Tensor
    refuse_padding: bool
    is_scores: bool

    @staticmethod
    def wrap(
        data: torch.Tensor, visible: torch.Tensor, refuse_padding: bool, is_scores: bool = False
    ) -> MaskedKeys:
        """``refuse_padding``: a mask that hides a whole column (a pad) is a ``ValueError``."""
        keys = data.as_subclass(MaskedKeys)
        keys.visible, keys.refuse_padding, keys.is_scores = visible, refuse_padding, is_scores
        return keys

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        carrier = next((a for a in (*args, *kwargs.values()) if isinstance(a, MaskedKeys)), None)
        if carrier is None or not hasattr(carrier, "visible"):
            return super().__torch_function__(func, types, args, kwargs)
        name = func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.scaled_dot_product_attention:
                return carrier._attend(*args, **kwargs)
            if carrier.is_scores and name not in KEEPS_SCORES and name not in KEEPS_KEYS:
                hidden = carrier.as_subclass(torch.Tensor).masked_fill(~carrier.visible, float("-inf"))
                return func(*(hidden if a is carrier else a for a in args), **kwargs)
            plain = [a.as_subclass(torch.Tensor) if isinstance(a, MaskedKeys) else a for a in args]
            out = func(*plain, **{k: _plain(v) for k, v in kwargs.items()})
            if not isinstance(out, torch.Tensor):
                return out
            if carrier.is_scores:
                for other in plain[1:]:
                    carrier._check_mask(other)
                return cls.wrap(out, carrier.visible, carrier.refuse_padding, True)
            if name in MAKES_SCORES:
                if out.shape[-2:] != carrier.visible.shape:
                    raise ValueError(
                        f"{name} on windowed keys gives {tuple(out.shape)}, not scores [.., queries, keys]: "
                        'call hf_kvcache.register() and model.set_attn_implementation("kvcache")'
                    )
                return cls.wrap(out, carrier.visible, carrier.refuse_padding, True)
            if name == "einsum":
                raise ValueError(
                    "einsum on windowed keys cannot be masked: call hf_kvcache.register() and "
                    'model.set_attn_implementation("kvcache")'
                )
            if name in KEEPS_KEYS:
                return cls.wrap(out, carrier.visible, carrier.refuse_padding)
            return out

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        mask = self.visible  # includes causality
        if attn_mask is not None:
            self._check_mask(attn_mask)
            bool_mask = attn_mask.dtype == torch.bool
            mask = attn_mask & mask if bool_mask else attn_mask.masked_fill(~mask, float("-inf"))
        return F.scaled_dot_product_attention(query, _plain(key), _plain(value), mask, dropout_p, **kwargs)

    def _check_mask(self, mask: Any) -> None:
        """Refuse what a mask gives away: pads, and queries that may not see themselves (the prompt fed twice)."""
        if not isinstance(mask, torch.Tensor) or mask.dim() < 2 or mask.shape[-2:] != self.visible.shape:
            return
        allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        if not allowed[..., -1, -1].any():
            raise ValueError(FED_TWICE)
        if self.refuse_padding and not allowed[..., -1, :].all():
            raise ValueError(PADDED)


FED_TWICE = (
    "the cache already holds these tokens, and the attention mask does not cover them again: "
    "call cache.rollback(1) before generating from a prompt that is fully cached"
)
PADDED = (
    "this retention evicts tokens and the batch has padding: rows would keep pads as their first tokens; "
    "use rows of equal length, or retention 'all'"
)


def _plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, MaskedKeys) else value
