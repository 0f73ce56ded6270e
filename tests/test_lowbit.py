"""Four and two bits: half a step, finite, folded like decoded, sealed once, the same for every schedule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import feed, llama, llama_config, prompt, states

from hf_kvcache import KVCache, QuantizedCache
from hf_kvcache.codecs import ALWAYS, NEVER, rotation
from hf_kvcache.lowbit import GroupedCodec

CODECS = [(bits, axis) for bits in (4, 2) for axis in ("channel", "token")]
SMALL = (
    "int4(group=4,residual=5,sinks=2)",
    "int2(group=4,residual=0,sinks=0)",
    "k8v4(group=4,residual=3,sinks=2)",
    "k4v2(group=8,residual=2)",
    "int4(group=4,residual=2,key_axis=token)",
    "int4(group=4,quantize_after=20)",
    "int8(residual=4,sinks=1)",
    "int2(group=4,residual=5)+sink(2,9)",
    "int4(group=4,residual=2)+sink(1,6)",
    "int8(sinks=4)+sink(1,6)",  # three plain sinks leave the window
    "int4(group=4,residual=5,sinks=2,skip_layers=1)",  # the mask is made for layer 0, which is encoded
    "int4(group=4,residual=5,sinks=2,skip_layers=1)+sink(2,9)",
    "int4(group=4,residual=5,sinks=2,skip_layers=0)+sink(2,9)",
)


def spread(codec, meta, like):
    """Metadata at the shape of ``like`` [B, H, n, D]."""
    b, h, n, d = like.shape
    return codec._spread(meta.float(), d).expand(b, h, n // codec.group, codec.group, d).reshape(like.shape)


@pytest.mark.parametrize("bits, axis", CODECS)
@settings(max_examples=40, deadline=None)
@given(
    width=st.sampled_from([1, 7, 32, 33, 64, 80]),
    groups=st.integers(1, 3),
    group=st.sampled_from([4, 8, 32]),
    log=st.floats(-6, 5),
    kind=st.sampled_from(["normal", "constant", "zeros", "outlier", "offset"]),
    seed=st.integers(0, 99),
)
def test_round_trip_is_within_half_a_step(bits, axis, width, groups, group, log, kind, seed):
    torch.manual_seed(seed)
    codec = GroupedCodec(bits, group, axis)
    x = torch.randn(2, 1, groups * group, width) * 10**log
    if kind == "constant":
        x = torch.full_like(x, 10**log)
    elif kind == "zeros":
        x = torch.zeros_like(x)
    elif kind == "outlier":
        x[0, 0, 1, 0] *= 1e3
    elif kind == "offset":
        x = x + 1e4 * 10**log
    state = codec.encode(x)
    y = codec.decode(state, torch.float32)
    step = spread(codec, state.scale, x)
    assert y.isfinite().all() and state.scale.isfinite().all()
    # Half a step, plus the rounding of float32 in x / step where the offset is far from zero.
    assert ((y - x).abs() <= 0.5 * step + 1e-6 * x.abs() + 1e-37).all()
    # The step is the smallest that covers the group: its range in `top` steps, or its offset in an int16.
    amax, far = x.abs().amax(), {4: 32000, 2: 4000}[bits]
    assert step.max() <= 1.01 * max((x.max() - x.min()).item() / codec.top, amax.item() / far) + 1e-37 or amax == 0
    assert not (kind == "zeros" and y.any())


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_two_bits_lie_where_the_error_is_smaller(axis):
    """On random numbers the middles of four quarters, with steps of a quarter of the range; on a lone outlier above
    equal values the ends, which hit both exactly."""
    codec = GroupedCodec(2, 32, axis)
    x = torch.randn(2, 3, 32 * 20, 32)
    pieces = x.unflatten(2, (-1, 32))
    low, high = pieces.aminmax(dim=3 if axis == "channel" else 4, keepdim=True)
    y = codec.decode(codec.encode(x), torch.float32).unflatten(2, (-1, 32))
    ends = (((pieces - low) / (high - low) * 3).round() / 3) * (high - low) + low
    assert (y - pieces).square().mean() < 0.75 * (ends - pieces).square().mean()
    alone = torch.zeros(1, 1, 32, 32)
    alone[0, 0, range(32), range(32)] = 3.0  # one in each group, whichever way
    assert torch.equal(codec.decode(codec.encode(alone), torch.float32), alone)


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_the_grid_does_not_depend_on_how_many_groups_are_encoded_at_once(axis):
    codec = GroupedCodec(2, 32, axis)
    x = torch.randn(3, 2, 32 * 40, 33)
    whole = codec.encode(x)
    for i in range(40):
        one = codec.encode(x[1:2, :, 32 * i : 32 * i + 32])
        assert all(torch.equal(a[1:2, :, i : i + 1], b) for a, b in zip(whole, one, strict=True))


@pytest.mark.parametrize("name", ["int4", "int2", "k4v2"])
@pytest.mark.parametrize("width, keys, values", [(32, False, False), (64, True, True), (256, False, True)])
def test_channels_of_large_heads_are_not_mixed(name, width, keys, values):
    layer = KVCache.from_spec(llama_config(1), name).layers[0]
    assert (width in layer.storage.key_codec.rotated, width in layer.storage.value_codec.rotated) == (keys, values)
    everywhere = KVCache.from_spec(llama_config(1), f"{name}(rotate=on)").layers[0].storage
    assert width in everywhere.key_codec.rotated and width in everywhere.value_codec.rotated


@pytest.mark.parametrize("bits, axis", CODECS)
@pytest.mark.parametrize("rotated", [NEVER, ALWAYS])
@pytest.mark.parametrize("width", [32, 33, 80])
def test_folded_attention_equals_decoding_first(bits, axis, rotated, width):
    codec = GroupedCodec(bits, 32, axis, rotated)
    x, query, probs = torch.randn(2, 3, 96, width) + 2, torch.randn(2, 3, 5, width), torch.rand(2, 3, 5, 96)
    state = codec.encode(x)
    y = codec.decode(state, torch.float32)
    torch.testing.assert_close(codec.scores(query, state), query @ y.transpose(-1, -2), atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(codec.mix(probs, state), probs @ y, atol=1e-3, rtol=1e-4)
    assert (y - x).abs().mean() < (x.max() - x.min()) / codec.top


@pytest.mark.parametrize("width", [1, 33, 64, 80, 96, 128])
def test_rotation_is_orthonormal_and_spreads_an_outlier(width):
    matrix = rotation(width, "cpu")
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(width), atol=2e-6, rtol=0)
    if width > 1:
        assert matrix.abs().max() < 2.0 / width**0.5


@pytest.mark.parametrize("bits, limit", [(4, 5.1), (2, 3.1)])
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_bits_per_value_with_metadata(bits, limit, axis):
    x = torch.randn(1, 2, 320, 64)
    size = sum(t.numel() * t.element_size() for t in GroupedCodec(bits, 32, axis).encode(x))
    assert size * 8 / x.numel() <= limit


@pytest.mark.parametrize("name, limit", [("int4", 0.335), ("int2", 0.21)])
def test_whole_cache_at_8000_tokens(name, limit):
    cache = KVCache.from_spec(llama_config(1), name)
    layer, plain = cache.layers[0], 2 * 8000 * 64 * 2
    for _ in range(16):
        layer.update(*(x.bfloat16() for x in states(500, 1, 1, 64)))
    layer.update(*(x.bfloat16() for x in states(1, 1, 1, 64)))
    assert cache.nbytes <= limit * plain
    assert sum(cache.memory()["device"].values()) == cache.nbytes


@pytest.mark.parametrize("spec", SMALL)
@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvcache"])
def test_every_schedule_gives_the_same_logits(spec, attention):
    model, ids = llama(attention), prompt(41, 2)
    one_by_one = feed(model, ids, KVCache.from_spec(model.config, spec), 1)
    for chunk in (3, 7, 41):
        logits = feed(model, ids, KVCache.from_spec(model.config, spec), chunk)
        # A difference of 1e-6 between kernels can flip a code; what it then changes is below 1e-2 on this model.
        assert (logits - one_by_one).abs().max() < 2e-2
        assert (logits - one_by_one).abs().median() < 1e-4


@pytest.mark.parametrize("spec", [spec for spec in SMALL if "skip_layers" not in spec])
def test_mask_sizes_are_the_lengths_returned(spec):
    for new in (1, 3, 6, 7, 20):
        layer = KVCache.from_spec(llama_config(1), spec).layers[0]
        for _ in range(14 if new < 20 else 3):
            expected = layer.get_mask_sizes(new)[0]
            keys, values = layer.update(*states(new))
            assert keys.shape[2] == values.shape[2] == expected


@pytest.mark.parametrize("name", ["int4", "int2", "k8v4", "k4v2"])
def test_sealed_bytes_never_change_and_the_tail_stays_short(name):
    layer = KVCache.from_spec(llama_config(1), f"{name}(group=8,residual=5,sinks=2)").layers[0]
    new = states(200)
    seen = None
    for t in range(200):
        layer.update(new[0][:, :, t : t + 1], new[1][:, :, t : t + 1])
        assert len(layer.tail) <= 5 + 8
        if t == 20:
            seen = [x[:, :, :1].clone() for slab in layer.sealed.slabs for x in slab.state]
    assert seen is not None
    now = [x[:, :, :1] for slab in layer.sealed.slabs for x in slab.state]
    assert all(torch.equal(a, b) for a, b in zip(seen, now, strict=True))
    assert torch.equal(layer.keys[:, :, :2], new[0][:, :, :2])  # sinks
    assert torch.equal(layer.keys[:, :, -5:], new[0][:, :, -5:])  # residual


def test_nothing_is_encoded_before_quantize_after():
    layer = KVCache.from_spec(llama_config(1), "int8(quantize_after=10)").layers[0]
    for t in range(1, 13):
        layer.update(*states(1))
        assert len(layer.sealed) == (0 if t <= 10 else t)


def test_rollback_is_exact_within_the_tail_and_refused_past_it():
    spec = "int4(group=4,residual=6,sinks=0)"
    cache, other = KVCache.from_spec(llama_config(1), spec), KVCache.from_spec(llama_config(1), spec)
    new = states(13)
    cache.update(*new, 0)  # boundary 4, tail of 9
    cache.rollback(3)
    other.update(new[0][:, :, :10], new[1][:, :, :10], 0)
    assert torch.equal(cache.layers[0].keys, other.layers[0].keys)
    assert not cache.is_croppable
    with pytest.raises(ValueError, match="sealed"):
        cache.rollback(4)
    assert cache.get_seq_length() == 10


def test_b55_channel_keys_survive_a_bias_that_breaks_token_keys():
    """The Qwen2 trap (B55): a bias of 200 on two key channels."""
    from models import build
    from transformers import Qwen2Config

    def divergence(spec, bias):
        config = Qwen2Config(
            vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, initializer_range=0.2, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        model = build(config, "kvcache")
        for layer in model.model.layers:
            # the slowest rotating pair of channels, where trained models keep theirs
            layer.self_attn.k_proj.bias.data[[15, 31]] = bias
        ids = prompt(300)
        exact = feed(model, ids, KVCache(config), 20).log_softmax(-1)
        near = feed(model, ids, KVCache.from_spec(config, spec), 20).log_softmax(-1)
        return (exact.exp() * (exact - near)).sum(-1).mean().item()

    options = "residual=16,sinks=2"
    assert divergence(f"int4({options})", 200.0) < 2 * divergence(f"int4({options})", 0.0)
    assert divergence(f"int4({options},key_axis=token)", 200.0) > 5 * divergence(f"int4({options})", 200.0)


@pytest.mark.parametrize(
    "spec, message",
    [
        ("int4(group=3)", "multiple of 2"),
        ("int2(group=6)", "multiple of 4"),
        ("int4(residual=-1)", "residual=-1"),
        ("int4(rotate=perhaps)", "known are auto, on, off"),
        ("int4(key_axis=head)", "channel"),
        ("int4(bits=3)", "known are"),
        ("k3v2", "known are"),
        ("int4(skip_layers=9)", "2 layers"),
        ("int4(skip_layers=first)", "layer number"),
    ],
)
def test_wrong_options_are_named(spec, message):
    with pytest.raises(ValueError, match=message):
        KVCache.from_spec(llama_config(2), spec)


def test_skip_layers_by_number_and_by_name():
    for option, plain in ((("ends"), {0, 3}), ((0, -2), {0, 2})):
        cache = QuantizedCache(llama_config(4), "int4", skip_layers=option)
        assert {i for i, layer in enumerate(cache.layers) if layer.storage.lossless} == plain
        again = KVCache.from_spec(llama_config(4), cache.spec)
        assert again.spec == cache.spec
        assert [layer.storage.lossless for layer in again.layers] == [la.storage.lossless for la in cache.layers]
