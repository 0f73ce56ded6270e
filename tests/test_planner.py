"""What ``plan`` says is what a cache then holds."""

from __future__ import annotations

import copy
import functools
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build, feed, greedy, llama_config, prompt
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, DynamicCache, LlamaConfig

import hf_kvcache
from eval.memory import PeakBytes
from hf_kvcache import KVCache, plan
from hf_kvcache.__main__ import main
from hf_kvcache.planner import UNLIMITED, _Layer, parse_memory
from hf_kvcache.policies import POLICIES
from hf_kvcache.shapes import AnyValue, outline

TOKENS = 300
BASE = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=0,
)
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
WINDOW = dict(head_dim=16, sliding_window=64, layer_types=MIXED)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": dict(sliding_window=64),
    "gemma3_text": WINDOW,
    "gpt2": dict(n_embd=32, n_layer=3, n_head=4, n_positions=512),
    "gpt_oss": dict(**WINDOW, **EXPERTS),
    "deepseek_v3": dict(
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    ),
    "qwen3_next": dict(
        head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "jamba": dict(
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        mamba_d_state=4,
        mamba_expand=2,
        mamba_dt_rank=4,
    ),
    "gemma3n_text": dict(
        head_dim=16,
        sliding_window=64,
        num_hidden_layers=5,
        num_kv_shared_layers=2,
        layer_types=[*MIXED[:2], *MIXED[:1], *MIXED[:2]],
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=97,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0, 0.0],
    ),
}
TYPES = {
    "llama": {"full": 3},
    "mistral": {"sliding": 3},
    "gemma3_text": {"sliding": 2, "full": 1},
    "gpt2": {"full": 3},
    "gpt_oss": {"sliding": 2, "full": 1},
    "deepseek_v3": {"latent": 3},
    "qwen3_next": {"linear": 2, "full": 1},
    "jamba": {"linear": 2, "full": 1},
    "gemma3n_text": {"sliding": 2, "full": 1, "shared": 2},
}
SPECS = [
    "full",
    "int8",
    "fp8",
    "fp8_e5m2",
    "int4",
    "int2",
    "k4v2",
    "k8v4",
    "int4(group=64,residual=64)",
    "int4(sinks=0,residual=0,key_axis=token)",
    "int8(residual=32,sinks=2)",
    "int8(skip_layers=ends)",
    "int4(skip_layers=-1)",
    "int4(quantize_after=1000)",
    "int4(quantize_after=200)",
    "sink(4,60)",
    "int8+sink(4,60)",
    "int4+sink(4,60)",
    "k8v4(residual=16)+sink(8,100)",
]


def config_of(family: str) -> Any:
    return AutoConfig.for_model(family, **{**BASE, **FAMILIES[family]})


class Recorder(DynamicCache):
    """A stock cache that remembers what it was given."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):  # noqa: ANN001
        self.given = {**getattr(self, "given", {}), layer_idx: (key_states, value_states)}
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@functools.cache
def recorded(family: str, batch: int) -> tuple[Any, Recorder]:
    """The config of a model that really ran, and what it handed to its cache."""
    model = build(config_of(family), "eager", dtype=torch.bfloat16)
    cache = Recorder(config=model.config)
    feed(model, prompt(TOKENS, batch), cache)
    return model.config, cache


def filled(config: Any, stock: Recorder, spec: str) -> KVCache:
    """Our cache with the same states; recurrent layers are the stock ones."""
    cache = KVCache.from_spec(config, spec)
    for index, states in stock.given.items():
        cache.update(*states, index)
    for index, layer in enumerate(stock.layers):
        if index not in stock.given:
            cache.layers[index] = copy.deepcopy(layer)
    return cache


@functools.cache
def planned(family: str) -> Any:
    return plan(config_of(family), TOKENS, dtype="bfloat16")


@pytest.mark.filterwarnings("ignore:.*changes nothing")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_spec_of_every_family_is_within_two_percent(family, batch):
    config, stock = recorded(family, batch)
    last = max(stock.given) - len(stock.layers)  # the last layer that has a cache of its own: others are refused
    for spec in (spec.replace("skip_layers=-1", f"skip_layers={last}") for spec in SPECS):
        measured = filled(config, stock, spec).nbytes
        said = planned(family).at(spec=spec, batch=batch)
        assert said.cache_bytes == pytest.approx(measured, rel=0.02), spec
        assert sum(said.bytes_by_type.values()) == said.cache_bytes == said.device_bytes
        if "sliding" not in said.layers_by_type:  # a native window holds one token less right after a prompt
            assert said.cache_bytes == measured, spec


@pytest.mark.parametrize("seen", [20, 50])
@pytest.mark.parametrize("adaptive", ["", ",adaptive=on"])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_policy_remembers_is_counted(policy, adaptive, seen):
    model = build(llama_config(2), "kvcache")
    spec = f"int8+{policy}(budget=24,sinks=2,recent=4{adaptive})"
    cache = KVCache.from_spec(model.config, spec)
    feed(model, prompt(seen, 3), cache)
    tables = sum(t.nbytes for layer in cache.layers if layer.rope for t in layer.rope.tensors())
    assert plan(model.config, seen, 3, spec=spec).cache_bytes == cache.nbytes - tables


@pytest.mark.parametrize("tier", ["cpu", "disk"])
@pytest.mark.parametrize("options", ["", "keep_layers=0", "keep_layers=ends,keep_recent=9", "keep_recent=9"])
@pytest.mark.parametrize("storage", ["full", "int8", "int4(residual=8,group=8)"])
def test_far_bytes_are_those_that_lie_elsewhere(storage, options, tier, tmp_path):
    """Five equal layers: what is counted once has to be counted for each of them."""
    model = build(llama_config(5))
    inside = ",".join(filter(None, [str(tmp_path) if tier == "disk" else "", options]))
    spec = f"{storage}+{tier}({inside})" if inside else f"{storage}+{tier}"
    cache = KVCache.from_spec(model.config, spec)
    feed(model, prompt(40), cache)
    said, held = plan(model.config, context=40, spec=spec), cache.memory()
    used = {name: sum(parts.values()) - parts["spare"] - parts["staging"] for name, parts in held.items()}
    assert said.device_bytes == used.pop("device") and said.far_bytes == sum(used.values())
    assert said.cache_bytes == said.device_bytes + said.far_bytes
    cache.close()


def test_what_lies_elsewhere_leaves_room_on_the_device():
    made = plan(llama_config(8, hidden_size=256), context=4096, batch=4, dtype="float32", device_memory="64MiB")
    here, there = made.at(spec="full"), made.at(spec="cpu")
    assert there.far_bytes == here.cache_bytes and there.device_bytes == 0
    assert there.longest_context > 2 * here.longest_context and there.largest_batch > here.largest_batch
    for said in (here, there):
        at_most = made.at(spec=said.spec, context=said.longest_context)
        assert at_most.fits and not made.at(spec=said.spec, context=said.longest_context + 64).fits


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_types(family):
    said = planned(family)
    assert said.layers_by_type == TYPES[family]
    assert said.bytes_by_type.get("shared", 0) == 0
    assert all(size > 0 for kind, size in said.bytes_by_type.items() if kind != "shared")


def test_weights_are_those_of_the_model():
    for family in ("llama", "gpt2", "deepseek_v3"):
        model = build(config_of(family), "eager", dtype=torch.bfloat16)
        tensors = [*model.parameters(), *model.buffers()]
        assert planned(family).weight_bytes == pytest.approx(sum(t.nbytes for t in tensors), rel=0.01)


# -- decode steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_after_decode_steps_rows_allocated_ahead_stay_within_two_percent(spec):
    spec = spec.replace("sink(4,60)", "sink(4,4092)").replace("sink(8,100)", "sink(8,4088)")
    config = llama_config(layers=3, hidden_size=512, num_attention_heads=8)
    config._attn_implementation = "kvcache"  # nothing is decoded
    # A tail of one group keeps as many rows again ready for its next tokens.
    cache, tokens = KVCache.from_spec(config, spec), 16384 if "residual=0" in spec else 8192
    states = [torch.randn(1, 2, tokens, 64, dtype=torch.bfloat16) for _ in range(2)]
    for piece in (slice(0, tokens - 20), *(slice(t, t + 1) for t in range(tokens - 20, tokens))):
        for layer in range(3):
            cache.update(*(x[:, :, piece] for x in states), layer)
    said = wide().at(spec=spec, context=tokens)
    assert said.cache_bytes == pytest.approx(cache.nbytes, rel=0.02)
    made = said._outline
    ahead = sum(_Layer(layer, made, i).bytes(tokens, ahead=True) for i, layer in enumerate(cache.layers))
    assert said.cache_bytes <= cache.nbytes <= ahead  # rows ahead are counted as workspace


@functools.cache
def wide() -> Any:
    return plan(llama_config(layers=3, hidden_size=512, num_attention_heads=8), 8192, dtype="bfloat16")


def test_generate_ends_where_the_plan_says():
    model = build(llama_config(), "kvcache")
    cache = KVCache.from_spec(model.config, "int8")
    greedy(model, prompt(1500), cache, new=10)
    said = plan(model, 1509, spec="int8")
    assert said.dtype == "float32"
    assert said.cache_bytes == pytest.approx(cache.nbytes, rel=0.02)


@pytest.mark.parametrize("attention", ["sdpa", "kvcache"])
@pytest.mark.parametrize("spec", ["full", "int8", "int4"])
def test_a_decode_step_needs_no_more_than_the_workspace(spec, attention):
    model = build(llama_config(hidden_size=128, vocab_size=1024), attention)
    cache = KVCache.from_spec(model.config, spec)
    ids = prompt(2000, batch=2)
    feed(model, ids, cache)
    stored = cache.nbytes
    with PeakBytes(torch.device("cpu")) as peak:
        feed(model, ids[:, :1], cache)
    assert peak.bytes < plan(model, 2001, 2, spec=spec).workspace_bytes + max(cache.nbytes - stored, 0)


# -- published figures -------------------------------------------------------------------------------------------------


def published(layers: int, heads: int) -> dict[str, Any]:
    return dict(
        model_type="llama",
        hidden_size=heads * 128,
        num_attention_heads=heads,
        num_key_value_heads=8,
        num_hidden_layers=layers,
        torch_dtype="float16",
        vocab_size=1000,
        intermediate_size=1024,
    )


def test_worked_examples_are_exact():
    assert plan(published(32, 32), 4096).cache_bytes == 536_870_912
    assert plan(published(80, 64), 32_768).cache_bytes == 10_737_418_240
    assert plan(published(80, 64), 32_768, 4).cache_bytes == 4 * 10_737_418_240
    assert isinstance(plan(published(32, 32), 4096, spec="int4").cache_bytes, int)


class RealBytes(TorchDispatchMode):
    """Adds up what operators allocate outside of the meta device."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not out.is_meta:
            self.total += out.untyped_storage().nbytes()
        return out


def test_nothing_is_allocated():
    with RealBytes() as real:
        said = plan(published(32, 32), 1_000_000, 64, spec="int4+sink(4,500000)", device_memory="80GiB")
    assert said.cache_bytes > 2**40
    assert real.total < 2**20


# -- what fits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["full", "int8", "int4", "int4(quantize_after=20000)"])
def test_limits_are_the_last_that_fit(spec):
    memory = 200 * 2**20
    config = llama_config(layers=3, hidden_size=512, num_attention_heads=8)
    said = plan(config, 4096, 2, spec=spec, device_memory=memory)
    most = said.at(batch=said.largest_batch)
    assert most.fits and most.total_bytes <= 0.8 * memory
    assert not said.at(batch=said.largest_batch + 1).fits
    assert said.at(batch=said.largest_batch + 1).total_bytes > 0.8 * memory
    assert said.at(context=said.longest_context).fits
    assert not said.at(context=said.longest_context + 1).fits or "quantize_after" in spec
    assert all(said.at(context=c).fits for c in (said.longest_context // 2, min(20_000, said.longest_context)))


def test_a_plain_start_limits_what_is_encoded_later():
    config, spec = llama_config(layers=3, hidden_size=512, num_attention_heads=8), "int2(quantize_after=20000)"
    later = plan(config, 21_000, spec=spec)
    assert later.at(context=20_000).total_bytes > later.total_bytes
    said = plan(config, 21_000, spec=spec, device_memory=int(later.total_bytes / 0.8) + 10)
    assert said.fits and said.longest_context < 20_000


def test_limits_that_say_nothing_or_anything():
    open_ended = plan(llama_config(), 100)
    assert (open_ended.largest_batch, open_ended.longest_context, open_ended.fits) == (None, None, None)
    small = plan(llama_config(), 100, device_memory=1000)
    assert (small.largest_batch, small.longest_context, small.fits) == (0, 0, False)
    bounded = plan(llama_config(), 100, spec="sink(4,60)", device_memory="1GiB")
    assert bounded.longest_context == UNLIMITED
    assert [line.endswith("any") for line in bounded.table(["full", "sink(4,60)"]).splitlines()] == [False, False, True]


def test_quantized_checkpoints_have_unknown_weights():
    config = llama_config()
    config.quantization_config = {"quant_method": "awq", "bits": 4}
    said = plan(config, 100, device_memory="1GiB")
    assert (said.weight_bytes, said.total_bytes, said.largest_batch, said.fits) == (None, None, None, None)
    assert "weight_bytes" in said.notes[-1] and "?" in str(said)
    said = plan(config, 100, device_memory="1GiB", weight_bytes=2**20)
    assert said.weight_bytes == 2**20 and said.fits


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * 2**30), ("24 GB", 24 * 10**9), (1024, 1024), ("1.5kib", 1536), ("7", 7)]
)
def test_memory(text, size):
    assert parse_memory(text) == size


# -- where a config comes from -----------------------------------------------------------------------------------------


def test_every_source_of_a_config_gives_the_same(tmp_path, monkeypatch):
    config = llama_config()
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path)
    dictionary = json.loads((tmp_path / "config.json").read_text())
    monkeypatch.setattr(hf_kvcache.shapes.transformers.AutoConfig, "from_pretrained", _hub(config))
    sources = [config, dictionary, tmp_path, str(tmp_path / "config.json"), "some/name"]
    sizes = {plan(source, 1000, spec="int4").cache_bytes for source in sources}
    assert len(sizes) == 1
    assert plan("some/name", 10).model == "some/name"


def _hub(config: Any) -> Any:
    real = AutoConfig.from_pretrained
    return lambda name: config if name == "some/name" else real(name)


def test_the_config_is_left_alone():
    config = llama_config()
    before = config.to_dict()
    plan(config, 100, spec="int8")
    assert config.to_dict() == before and config.dtype is None and config._attn_implementation is None


def test_a_plan_does_not_follow_later_changes_of_the_config():
    config = llama_config()
    said = plan(config, 100)
    config.vocab_size = config.num_hidden_layers = 1
    assert said.at(spec="full") == said


def test_questions_about_values_have_an_answer_on_the_meta_device():
    with AnyValue():
        x = torch.empty(3, 4, device="meta")
        assert x.sum().item() == 1 and bool((x > 0).all())
        assert x.nonzero().shape == (0, 2)


def test_dtype():
    assert plan(llama_config(), 64).dtype == "bfloat16"
    assert "assumed" in plan(llama_config(), 64).notes[0]
    assert plan(llama_config(dtype="float16"), 64).dtype == "float16"
    assert plan(llama_config(), 64, dtype=torch.float32).cache_bytes == 2 * plan(llama_config(), 64).cache_bytes


def test_blocks_that_cannot_be_skipped_all_run(monkeypatch):
    skipped = outline(llama_config(layers=4))
    monkeypatch.setattr("hf_kvcache.shapes._skip_twins", lambda *args: {})
    assert outline(llama_config(layers=4)).layers == skipped.layers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(context=0), "context=0"),
        (dict(batch=True), "batch=True"),
        (dict(spec="int9"), "unknown spec part 'int9'"),
        (dict(spec="int8", storage="int4"), "leave out storage"),
        (dict(dtype="int8"), "known are bfloat16"),
        (dict(device_memory="80 parsecs"), "80GiB"),
        (dict(device_memory=0), "memory 0"),
        (dict(config_or_name={"model_type": "nothing"}), "model_type='nothing'"),
        (dict(config_or_name={}), "model_type=''"),
        (dict(config_or_name=7), "model 7"),
        (dict(config_or_name="/no/such/file.json"), "no config could be read (there is no such file"),
        (dict(config_or_name={"model_type": "t5"}), "encoder-decoder"),
        (dict(config_or_name={"model_type": "clip"}), "cannot be run on the meta device"),
        (dict(config_or_name=dict(model_type="rwkv", hidden_size=32, num_hidden_layers=2)), "hands nothing"),
    ],
)
def test_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError, match="(?i)" + message.replace("(", r"\(")) as error:
        plan(**{"config_or_name": llama_config(), "context": 100, **arguments})
    assert "\n" not in str(error.value)


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ValueError, match="no config.json"):
        plan(tmp_path, 100)


# -- output ------------------------------------------------------------------------------------------------------------


def test_vllm_settings():
    said = plan(LlamaConfig(**BASE), 1000, 8, spec="fp8_e5m2")
    assert said.vllm == {
        "--kv-cache-dtype": "fp8_e5m2",
        "--block-size": "16",
        "--max-model-len": "1008",
        "--max-num-seqs": "8",
        "--gpu-memory-utilization": "0.80",
    }
    assert said.at(spec="int2").vllm["--kv-cache-dtype"] == ""
    notes = said.at(spec="int2+sink(4,60)").notes
    assert any("sink(4,60)" in note for note in notes) and any("int2" in note for note in notes)


def test_command_line(tmp_path, capsys):
    config = llama_config(dtype="bfloat16")
    config.save_pretrained(tmp_path)
    options = ["plan", "--model", str(tmp_path), "--context", "2048", "--batch", "8", "--memory", "1GiB"]
    assert main([*options, "--spec", "int4(group=64)", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    expected = plan(config, 2048, 8, spec="int4(group=64)", device_memory="1GiB")
    assert said["cache_bytes"] == expected.cache_bytes and said["largest_batch"] == expected.largest_batch
    assert {"full", "int8", "int2"} < {row["spec"] for row in said["table"]}
    assert main(options) == 0
    text = capsys.readouterr().out
    assert "8 x 2,048 tokens" in text and "int8+sink(4,1020)" in text and "--kv-cache-dtype auto" in text


def test_command_line_errors(tmp_path, capsys, monkeypatch):
    assert main(["plan", "--model", str(tmp_path)]) == 2
    assert "no config.json" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["hf_kvcache", "plan", "--model", str(tmp_path)])
    monkeypatch.delitem(sys.modules, "hf_kvcache.__main__")
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("hf_kvcache", run_name="__main__")


def test_the_page_shows_what_is_printed(tmp_path, capsys, monkeypatch):
    """An 8B Llama, as in docs/planning.md."""
    sizes = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32)
    config = LlamaConfig(**sizes, num_key_value_heads=8, vocab_size=128256, dtype="bfloat16")
    config.save_pretrained(tmp_path / "path" / "to")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parent.parent / "docs" / "planning.md").read_text()
    command, printed = re.findall(r"```\n(.*?)```", page, re.DOTALL)[:2]
    assert main(command.split()[3:]) == 0
    assert capsys.readouterr().out == printed
