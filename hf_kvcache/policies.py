"""Which tokens matter? One small class per importance policy; a higher score stays longer.

A policy sees the tokens of one forward after their attention was computed, and scores everything that is held:

    score(pool) -> [B, H, m + q] float32     m tokens held before (scored in ``pool.scores``), then q new ones

Most steps of decode bring one token to slots that are full. Then a policy may do with less, and write in place:

    step(pool) -> [B, H, 1]           the new token's score; those of the tokens held are updated in ``pool.scores``

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

import inspect
import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .rope import Rope
from .slots import by_number

TINY = 1e-12  # where ``normalize`` stops dividing
MOST = 80.0  # what exp can take in float32
WORKSPACE = 1 << 24  # most float32 numbers of a tensor of [queries, keys]


class Pool(NamedTuple):
    """What one forward brought, for a policy to look at. m tokens were held before, q are new."""

    scores: torch.Tensor  # [B, H, m] float32, of the tokens held
    held: torch.Tensor  # [B, H, m] their numbers among the row's own tokens, in no order; -1: an empty slot
    keys: torch.Tensor  # [B, H, q, Dk], as the model computed them
    values: torch.Tensor  # [B, H, q, Dv]
    position: torch.Tensor  # [B, H, q] int64, number among the row's own tokens; -1: a pad
    mass: torch.Tensor | None  # [B, H, m + q] float32
    query: torch.Tensor | None  # [B, Hq, q, Dk], as the model computed them
    memory: dict[str, torch.Tensor]
    layer: int
    rope: Rope | None
    scaling: float = 1.0  # of scores: softmax(scaling q . k)
    number: int | None = None  # that of the first new token, where no row has a pad: a look would wait for the device

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
        """Of a row's ``queries`` new queries, the first whose attention mass is wanted."""
        return 0

    def score(self, pool: Pool) -> torch.Tensor:
        raise NotImplementedError

    def step(self, pool: Pool) -> torch.Tensor:
        """``score`` of one token that is no pad in any row, beside others: its own [B, H, 1], those held in place."""
        scores = self.score(pool)
        pool.scores.copy_(scores[..., :-1])
        return scores[..., -1:]

    def memory_bytes(self, heads: int, query_heads: int, width: int, seen: int) -> int:
        """Bytes of ``pool.memory`` for one row of ``seen`` tokens; ``width`` is that of a key."""
        return 0

    def remembers(self, memory: dict[str, torch.Tensor], batch: int, heads: int, width: int) -> bool:
        """Whether this can be ``pool.memory`` after some tokens: rows come first."""
        return all(t.shape[:1] == (batch,) for t in memory.values())


class Once(Policy):
    """Base of those that score a token when it comes, and never again."""

    def new(self, pool: Pool) -> torch.Tensor:
        """The scores of the new tokens, [B, H, q]."""
        raise NotImplementedError

    def score(self, pool: Pool) -> torch.Tensor:
        return pool.after(self.new(pool))

    def step(self, pool: Pool) -> torch.Tensor:
        return self.new(pool)


class Random(Once):
    """The control: what a budget is worth without any policy. A hash of (seed, layer, head, position)."""

    def __init__(self, seed: int = 0) -> None:
        if not 0 <= seed < 1 << 32:
            raise ValueError(f"random: seed={seed} is not in 0 to {(1 << 32) - 1}")
        self.seed = seed

    def new(self, pool: Pool) -> torch.Tensor:
        return _hash(pool.position, pool.layer, pool.position.shape[1], self.seed)

    def step(self, pool: Pool) -> torch.Tensor:
        assert pool.number is not None
        batch, heads = pool.position.shape[:2]
        found = _hash_of_layers(pool.number, pool.layer // LAYERS, heads, self.seed, pool.position.device)
        return found[pool.layer % LAYERS].expand(batch, -1, -1)


LAYERS = 32  # so many have the hashes of a step's token made at once


@lru_cache(maxsize=8)
def _hash_of_layers(number: int, block: int, heads: int, seed: int, device: torch.device) -> torch.Tensor:
    """[LAYERS, H, 1]"""
    with torch.inference_mode(False):
        layers = torch.arange(block * LAYERS, (block + 1) * LAYERS, device=device)[:, None, None]
        return _hash(torch.full_like(layers, number), layers, heads, seed)


def _hash(position: torch.Tensor, layer: torch.Tensor | int, heads: int, seed: int) -> torch.Tensor:
    """[B, H, q] in [0, 1)"""
    head = torch.arange(heads, device=position.device)[:, None]
    x = position * 0x9E3779B1 + head * 0x85EBCA77 + (layer + 1) * 0xC2B2AE3D + seed * 0x27D4EB2F
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1)):  # an integer finalizer: every bit mixes
        x = (x & 0xFFFFFFFF).bitwise_xor((x & 0xFFFFFFFF) >> shift) * factor
    return (x & 0xFFFFFF).float() / (1 << 24)


def lengths(x: torch.Tensor) -> torch.Tensor:
    """The L2 norm of [..., D] in float32, without a copy of ``x`` in it."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32)).float()


class KNorm(Once):
    """Keys with a small L2 norm attract attention: score = -|k| (Devoto et al., arXiv:2406.11430)."""

    def new(self, pool: Pool) -> torch.Tensor:
        return -lengths(pool.keys)


class KeyDiff(Once):
    """Keys unlike the others carry information: score = -cos(k, mean of k/|k|) (Park et al., arXiv:2504.15364).

    The mean runs over all of the row's tokens so far; a token is scored once, when it comes.
    """

    rolls_back = False

    def new(self, pool: Pool) -> torch.Tensor:
        unit = F.normalize(pool.keys.float(), dim=-1)
        total = (unit * (pool.position >= 0)[..., None]).sum(2)  # [B, H, D]
        if "anchor" in pool.memory:
            total = total + pool.memory["anchor"]
        pool.memory["anchor"] = total
        return -(unit @ F.normalize(total, dim=-1)[..., None])[..., 0]

    def step(self, pool: Pool) -> torch.Tensor:
        unit = pool.keys.float() / lengths(pool.keys)[..., None].clamp_min(TINY)
        total = unit + pool.memory["anchor"][:, :, None]  # [B, H, 1, D]
        pool.memory["anchor"] = total[:, :, 0]
        return (unit * total).sum(-1) / torch.linalg.vector_norm(total, dim=-1).clamp_min(TINY).neg()

    def memory_bytes(self, heads: int, query_heads: int, width: int, seen: int) -> int:
        return 4 * heads * width

    def remembers(self, memory: dict[str, torch.Tensor], batch: int, heads: int, width: int) -> bool:
        return _are(memory, anchor=(torch.float32, (batch, heads, width)))


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

    def step(self, pool: Pool) -> torch.Tensor:
        assert pool.mass is not None
        mean = pool.mass.mean(1, keepdim=True)
        pool.scores.copy_(mean[..., :-1])
        return mean[..., -1:].expand(-1, pool.mass.shape[1], -1)


class H2O(Policy):
    """Heavy hitters: attention mass accumulated over all queries so far (Zhang et al., arXiv:2306.14048)."""

    needs, rolls_back = "mass", False

    def score(self, pool: Pool) -> torch.Tensor:
        assert pool.mass is not None
        return pool.after(torch.zeros_like(pool.keys[..., 0], dtype=torch.float32)) + pool.mass

    def step(self, pool: Pool) -> torch.Tensor:
        assert pool.mass is not None
        pool.scores.add_(pool.mass[..., :-1])
        return pool.mass[..., -1:]


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
        return smoothed(pool.mass, torch.cat([pool.held, pool.position], -1), self.kernel, self.pool)

    def step(self, pool: Pool) -> torch.Tensor:
        assert pool.mass is not None
        pool.scores.mul_(1 - 1 / self.window).add_(pool.mass[..., :-1])
        return pool.mass[..., -1:]


def smoothed(scores: torch.Tensor, number: torch.Tensor, kernel: int, pool: str = "max") -> torch.Tensor:
    """Scores [B, H, n] pooled over neighbours in the row's own text, whatever their order and the pads between them."""
    order = by_number(number)
    smooth = F.max_pool1d if pool == "max" else F.avg_pool1d
    pooled = smooth(scores.gather(2, order), kernel, stride=1, padding=kernel // 2)
    return torch.empty_like(pooled).scatter_(2, order, pooled)


class Expected(Once):
    """Attention that future queries can be expected to pay (after Devoto et al., arXiv:2510.00636).

    Future queries are taken to be like the row's last n = ``queries`` ones, q_i before rotation, at the next ``future``
    positions. A key k, turned back by the mean rotation R of those, k' = R' k, then expects

        z_ij = s q_i . k'_j          a_ij = exp(z_ij) / mean_j exp(z_ij)
        score_j = max over its ``kernel`` neighbours of (mean_i a_ij + epsilon) |v_j|

    averaged over the query heads of a KV head: 1 is the attention to an average token; s is the model's scaling,
    1 / sqrt(d) for most. With ``normal``, q ~ N(mu, S) instead, the paper's closed form: one z_j = s mu . k'_j
    + s^2 k'_j' S k'_j / 2, the mean of z_ij over i and half its variance. Averaging attention instead of exp(z_ij) is
    what finds things: otherwise the queries with the largest norms decide alone (docs/retention.md has both).

    A token is scored once, when it comes. What a query pays an average token is estimated from the tokens that came
    since it did, and before that from the queries before it, which count as n tokens.
    """

    needs, rolls_back = "queries", False

    def __init__(
        self, future: int = 512, queries: int = 32, kernel: int = 7, epsilon: float = 0.0, normal: bool = False
    ) -> None:
        if future < 1 or queries < 2 or kernel < 1 or kernel % 2 == 0 or epsilon < 0:
            raise ValueError(
                f"expected: future={future}, queries={queries}, kernel={kernel}, epsilon={epsilon}: "
                "future >= 1, queries >= 2, an odd kernel, epsilon >= 0"
            )
        self.future, self.queries, self.kernel = future, queries, kernel
        self.epsilon, self.normal = epsilon, normal

    def new(self, pool: Pool) -> torch.Tensor:
        own = pool.position[:, 0]  # [B, q]
        query, level, known = self._recent(pool, own)
        weight = known[:, None, None, :, None] / known.sum(-1).clamp_min(1)[:, None, None, None, None]
        size = max(WORKSPACE // level.numel(), 1)
        blocks = [slice(start, start + size) for start in range(0, own.shape[1], size)]
        made = [self._logits(pool, own, query, weight, blocks[0])] if len(blocks) == 1 else None
        each = lambda: made or (self._logits(pool, own, query, weight, block) for block in blocks)  # noqa: E731
        new, before = (own >= 0).sum(-1), pool.memory.get("seen", torch.zeros_like(own[:, 0]))
        trust = before.clamp_max(self.queries)[:, None, None, None]
        paid = torch.stack([z.logsumexp(-1) for z in each()]).logsumexp(0)
        now = torch.logaddexp(level + trust.log(), paid) - (trust + new[:, None, None, None]).clamp_min(1).log()
        level = torch.where(new[:, None, None, None] > 0, now, level)
        pool.memory["level"], pool.memory["seen"] = level, before + new
        attention = [((z - level[..., None]).clamp_max(MOST).exp() * weight).sum(3).mean(2) for z in each()]
        norm = lengths(pool.values)
        score = ((torch.cat(attention, -1) + self.epsilon) * norm).masked_fill(pool.position < 0, 0.0)
        return smoothed(score, pool.position, self.kernel)

    def step(self, pool: Pool) -> torch.Tensor:
        """``new`` of one token, by the same formula: it is its only neighbour, and all n queries are there."""
        memory, n, number = pool.memory, self.queries, pool.number
        if "number" not in memory or memory["number"].shape[1] < n:
            return self.new(pool)
        assert pool.query is not None and number is not None
        query, key = pool.query.float(), pool.keys.float() * pool.scaling
        if pool.rope is not None:
            query = query @ pool.rope.matrix(-number, query.shape[-1], query.device)
            key = key @ pool.rope.ahead(-number - 1, self.future, key.shape[-1], key.device)
        query = torch.cat([memory["query"][:, :, :, 1:], query.unflatten(1, (key.shape[1], -1))], 3)  # [B, H, G, n, D]
        level = memory["level"]
        level = torch.cat([level[..., 1:], level.mean(-1, keepdim=True)], -1)
        z = (query * key[:, :, None]).sum(-1)  # [B, H, G, n]
        if self.normal:
            mean = z.mean(-1, keepdim=True)
            z = mean + (z - mean).square().mean(-1, keepdim=True) / 2
        level = torch.logaddexp(level + math.log(n), z) - math.log(n + 1)
        memory["query"], memory["level"] = query, level
        memory["number"], memory["seen"] = memory["number"] + 1, memory["seen"] + 1
        attention = (z - level).clamp_max_(MOST).exp_().mean((2, 3))
        norm = lengths(pool.values)
        return (attention[..., None] + self.epsilon) * norm

    def _logits(
        self, pool: Pool, own: torch.Tensor, query: torch.Tensor, weight: torch.Tensor, block: slice
    ) -> torch.Tensor:
        """z [B, H, G, n, block] of some of the new tokens; -inf for pads."""
        keys = pool.keys[:, :, block].float()
        if pool.rope is not None:
            end = own.amax(1, keepdim=True) + 1  # where the positions to come begin
            keys = pool.rope.turn(keys, -end.expand(-1, keys.shape[2]))
            keys = keys @ pool.rope.mean_turn(self.future, keys.shape[-1], keys.device)
        z = (query @ keys[:, :, None].transpose(-1, -2)) * pool.scaling
        if self.normal:
            mean = (z * weight).sum(3, keepdim=True)
            z = (mean + ((z - mean).square() * weight).sum(3, keepdim=True) / 2).expand_as(z)
        return z.masked_fill((own[:, block] < 0)[:, None, None, None], -math.inf)

    def _recent(self, pool: Pool, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The row's last queries before rotation [B, H, G, n, D], the log of what each pays an average token as far as
        that was known [B, H, G, n], and which of them are there [B, n]."""
        assert pool.query is not None
        memory, heads = pool.memory, pool.keys.shape[1]
        last = own.argsort(dim=1, stable=True)[:, -self.queries :]
        number, query = own.gather(1, last), _take(pool.query, last, 2).float()
        if pool.rope is not None:
            query = pool.rope.turn(query, -number)
        query = query.unflatten(1, (heads, -1))  # [B, H, G, n, D]
        level = torch.zeros_like(query[..., 0])
        if "number" in memory:
            old, there = memory["level"], (memory["number"] >= 0)[:, None, None]
            typical = ((old * there).sum(-1) / there.sum(-1).clamp_min(1))[..., None]
            level = torch.cat([old, typical.expand_as(level)], 3)
            query = torch.cat([memory["query"], query], 3)
            number = torch.cat([memory["number"], number], 1)
            last = number.argsort(dim=1, stable=True)[:, -self.queries :]
            number, query, level = number.gather(1, last), _take(query, last, 3), _take(level, last, 3)
        memory["query"], memory["number"] = query, number
        return query, level, number >= 0

    def memory_bytes(self, heads: int, query_heads: int, width: int, seen: int) -> int:
        return min(self.queries, seen) * (4 * query_heads * (width + 1) + 8) + 8

    def remembers(self, memory: dict[str, torch.Tensor], batch: int, heads: int, width: int) -> bool:
        groups, count = (memory["query"].shape[2:4] if memory["query"].dim() == 5 else (0, 0)) if memory else (1, 1)
        shape = (batch, heads, groups, count)
        return 0 < count <= self.queries and _are(
            memory,
            query=(torch.float32, (*shape, width)),
            level=(torch.float32, shape),
            number=(torch.int64, (batch, count)),
            seen=(torch.int64, (batch,)),
        )


def _are(memory: dict[str, torch.Tensor], **wanted: tuple[torch.dtype, tuple[int, ...]]) -> bool:
    """Whether these are the tensors of a memory, by dtype and shape."""
    return {name: (t.dtype, tuple(t.shape)) for name, t in memory.items()} == wanted


def _take(x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    """Of each row of ``x`` the tokens ``index`` [B, n], along ``dim``."""
    shape = [1] * x.dim()
    shape[0], shape[dim] = index.shape
    return x.take_along_dim(index.view(shape), dim)


POLICIES: dict[str, type[Policy]] = {
    "random": Random,
    "knorm": KNorm,
    "keydiff": KeyDiff,
    "tova": Tova,
    "h2o": H2O,
    "snapkv": SnapKV,
    "expected": Expected,
}


def find_policy(name: str, options: dict[str, Any]) -> tuple[Policy, dict[str, Any]]:
    """The policy called ``name``, and which of its options are not the defaults.

    Raises:
        ValueError: an unknown policy or option (the known ones are listed), or an option of another type.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}: known are {', '.join(POLICIES)}")
    unknown = [option for option in options if option not in own_options(name)]
    if unknown:
        known = ", ".join(own_options(name)) or "none of its own"
        raise ValueError(f"policy {name!r} cannot take {', '.join(unknown)}: known are {known}")
    known_options = inspect.signature(POLICIES[name]).parameters
    values = {option: _as(known_options[option].annotation, name, option, v) for option, v in options.items()}
    return POLICIES[name](**values), {option: v for option, v in values.items() if v != known_options[option].default}


def _as(kind: Any, name: str, option: str, value: Any) -> Any:
    kind = getattr(kind, "__name__", kind)  # a name under ``from __future__ import annotations``
    if kind == "bool":
        return flag(name, option, value)
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if kind == "int" and not (number and isinstance(value, int)):
        raise ValueError(f"{name}: {option}={value!r} is not an integer")
    if kind == "float" and not number:
        raise ValueError(f"{name}: {option}={value!r} is not a finite number")
    return value


def flag(name: str, option: str, value: Any) -> bool:
    """On or off, as it is written in a spec or passed as a bool."""
    if value not in (True, False, "on", "off", "true", "false", "True", "False"):
        raise ValueError(f"{name}: {option}={value!r}: on or off")
    return value in (True, "on", "true", "True")


def own_options(name: str) -> tuple[str, ...]:
    """Names of the options that only this policy has."""
    init = POLICIES[name].__init__
    return () if init is object.__init__ else tuple(init.__code__.co_varnames[1 : init.__code__.co_argcount])
