"""Streams on a tiny random model: buckets and fresh windows against one pass, bytes, records, refusals, the picture."""

from __future__ import annotations

import argparse
import math

import pytest
import torch
from models import build, llama_config, prompt

from eval import models, records, streaming
from eval.__main__ import main


@pytest.fixture(scope="module")
def model():
    return build(llama_config(max_position_embeddings=64), "sdpa")


@pytest.fixture
def cli(model, monkeypatch):
    """`python -m eval streaming ...` on the tiny model and 129 random tokens; returns the specs that were streamed."""
    streamed = []
    loaded = models.Loaded(
        model, lambda text, **options: {"input_ids": prompt(min(129, options["max_length"]))}, "tiny"
    )
    monkeypatch.setattr(models, "load_model", lambda *args: loaded)
    real = streaming.measure
    monkeypatch.setattr(streaming, "measure", lambda m, ids, spec, *a: streamed.append(spec) or real(m, ids, spec, *a))

    def run(*arguments):
        sizes = ("--tokens", "128", "--bucket", "32", "--step", "8", "--context", "16")
        main(["streaming", "--no-proofs", *sizes, *map(str, arguments)])
        return streamed

    return run


def one_pass(model, ids):
    """-log probability of every token but the first, without a cache."""
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        logits = model(ids[:, :-1], use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")


def test_buckets_are_those_of_one_pass_and_fresh_ones_of_a_pass_that_starts_before_them(cli, model, tmp_path):
    out = tmp_path / "s.jsonl"
    assert cli("--specs", "full", "--out", out) == ["fresh", "full"]
    fresh, full = records.read(out)
    ids = prompt(129)
    nll = one_pass(model, ids)
    for bucket, start in enumerate(range(0, 128, 32)):
        whole = nll[start : start + 32].mean().exp().item()
        assert full["metrics"]["perplexity"][bucket] == pytest.approx(whole, rel=1e-3)
        before = max(start - 16, 0)
        again = one_pass(model, ids[:, before : start + 33])[start - before :].mean().exp().item()
        assert fresh["metrics"]["perplexity"][bucket] == pytest.approx(again, rel=1e-3)
    assert fresh["metrics"]["perplexity"][0] == pytest.approx(full["metrics"]["perplexity"][0])
    assert fresh["metrics"]["perplexity"][1] != pytest.approx(full["metrics"]["perplexity"][1], rel=1e-2)
    assert fresh["metrics"]["tokens_kept"] == [32, 48, 48, 48]
    assert full["metrics"]["tokens_kept"] == [32, 64, 96, 128]
    assert full["metrics"]["trained_length"] == 64


def test_recomputation_starts_anew_as_often_as_it_says(cli, model, tmp_path):
    out = tmp_path / "s.jsonl"
    assert cli("--specs", "fresh(8, 16)", "--out", out) == ["fresh", "full", "fresh(8,16)"]
    m, ids = records.read(out)[-1]["metrics"], prompt(129)
    nll = [one_pass(model, ids[:, max(s - 8, 0) : s + 17])[min(s, 8) :] for s in range(0, 128, 16)]
    assert m["perplexity"] == pytest.approx(torch.cat(nll).view(4, 32).mean(1).exp().tolist(), rel=1e-3)
    assert m["tokens_kept"] == [24] * 4


def test_a_window_is_a_mask_and_its_memory_is_constant(cli, model, tmp_path):
    out = tmp_path / "s.jsonl"
    cli("--specs", "sink(2,6)", "--out", out)
    m = records.read(out)[-1]["metrics"]
    assert m["tokens_kept"] == [8] * 4 and len(set(m["nbytes"])) == 1
    from models import sink_mask

    ids = prompt(129)
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        logits = model(ids[:, :-1], attention_mask=sink_mask(128, 2, 6), use_cache=False).logits[0]
    nll = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    assert m["perplexity"] == pytest.approx(nll.view(4, 32).mean(1).exp().tolist(), rel=1e-3)


def test_a_second_run_streams_only_what_is_missing(cli, tmp_path, capsys):
    out = tmp_path / "s.jsonl"
    cli("--specs", "sink(2,6)", "--out", out)
    assert cli("--specs", "sink(2,6)", "int8", "--out", out)[3:] == ["int8"]
    assert "skipped sink(2,6): s.jsonl has it already" in capsys.readouterr().out
    assert cli("--specs", "int8", "--context", "8", "--out", out)[4:] == ["fresh"]  # the others do not depend on it
    assert str(tmp_path) not in out.read_text()


def test_too_short_a_text_is_said_and_leaves_no_record(cli, tmp_path):
    out = tmp_path / "s.jsonl"
    with pytest.raises(SystemExit, match="has 129 tokens, 161 are needed; lower --tokens"):
        cli("--tokens", "160", "--out", out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "100"], "--tokens 100 is no multiple of --bucket 32"),
        (["--step", "5"], "--bucket 32 is no multiple of --step 5"),
        (["--bucket", "0"], "--bucket 0: give at least 1"),
        (["--specs", "fresh(8,12)"], r"fresh\(8,12\): .* R divides --bucket 32 and --step 8 divides R"),
        (["--specs", "fresh(8,0)"], r"fresh\(8,0\): .* R divides"),
        (["--specs", "fresh(8)"], r"fresh\(8\): give C and R of fresh\(C,R\)"),
    ],
)
def test_wrong_sizes_are_named_in_one_line(cli, arguments, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        cli(*arguments, "--out", tmp_path / "s.jsonl")


def test_learned_positions_cannot_stream_past_the_last_one():
    from transformers import GPT2Config

    small = GPT2Config(
        vocab_size=97, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=None, eos_token_id=None
    )
    loaded = models.Loaded(build(small), None, "learned")
    assert streaming.trained_length(loaded, 64) == 64
    with pytest.raises(ValueError, match="65 tokens: learned has learned positions, 64 of them"):
        streaming.trained_length(loaded, 65)


def test_the_table_compares_each_bucket_with_the_same_bucket(cli, tmp_path, capsys):
    def record(spec, perplexity):
        nll = [[math.log(x) + shift for x in perplexity for shift in (-0.25 * x, 0.25 * x)]]
        metrics = {
            "perplexity": perplexity,
            "nbytes": [1e6, 2e6],
            "tokens_kept": [1, 2],
            "trained_length": 64,
            "nll": nll,
        }
        return {"spec": spec, "settings": {"tokens": 4, "bucket": 2, "step": 1}, "metrics": metrics}

    lines = streaming.table([record("fresh", [2.0, 4.0]), record("full", [1.0, 8.0]), record("int8", [3.0, 6.0])])
    shown = [row.split() for row in lines.splitlines()]
    assert shown[-5] == ["int8", "3.00", "6.00", "1.00", "2.00"]
    assert shown[-4] == ["against", "fresh", "1.500x", "1.500x"]
    assert shown[-2] == ["against", "full", "3.000x", "0.750x"]
    # Differences of the two steps: log 1.5 -+ 0.25 of the perplexities' difference (1 and 2).
    assert shown[-3] == ["standard", "error", "0.375", "0.750"]


def test_streams_are_stretches_of_the_text_and_share_their_buckets(cli, model, tmp_path):
    out = tmp_path / "s.jsonl"
    cli("--specs", "sink(2,6)", "--streams", 2, "--tokens", 64, "--out", out)
    ids = prompt(129)
    for record in records.read(out):
        spec, m = record["spec"], record["metrics"]
        args = argparse.Namespace(streams=1, tokens=64, bucket=32, step=8, attn="kvcache", context=16)
        alone = [streaming.measure(model, part, spec, args, lambda n: None) for part in (ids[:, :65], ids[:, 64:])]
        assert m["nll"] == [alone[0]["nll"][0], alone[1]["nll"][0]]
        logs = [[math.log(x) for x in stream["perplexity"]] for stream in alone]
        assert m["perplexity"] == pytest.approx([math.exp((a + b) / 2) for a, b in zip(*logs, strict=True)])
        assert m["tokens_kept"] == alone[0]["tokens_kept"] and m["nbytes"] == alone[0]["nbytes"]


def test_the_error_of_a_ratio_is_that_of_independent_steps(tmp_path):
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(1, 4000, generator=generator)
    other = base + torch.randn(1, 4000, generator=generator) * 0.5
    same = {"settings": {"bucket": 4000, "step": 1}}
    pair = [{**same, "metrics": {"nll": x.tolist(), "perplexity": [x.mean().exp().item()]}} for x in (other, base)]
    value, error = streaming.ratio(*pair, 0)
    assert value == pytest.approx((other - base).mean().exp().item(), rel=1e-5)
    assert error == pytest.approx(0.5 / math.sqrt(4000), rel=0.05)


def test_the_picture_comes_from_the_records(cli, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "s.jsonl"
    cli("--specs", "sink(2,6)", "--out", out)
    assert "drew" in capsys.readouterr().out
    assert (tmp_path / "streaming_perplexity.png").read_bytes().startswith(b"\x89PNG")
    assert [r["spec"] for r in records.one_setting(records.read(out), "streaming")] == ["fresh", "full", "sink(2,6)"]


def test_without_matplotlib_the_table_is_still_there(cli, tmp_path, monkeypatch, capsys):
    def missing(*args):
        raise ValueError("plots need the package matplotlib, which is not installed; pip install matplotlib")

    monkeypatch.setattr(streaming, "plot", missing)
    cli("--specs", "full", "--out", tmp_path / "s.jsonl")
    shown = capsys.readouterr().out
    assert "note: no picture: plots need the package matplotlib" in shown and "Perplexity by bucket of 32" in shown


def test_an_infinite_perplexity_is_no_crash(model, monkeypatch):
    monkeypatch.setattr(streaming, "surprise", lambda *args: torch.full((4,), 1e4))
    args = type("Args", (), {"streams": 1, "tokens": 8, "bucket": 4, "step": 2, "context": 2, "attn": "sdpa"})
    assert streaming.measure(model, prompt(9), "full", args, lambda n: None)["perplexity"] == [math.inf, math.inf]
