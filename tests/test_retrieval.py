"""Retrieval on a tiny random model: items, cuts, ranks against one pass without a cache, records, the table."""

from __future__ import annotations

import json
import math

import pytest
import torch
from models import build, llama_config

from eval import contenders, models, records, retrieval
from eval.__main__ import main

VOCABULARY = 128


class Characters:
    """A tokenizer whose tokens are ASCII characters."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}


@pytest.fixture(scope="module")
def model():
    return build(llama_config(vocab_size=VOCABULARY), "sdpa")


@pytest.fixture
def cli(model, monkeypatch):
    """`python -m eval retrieval ...` on the tiny model; returns the specs that were asked."""
    asked = []
    loaded = models.Loaded(model, Characters(), "tiny")
    monkeypatch.setattr(models, "load_model", lambda *args: loaded)
    real = retrieval.ask
    monkeypatch.setattr(retrieval, "ask", lambda m, item, spec, **k: asked.append(spec) or real(m, item, spec, **k))

    def run(*arguments):
        main(["retrieval", "--no-proofs", "--lengths", "700", *map(str, arguments)])
        return asked

    return run


def item(depth=0.5, keys=4, length=700, seed="a"):
    return retrieval.make_item(len, length, depth, keys, seed)


@pytest.mark.parametrize("depth, place", [(0.0, 0), (0.3, 1), (0.5, 2), (0.9, 3), (1.0, 3)])
def test_an_item_has_all_keys_and_its_own_at_the_depth(depth, place):
    made = item(depth)
    assert len(set(made.answers)) == 4 and all(made.prompt.count(key) == 1 for key in made.answers)
    order = sorted(made.answers, key=made.prompt.index)
    assert order.index(made.answers[0]) == place
    name = made.prompt.split()[-2]
    assert f"The pass key of {name} is {made.answers[0]}." in made.prompt and made.prompt.endswith(f"of {name} is")


@pytest.mark.parametrize("length", [600, 701, 1500])
def test_an_item_fills_its_length_to_the_last_sentence(length):
    made = item(length=length)
    used = len(made.prompt + " " + made.answers[0])
    assert length - max(map(len, retrieval.FILLER)) < used <= length


def test_facts_are_spread_over_the_whole_context():
    made = item(length=4000)
    places = sorted(made.prompt.index(key) / len(made.prompt) for key in made.answers)
    assert places == pytest.approx([1 / 8, 3 / 8, 5 / 8, 7 / 8], abs=0.05)


def test_items_differ_by_seed_and_only_by_seed():
    assert item(seed="a") == item(seed="a") != item(seed="b")


def test_too_short_a_length_is_refused():
    with pytest.raises(ValueError, match="--lengths 200 has no room"):
        item(length=200)


def test_a_cut_prompt_and_its_answers_are_the_whole_text():
    made = item()
    encoded = retrieval.encode(Characters(), made)
    for key, answer in zip(made.answers, encoded.answers, strict=True):
        text = "".join(map(chr, [*encoded.prefill[0].tolist(), *answer.tolist()]))
        assert text == f"{made.prompt} {key}"
    assert encoded.prefill.shape[1] == len(made.prompt) - 1  # the last token is held back


def test_a_tokenizer_that_joins_prompt_and_answer_moves_the_cut():
    class Joining(Characters):
        def __call__(self, text):  # "s 4" is one token, so that no answer starts where the prompt ends
            whole, joined = [], list(text)
            while joined:
                take = 3 if "".join(joined[:2]) == "s " and joined[2:] and joined[2].isdigit() else 1
                whole.append(int.from_bytes("".join(joined[:take]).encode(), "big"))
                del joined[:take]
            return {"input_ids": whole}

    made = item()
    encoded = retrieval.encode(Joining(), made)
    assert encoded.prefill.shape[1] == len(Joining()(made.prompt)["input_ids"]) - 2
    assert {len(answer) for answer in encoded.answers} == {1 + 1 + 4}


def by_one_pass(model, encoded):
    """Log-likelihoods without any cache."""
    found = []
    for answer in encoded.answers:
        ids = torch.cat([encoded.prefill[0], answer])[None]
        with torch.inference_mode():
            logits = model(ids[:, :-1], use_cache=False).logits[0].log_softmax(-1)
        start = encoded.prefill.shape[1]
        found.append(sum(logits[t, ids[0, t + 1]].item() for t in range(start, ids.shape[1] - 1)))
    return found


@pytest.mark.parametrize("spec, attn", [("full", "kvcache"), ("full", "sdpa"), ("dynamic", "sdpa")])
@pytest.mark.parametrize("chunk", [0, 64])
def test_ranks_are_those_of_one_pass_over_prompt_and_answer(model, spec, attn, chunk):
    for seed in "abc":
        encoded = retrieval.encode(Characters(), item(seed=seed))
        found = retrieval.ask(model, encoded, spec, chunk=chunk, attn=attn)
        contenders.use_attention(model, "dynamic", "sdpa")
        expected = by_one_pass(model, encoded)
        assert found.rank == sum(x >= expected[0] for x in expected[1:])
        share = expected[0] - math.log(sum(map(math.exp, expected)))
        assert found.log_share == pytest.approx(share, abs=1e-3)
        assert found.tokens == found.tokens_kept == encoded.prefill.shape[1]


def test_answers_are_scored_from_what_was_stored(model, monkeypatch):
    """What was stored is wiped after the prefill: were a logit of the prefill scored, it would not show."""
    encoded = retrieval.encode(Characters(), item())
    encoded = encoded._replace(answers=[answer[:2] for answer in encoded.answers])  # one scored token each
    encoded.answers[1][1] += 1
    whole = retrieval.ask(model, encoded, "full")
    real = retrieval.prefill

    def wiped(model, ids, cache, chunk):
        real(model, ids, cache, chunk)
        for layer in cache.layers:
            layer.sealed.keys.state[0].zero_()

    monkeypatch.setattr(retrieval, "prefill", wiped)
    assert abs(retrieval.ask(model, encoded, "full").log_share - whole.log_share) > 1e-2


def test_answers_of_different_lengths_and_one_row_at_a_time_are_the_same(model):
    contenders.use_attention(model, "full", "kvcache")
    cache = contenders.make_cache("full", model.config)
    retrieval.prefill(model, torch.randint(1, 90, (1, 30)), cache, 0)
    answers = [torch.tensor(ids) for ids in ([1, 2, 3], [1, 5], [1, 9, 4], [1, 2], [1, 7, 7])]
    with torch.inference_mode():
        alone = [retrieval.log_likelihoods(model, [answer], cache, 1)[0] for answer in answers]
        for rows in (1, 2, 5):
            assert retrieval.log_likelihoods(model, answers, cache, rows) == pytest.approx(alone, abs=1e-4)
    assert cache.get_seq_length() == 30 and cache.layers[0].batch_size == 1


def test_a_tie_is_not_an_answer(model, monkeypatch):
    monkeypatch.setattr(retrieval, "log_likelihoods", lambda *args: [-1.0, -1.0, -2.0])
    assert retrieval.ask(model, retrieval.encode(Characters(), item()), "full").rank == 1


def test_records_are_complete_and_a_second_run_asks_only_what_is_missing(cli, tmp_path, capsys):
    out = tmp_path / "r.jsonl"
    options = ("--items", 4, "--keys", 4, "--out", out)
    cli("--specs", "int8", "--depths", 0.2, 0.8, *options)
    found = records.read(out)
    assert [(r["spec"], r["settings"]["depth"]) for r in found] == [
        ("full", 0.2), ("int8", 0.2), ("full", 0.8), ("int8", 0.8)
    ]  # fmt: skip
    for record in found:
        m = record["metrics"]
        assert record["settings"]["items"] == len(m["right"]) == 2 and m["accuracy"] == sum(m["right"]) / 2
        assert m["tokens_kept"] == m["tokens_seen"] <= 700
    assert found[1]["metrics"]["nbytes"] < found[0]["metrics"]["nbytes"]
    assert "int8" in capsys.readouterr().out.split("700 tokens\n")[-1]
    asked = cli("--specs", "int8", "fp8", "--depths", 0.8, "--items", 2, "--keys", 4, "--out", out)
    assert asked[8:] == ["fp8_e4m3"] * 2
    assert "skipped int8 at 700, depth 0.8: r.jsonl has it already" in capsys.readouterr().out


def test_an_evicting_cache_keeps_what_it_says(cli, tmp_path):
    out = tmp_path / "r.jsonl"
    cli("--specs", "sink(4,60)", "--depths", 0.1, "--items", 1, "--keys", 2, "--out", out)
    kept = {record["spec"]: record["metrics"]["tokens_kept"] for record in records.read(out)}
    assert kept["sink(4,60)"] == 64 and kept["full"] > 600


def test_a_window_wider_than_the_text_is_no_result(cli, tmp_path):
    out = tmp_path / "r.jsonl"
    with pytest.raises(SystemExit, match=r"sink\(4,900\) .* no compression happened"):
        cli("--specs", "sink(4,900)", "--depths", 0.1, "--items", 1, "--keys", 2, "--out", out)
    assert [record["spec"] for record in records.read(out)] == ["full"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--items", "7"], "--items 7 cannot be shared among 5 depths"),
        (["--depths", "1.5"], r"--depths \[1.5\]: a depth is between"),
        (["--keys", "1"], "--keys 1: ranking needs at least 2"),
        (["--chunk", "-1"], "--chunk -1: give tokens"),
        (["--lengths", "9999"], "--lengths 9999 exceeds the context of tiny, 4096"),
    ],
)
def test_wrong_options_are_named_in_one_line(cli, arguments, message, tmp_path):
    with pytest.raises(SystemExit, match=message) as caught:
        cli(*arguments, "--out", tmp_path / "r.jsonl")
    assert "\n" not in str(caught.value)


def test_standard_errors_match_hand_computation():
    assert retrieval.standard_error([1, 0, 0, 1, 1, 1]) == pytest.approx(math.sqrt(0.6 * 0.4 / 10))
    assert retrieval.standard_error([1] * 10) > 0.05
    difference, error = retrieval.paired([1, 1, 1, 0], [0, 0, 1, 1])
    assert difference == 0.25 and error == pytest.approx(math.sqrt(4 - 1 / 6) / 6)


@pytest.mark.parametrize(
    "spec, beside",
    [
        ("full", None),
        ("int4(group=64)", None),
        ("snapkv(budget=0.25)", "random(budget=0.25)"),
        ("int8+snapkv(budget=256,recent=16,window=32)", "int8+random(budget=256,recent=16)"),
        ("keydiff", "random"),
        ("int4(skip_layers=0|1)+snapkv(budget=0.5)+adaptive", "int4(skip_layers=0|1)+random(budget=0.5)"),
        ("sink(4,252)", "random(budget=256)"),
        ("int8+sink(0,1024)", "int8+random(budget=1024,sinks=0)"),
        ("random(budget=0.5)", None),
    ],
)
def test_random_at_the_same_budget(spec, beside):
    assert contenders.random_beside(spec) == beside


def test_controls_stand_behind_the_specs_and_unknown_ones_are_noted(model, monkeypatch, capsys):
    def canonical(spec, config):
        if spec.startswith("int8+random"):
            raise ValueError("no such part")
        return spec

    monkeypatch.setattr(contenders, "canonical", canonical)
    specs = ["knorm(budget=0.5)", "snapkv(budget=0.5)", "int8+tova(budget=9)"]
    assert contenders.with_controls(specs, None) == [*specs, "random(budget=0.5)"]
    assert capsys.readouterr().out == "note: left out int8+random(budget=9): no such part\n"


def test_a_cache_that_loses_to_random_is_called_so():
    def record(spec, right):
        metrics = {"right": right, "accuracy": sum(right) / 4, "tokens_kept": 9, "tokens_seen": 10, "nbytes": 1000}
        return {"spec": spec, "settings": {"length": 10, "depth": 0.5, "keys": 10}, "metrics": metrics}

    shown = retrieval.table(
        [
            record("full", [1, 1, 1, 0]),
            record("knorm(budget=0.5)", [0, 0, 0, 1]),
            record("snapkv(budget=0.5)", [1, 1, 1, 1]),
            record("random(budget=0.5)", [1, 1, 0, 0]),
        ]
    ).splitlines()
    assert [row.split()[0] for row in shown if row.endswith("loses to random")] == ["knorm(budget=0.5)"]
    assert "0.75 +- 0.17" in shown[4] and "-0.50 +- " in shown[5]


def test_records_hold_no_paths(cli, tmp_path):
    out = tmp_path / "r.jsonl"
    cli("--specs", "full", "--depths", 0.5, "--items", 1, "--keys", 2, "--out", out)
    assert str(tmp_path) not in out.read_text() and json.loads(out.read_text())["task"] == "retrieval"
