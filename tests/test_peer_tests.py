"""Would ``scripts/peer_tests.py`` notice? Its machinery, on tests as small as tests can be."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import pytest
import transformers

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))
peer = importlib.import_module("peer_tests")

TESTS = """
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.bart import BartConfig, BartModel

SIZES = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)


def model():
    return LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.4, eos_token_id=None, pad_token_id=0)).eval()


def test_generate():
    ids, options = torch.randint(1, 90, (2, 9)), dict(do_sample=False, max_new_tokens=4)
    llama = model()
    assert torch.equal(llama.generate(ids, **options), llama.generate(ids, use_cache=False, **options))


def test_forward_makes_a_cache():
    cache = model()(torch.tensor([[1, 2, 3]])).past_key_values
    assert isinstance(cache, DynamicCache) and cache.get_seq_length() == 3


def test_cross_attention():
    bart = BartModel(BartConfig(vocab_size=97, d_model=32, encoder_layers=1, decoder_layers=1)).eval()
    cache = bart(torch.tensor([[5, 6, 2]])).past_key_values
    assert cache.cross_attention_cache.get_seq_length() == cache.self_attention_cache.get_seq_length() == 3


def test_its_own():
    assert DynamicCache(config=model().config).get_seq_length() == 0


def test_name_of_attention():
    llama = model()
    llama(torch.tensor([[1, 2, 3]]))
    assert llama.config._attn_implementation == "sdpa"


def test_type():
    assert type(model()(torch.tensor([[1, 2, 3]])).past_key_values).__name__ == "DynamicCache"


def test_without_a_cache():
    assert model().generate(torch.tensor([[1]]), use_cache=False, max_new_tokens=1).shape == (1, 2)


def test_that_stock_fails():
    assert model()(torch.tensor([[1]])).past_key_values is None
"""
BROKEN = """
import peer_plugin, torch
from peer_plugin import *


class Broken(peer_plugin.KVCache):
    def update(self, *args, **kwargs):
        keys, values = super().update(*args, **kwargs)
        return keys, torch.zeros_like(values)


class Unused(peer_plugin.InPlace):
    __call__ = lambda cls, *args, **options: peer_plugin.STOCK(*args, **options)


if KIND == "zeros":
    peer_plugin.make = Broken
else:
    peer_plugin.Replacement = Unused("Replacement", (), {})
"""
COUNT = {"generate", "forward_makes_a_cache", "cross_attention", "its_own", "name_of_attention", "type"}


def suite(folder: Path, kind: str = "") -> peer.Suite:
    (folder / "tests").mkdir(parents=True)
    (folder / "tests/__init__.py").touch()
    (folder / "tests/test_small.py").write_text(TESTS)
    (folder / "broken.py").write_text(BROKEN.replace("KIND", repr(kind)))
    return peer.Suite(folder, ["tests/test_small.py"], "(small)", plugin="broken" if kind else "peer_plugin")


def names(tests) -> set[str]:
    return {test.rpartition("::test_")[2] for test in tests}


@pytest.fixture(scope="module")
def chosen(tmp_path_factory):
    return peer.counting(suite(tmp_path_factory.mktemp("stock")).run("", "sdpa"))


def test_tests_that_make_a_cache_and_pass_count(chosen):
    assert names(chosen) == COUNT


@pytest.mark.parametrize(
    "kind, attention, wrong",
    [
        ("", "sdpa", {"type"}),
        ("", "kvcache", {"type", "name_of_attention"}),
        ("zeros", "sdpa", {"type", "generate"}),
        ("unused", "sdpa", COUNT),
    ],
)
def test_a_cache_that_is_broken_or_not_used_is_noticed(chosen, tmp_path, kind, attention, wrong):
    found = peer.differences(chosen, suite(tmp_path, kind).run("full", attention, chosen))
    assert names(found) == wrong
    if kind == "unused":
        assert set(found.values()) == {"made no cache of ours"}


def test_tests_that_do_not_run_differ(tmp_path):
    assert peer.differences(["a"], {}) == {"a": "not run"}
    assert peer.differences(["a"], {"a": peer.Result("skipped", caches=1)}) == {"a": "skipped"}
    lines = [dict(test="a", outcome=outcome, error=outcome[:4], caches=1) for outcome in ("failed", "passed")]
    assert peer.differences(["a"], peer.read(map(json.dumps, lines))) == {"a": "fail"}  # one of its subtests


def test_known_differences_must_be_the_ones_that_are():
    cell, other = ("bart", "full", "sdpa"), ("t5", "full", "sdpa")
    entry = peer.Known("crops", "assisted", ("bart",), ("full", "int8"), ("sdpa",))
    ran = {cell: ["f::Bart::test_assisted", "f::Bart::test_b"], other: ["f::T5::test_assisted"]}
    at = {cell: {"f::Bart::test_assisted": "E"}, other: {}}
    assert peer.judge(ran, at, [entry]) == ([], [])
    new, gone = peer.judge(ran, at, [])
    assert len(new) == 1 and "test_assisted: E" in new[0] and not gone
    new, gone = peer.judge(ran, {cell: {}, other: {"f::T5::test_assisted": "E"}}, [entry])
    assert len(new) == 1 and "t5" in new[0]
    assert len(gone) == 1 and "bart full sdpa" in gone[0]
    assert peer.judge({cell: ["f::Bart::test_b"]}, {cell: {}}, [entry]) == ([], [])  # it was not run
    at_times = dataclasses.replace(entry, always=False)
    assert peer.judge(ran, at, [at_times]) == ([], []) == peer.judge(ran, {cell: {}, other: {}}, [at_times])


def test_the_known_differences_can_be_read():
    for entry in peer.known():
        assert len(entry.reason) > 20 and set(entry.families) <= set(peer.FAMILIES), entry
        assert set(entry.specs) <= set(peer.SPECS) and set(entry.attentions) <= set(peer.ATTENTIONS), entry


def test_a_folder_that_is_no_checkout_is_named(tmp_path):
    (tmp_path / "src/transformers").mkdir(parents=True)
    version = tmp_path / "src/transformers/__init__.py"
    version.write_text("")
    with pytest.raises(ValueError, match="no checkout of transformers"):
        peer.from_tree(tmp_path / "run", ["llama"], tmp_path)
    version.write_text(f'__version__ = "{transformers.__version__}"\n')
    with pytest.raises(ValueError, match=r"has no tests/generation/test_utils.py"):
        peer.from_tree(tmp_path / "run", ["llama"], tmp_path)
