"""The doctor on a tiny Qwen2: it sees the layers with a key bias, measures, and recommends what its budget allows."""

from __future__ import annotations

import pytest
import torch
from models import build, prompt, states
from transformers import Qwen2Config

from eval import contenders, doctor, models, records
from eval.__main__ import main
from hf_kvcache import KVCache

SMALL = "int4(sinks=2,residual=16)"
BY_TOKEN = "int4(sinks=2,residual=16,key_axis=token)"
BIASED = (1, 2)  # layers


def qwen2(bias: float):
    config = Qwen2Config(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = build(config, "kvcache")
    for layer in BIASED:
        # the slowest rotating pair of channels, where trained models keep theirs
        model.model.layers[layer].self_attn.k_proj.bias.data[[15, 31]] = bias
    return model


@pytest.fixture(scope="module")
def sick():
    return qwen2(200.0)


@pytest.fixture
def cli(sick, monkeypatch, tmp_path, capsys):
    """`python -m eval doctor ...` on the biased model: what it prints, and the caches it scored."""
    scored = []
    monkeypatch.setattr(models, "load_model", lambda *args: models.Loaded(sick, None, "tiny"))
    monkeypatch.setattr(models, "token_ids", lambda loaded, text, count: prompt(count))
    real = doctor.divergences
    monkeypatch.setattr(
        doctor, "divergences", lambda m, ids, specs, *a: scored.extend(specs) or real(m, ids, specs, *a)
    )

    def run(*arguments):
        sizes = ("--tokens", "160", "--step", "80", "--context", "1000", "--out", tmp_path / "d.jsonl")
        main(["doctor", *map(str, sizes), *map(str, arguments)])
        return capsys.readouterr().out, scored

    return run


def test_b55_layers_with_a_key_bias_are_named_and_left_out_where_that_is_what_it_takes(cli, tmp_path):
    """B55: keys with one step per token do not bear a bias of 200 on two channels."""
    out, _ = cli("--storages", BY_TOKEN, "--max-kl", "0.2")
    assert "layers with outlier keys (ratio 20 or more): 1, 2\n" in out
    assert f"recommended: {BY_TOKEN.replace('(', '(skip_layers=1|2,')}  (mean KL" in out
    full, whole = records.read(tmp_path / "d.jsonl")[:2]
    keys = full["metrics"]["keys"]
    assert [k["layer"] for k in keys if k["ratio"] > 20 and k["constant"] > 0.95 and k["channel"] in (15, 31)] == [1, 2]
    assert whole["metrics"]["kl_mean"] > 0.2


def test_keys_in_groups_along_a_channel_need_no_layer_left_out(cli):
    out, scored = cli("--storages", SMALL, BY_TOKEN, "int8", "--max-kl", "0.2")
    assert f"recommended: {SMALL}  (mean KL" in out
    assert scored == ["full", SMALL, BY_TOKEN, "int8"]  # nothing cheaper than the recommended one: no layers tried


def test_nothing_within_the_budget_is_said(cli):
    out, _ = cli("--storages", BY_TOKEN, "--max-kl", "1e-9")
    assert "recommended: full" in out and "no storage is both cheaper and within the budget" in out


def test_a_second_run_measures_nothing_again(cli):
    out, scored = cli("--storages", SMALL, "--max-kl", "0.2")
    before = len(scored)
    again, scored = cli("--storages", SMALL, "--max-kl", "0.2")
    assert again == out and len(scored) == before > 0


def test_the_recommended_spec_makes_a_cache(cli, sick):
    out, _ = cli("--storages", BY_TOKEN, "--max-kl", "0.2")
    spec = out.rpartition("recommended: ")[2].split("  ")[0]
    cache = KVCache.from_spec(sick.config, spec)
    assert [layer.storage.lossless for layer in cache.layers] == [False, True, True, False]


def test_amplitude_ratio_and_constant_share_match_hand_computation():
    keys = torch.zeros(1, 2, 64, 4)
    keys[..., :] = torch.tensor([1.0, -1.0]).repeat(32)[:, None]  # every channel: amplitude 1, no constant
    keys[0, 1, :, 2] = torch.tensor([30.0, 50.0]).repeat(32)  # mean 40 in every group of 32
    found = doctor.look(7, keys)
    assert (found.layer, found.head, found.channel) == (7, 1, 2)
    assert found.ratio == pytest.approx(50) and found.constant == pytest.approx(1600 / 1700)
    keys[0, 1, 32:, 2] *= -1  # changes from group to group: still a constant to each group
    assert doctor.look(7, keys).constant == pytest.approx(1600 / 1700)
    assert doctor.look(0, torch.zeros(1, 1, 5, 4)).ratio == 0


def test_only_the_second_half_counts(sick):
    ids = prompt(121)
    scores = doctor.divergences(sick, ids, [SMALL], 7, "kvcache")[SMALL]
    contenders.use_attention(sick, "dynamic", "sdpa")
    with torch.inference_mode():
        exact = sick(ids[:, :-1], use_cache=False).logits[0].log_softmax(-1)
        contenders.use_attention(sick, SMALL, "kvcache")
        near = sick(ids[:, :-1], past_key_values=KVCache.from_spec(sick.config, SMALL)).logits[0].log_softmax(-1)
    kl = (exact.exp() * (exact - near)).sum(-1)
    assert scores.kl_mean == pytest.approx(kl[60:].mean().item(), rel=0.05)
    assert kl[:60].mean() < 0.8 * kl[60:].mean()


def test_bytes_are_those_of_a_cache_that_holds_as_many_tokens(sick):
    cache = KVCache.from_spec(sick.config, SMALL)
    for layer in range(4):
        cache.update(*states(500, 1, 1, 32), layer)
    like = {layer: states(3, 1, 1, 32) for layer in range(4)}
    assert doctor.bytes_at(sick, SMALL, like, 500) == cache.nbytes


@pytest.mark.parametrize(
    ("storage", "layers", "spec"),
    [
        ("int4", [2, 0], "int4(skip_layers=0|2)"),
        ("int4(group=64)", [1], "int4(skip_layers=1,group=64)"),
        ("int8", [], "int8"),
    ],
)
def test_skipping_writes_a_spec(storage, layers, spec, sick):
    assert doctor.skipping(storage, layers) == spec
    assert KVCache.from_spec(sick.config, spec).spec == spec


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-kl", "0"], "--max-kl 0.0: give a divergence above 0"),
        (["--tokens", "1"], "--tokens 1: give at least 2"),
        (["--storages", "int8+sink(4,60)"], r"--storages int8\+sink\(4,60\): give plain storages"),
        (["--storages", "int8(skip_layers=0)"], "which layers to skip is what the doctor finds"),
        (["--storages", "full"], "--storages full encodes no layer of tiny"),
        (["--storages", "int4", "--tokens", "100"], "int4 has encoded none of 100 tokens"),
    ],
)
def test_what_has_no_meaning_is_refused_in_one_line(cli, arguments, message):
    with pytest.raises(SystemExit, match=message) as caught:
        cli(*arguments)
    assert "\n" not in str(caught.value)
