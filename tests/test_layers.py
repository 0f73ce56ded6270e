"""One attention layer: what it stores, what it hands out, what it refuses."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import (
    EVICTING,
    KEEPING,
    LIMITS,
    SPECS,
    ReferenceLayer,
    axes,
    llama_config,
    round_trip,
    states,
)

from hf_kvcache import KVCache

every_spec = pytest.mark.parametrize("spec", SPECS)
lossy_spec = pytest.mark.parametrize("spec", ["int8", "fp8", "fp8_e5m2", "int8+sink(2,6)"])


def layer_of(spec, attention="sdpa"):
    config = llama_config(1)
    config._attn_implementation = attention
    return KVCache.from_spec(config, spec).layers[0]


def reference_of(spec):
    return ReferenceLayer(*axes(llama_config(1), spec))


def rows(x):
    """[B, H, n, D] with the tokens sorted: attention does not care for their order."""
    order = x[:1, :1, :, :1].argsort(2)
    return x.take_along_dim(order.expand(x.shape), 2)


def held(reference, x):
    """What a reference layer that has seen everything keeps of its keys or values."""
    n = x.shape[2]
    if reference.window is None:
        return x
    return x[:, :, [t for t in range(n) if t < reference.sinks or t >= n - reference.window]]


def filled(spec, n=9, **shape):
    layer, reference = layer_of(spec), reference_of(spec)
    new = states(n, **shape)
    layer.update(*new)
    reference.update(*new)
    return layer, reference


def assert_same(layer, reference, tokens=3):
    """Same content now, and the same answer to the next update."""
    assert layer.get_seq_length() == reference.get_seq_length()
    if reference.get_seq_length():
        assert torch.equal(layer.keys, held(reference, reference.keys))
        assert torch.equal(layer.values, held(reference, reference.values))
    batch = layer.batch_size if layer.is_initialized else 2
    new = states(tokens, batch)
    for mine, theirs in zip(layer.update(*new), reference.update(*new), strict=True):
        assert torch.equal(rows(plain(mine)), rows(theirs))


def by_pickle(x):
    return pickle.loads(pickle.dumps(x))


def itself(x):
    return x


def plain(x):
    return x.as_subclass(torch.Tensor)


# -- growing -----------------------------------------------------------------------------------------------------------


@every_spec
@pytest.mark.parametrize("extra", [((), {}), (({"x": 1},), {}), ((), {"kwargs": {"position_ids": None}})])
def test_b03_three_call_forms(spec, extra):
    args, kwargs = copy.deepcopy(extra)
    if "kwargs" in kwargs:
        kwargs["kwargs"] = {"position_ids": torch.arange(9)[None], "use_cache": True}
    layer, reference = layer_of(spec), reference_of(spec)
    new = states(9)
    out = layer.update(*new, *args, **kwargs)
    for mine, theirs in zip(out, reference.update(*new), strict=True):
        assert torch.equal(rows(plain(mine)), rows(theirs))


@every_spec
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 8, 9, 40])
def test_update_hands_out_what_its_queries_attend_to(spec, chunk):
    layer, reference = layer_of(spec), reference_of(spec)
    keys, values = states(40)
    for new in zip(keys.split(chunk, 2), values.split(chunk, 2), strict=True):
        for mine, theirs in zip(layer.update(*new), reference.update(*new), strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(rows(plain(mine)), rows(theirs))
        assert torch.equal(layer.keys, held(reference, reference.keys))
        assert torch.equal(layer.values, held(reference, reference.values))


@pytest.mark.parametrize("spec", [*SPECS, "sink(0,6)", "sink(2,1)", "int8+sink(0,1)"])
def test_b25_mask_sizes_are_what_update_returns(spec):
    window = axes(llama_config(1), spec)[2] or 8
    for n in range(2 * window + 1):
        for q in {1, 3, window, window + 1}:
            layer = layer_of(spec)
            for _ in range(n):
                layer.update(*states(1, 1))
            length, offset = layer.get_mask_sizes(q)
            keys, values = layer.update(*states(q, 1))
            assert keys.shape[2] == values.shape[2] == length
            assert length + offset == n + q


@every_spec
@pytest.mark.parametrize("first", [1, 8])
def test_b29_one_token_prompt(spec, first):
    """A prompt of one token is a prompt, and the next token is not: both are stored once."""
    layer, reference = layer_of(spec), reference_of(spec)
    for n in (first, 1, 1):
        new = states(n)
        layer.update(*new)
        reference.update(*new)
    assert_same(layer, reference)


@every_spec
@pytest.mark.parametrize("attention", ["sdpa", "kvcache"])
def test_an_empty_update_changes_nothing(spec, attention):
    layer, reference = layer_of(spec, attention), reference_of(spec)
    keys, values = layer.update(*states(0))
    assert keys.shape == values.shape == (2, 2, 0, 8)
    assert layer.get_seq_length() == 0
    new = states(9)
    layer.update(*new)
    reference.update(*new)
    layer.update(*states(0))
    assert layer.get_seq_length() == 9
    assert torch.equal(layer.keys, held(reference, reference.keys))


@every_spec
def test_widths_of_keys_and_values_may_differ(spec):
    layer = layer_of(spec)
    keys, values = states(9, width=24)[0], states(9, width=8)[1]
    layer.update(keys, values)
    assert layer.keys.shape[-1] == 24 and layer.values.shape[-1] == 8


@every_spec
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_b60_returned_dtype_is_the_given_one(spec, dtype):
    layer = layer_of(spec)
    for n in (1, 1, 9, 1, 3):
        keys, values = layer.update(*states(n, dtype=dtype))
        assert keys.dtype == values.dtype == layer.keys.dtype == layer.values.dtype == dtype


@every_spec
def test_given_tensors_are_neither_changed_nor_held(spec):
    layer = layer_of(spec)
    keys, values = states(9)
    before = keys.clone(), values.clone()
    layer.update(keys, values)
    assert torch.equal(keys, before[0]) and torch.equal(values, before[1])
    keys.fill_(7.0)
    values.fill_(7.0)
    assert torch.equal(layer.keys, held(reference_of(spec), round_all(spec, before[0])))


def round_all(spec, x):
    storage, sinks, _ = axes(llama_config(1), spec)
    return torch.cat([x[:, :, :sinks], round_trip(x[:, :, sinks:], storage)], 2)


# -- what is stored ----------------------------------------------------------------------------------------------------


def storage_bytes(layer):
    slabs = (slab for run in (layer.sinks, layer.sealed) for slab in run.slabs)
    return sum(t.untyped_storage().nbytes() for slab in slabs for t in slab.state or ())


def stored_bytes(layer, token=0):
    """Encoded bytes of a token that has not been overwritten."""
    return [t[:, :, token].clone() for slab in layer.sealed.slabs for t in slab.state]


@pytest.mark.parametrize("spec", KEEPING)
def test_b58_bytes_of_a_token_never_change(spec):
    layer = layer_of(spec)
    seen = {}
    for step in range(1, 201):
        layer.update(*states(1))
        if step in (20, 200):
            seen[step] = stored_bytes(layer)
    for early, late in zip(seen[20], seen[200], strict=True):
        assert torch.equal(early.view(torch.uint8), late.view(torch.uint8))


@pytest.mark.parametrize("storage", LIMITS)
def test_b63_bits_are_stored_not_a_flag(storage):
    layer = layer_of(storage)
    layer.update(*states(100, dtype=torch.bfloat16))
    for slab in layer.sealed.slabs:
        assert slab.state.codes.dtype.itemsize == 1 and slab.state.scale.dtype == torch.float32
        assert sum(t.numel() * t.element_size() for t in slab.view()) == 2 * 2 * 100 * (8 + 4)


@pytest.mark.parametrize("spec", EVICTING)
@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_b74_evicted_tokens_free_their_bytes(spec, chunk):
    layer = layer_of(spec)
    keys, values = states(100)
    for new in zip(keys.split(chunk, 2), values.split(chunk, 2), strict=True):
        layer.update(*new)
    assert layer.kept == 8 and layer.keys.shape[2] == 8
    row, rounded = 8 * 4, 8 + 4  # bytes of one token of one head
    least = 8 * row if spec == "sink(2,6)" else 2 * row + 6 * rounded
    assert least <= storage_bytes(layer) / (2 * 2 * 2) <= least + 16 * row
    assert layer.update(*states(1))[0].shape[2] == 8  # the sinks, five old ones and itself


def test_b111_sinks_and_window_in_int8():
    """Sinks stay bit-exact, and a token's payload stays as it was while the window slides over it."""
    layer = layer_of("int8+sink(4,32)")
    keys, values = states(120)
    payload = {}
    for t in range(120):
        layer.update(keys[:, :, t : t + 1], values[:, :, t : t + 1])
        assert torch.equal(layer.keys[:, :, :4], keys[:, :, : min(t + 1, 4)])
        tokens = layer.sealed.keys.tokens().tolist()  # counted from the first one behind the sinks
        assert sorted(tokens) == list(range(max(0, t - 4 + 1 - 32), max(t - 4 + 1, 0)))
        for slot, token in enumerate(tokens):
            row = layer.sealed.keys.state.codes[:, :, slot].clone()
            assert torch.equal(payload.setdefault(token, row), row)
    assert torch.equal(layer.keys[:, :, 4:], round_trip(keys[:, :, -32:], "int8"))
    assert torch.equal(layer.values[:, :, 4:], round_trip(values[:, :, -32:], "int8"))


@pytest.mark.parametrize("storage", LIMITS)
def test_b36_payload_does_not_depend_on_the_batch(storage):
    keys, values = states(12, batch=3)
    together, alone = layer_of(storage), layer_of(storage)
    together.update(keys, values)
    alone.update(keys[1:2], values[1:2])
    for a, b in zip(together.sealed.slabs, alone.sealed.slabs, strict=True):
        for x, y in zip(a.view(), b.view(), strict=True):
            assert torch.equal(x[1:2].view(torch.uint8), y.contiguous().view(torch.uint8))


# -- the batch axis, rollback, reset -----------------------------------------------------------------------------------


@every_spec
def test_b12_reorder_reaches_packed_part(spec):
    layer, reference = filled(spec, 10, batch=4)
    beams = torch.tensor([3, 3, 0, 1])
    layer.reorder_cache(beams)
    reference.reorder_cache(beams)
    assert_same(layer, reference, tokens=1)


@every_spec
@pytest.mark.parametrize("n", [1, 2, 3, 8, 30])
@pytest.mark.parametrize(
    "operation, argument, batch",
    [
        ("reorder_cache", torch.tensor([1, 1, 2]), 3),
        ("batch_repeat_interleave", 2, 6),
        ("batch_select_indices", torch.tensor([2, 0]), 2),
        ("batch_select_indices", torch.tensor([True, False, True]), 2),
    ],
)
def test_b15_batch_operations_reach_all_state(spec, n, operation, argument, batch):
    layer, reference = filled(spec, n, batch=3)
    for each in (layer, reference):
        getattr(each, operation)(argument)
    assert layer.batch_size == batch
    assert_same(layer, reference)


@pytest.mark.parametrize("spec", KEEPING)
@pytest.mark.parametrize("amount, left", [(0, 3), (-2, 1), (-3, 0), (-5, 0)])
def test_b17_crop(spec, amount, left):
    layer, reference = filled(spec, 3)
    layer.crop(amount)
    assert layer.get_seq_length() == left
    assert layer.keys.shape[2] == left
    if left:
        reference.crop(amount)
    else:
        reference.reset()
    assert_same(layer, reference, tokens=2)
    assert layer.get_seq_length() == left + 2


@every_spec
def test_b17_positive_crop_is_refused(spec):
    layer, _ = filled(spec, 3)
    with pytest.raises(ValueError, match=r"crop\(-2\)"):
        layer.crop(2)
    assert layer.get_seq_length() == 3


@pytest.mark.parametrize("spec", EVICTING)
def test_crop_before_and_after_an_eviction(spec):
    layer, reference = filled(spec, 7)
    for each in (layer, reference):
        each.crop(-6)
    assert_same(layer, reference, tokens=2)
    layer, _ = filled(spec, 9)
    before = layer.keys
    with pytest.raises(ValueError, match="evicted"):
        layer.crop(-1)
    assert layer.get_seq_length() == 9 and torch.equal(layer.keys, before)
    layer.crop(0)


@every_spec
def test_b19_capability_flag_is_honest(spec):
    assert layer_of(spec).is_croppable == (spec in KEEPING)


@every_spec
@pytest.mark.parametrize("n", [6, 30])
def test_b20_reset_equals_a_new_layer(spec, n):
    layer, _ = filled(spec, n)
    layer.reset()
    assert layer.get_seq_length() == 0 and layer.get_mask_sizes(5) == (5, 0)
    assert layer.keys is None and layer.values is None and not layer.is_initialized
    assert layer.kept == 0
    reference = reference_of(spec)
    assert_same(layer, reference)
    layer.reset()
    layer.update(*states(2, batch=5, heads=1, width=16, dtype=torch.bfloat16))  # other shapes and dtype
    assert layer.keys.shape == (5, 1, 2, 16)


@every_spec
@pytest.mark.parametrize("n", [1, 3, 30])
@pytest.mark.parametrize("copy_of", [copy.deepcopy, by_pickle])
def test_b46_copies_continue_alike(spec, n, copy_of):
    layer, reference = filled(spec, n)
    twin = copy_of(layer)
    layer.update(*states(4))
    assert_same(twin, reference)


Operation = st.one_of(
    st.tuples(st.just("update"), st.integers(0, 11)),
    st.tuples(st.just("crop"), st.integers(0, 12)),
    st.tuples(st.just("reorder_cache"), st.permutations([0, 1])),
    st.tuples(st.just("copy"), st.none()),
    st.tuples(st.just("reset"), st.none()),
)


@every_spec
@given(operations=st.lists(Operation, max_size=14))
@settings(max_examples=25, deadline=None)
def test_any_sequence_of_operations(spec, operations):
    layer, reference = layer_of(spec), reference_of(spec)
    for name, argument in operations:
        if name == "update":
            length, _ = layer.get_mask_sizes(argument)
            new = states(argument)
            mine, theirs = layer.update(*new), reference.update(*new)
            if argument:
                assert mine[0].shape[2] == length
                assert all(torch.equal(rows(plain(a)), rows(b)) for a, b in zip(mine, theirs, strict=True))
        elif name == "crop":
            keeps = reference.window is None or reference.get_seq_length() <= reference.window + reference.sinks
            if argument and not keeps:
                with pytest.raises(ValueError):
                    layer.crop(-argument)
                continue
            layer.crop(-argument)
            if argument >= reference.get_seq_length():
                if argument and reference.is_initialized:
                    reference.keys, reference.values = reference.keys[:, :, :0], reference.values[:, :, :0]
            elif argument:
                reference.crop(-argument)
        elif name == "reorder_cache":
            for each in (layer, reference):
                each.reorder_cache(torch.tensor(argument))
        elif name == "reset":
            layer.reset()
            reference.reset()
        else:
            layer = copy.deepcopy(layer)
    assert layer.get_seq_length() == reference.get_seq_length()
    assert_same(layer, reference)


@every_spec
@pytest.mark.parametrize("copy_of", [copy.deepcopy, itself])
def test_prefill_under_inference_mode_then_decode_outside(spec, copy_of):
    layer, reference = layer_of(spec), reference_of(spec)
    new = states(7)
    with torch.inference_mode():
        layer.update(*new)
        layer.reorder_cache(torch.tensor([1, 0]))
        layer = copy_of(layer)
    reference.update(*new)
    reference.reorder_cache(torch.tensor([1, 0]))
    for _ in range(40):
        new = states(1)
        with torch.no_grad():
            layer.update(*new)
        reference.update(*new)
    assert_same(layer, reference)


# -- refusals ----------------------------------------------------------------------------------------------------------


@lossy_spec
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_non_finite_states_are_refused_with_the_layer(spec, side, value, dtype):
    cache = KVCache.from_spec(llama_config(4), spec)
    cache.update(*states(3, dtype=dtype), 3)
    before = cache.layers[3].keys
    keys, values = states(2, dtype=dtype)
    (keys if side == "keys" else values)[1, 1, 1, 3] = value
    with pytest.raises(ValueError, match=f"layer 3.*{side}"):
        cache.update(keys, values, 3)
    assert cache.layers[3].get_seq_length() == 3 and torch.equal(cache.layers[3].keys, before)


@lossy_spec
@pytest.mark.parametrize("n", [3, 20])
def test_a_refused_first_update_leaves_no_trace(spec, n):
    layer, reference = layer_of(spec), reference_of(spec)
    keys, values = states(n, batch=5)
    values[0, 0, -1, 0] = math.nan
    with pytest.raises(ValueError, match="layer 0"):
        layer.update(keys, values)
    assert layer.get_seq_length() == 0 and layer.kept == 0 and layer.keys is None
    assert not layer.is_initialized  # a batch of two may come now
    assert_same(layer, reference)


@pytest.mark.parametrize("side", [0, 1])
def test_non_finite_sinks_are_refused_too(side):
    layer = layer_of("int8+sink(2,6)")
    new = states(1)
    new[side][0, 0, 0, 0] = math.nan
    with pytest.raises(ValueError, match="layer 0"):
        layer.update(*new)


@pytest.mark.parametrize("spec", ["full", "sink(2,6)"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("grad", [False, True])
def test_non_finite_states_are_carried_through_full(spec, value, grad):
    layer = layer_of(spec)
    keys, values = states(3)
    keys[1, 1, 1, 3] = value
    out, _ = layer.update(keys.requires_grad_(grad), values)
    torch.testing.assert_close(plain(out).detach(), keys.detach(), equal_nan=True, rtol=0, atol=0)


@every_spec
@pytest.mark.parametrize(
    "shape, words",
    [
        (dict(batch=3), "batch of 2, got 3"),
        (dict(heads=4), "expected"),
        (dict(width=16), "expected"),
        (dict(dtype=torch.bfloat16), "bfloat16"),
    ],
)
def test_states_unlike_the_stored_ones_are_refused(spec, shape, words):
    layer, reference = filled(spec, 9)
    with pytest.raises(ValueError, match=f"layer 0.*{words}"):
        layer.update(*states(1, **shape))
    assert_same(layer, reference)


@every_spec
def test_keys_and_values_of_unequal_length_are_refused(spec):
    layer = layer_of(spec)
    with pytest.raises(ValueError, match="layer 0"):
        layer.update(states(3)[0], states(2)[1])
    assert layer.get_seq_length() == 0


@pytest.mark.parametrize("spec", EVICTING)
def test_an_attention_that_cannot_apply_a_window_is_named(spec):
    layer = layer_of(spec, "flash_attention_2")
    layer.update(*states(5))
    layer.update(*states(3))  # nothing leaves yet
    with pytest.raises(ValueError, match=r"flash_attention_2.*set_attn_implementation"):
        layer.update(*states(2))
    assert layer.get_seq_length() == 8
    layer.update(*states(1))  # one query sees all that is held


# -- gradients ---------------------------------------------------------------------------------------------------------


@every_spec
@pytest.mark.parametrize("past", [0, 1, 5, 20])
@pytest.mark.parametrize("new", [1, 4, 12])
def test_newest_tokens_keep_their_gradient(spec, past, new):
    """Straight through the codec; the past carries none."""
    layer, reference = layer_of(spec), reference_of(spec)
    if past:
        old = states(past)
        layer.update(*old)
        reference.update(*old)
    keys, values = states(new)
    expected = reference.update(keys, values)
    keys.requires_grad_()
    values.requires_grad_()
    out = layer.update(keys, values)
    for x, y in zip(out, expected, strict=True):
        torch.testing.assert_close(plain(x).detach(), y, rtol=0, atol=1e-6)  # in token order
    weight = torch.randn_like(expected[0])
    (plain(out[0]) * weight).sum().backward()
    assert torch.equal(keys.grad, weight[:, :, -new:])
    assert not layer.keys.requires_grad


@pytest.mark.parametrize(
    "spec, least, most",
    [("int4+sink(4,508)", 644, 675), ("int8(residual=16)+sink(4,60)", 80, 80), ("int8+sink(4,60)", 64, 64)],
)
def test_a_residual_is_held_beside_the_window_as_the_documents_say(spec, least, most):
    cache, kept = KVCache.from_spec(llama_config(1), spec), set()
    cache.update(*states(800, 2), 0)
    for _ in range(40):
        cache.update(*states(1, 2), 0)
        kept.add(cache.stats().tokens_kept)
    assert (min(kept), max(kept)) == (least, most)
