"""lm-eval through our caches, against its own `hf` model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed; pip install 'hf-kvcache[eval]'")

import letters  # noqa: E402
import lm_eval  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from hf_kvcache.lm_eval_model import KVCacheLM, model_args  # noqa: E402

ROOT = Path(__file__).parent.parent
PAIRS = [
    ("The sun rises in the", " east"),
    ("The sun rises in the", " west"),
    ("The sun rises in the", " evening of a day"),
    ("Water", " is wet"),
    ("", "no context"),
    ("A longer context than the others have", " a"),
]


@pytest.fixture(scope="module")
def parts():
    return letters.model(), letters.tokenizer()


@pytest.fixture
def ours(parts):
    def make(**options):
        return KVCacheLM(parts[0], tokenizer=parts[1], **options)

    return make


@pytest.fixture
def stock(parts):
    return HFLM(parts[0], tokenizer=parts[1], batch_size=4)


def instances(kind, arguments):
    return [Instance(kind, {}, one, index) for index, one in enumerate(arguments)]


def test_it_is_registered_and_named_in_the_package():
    assert get_model("hf-kvcache") is KVCacheLM
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r'\[project\.entry-points\."lm_eval\.models"\]\nhf-kvcache = "([\w.]+):(\w+)"', text)
    assert found and found.groups() == (KVCacheLM.__module__, KVCacheLM.__name__)


def test_commas_in_brackets_do_not_separate():
    text = "pretrained=a/b,cache=int8(skip_layers=ends)+sink(4,1020),step=1,dtype=float32"
    expected = {"pretrained": "a/b", "cache": "int8(skip_layers=ends)+sink(4,1020)", "step": 1, "dtype": "float32"}
    assert model_args(text) == expected
    assert model_args("") == {}
    with pytest.raises(ValueError, match="'1020' is not NAME=VALUE"):
        model_args("cache=sink,1020")


@pytest.mark.parametrize("cache", ["full", "sink(4,1020)"])
@pytest.mark.parametrize(("step", "batch_size"), [(1, 1), (1, 5), (4, 3)])
def test_log_likelihoods_are_those_of_hf(ours, stock, cache, step, batch_size):
    asked = instances("loglikelihood", PAIRS)
    expected = stock.loglikelihood(asked, disable_tqdm=True)
    for a, b in zip(
        ours(cache=cache, step=step, batch_size=batch_size).loglikelihood(asked, disable_tqdm=True),
        expected,
        strict=True,
    ):
        assert a[0] == pytest.approx(b[0], abs=1e-3) and a[1] == b[1]


def test_a_lossy_cache_is_read(ours, stock):
    asked = instances("loglikelihood", PAIRS)
    expected = [x for x, _ in stock.loglikelihood(asked, disable_tqdm=True)]
    found = [x for x, _ in ours(cache="sink(1,4)", batch_size=3).loglikelihood(asked, disable_tqdm=True)]
    alone = [x for x, _ in ours(cache="sink(1,4)").loglikelihood(asked, disable_tqdm=True)]
    assert found == pytest.approx(alone, abs=1e-3)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) > 0.1


def test_too_long_requests_are_cut_as_hf_cuts_them(parts):
    asked = instances("loglikelihood", [("a long context that has to go " * 3, " in the end")])
    options = {"tokenizer": parts[1], "max_length": 32}
    expected = HFLM(parts[0], **options).loglikelihood(asked, disable_tqdm=True)
    found = KVCacheLM(parts[0], **options).loglikelihood(asked, disable_tqdm=True)
    assert found[0][0] == pytest.approx(expected[0][0], abs=1e-3)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_rolling_is_that_of_hf(parts, batch_size):
    asked = instances("loglikelihood_rolling", [("one text " * 8,), ("another",)])
    options = {"tokenizer": parts[1], "max_length": 32, "batch_size": batch_size}
    expected = HFLM(parts[0], **options).loglikelihood_rolling(asked, disable_tqdm=True)
    found = KVCacheLM(parts[0], step=5, **options).loglikelihood_rolling(asked, disable_tqdm=True)
    assert found == pytest.approx(expected, abs=1e-2)
    lossy = KVCacheLM(parts[0], cache="sink(1,4)", **options).loglikelihood_rolling(asked, disable_tqdm=True)
    assert abs(lossy[0] - expected[0]) > 0.1


@pytest.mark.parametrize("cache", ["full", "sink(4,1020)"])
def test_generation_is_that_of_hf(ours, stock, cache):
    """Left-padded prompts; with `sink`, which refuses pads, each length by itself."""
    options = {"until": ["\n\n"], "max_gen_toks": 6, "do_sample": False}
    asked = instances("generate_until", [(text, options) for text in ("One", "Another", "The third", "One of three")])
    expected = stock.generate_until(asked, disable_tqdm=True)
    assert ours(cache=cache, batch_size=4).generate_until(asked, disable_tqdm=True) == expected
    assert len(set(expected)) > 1


def test_generation_reads_the_cache(ours, stock):
    options = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
    asked = instances("generate_until", [("A prompt that is longer than its window", options)])
    lossy = ours(cache="sink(0,3)").generate_until(asked, disable_tqdm=True)
    assert lossy != stock.generate_until(asked, disable_tqdm=True)


def test_what_is_refused(ours):
    with pytest.raises(ValueError, match="int9"):
        ours(cache="int9")
    with pytest.raises(ValueError, match="step=0"):
        ours(step=0)
    with pytest.raises(ValueError, match="does not fit"):
        ours(max_length=4).loglikelihood(instances("loglikelihood", [("a", "answer")]), disable_tqdm=True)


def test_results_name_the_cache(ours):
    info = ours(cache="sink(1,4)+int8", step=2).get_model_info()
    assert (info["kv_cache"], info["kv_cache_step"]) == ("int8+sink(1,4)", 2)


def test_a_string_of_arguments_makes_one(parts, tmp_path):
    parts[0].save_pretrained(tmp_path)
    parts[1].save_pretrained(tmp_path)
    text = f"pretrained={tmp_path},cache=int8+sink(1,4),step=3,attn_implementation=kvcache"
    made = KVCacheLM.create_from_arg_string(text, {"batch_size": 2, "device": "cpu", "max_batch_size": None})
    assert (made.spec, made.step, made.batch_size) == ("int8+sink(1,4)", 3, 2)
    assert made.model.config._attn_implementation == "kvcache"


def test_local_tasks_give_the_metrics_of_hf(parts, stock, ours, tmp_path, monkeypatch):
    """From files to metrics: with `cache=full` shares of right answers are the same number, perplexity to rounding."""
    files = {
        "lambada_openai.jsonl": [{"context": f"We saw {n} birds and", "continuation": "then"} for n in range(6)],
        "arc_easy.jsonl": [
            {"query": f"Question: {n}?", "choices": ["one", "two thirds", "no"], "gold": n % 3} for n in range(6)
        ],
        "gsm8k.jsonl": [{"context": f"What is {n}?", "chain_of_thought": "So", "answer": f"{n}"} for n in range(6)],
    }
    for name, lines in files.items():
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setenv("HF_KVCACHE_DATA", str(tmp_path))
    tasks = TaskManager(include_path=str(ROOT / "eval" / "lm_eval_tasks"), include_defaults=False)
    for name in ("local_lambada", "local_arc_easy", "local_gsm8k"):
        options = {"tasks": [name], "task_manager": tasks, "bootstrap_iters": 0}
        options |= {"gen_kwargs": "max_gen_toks=4", "limit": 2} if "gsm" in name else {}
        expected = lm_eval.simple_evaluate(model=stock, **options)["results"][name]
        found = lm_eval.simple_evaluate(model=ours(batch_size=4), **options)["results"][name]
        numbers = [key for key, value in expected.items() if isinstance(value, float)]
        assert numbers
        for key in numbers:
            close = pytest.approx(expected[key], rel=1e-4)  # random weights: the exponential of about 40
            assert found[key] == (close if key.startswith("perplexity") else expected[key]), key


def test_a_wrecked_cache_wrecks_the_metrics(parts):
    """What `full` is compared with could not pass by chance: zeros in the cache change every answer."""
    from eval import contenders

    asked = instances("loglikelihood", [pair for pair in PAIRS if pair[0]])
    whole = KVCacheLM(parts[0], tokenizer=parts[1])
    broken = KVCacheLM(parts[0], tokenizer=parts[1])
    broken.make_cache = lambda: contenders.zeroed(KVCacheLM.make_cache(broken))
    a, b = (torch.tensor([x for x, _ in one.loglikelihood(asked, disable_tqdm=True)]) for one in (whole, broken))
    assert ((a - b).abs() > 1e-2).all()
