"""Which tokens matter? One small class per importance policy; a higher score stays longer.

A policy sees the tokens of one forward after their attention was computed, and scores everything that is held:

    score(pool) -> [B, H, m + q] float32     m tokens held before (scored in ``pool.scores``), then q new ones

Who is always kept (sinks, recent tokens), how many stay, pads and padding rows are the layer's business
(``eviction.py``): a policy never looks at them. What a policy keeps between forwards lies in ``pool.memory``, tensors
with the batch axis leading.

``needs`` says what attention has to hand over, and so what a policy costs per forward of q tokens over n keys:

    "keys"      nothing: works with any attention                               random, knorm, keydiff
    "mass"      per-key attention mass of some of the queries, [B, H, n]        tova, snapkv (few queries), h2o (all)
    "queries"   the rotated queries themselves, [B, Hq, q, D]                   expected

The attention mass of key j is  sum_i mean_g softmax(s_i)_j  over the observed queries i and the G query heads of a
KV head.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .rope import Rope


class Pool(NamedTuple):
    """What one forward brought, for a policy to look at. m tokens were held before, q are new."""

    scores: torch.Tensor  # [B, H, m] float32, of the tokens held
    held: torch.Tensor  # [B, H, m] their numbers among the row's own tokens, in no order; -1: an empty slot
    keys: torch.Tensor  # [B, H, q, Dk], as the model computed them
    values: torch.Tensor  # [B, H, q, Dv]
    position: torch.Tensor  # [B, H, q] int64, number among the row's own tokens; -1: a pad
    first: int  # number of the first new token, pads counted
    mass: torch.Tensor | None  # [B, H, m + q] float32
    query: torch.Tensor | None  # [B, Hq, q, Dk]
    memory: dict[str, torch.Tensor]
    layer: int
    rope: Rope | None

    @property
    def decoding(self) -> bool:
        return self.keys.shape[2] == 1

    def after(self, new: torch.Tensor) -> torch.Tensor:
        """The scores so far, and those of the new tokens."""
        return torch.cat([self.scores, new], -1)


class Policy:
    """Base of all policies; ``options`` are the constructor's arguments, for the spec string."""

    needs = "keys"
    rolls_back = True  # scores after a rollback are what they were before

    def first_observed(self, queries: int) -> int:
        """Of ``queries`` new queries, the first whose attention mass is wanted."""
        return 0

    def score(self, pool: Pool) -> torch.Tensor:
        raise NotImplementedError


class Random(Policy):
    """The control: what a budget is worth without any policy. A hash of (seed, layer, head, position)."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def score(self, pool: Pool) -> torch.Tensor:
        heads = torch.arange(pool.position.shape[1], device=pool.position.device)[:, None]
        x = pool.position * 0x9E3779B1 + heads * 0x85EBCA77 + (pool.layer + 1) * 0xC2B2AE3D + self.seed * 0x27D4EB2F
        for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1)):  # an integer finalizer: every bit mixes
            x = (x & 0xFFFFFFFF).bitwise_xor((x & 0xFFFFFFFF) >> shift) * factor
        return pool.after((x & 0xFFFFFF).float() / (1 << 24))


class KNorm(Policy):
    """Keys with a small L2 norm attract attention: score = -|k| (Devoto et al., arXiv:2406.11430)."""

    def score(self, pool: Pool) -> torch.Tensor:
        return pool.after(-pool.keys.float().norm(dim=-1))


class KeyDiff(Policy):
    """Keys unlike the others carry information: score = -cos(k, mean of k/|k|) (Park et al., arXiv:2504.15364).

    The mean runs over all of the row's tokens so far; a token is scored once, when it comes.
    """

    rolls_back = False

    def score(self, pool: Pool) -> torch.Tensor:
        unit = F.normalize(pool.keys.float(), dim=-1)
        total = (unit * (pool.position >= 0)[..., None]).sum(2)  # [B, H, D]
        if "anchor" in pool.memory:
            total = total + pool.memory["anchor"]
        pool.memory["anchor"] = total
        return pool.after(-(unit @ F.normalize(total, dim=-1)[..., None])[..., 0])


class Tova(Policy):
    """The token that the newest query looks at least goes (TOVA, Oren et al., arXiv:2401.06104).

    Mass of the last query, averaged over all heads: every head keeps the same tokens.
    """

    needs = "mass"

    def first_observed(self, queries: int) -> int:
        return queries - 1

    def score(self, pool: Pool) -> torch.Tensor:
        assert pool.mass is not None
        return pool.mass.mean(1, keepdim=True).expand_as(pool.mass)


class H2O(Policy):
    """Heavy hitters: attention mass accumulated over all queries so far (Zhang et al., arXiv:2306.14048)."""

    needs, rolls_back = "mass", False

    def score(self, pool: Pool) -> torch.Tensor:
        assert pool.mass is not None
        return pool.after(torch.zeros_like(pool.keys[..., 0], dtype=torch.float32)) + pool.mass


class SnapKV(Policy):
    """What the last ``window`` queries of a forward look at, smoothed over neighbours (Li et al., arXiv:2404.14469).

    Their mass is pooled along the tokens (``kernel`` wide, max or mean), so that a token brings its neighbours along.
    While decoding, the sum becomes a running one, ``score <- score (1 - 1 / window) + mass``: the same weight as
    ``window`` queries in the long run. Depends on the prefill schedule by definition: each chunk has its own window.
    """

    needs, rolls_back = "mass", False

    def __init__(self, window: int = 32, kernel: int = 7, pool: str = "max") -> None:
        if window < 1 or kernel < 1 or kernel % 2 == 0 or pool not in ("max", "mean"):
            raise ValueError(
                f"snapkv: window={window}, kernel={kernel}, pool={pool!r}: window >= 1, an odd kernel, pool max or mean"
            )
        self.window, self.kernel, self.pool = window, kernel, pool

    def first_observed(self, queries: int) -> int:
        return max(queries - self.window, 0)

    def score(self, pool: Pool) -> torch.Tensor:
        assert pool.mass is not None
        if pool.decoding and pool.scores.shape[-1]:
            return pool.after(torch.zeros_like(pool.mass[..., :1])) * (1 - 1 / self.window) + pool.mass
        number = torch.cat([pool.held, pool.position], -1)  # slots lie in any order: neighbours are those in the text
        order = number.masked_fill(number < 0, torch.iinfo(number.dtype).max).argsort(dim=-1, stable=True)
        smooth = F.max_pool1d if self.pool == "max" else F.avg_pool1d
        smoothed = smooth(pool.mass.gather(2, order), self.kernel, stride=1, padding=self.kernel // 2)
        return torch.empty_like(smoothed).scatter_(2, order, smoothed)


class Expected(Policy):
    """Attention that future queries can be expected to pay (Devoto et al., arXiv:2510.00636).

    Queries before rotation are taken as normal, q ~ N(mu, S) (statistics of the row's last ``queries`` queries of the
    first forward, sinks left out), and rotated by the mean rotation R of the next ``future`` positions:

        score_j = (exp(mu' . k_j / sqrt(d) + k_j' S' k_j / 2 d) / sum + epsilon) |v_j|,   mu' = R mu,  S' = R S R'

    averaged over the query heads of a KV head. A token is scored once, when it comes. ``epsilon`` is as large as a
    share of the attention: above one over the number of tokens, little but the values' norms is left of the score.
    """

    needs, rolls_back = "queries", False

    def __init__(self, future: int = 512, queries: int = 512, epsilon: float = 0.0) -> None:
        if future < 1 or queries < 2:
            raise ValueError(f"expected: future={future} and queries={queries} must be at least 1 and 2")
        self.future, self.queries, self.epsilon = future, queries, epsilon

    def score(self, pool: Pool) -> torch.Tensor:
        if "total" not in pool.memory or "waiting" in pool.memory:
            self._learn(pool)
        logits = self._logits(pool, pool.memory["mean"], pool.memory["cov"])
        chance = (logits - pool.memory["total"]).clamp_max(0.0).exp().mean(2)
        return pool.after((chance + self.epsilon) * pool.values.float().norm(dim=-1))

    def _logits(self, pool: Pool, mean: torch.Tensor, cov: torch.Tensor) -> torch.Tensor:
        """[B, H, G, q]"""
        keys, width = pool.keys.float(), pool.keys.shape[-1]
        logits = torch.einsum("bhgd,bhnd->bhgn", mean, keys) / math.sqrt(width)
        return logits + torch.einsum("bhnd,bhgde,bhne->bhgn", keys, cov, keys) / (2 * width)

    def _learn(self, pool: Pool) -> None:
        """Statistics and normaliser of each row's first forward, kept so that later tokens are scored on the same
        scale. A row that was all pads waits for its own first one."""
        mean, cov = self._statistics(pool)
        pads = pool.position < 0
        total = self._logits(pool, mean, cov).masked_fill(pads[:, :, None], -math.inf).logsumexp(-1, keepdim=True)
        waits, rows = pool.memory.pop("waiting", None), pads[:, 0].all(-1)  # [B]
        for name, new in (("mean", mean), ("cov", cov), ("total", total)):
            if waits is not None:
                new = torch.where(waits.view(-1, *[1] * (new.dim() - 1)), new, pool.memory[name])
            pool.memory[name] = new
        rows = rows if waits is None else rows & waits
        if bool(rows.any()):
            pool.memory["waiting"] = rows

    def _statistics(self, pool: Pool) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean [B, H, G, D] and covariance [B, H, G, D, D] of future queries, from those of this forward."""
        assert pool.query is not None
        batch, heads = pool.keys.shape[:2]
        query = pool.query.float()
        if pool.rope is not None:
            slots = torch.arange(pool.first, pool.first + query.shape[2], device=query.device)
            query = pool.rope.turn(query, -slots)
        query = query[:, :, -self.queries :].unflatten(1, (heads, -1))  # [B, H, G, q, D]
        own = pool.position[:, :1, None, -self.queries :, None]
        weight = ((own >= 4) | (own == own.amax(3, keepdim=True))).float()  # sinks' queries are unlike all others
        count = weight.sum(3)
        mean = (query * weight).sum(3) / count
        centred = (query - mean[..., None, :]) * weight
        cov = centred.transpose(-1, -2) @ centred / count[..., None]
        if pool.rope is not None:
            end = pool.first + pool.keys.shape[2]
            turn = pool.rope.mean_turn(end, self.future, query.shape[-1], query.device)  # [D, D]
            mean, cov = (turn @ mean[..., None])[..., 0], turn @ cov @ turn.transpose(-1, -2)
        return mean, cov


POLICIES: dict[str, type[Policy]] = {
    "random": Random,
    "knorm": KNorm,
    "keydiff": KeyDiff,
    "tova": Tova,
    "h2o": H2O,
    "snapkv": SnapKV,
    "expected": Expected,
}


def find_policy(name: str, options: dict[str, Any]) -> Policy:
    """The policy called ``name``; ``ValueError`` that lists the known ones, or its options, otherwise."""
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}: known are {', '.join(POLICIES)}")
    try:
        return POLICIES[name](**options)
    except TypeError:
        known = ", ".join(own_options(name)) or "none of its own"
        raise ValueError(f"policy {name!r} cannot take {', '.join(options)}: known are {known}") from None


def own_options(name: str) -> tuple[str, ...]:
    """Names of the options that only this policy has."""
    init = POLICIES[name].__init__
    return () if init is object.__init__ else tuple(init.__code__.co_varnames[1 : init.__code__.co_argcount])
