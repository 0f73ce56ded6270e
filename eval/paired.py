"""Is that a difference, or noise?

Two caches answer the same items, so their scores are compared item by item: most of the noise, which is in the choice
of items, cancels. Of n paired differences d,

    difference = mean(d)        standard error = sd(d) / sqrt(n)

The sign test asks how likely the observed split is if neither cache were better: of the w + l items on which they
differ, w would then be a toss of fair coins. Its p is exact, two-sided, and needs no assumption about the scores. Where
many comparisons stand in one table some p are small by luck: `holm` raises them to what they are worth together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Paired(NamedTuple):
    """A cache against the baseline on the same items."""

    difference: float
    difference_se: float
    better: int
    worse: int
    sign_p: float


def mean_se(scores: Sequence[float]) -> tuple[float, float]:
    """Mean, and its standard error (0 for fewer than two scores)."""
    n = len(scores)
    mean = math.fsum(scores) / n
    if n < 2:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / (n - 1) / n)


def paired(scores: Sequence[float], baseline: Sequence[float]) -> Paired:
    """Compare scores with the baseline's on the same items."""
    differences = [a - b for a, b in zip(scores, baseline, strict=True)]
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return Paired(*mean_se(differences), better, worse, sign_test(better, worse))


def sign_test(better: int, worse: int) -> float:
    """Probability of a split at least as uneven as this one, if both sides were equally likely."""
    n, few = better + worse, min(better, worse)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(few + 1)) / 2**n)


def holm(p: Sequence[float]) -> list[float]:
    """Each p adjusted for the others (Holm 1979): below a level, all such findings hold at that level together."""
    adjusted, worst = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        worst = max(worst, (len(p) - rank) * p[index])
        adjusted[index] = min(1.0, worst)
    return adjusted
