"""Who sees what: segments against the rules written out, masks by column, what a mask is found to say."""

from __future__ import annotations

import pytest
import torch

from hf_kvcache.plan import FOREVER, LEAF, NOWHERE, Fed, Visible, causal, look, segments


def random_rules(seed: int, queries: int, slots: int, rows: int = 1) -> Visible:
    """Slots in any order, forms that begin and end anywhere, some empty."""
    g = torch.Generator().manual_seed(seed)
    number = torch.stack([torch.randperm(slots, generator=g) for _ in range(rows)])
    since = torch.randint(0, slots, (rows, slots), generator=g) * (torch.rand(rows, slots, generator=g) < 0.3)
    until = since + torch.randint(1, slots + 1, (rows, slots), generator=g)
    until = torch.where(torch.rand(rows, slots, generator=g) < 0.5, until, FOREVER)
    number = number.masked_fill(torch.rand(rows, slots, generator=g) < 0.1, NOWHERE)
    until = until.masked_fill(number < 0, NOWHERE)
    query = torch.arange(slots - queries, slots).expand(rows, -1)
    return Visible(number, since, until, query, number.clamp_min(0), slots)


def written_out(plan, queries: int, slots: int) -> torch.Tensor:
    """How often each query sees each slot, [q, n]."""
    seen = torch.zeros(queries, slots, dtype=torch.int64)
    for start, stop, runs, mask, times, step, shifts in plan:
        for i in range(times):
            moved = zip(runs, shifts or (0,) * len(runs), strict=True)
            keys = torch.cat([torch.arange(a, b) + i * shift for (a, b), shift in moved])
            some = torch.ones(stop - start, len(keys), dtype=torch.bool) if mask is None else mask
            seen[start + i * step : stop + i * step, keys] += some.long()
    return seen


@pytest.mark.parametrize("queries, slots", [(1, 1), (1, 300), (5, 5), (257, 300), (321, 321), (400, 520)])
@pytest.mark.parametrize("kind", ["causal", "window", "sinks", "random"])
def test_segments_are_the_rules_and_cover_each_pair_once(queries, slots, kind):
    rules = random_rules(slots, queries, slots) if kind == "random" else causal(queries, slots)
    if kind in ("window", "sinks"):
        leaves = rules.number + 40
        until = leaves if kind == "window" else torch.where(rules.number < 3, FOREVER, leaves)
        rules = rules._replace(until=until)
    expected = torch.zeros(queries, slots, dtype=torch.int64)
    for i, p in enumerate(rules.query[0].tolist()):  # the rules, one query at a time
        for j in range(slots):
            t, a, b = (int(x[0, j]) for x in (rules.number, rules.since, rules.until))
            expected[i, j] = 0 <= t <= p and a <= p < b
    assert torch.equal(written_out(segments(rules), queries, slots), expected)
    assert torch.equal(rules.rows()[0, 0].long(), expected)


def test_a_window_costs_what_it_is_wide():
    n, window = 8192, 508
    rules = causal(n, n)._replace(until=torch.arange(n)[None] + window)
    touched = sum(s.times * (s.stop - s.start) * sum(b - a for a, b in s.runs) for s in segments(rules))
    assert touched <= n * (window + 2 * LEAF)
    assert all(s.mask is None or s.mask.numel() <= LEAF * (window + LEAF) for s in segments(rules))
    twice = causal(2 * n, 2 * n)._replace(until=torch.arange(2 * n)[None] + window)
    assert len(segments(rules)) == len(segments(twice)) < 40  # leaves look alike


def test_no_mask_is_as_large_as_queries_times_history():
    plan = segments(causal(2048, 8192))
    assert max(s.mask.numel() for s in plan if s.mask is not None) <= LEAF * 2 * LEAF
    assert sum(s.mask is None for s in plan) <= 8  # one per halving


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("missing", [0, 4])
def test_a_mask_speaks_of_tokens_wherever_they_lie(additive, heads, missing):
    queries, slots = 3, 11
    g = torch.Generator().manual_seed(heads)
    rules = random_rules(5, queries, slots, rows=2)
    rules = rules._replace(column=torch.stack([torch.randperm(slots, generator=g) for _ in range(2)]))
    mask = torch.rand(2, heads, queries, slots - missing, generator=g)
    mask = mask if additive else mask > 0.4
    got = rules.rows(mask)
    for b in range(2):
        for h in range(heads):
            for i, p in enumerate(rules.query[b].tolist()):
                for j in range(slots):
                    column = int(rules.column[b, j]) - missing
                    fits = int(rules.since[b, j]) <= p < int(rules.until[b, j])
                    says = mask[b, h, i, column] if column >= 0 else torch.tensor(0.0 if additive else True)
                    value = got[b, h, i, j]
                    assert (value == float("-inf") if additive else not value) if not fits else value == says


def test_what_a_mask_says():
    real = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]).bool()  # pads on the left, and on the right
    padded = (torch.ones(4, 6, dtype=torch.bool).tril(2) & real[:, None])[:, None]
    assert look(padded, 6).new(2, 4) is None  # of a caller's mask: later forwards may see what comes last
    padded = padded.clone()
    padded.from_padding = True
    facts = look(padded, 6)
    assert facts.pads and torch.equal(facts.new(2, 4), real[:, 2:]) and torch.equal(facts.real, real)
    additive = torch.zeros(padded.shape).masked_fill(~padded, torch.finfo(torch.float32).min)
    assert look(additive, 6).mask.dtype == torch.bool and look(additive, 6).pads
    assert look(additive + 0.5 * padded, 6).mask.dtype == torch.float32  # more than yes and no
    tree = torch.ones(1, 1, 4, 6, dtype=torch.bool).tril(2)
    tree[0, 0, 2, 3] = tree[0, 0, 3, 4] = False
    facts = look(tree, 6)
    assert not facts.pads and facts.new(2, 4) is None  # siblings are no pads
    ahead = torch.ones(1, 1, 4, 6, dtype=torch.bool)
    assert not look(ahead, 6).pads


def test_columns_after_pads_before_between_and_behind():
    fed = Fed.of(2, 2).and_then(torch.tensor([[False, True, True], [True, True, False]]), 3).and_then(None, 2)
    assert fed.columns().tolist() == [[0, 1, 3, 4, 5, 6], [0, 1, 2, 3, 5, 6]]
    assert fed.real.shape[1] == 5  # tokens after the last pad need no room
    fed = fed.until(4)
    assert fed.columns().tolist() == [[0, 1, 3, NOWHERE], [0, 1, 2, 3]]
