"""Slabs against a plain Python list of tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvcache import store
from hf_kvcache.codecs import CODECS, Plain, Scaled
from hf_kvcache.store import Slab


def tokens(start, count, batch=2):
    """A state whose rows say which token, batch row and head they are."""
    token = torch.arange(start, start + count, dtype=torch.float32)
    row = torch.arange(batch * 2, dtype=torch.float32).view(batch, 2, 1, 1) / 16
    return Plain((token.view(1, 1, -1, 1) + row).expand(batch, 2, count, 3).clone())


def numbers(state):
    """The token numbers of a state, after a look that every row and head has the same ones."""
    values = state.values
    assert (values.floor() == values[:1, :1, :, :1].floor()).all()
    assert values.numel() == 0 or (values - values.floor() == tokens(0, 1, values.shape[0]).values).all()
    return values[0, 0, :, 0].floor().long().tolist()


class Model:
    """What a slab should hold, in token order."""

    def __init__(self, limit, pinned):
        self.limit, self.pinned, self.tokens = limit, pinned, []

    def append(self, new):
        for token in new:
            self.tokens.append(token)
            if self.limit is not None and len(self.tokens) > self.limit:
                del self.tokens[self.pinned]


def check(slab, model):
    assert len(slab) == len(model.tokens)
    if slab.state is None:
        assert not model.tokens
        return
    held = numbers(slab.view())
    assert sorted(held) == model.tokens
    assert held == [model_token for model_token in slab.tokens().tolist()]
    assert numbers(slab.last(len(slab))) == model.tokens
    assert held[: slab.pinned] == model.tokens[: slab.pinned]  # never overwritten, never moved


limits = st.one_of(
    st.tuples(st.none(), st.just(0)),
    st.integers(1, 24).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))),
)


@given(limits, st.integers(0, 30), st.lists(st.integers(0, 60), max_size=12))
@settings(max_examples=300, deadline=None)
def test_a_slab_is_a_list_that_forgets(shape, phase, runs):
    limit, pinned = shape
    slab, model, start = Slab(limit, pinned, phase), Model(limit, pinned), 0
    for count in runs:
        slab.append(tokens(start, count))
        model.append(range(start, start + count))
        start += count
        check(slab, model)
        assert slab.appended == start
        assert limit is None or slab.capacity <= limit


@given(limits, st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 40))
@settings(max_examples=200, deadline=None)
def test_last_gives_the_pinned_and_the_newest(shape, runs, count):
    limit, pinned = shape
    slab, model, start = Slab(limit, pinned), Model(limit, pinned), 0
    for n in runs:
        slab.append(tokens(start, n))
        model.append(range(start, start + n))
        start += n
    first, others = model.tokens[:pinned], model.tokens[pinned:]
    assert numbers(slab.last(count)) == first + (others[-count:] if count else [])


@given(st.integers(1, 60), st.integers(0, 70), st.integers(1, 20))
@settings(deadline=None)
def test_truncate_then_append(count, left, more):
    slab = Slab()
    slab.append(tokens(0, count))
    slab.truncate(left)
    kept = list(range(min(count, left)))
    assert len(slab) == len(kept) and numbers(slab.view()) == kept
    slab.append(tokens(100, more))
    assert numbers(slab.view()) == kept + list(range(100, 100 + more))


@pytest.mark.parametrize("limit, count", [(8, 8), (8, 5), (8, 0)])
def test_truncate_a_ring_that_has_not_wrapped(limit, count):
    slab, model = Slab(limit, 2), Model(limit, 2)
    slab.append(tokens(0, count))
    slab.truncate(3)
    model.append(range(min(count, 3)))
    slab.append(tokens(10, 12))
    model.append(range(10, 22))
    assert numbers(slab.last(len(slab))) == model.tokens


def test_truncate_a_ring_that_has_wrapped_is_an_error():
    slab = Slab(8)
    slab.append(tokens(0, 9))
    with pytest.raises(AssertionError):
        slab.truncate(3)


@pytest.mark.parametrize("pinned, limit", [(0, None), (0, 7), (2, 7)])
@pytest.mark.parametrize("rows", [[1, 0], [1, 1, 0], [0], [1], []])
def test_select_rows_changes_the_batch_axis_alone(pinned, limit, rows):
    slab = Slab(limit, pinned)
    slab.append(tokens(0, 12))
    before, index = slab.view().values.clone(), torch.tensor(rows, dtype=torch.long)
    slab.select_rows(lambda t: t.index_select(0, index))
    assert torch.equal(slab.view().values, before[index])
    new = tokens(12, 3, 2).values[index]
    slab.append(Plain(new))
    assert torch.equal(slab.last(3).values[:, :, -3:], new)


def test_clear_and_empty():
    slab = Slab(6, 1)
    assert len(slab) == 0 and slab.tokens().tolist() == [] and sum(slab.bytes_by_part().values()) == 0
    slab.select_rows(lambda t: t[:1])
    slab.append(tokens(0, 0))
    check(slab, Model(6, 1))
    slab.append(tokens(0, 9))
    slab.clear()
    assert len(slab) == 0 and slab.state is None and slab.appended == 0
    slab.append(tokens(0, 2))
    assert numbers(slab.view()) == [0, 1]


@pytest.mark.parametrize("count", [1, 5, 31])
def test_drop_the_first_tokens(count):
    slab = Slab()
    slab.append(tokens(0, 40))
    slab.drop(count)
    assert numbers(slab.view()) == list(range(count, 40))
    slab.append(tokens(40, 3))
    assert numbers(slab.view()) == list(range(count, 43))


# -- growth ------------------------------------------------------------------------------------------------------------


class Copies:
    """Counts the rows that growing copies."""

    def __init__(self, monkeypatch):
        self.rows, self.times = 0, 0
        original = Slab._reserve

        def reserve(slab, count, like):
            before = slab.state
            original(slab, count, like)
            if before is not None and slab.state is not before:
                self.rows += len(slab)
                self.times += 1

        monkeypatch.setattr(Slab, "_reserve", reserve)


@pytest.mark.parametrize("phase", [0, 1, 9, 29])
def test_growth_is_amortised(monkeypatch, phase):
    copies, slab, n = Copies(monkeypatch), Slab(phase=phase), 20_000
    one = Plain(torch.zeros(1, 1, 1, 1))
    for _ in range(n):
        slab.append(one)
    assert copies.rows <= 2 * 128 * n  # each token moves about 128 times in its life
    assert copies.times < n / 16
    at_end = copies.times
    for _ in range(n // 128 - 1):
        slab.append(one)
    assert copies.times - at_end <= 1


@given(st.integers(1, 30_000), st.integers(1, 3000), st.integers(0, 40))
@settings(max_examples=200, deadline=None)
def test_spare_rows_are_below_one_percent(first, more, phase):
    slab = Slab(phase=phase)
    one = torch.zeros(1, 1, 1, 1)
    slab.append(Plain(one.expand(1, 1, first, 1)))
    assert slab.capacity == first
    slab.append(Plain(one.expand(1, 1, more, 1)))
    assert 0 <= slab.capacity - len(slab) <= 0.01 * len(slab) + 16
    assert slab.state.values.untyped_storage().nbytes() == slab.capacity * 4


def test_layers_do_not_grow_in_the_same_step():
    """With phases 0 to 29 no step makes more than a few of thirty slabs copy themselves."""
    slabs, one = [Slab(phase=i) for i in range(30)], Plain(torch.zeros(1, 1, 1, 1))
    for slab in slabs:
        slab.append(Plain(torch.zeros(1, 1, 8000, 1)))
        slab.append(one)  # the first one grows everywhere
    worst = 0
    for _ in range(300):
        before = [slab.capacity for slab in slabs]
        for slab in slabs:
            slab.append(one)
        worst = max(worst, sum(a != slab.capacity for a, slab in zip(before, slabs, strict=True)))
    assert 1 <= worst <= 10


def test_appending_within_the_capacity_touches_the_new_rows_only():
    slab = Slab()
    slab.append(tokens(0, 5000))
    slab.append(tokens(5000, 1))
    state, pointer = slab.state, slab.state.values.data_ptr()
    spare = slab.capacity - len(slab)
    assert spare > 1
    slab.state.values[:, :, len(slab) + 1 :] = float("nan")
    version = slab.state.values[:, :, :5001].clone()
    slab.append(tokens(5001, 1))
    assert slab.state is state and slab.state.values.data_ptr() == pointer
    assert torch.equal(slab.state.values[:, :, :5001], version)
    assert slab.state.values[:, :, 5002:].isnan().all()


@pytest.mark.parametrize("codec", list(CODECS.values()), ids=list(CODECS))
@given(st.lists(st.integers(1, 40), min_size=2, max_size=12))
@settings(max_examples=20, deadline=None)
def test_bytes_never_change_after_append(codec, runs):
    slab = Slab()
    first = codec.encode(torch.randn(2, 2, runs[0], 8))
    slab.append(first)
    saved = [t.clone() for t in first]
    for count in runs[1:]:
        slab.append(codec.encode(torch.randn(2, 2, count, 8) * 100))
    for held, old in zip(slab.view(), saved, strict=True):
        assert torch.equal(held[:, :, : runs[0]].view(torch.uint8), old.view(torch.uint8))


def test_appended_tensors_are_copied():
    slab, new = Slab(), tokens(0, 4)
    slab.append(new)
    new.values.zero_()
    assert numbers(slab.view()) == [0, 1, 2, 3]


def test_bytes_by_part():
    slab = Slab()
    for count in (100, 1):
        slab.append(Scaled(torch.zeros(2, 3, count, 8, dtype=torch.int8), torch.ones(2, 3, count, 1)))
    parts = slab.bytes_by_part()
    assert parts["payload"] == 101 * 2 * 3 * 8 and parts["scales"] == 101 * 2 * 3 * 4
    assert sum(parts.values()) == sum(t.untyped_storage().nbytes() for t in slab.state)
    assert parts["spare"] == (slab.capacity - 101) * 2 * 3 * 12


def test_concat_and_narrow():
    whole = store.concat([tokens(0, 3), tokens(3, 0), tokens(3, 5)])
    assert numbers(whole) == list(range(8))
    part = store.narrow(whole, 2, 6)
    assert numbers(part) == [2, 3, 4, 5] and part.values.data_ptr() != whole.values.clone().data_ptr()
    assert part.values._base is not None  # a view
