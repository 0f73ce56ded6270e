"""Would the harness notice if the cache did nothing, or broke everything?

Two claims are checked on the model and text at hand before any number is believed:

1. *Cached equals uncached.* Logits of tokens fed in steps through the cache equal those of one forward pass
   without any cache. If not, the harness feeds wrong positions, masks or tokens.
2. *A zeroed cache wrecks the score.* With keys and values replaced by zeros, perplexity at least doubles.
   If not, the scored tokens never read the cache, and every compression would look lossless.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from eval import contenders
from eval.scoring import forward, perplexity, steps

TOKENS = 128  # enough for a score to break, few enough to cost a second


class Proofs(NamedTuple):
    """What the two proofs measured."""

    cached_difference: float
    zeroed_perplexity_ratio: float


def line(proven: Proofs) -> str:
    """What was proven, for a reader."""
    return (
        f"proofs: cached and uncached logits differ by {proven.cached_difference:.1e}; "
        f"a zeroed cache multiplies perplexity by {proven.zeroed_perplexity_ratio:.0f}"
    )


def prove(model: Any, ids: torch.Tensor, *, step: int = 32, attn: str = "sdpa", spec: str = "full") -> Proofs:
    """Check both claims on the first tokens of [1, T + 1] with a cache that should lose nothing."""
    ids = ids[:, : TOKENS + 1]
    step = min(step, max(1, (ids.shape[1] - 1) // 4))  # at least four steps, or nothing is read back
    return Proofs(
        cached_equals_uncached(model, ids, step=step, attn=attn, spec=spec),
        zeroed_cache_wrecks(model, ids, step=step, spec=spec),
    )


@torch.inference_mode()
def cached_equals_uncached(
    model: Any, ids: torch.Tensor, *, step: int, attn: str = "sdpa", spec: str = "full"
) -> float:
    """The difference of cached and uncached logits: the largest in float32, where it must stay below 1e-3.

    Lower precisions round differently on another schedule: there it is the mean one in standard deviations
    of the logits, which must stay below 0.05.
    """
    contenders.use_attention(model, contenders.BASELINE, attn)
    uncached = model(ids[:, :-1], use_cache=False).logits[0].float()
    cached = _logits(model, ids, step, attn, spec).float()
    difference = (cached - uncached).abs()
    exact = model.dtype in (torch.float32, torch.float64)
    measured, limit = (difference.max(), 1e-3) if exact else (difference.mean() / uncached.std(), 0.05)
    if not measured < limit:
        raise ValueError(
            f"proof failed: cached and uncached logits of {spec} differ by {measured:.2g} (limit {limit}); "
            "the harness or the cache feeds wrong tokens, positions or masks, so no score can be believed"
        )
    return measured.item()


@torch.inference_mode()
def zeroed_cache_wrecks(model: Any, ids: torch.Tensor, *, step: int, spec: str = "full") -> float:
    """Perplexity with a zeroed cache over perplexity with the same cache whole; must be at least 2."""
    attn = contenders.stock_attention(model)
    whole = _perplexity(_logits(model, ids, step, attn, spec), ids)
    broken = _perplexity(_logits(model, ids, step, attn, spec, wrecked=True), ids)
    if not broken >= 2 * whole:
        raise ValueError(
            f"proof failed: perplexity is {whole:.4g} with {spec} and {broken:.4g} with a zeroed cache; "
            "the scored tokens do not read the cache, or the model cannot predict this text at all"
        )
    return broken / whole


def _logits(model: Any, ids: torch.Tensor, step: int, attn: str, spec: str, wrecked: bool = False) -> torch.Tensor:
    contenders.use_attention(model, spec, attn)
    cache = contenders.make_cache(spec, model.config)
    cache = contenders.zeroed(cache) if wrecked else cache
    return torch.cat([forward(model, fed, cache) for fed, _ in steps(ids, step)])  # [T, V]


def _perplexity(logits: torch.Tensor, ids: torch.Tensor) -> float:
    return perplexity(torch.nn.functional.cross_entropy(logits.float(), ids[0, 1:], reduction="none"))
