"""How far are a cache's predictions from the full cache's?

The baseline and every scored cache read the same tokens in lockstep, a step at a time, so that nothing as
large as the logits (2,048 tokens x 49,152 words x 4 bytes = 400 MB) is ever kept. Per token t of the text,
with p = softmax(baseline logits) and q = softmax(scored logits) at t - 1, in float32:

    nll(t) = -log q(t)                     perplexity = exp(mean nll)
    KL(t)  = sum over words p (log p - log q)
    agreement(t) = argmax p == argmax q

Kept are three numbers per token and cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from eval import contenders
from eval.models import cache_argument

ROWS = 64  # rows of logits compared at a time, to bound the workspace at 64 x vocabulary


class Score(NamedTuple):
    """What one cache's predictions were worth."""

    perplexity: float
    kl_mean: float
    kl_p999: float
    top1_agreement: float


class Tally:
    """Three numbers per token, and what follows from them."""

    def __init__(self) -> None:
        self.nll: list[torch.Tensor] = []
        self.kl: list[torch.Tensor] = []
        self.agree: list[torch.Tensor] = []

    def add(self, baseline: torch.Tensor, scored: torch.Tensor, targets: torch.Tensor) -> None:
        """Compare logits [S, V] of one step; targets [S] are the tokens they predict."""
        for start in range(0, len(targets), ROWS):
            rows = slice(start, start + ROWS)
            log_p = baseline[rows].float().log_softmax(-1)  # [s, V]
            log_q = scored[rows].float().log_softmax(-1)
            self.nll.append(-log_q.gather(-1, targets[rows, None])[:, 0].cpu())
            kl = (log_p.exp() * (log_p - log_q)).sum(-1)
            self.kl.append(kl.clamp_min(0).cpu())  # below zero is rounding
            self.agree.append((log_p.argmax(-1) == log_q.argmax(-1)).cpu())

    def score(self) -> Score:
        """The metrics over everything added so far."""
        kl = torch.cat(self.kl).double()
        return Score(
            perplexity=perplexity(torch.cat(self.nll)),
            kl_mean=kl.mean().item(),
            kl_p999=kl.quantile(0.999).item(),
            top1_agreement=torch.cat(self.agree).double().mean().item(),
        )


def perplexity(nll: torch.Tensor) -> float:
    """exp of the mean negative log-likelihood; infinite rather than an overflow error."""
    mean = nll.double().mean().item()
    return math.exp(mean) if mean < 700 else math.inf


class Outcome(NamedTuple):
    """The scores of one spec, and the bytes behind them."""

    score: Score
    nbytes: int
    baseline_nbytes: int
    baseline_perplexity: float
    tokens_kept: int


def forward(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Logits [S, V] of one step of tokens [1, S], read and stored through the cache."""
    return model(ids, use_cache=True, **{cache_argument(model): cache}).logits[0]


def steps(ids: torch.Tensor, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut tokens [1, T + 1] into (fed [1, S], targets [S]): every fed token predicts the one after it."""
    if step < 1:
        raise ValueError(f"step {step} feeds nothing; use --step 1 or more")
    total = ids.shape[1] - 1
    for start in range(0, total, step):
        end = min(start + step, total)
        yield ids[:, start:end], ids[0, start + 1 : end + 1]


@torch.inference_mode()
def score(
    model: Any,
    ids: torch.Tensor,
    specs: list[str],
    *,
    step: int = 32,
    attn: str = "sdpa",
    tick: Callable[[int], object] = lambda tokens: None,
) -> dict[str, Outcome]:
    """Score caches against `DynamicCache` on tokens [1, T + 1]; `tick` is told the tokens of each step."""
    baseline = contenders.make_cache(contenders.BASELINE, model.config)
    caches = {spec: contenders.make_cache(spec, model.config) for spec in specs}
    own = Tally()
    tallies = {spec: Tally() for spec in specs}
    for fed, targets in steps(ids, step):
        contenders.use_attention(model, contenders.BASELINE, attn)
        reference = forward(model, fed, baseline)
        own.add(reference, reference, targets)
        for spec, cache in caches.items():
            contenders.use_attention(model, spec, attn)
            tallies[spec].add(reference, forward(model, fed, cache), targets)
        tick(fed.shape[1])
    held = contenders.stored_bytes(baseline)
    ppl = own.score().perplexity
    return {
        spec: Outcome(
            tallies[spec].score(),
            compressed(spec, contenders.stored_bytes(cache), held, ids.shape[1] - 1),
            held,
            ppl,
            contenders.tokens_kept(cache),
        )
        for spec, cache in caches.items()
    }


def compressed(spec: str, nbytes: int, baseline: int, tokens: int) -> int:
    """`nbytes`, unless the spec promised to hold fewer bytes than the baseline and does not."""
    if contenders.should_compress(spec) and nbytes >= baseline:
        raise ValueError(
            f"{spec} holds {nbytes} bytes after {tokens} tokens, the full-precision cache {baseline}: "
            "no compression happened, so this is not a result; feed more --tokens or drop the spec"
        )
    return nbytes
