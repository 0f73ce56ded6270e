"""Every ``ValueError`` of the library: is it in docs/errors.md, does its input raise it, does its way out work?

``SITES`` are all places that raise one, found in the source. Each has a row in the table, and a ``Case`` here (the
input, and what the message advises, tried), or a test elsewhere that is named in ``ELSEWHERE``.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from models import build, feed, llama, llama_config, prompt, states
from test_masks import compat_gives_positions
from transformers import (
    BloomConfig,
    DynamicCache,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2VLConfig,
    T5Config,
    XLNetConfig,
)

from hf_kvcache import (
    KVCache,
    OffloadedCache,
    PrefixStore,
    QuantizedCache,
    disk,
    families,
    identity,
    likelihood,
    plan,
    snapshot,
    spec,
    trust,
)
from hf_kvcache.__main__ import _run, parser
from hf_kvcache.attention import kvcache_attention
from hf_kvcache.lowbit import GroupedCodec
from hf_kvcache.metrics import Exporter
from hf_kvcache.planner import parse_memory
from hf_kvcache.prefix import generate_with_prefix, rewind
from hf_kvcache.retention import Importance

INSIDE = ("compat", "rope")  # what these raise is put into a message that knows the way out
PASSED_ON = {("caches", "KVCache.load")}  # the message of another site, which has a row, after the file's name
ROOT = Path(__file__).parent.parent


class Site(NamedTuple):
    function: str  # Class.method or function
    words: str  # the message, variable parts as "…"
    module: str


def words_of(node: ast.expr, names: dict[str, str]) -> str:
    """A message with "…" for what is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(words_of(part, names) for part in node.values)
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.FormattedValue):
        return words_of(node.value, names)
    if isinstance(node, ast.BinOp):
        return words_of(node.left, names) + words_of(node.right, names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "replace":
        return words_of(node.func.value, names).replace(*(words_of(text, names) for text in node.args))
    return "…"


def constants() -> dict[str, str]:
    """The messages that have a name."""
    modules = [importlib.import_module(f"hf_kvcache.{name}") for name in ("masked", "plan", "progress")]
    both = [pair for module in modules for pair in vars(module).items()]
    return {name: value for name, value in both if name.isupper() and isinstance(value, str)}


def sites() -> list[Site]:
    found, names = [], constants()
    for path in sorted((ROOT / "hf_kvcache").glob("**/*.py")):

        def walk(node: ast.AST, inside: tuple[str, ...], module: str = path.stem) -> None:
            for child in ast.iter_child_nodes(node):
                named = isinstance(child, (ast.FunctionDef, ast.ClassDef))
                own = (*inside, child.name) if named else inside  # type: ignore[attr-defined]
                call = child.exc if isinstance(child, ast.Raise) else None
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "ValueError":
                    found.append(Site(".".join(own), words_of(call.args[0], names), module))
                walk(child, own, module)

        walk(ast.parse(path.read_text()), ())
    return found


def fits(words: str, message: str) -> bool:
    """Whether a message, or another one with "…", is one of these words."""
    pattern = ".*".join(map(re.escape, words.split("…")))
    return re.fullmatch(pattern, message, re.DOTALL) is not None


SITES = sites()


class Case(NamedTuple):
    """``wrong`` raises the error that ``function`` raises with words that match ``words``; ``right`` is its way out."""

    function: str
    words: str
    wrong: Callable[[], Any]
    right: Callable[[], Any]

    @property
    def site(self) -> Site:
        hits = [site for site in SITES if site.function == self.function and re.search(self.words, site.words)]
        assert len(hits) == 1, f"{self.function} / {self.words}: {[hit.words for hit in hits]}"
        return hits[0]


def of(name: str, config: Any = None) -> KVCache:
    return KVCache.from_spec(config or llama_config(2), name)


def held(name: str = "full", tokens: int = 6, batch: int = 1) -> KVCache:
    cache = of(name)
    for layer in range(2):
        cache.update(*states(tokens, batch), layer)
    return cache


def on(attention: str, name: str) -> KVCache:
    config = llama_config(2)
    config._attn_implementation = attention
    return of(name, config)


def updated(cache: KVCache, keys: torch.Tensor, values: torch.Tensor | None = None, layer: int = 0) -> KVCache:
    cache.update(keys, keys if values is None else values, layer)
    return cache


def cropped(cache: KVCache, tokens: int) -> int:
    cache.crop(tokens)
    return cache.get_seq_length()


def run(*arguments: str) -> str:
    return _run(parser().parse_args(arguments))


def stored(*names: str) -> PrefixStore:
    store = PrefixStore(1 << 20)
    for name in names or ("full",):
        store.put([1, 2, 3, 4, 5, 6], held(name))
    return store


def t5() -> Any:
    return build_t5(
        T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )


def build_t5(config: Any) -> Any:
    from transformers import AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM.from_config(config).eval()


IDS = torch.tensor([[1, 2, 3, 4, 5, 6]])
SMALL = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, vocab_size=97)
INF = torch.full((1, 2, 3, 8), float("inf"))
ONES = torch.ones(1, 2, 3, 8)
LLAMA = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
BLOOM = BloomConfig(n_layer=1, hidden_size=16, n_head=2)
EIGHT = GroupedCodec(4, 8)
NEO = GPTNeoConfig(num_layers=1, hidden_size=16, num_heads=2, attention_types=[[["global"], 1]])

CASES = [
    # codecs, lowbit
    Case("find_codec", "unknown storage", lambda: QuantizedCache(llama_config(2), "int9"), lambda: of("int8")),
    Case("GroupedCodec.__init__", "bits=", lambda: GroupedCodec(3), lambda: (GroupedCodec(4), GroupedCodec(2))),
    Case(
        "GroupedCodec.__init__",
        "group=",
        lambda: of("int4(group=3)"),
        lambda: (of("int4(group=2)"), of("int2(group=4)")),
    ),
    Case("GroupedCodec.__init__", "key_axis=", lambda: of("int4(key_axis=row)"), lambda: of("int4(key_axis=token)")),
    Case(
        "GroupedCodec.encode",
        "whole groups",
        lambda: EIGHT.encode(torch.ones(1, 1, 12, 4)),
        lambda: EIGHT.encode(torch.ones(1, 1, 16, 4)),
    ),
    # spec
    Case("axis_of", "unknown spec part", lambda: of("int8+zip"), lambda: of("int8+cpu")),
    Case("split", "names two", lambda: of("int8+fp8"), lambda: of("fp8")),
    Case("parse_part", "is not a name", lambda: of("int8(("), lambda: (of("int8"), of("sink(4,508)"))),
    Case("parse_part", "twice", lambda: of("int8(residual=4,residual=5)"), lambda: of("int8(residual=4)")),
    Case(
        "storage",
        "twice, in the storage",
        lambda: KVCache(llama_config(2), spec.storage("int8"), skip_layers=1),
        lambda: (KVCache(llama_config(2), spec.storage("int8", 1)), KVCache(llama_config(2), "int8", skip_layers=1)),
    ),
    Case(
        "storage",
        "twice, in …",
        lambda: KVCache(llama_config(2), "int8(skip_layers=0)", skip_layers=1),
        lambda: KVCache(llama_config(2), "int8(skip_layers=0)"),
    ),
    Case("retention", "twice", lambda: of("knorm(adaptive,adaptive=on)"), lambda: of("knorm(adaptive)")),
    Case(
        "storage", "has no option", lambda: of("int8(group=4)"), lambda: (of("int8(residual=4)"), of("int4(group=4)"))
    ),
    Case("storage", "not an integer >= 0", lambda: of("int8(residual=-1)"), lambda: of("int8(residual=0)")),
    Case(
        "storage",
        "rotate=",
        lambda: of("int8(rotate=maybe)"),
        lambda: [of(f"int8(rotate={x})") for x in ("auto", "on", "off")],
    ),
    Case("retention", "unknown retention", lambda: spec.retention("lru"), lambda: spec.retention("sink(4,8)")),
    Case("retention", "cannot take", lambda: of("sink(4,8,9)"), lambda: of("sink(4,8,reposition=on)")),
    Case(
        "placement",
        "unknown placement",
        lambda: spec.placement("tape"),
        lambda: [spec.placement(x) for x in ("device", "cpu", "disk(/x)")],
    ),
    Case("placement", "has no option", lambda: of("device(keep_recent=1)"), lambda: of("cpu(keep_recent=1)")),
    Case("_path_and_options", "needs a directory", lambda: of("disk()"), lambda: spec.placement("disk(/path)")),
    Case(
        "layer_numbers",
        "give layer numbers",
        lambda: KVCache(llama_config(2), "int8", skip_layers=1.5),
        lambda: KVCache(llama_config(2), "int8", skip_layers="ends"),
    ),
    Case(
        "layer_numbers",
        "is not a layer number",
        lambda: of("int8(skip_layers=first)"),
        lambda: of("int8(skip_layers=0|1)"),
    ),
    # retention, policies, placement
    Case(
        "Importance.__init__",
        "an int",
        lambda: of("knorm(budget=1.5)"),
        lambda: (of("knorm(budget=100)"), of("knorm(budget=0.5)")),
    ),
    Case(
        "Importance.__init__",
        "is less than",
        lambda: of("knorm(budget=10)"),
        lambda: (of("knorm(budget=36)"), of("knorm(budget=10,recent=6)"), of("knorm(budget=32,sinks=0)")),
    ),
    Case("_check", "not an integer >= …$", lambda: of("sink(-1,8)"), lambda: of("sink(0,8)")),
    Case("find_policy", "unknown policy", lambda: Importance("best"), lambda: Importance("knorm")),
    Case(
        "find_policy",
        "cannot take",
        lambda: Importance("random", seed=1, kernel=3),
        lambda: Importance("random", seed=1),
    ),
    Case("_as", "not an integer", lambda: of("random(seed=x)"), lambda: of("random(seed=3)")),
    Case("_as", "not a finite number", lambda: of("expected(epsilon=x)"), lambda: of("expected(epsilon=0.1)")),
    Case(
        "flag",
        "on or off",
        lambda: of("knorm(pyramid=maybe)"),
        lambda: (of("knorm(pyramid=on)"), of("knorm(pyramid=off)")),
    ),
    Case("Random.__init__", "seed=", lambda: of("random(seed=-1)"), lambda: of("random(seed=0)")),
    Case(
        "SnapKV.__init__", "snapkv", lambda: of("snapkv(kernel=4)"), lambda: of("snapkv(window=1,kernel=5,pool=mean)")
    ),
    Case(
        "Expected.__init__",
        "expected",
        lambda: of("expected(queries=1)"),
        lambda: of("expected(future=1,queries=2,kernel=3,epsilon=0)"),
    ),
    Case("Offload.__init__", "offloading", lambda: of("cpu(keep_recent=-1)"), lambda: of("cpu(keep_recent=0)")),
    # caches
    Case("KVCache.__init__", "takes model.config", lambda: KVCache(llama()), lambda: KVCache(llama().config)),
    Case(
        "KVCache._refuse_position_bias",
        "biases scores",
        lambda: of("knorm", BLOOM),
        lambda: [of(x, BLOOM) for x in ("full", "int8", "fp8")],
    ),
    Case(
        "KVLayer._refuse_bias",
        "biases scores",
        lambda: updated(of("sink(1,4)", BLOOM), torch.ones(1, 2, 9, 8)),
        lambda: [updated(of(x, BLOOM), torch.ones(1, 2, 9, 8)) for x in ("full", "int8", "fp8", "sink(1,8)", "int4")],
    ),
    Case(
        "KVCache._make_layers",
        "no attention layers",
        lambda: KVCache(MambaConfig(num_hidden_layers=1)),
        lambda: KVCache(llama_config(1)),
    ),
    Case("KVCache._numbers", "the model has", lambda: of("int8(skip_layers=2)"), lambda: of("int8(skip_layers=1|-2)")),
    Case(
        "KVCache._refuse_far_eviction",
        "cannot follow",
        lambda: of("knorm(adaptive)+cpu"),
        lambda: (of("knorm+cpu"), of("knorm(adaptive)")),
    ),
    Case(
        "KVCache.from_spec", "spec is a", lambda: KVCache.from_spec(llama_config(2), 8), lambda: of("int8+sink(4,508)")
    ),
    Case("KVCache.from_spec", "is empty", lambda: of(""), lambda: of("int8+sink(4,508)")),
    Case(
        "KVCache._update",
        "does not exist",
        lambda: of("full").update(ONES, ONES, 2),
        lambda: of("full").update(ONES, ONES, 1),
    ),
    Case("KVCache._check_encoder_decoder", "cross-attention", lambda: feed_t5(whole=False), lambda: feed_t5()),
    Case("KVCache.rollback", "the cache has seen", lambda: held().rollback(7), lambda: held().rollback(6)),
    Case(
        "KVCache.from_states",
        "pairs of states",
        lambda: KVCache.from_states(llama_config(2), [(ONES, ONES)]),
        lambda: KVCache.from_states(llama_config(2), [(ONES, ONES)] * 2),
    ),
    Case(
        "QuantizedCache.__init__",
        "does not quantize",
        lambda: QuantizedCache(llama_config(2), "full"),
        lambda: KVCache(llama_config(2)),
    ),
    Case(
        "OffloadedCache.__init__",
        "device=",
        lambda: OffloadedCache(llama_config(2), device="tape"),
        lambda: OffloadedCache(llama_config(2), device="cpu"),
    ),
    # layers, eviction
    Case(
        "KVLayer._refuse",
        "can turn",
        lambda: updated(on("sdpa", "sink(1,4,reposition=on)"), ONES),
        lambda: updated(on("kvcache", "sink(1,4,reposition=on)"), ONES),
    ),
    Case(
        "KVLayer.update",
        "no gradient",
        lambda: updated(on("kvcache", "sink(1,4,reposition=on)"), ONES.clone().requires_grad_()),
        lambda: without_grad("sink(1,4,reposition=on)"),
    ),
    Case(
        "KVLayer._refuse",
        "needs a mask",
        lambda: updated(on("flash_attention_2", "sink(1,2)"), torch.ones(1, 2, 9, 8)),
        lambda: updated(on("kvcache", "sink(1,2)"), torch.ones(1, 2, 9, 8)),
    ),
    Case(
        "KVLayer._refuse",
        "hides some",
        lambda: padded_rows("sink(1,8)", "sdpa", more=5),
        lambda: (padded_rows("full", "sdpa", more=5), padded_rows("sink(1,8)", "kvcache", more=5)),
    ),
    Case(
        "KVLayer.found_pads",
        "hides some",
        lambda: padded_rows("sink(1,4)", "sdpa"),
        lambda: (padded_rows("full", "sdpa"), padded_rows("sink(1,4)", "kvcache"), feed_rows("sink(1,4)", "sdpa")),
    ),
    Case(
        "KVLayer.found_pads",
        "with placement 'device'",
        lambda: padded_rows("sink(1,4)+cpu", "kvcache"),
        lambda: (padded_rows("sink(1,4)", "kvcache"), padded_rows("full+cpu", "kvcache")),
    ),
    Case("Chunk.resolve", "hides some", lambda: late_mask(hides=True), lambda: late_mask(hides=False)),
    Case(
        "EvictionLayer.update",
        "hides some",
        lambda: padded_rows("knorm(budget=10,sinks=1,recent=2)", "sdpa", more=5),
        lambda: (
            padded_rows("full", "sdpa", more=5),
            padded_rows("knorm(budget=10,sinks=1,recent=2)", "kvcache", more=5),
            feed_rows("knorm(budget=10,sinks=1,recent=2)", "sdpa"),
        ),
    ),
    Case(
        "KVLayer.check_crop",
        "began with",
        lambda: beginning().rollback(1),
        lambda: (beginning().fork(), updated_all(beginning(), 2).rollback(2)),
    ),
    Case(
        "KVLayer.check_recording",
        "records the past",
        lambda: updated(recording("sink(1,4)", 4), ONES),
        lambda: [
            updated(cache, ONES)
            for cache in (
                cropped_to(recording("sink(1,4)", 4), -2),
                recording("full", 4),
                again(recording("sink(1,4)", 4)),
            )
        ],
    ),
    Case(
        "KVCache.activate_past_recording",
        "has evicted",
        lambda: held("sink(1,2)").activate_past_recording(),
        lambda: (recording("sink(1,2)", 3), held("full").activate_past_recording()),
    ),
    Case(
        "WindowLayer.update",
        "a sliding layer holds",
        lambda: windowed().update(*states(1, 2), 0),
        lambda: (again(windowed()).update(*states(1, 2), 0), twice(windowed()).update(*states(1, 2), 0)),
    ),
    Case(
        "WindowLayer.pretend",
        "needs the last",
        lambda: given(windowed().config, states(2, 1), tokens_seen=9),
        lambda: given(windowed().config, states(3, 1), tokens_seen=9),
    ),
    Case("KVLayer.check_crop", "has evicted", lambda: held("sink(1,2)").crop(-1), lambda: cropped(held(), -1)),
    Case(
        "KVLayer.check_crop",
        "holds only its last",
        lambda: held("int4(group=2,residual=1,sinks=0)").crop(-4),
        lambda: (cropped(held("int4(group=2,residual=1,sinks=0)"), -1), cropped(held("int8"), -4)),
    ),
    Case(
        "KVLayer._check",
        "differ in batch",
        lambda: updated(of("full"), ONES, ONES[:, :, :2]),
        lambda: updated(of("full"), ONES, ONES),
    ),
    Case("KVLayer._check", "holds a batch", lambda: updated(held(batch=2), ONES), lambda: repeated()),
    Case(
        "KVLayer._check",
        "of shape …, expected",
        lambda: updated(held(), torch.ones(1, 2, 3, 9)),
        lambda: updated(held(), ONES),
    ),
    Case(
        "KVLayer._check",
        "keep one dtype",
        lambda: updated(held(), ONES.half()),
        lambda: (lambda c: (c.reset(), updated(c, ONES.half())))(held()),
    ),
    Case("KVLayer.refuse_non_finite", "non-finite", lambda: updated(of("int8"), INF), lambda: updated(of("full"), INF)),
    Case("refuse_positive", "pass minus", lambda: held().crop(2), lambda: cropped(held(), -2)),
    Case(
        "EvictionLayer.__init__",
        "adaptive budgets",
        lambda: of("int4+knorm(adaptive)"),
        lambda: [of(x) for x in ("knorm(adaptive)", "int8+knorm(adaptive)", "fp8+knorm(adaptive)", "int4+knorm")],
    ),
    Case(
        "EvictionLayer._find_rope",
        "turns queries",
        lambda: of("expected", yarn("dynamic")),
        lambda: of("snapkv", yarn("dynamic")),
    ),
    Case(
        "EvictionLayer.update",
        "has no gradient",
        lambda: updated(on("kvcache", "knorm"), ONES.clone().requires_grad_()),
        lambda: without_grad("knorm"),
    ),
    Case(
        "EvictionLayer._refuse_stock",
        "needs attention",
        lambda: feed(llama(), IDS, of("snapkv", llama().config)),
        lambda: feed(llama("kvcache"), IDS, of("snapkv", llama("kvcache").config)),
    ),
    Case(
        "EvictionLayer._refuse_stock",
        "budgets differ",
        lambda: feed(llama(), IDS, of("knorm(pyramid)", llama().config)),
        lambda: feed(llama("kvcache"), IDS, of("knorm(pyramid)", llama("kvcache").config)),
    ),
    Case(
        "EvictionLayer.refuse_touch",
        "…, and",
        lambda: touched("snapkv"),
        lambda: [touched(x) for x in ("knorm", "keydiff", "random")],
    ),
    Case("EvictionLayer.refuse_touch", "adaptive", lambda: touched("knorm(adaptive)"), lambda: touched("knorm")),
    Case("EvictionLayer.check_crop", "fork", lambda: knorm().crop(-1), lambda: (knorm().fork(), cropped(held(), -1))),
    # shapes, planner, command line
    Case("read_config", "give a config", lambda: plan(3, 10), lambda: plan(LLAMA, 10)),
    Case("read_config", "no config.json", lambda: plan(str(ROOT / "docs"), 10), lambda: plan(llama_config(1), 10)),
    Case(
        "read_config",
        "no config could be read",
        lambda: plan(str(ROOT / "pyproject.toml"), 10),
        lambda: plan(llama_config(1), 10),
    ),
    Case("_from_dict", "model_type", lambda: plan({"model_type": "lama"}, 10), lambda: plan(LLAMA, 10)),
    Case(
        "find_dtype",
        "known are",
        lambda: plan(LLAMA, 10, dtype="int8"),
        lambda: [plan(LLAMA, 10, dtype=x) for x in ("bfloat16", "float16", "float32")],
    ),
    Case("outline", "encoder-decoder", lambda: plan(t5().config, 10), lambda: plan(LLAMA, 10)),
    Case(
        "plan",
        "names all axes",
        lambda: plan(LLAMA, 10, storage="int8", spec="int4"),
        lambda: (plan(LLAMA, 10, spec="int4"), plan(LLAMA, 10, storage="int8")),
    ),
    Case("_check", "not an integer >= 1", lambda: plan(LLAMA, 0), lambda: plan(LLAMA, 1)),
    Case(
        "parse_memory",
        "write bytes",
        lambda: parse_memory("80 gigs"),
        lambda: (parse_memory("80GiB"), parse_memory("24GB")),
    ),
    Case("_run", "write a unit", lambda: run("plan", "--model", "x", "--memory", "80"), lambda: parse_memory("80GiB")),
    # likelihood, lm_eval_model, metrics
    Case("score", "at least 1", lambda: scored(step=0), lambda: scored(step=1)),
    Case("rows_by_context", "at least one token", lambda: scored(context=()), lambda: scored(context=(1,))),
    Case(
        "Exporter.add",
        "has no stats",
        lambda: Exporter().add(DynamicCache(), "a"),
        lambda: (Exporter().add(held(), "a"), Exporter().add(stored(), "b")),
    ),
    # disk
    Case("_only_one", "is …: name", lambda: on_disk(link(folder())), lambda: on_disk(folder())),
    Case(
        "_only_one", "writable by everyone", lambda: on_disk(folder(0o777)), lambda: on_disk(folder(0o777) / "kvcache")
    ),
    Case("_flock", "needs flock", lambda: without_flock(), lambda: of("cpu")),
    # snapshot
    Case("read", "it is cut off", lambda: load(saved(lambda d: d[:4])), lambda: load(saved())),
    Case("read", "the checksum of", lambda: load(saved(lambda d: d[:-1] + bytes([d[-1] ^ 1]))), lambda: load(saved())),
    Case("_open", "symbolic link", lambda: load(link(saved())), lambda: load(saved())),
    Case("_open", "is empty", lambda: load(saved(lambda d: b"")), lambda: load(saved())),
    Case("_parse", "header is damaged$", lambda: load(saved(lambda d: d[:8] + b"#" + d[9:])), lambda: load(saved())),
    Case(
        "_parse", "checksums differ", lambda: load(saved(lambda d: d.replace(b'"6"', b'"7"', 1))), lambda: load(saved())
    ),
    Case("_parse", "is of version", lambda: snapshot.read(of_version("0")), lambda: load(saved())),
    Case("_parse", "it has no", lambda: load(edited('"rotated"', '"rotten"')), lambda: load(saved())),
    Case("_parse", "is no text", lambda: load(rewritten(tokens_seen=6)), lambda: load(rewritten(tokens_seen="6"))),
    Case("_check_places", "has no place", lambda: load(edited('"F32"', '"F99"')), lambda: load(saved())),
    Case("_check_places", "cut off or damaged", lambda: load(saved(lambda d: d[:-8])), lambda: load(saved())),
    Case("_check_places", "bytes more", lambda: load(saved(lambda d: d + b"12345678")), lambda: load(saved())),
    Case("fact", "its …", lambda: load(rewritten(rotated="6")), lambda: load(saved())),
    Case("restore", "and says", lambda: load(rewritten(tokens_seen="7")), lambda: load(saved())),
    Case(
        "_check",
        "cannot be",
        lambda: snapshot._check_fields(of("full").layers[0], {"seen": -1}),
        lambda: snapshot._check_fields(of("full").layers[0], {"seen": 6}),
    ),
    Case("KVCache.load", "", lambda: load(rewritten(spec="int9")), lambda: load(saved())),
    Case(
        "check",
        "does not say whose",
        lambda: KVCache.load(saved(), llama()),
        lambda: KVCache.load(saved_by(llama(), llama()), llama()),
    ),
    Case(
        "check",
        "belongs to certain weights",
        lambda: KVCache.load(saved_by(llama()), llama_config(2)),
        lambda: KVCache.load(saved_by(llama()), llama()),
    ),
    Case(
        "check",
        "made by other weights",
        lambda: KVCache.load(saved_by(llama()), llama(seed=1)),
        lambda: KVCache.load(saved_by(llama()), llama()),
    ),
    Case("write", "symbolic link", lambda: held().save(link(saved())), lambda: held().save(saved())),
    Case(
        "write",
        "cannot hold",
        lambda: snapshot.write(folder() / "a", {"x": torch.ones(1, dtype=torch.complex64)}, {}),
        lambda: snapshot.write(folder() / "a", {"x": torch.ones(1)}, {}),
    ),
    Case("_pack", "cannot hold", lambda: snapshot._pack(object(), "x", {}), lambda: snapshot._pack(1.5, "x", {})),
    Case(
        "check",
        "another model",
        lambda: load(saved(), llama_config(2, vocab_size=98)),
        lambda: load(saved(), llama_config(2)),
    ),
    Case(
        "check_spec",
        "holds a cache of spec",
        lambda: snapshot.check_spec(snapshot.read(saved()), "int8"),
        lambda: snapshot.check_spec(snapshot.read(saved()), "full+cpu"),
    ),
    Case(
        "restore",
        "the model has",
        lambda: snapshot.restore(of("full", llama_config(3)), snapshot.read(saved())),
        lambda: snapshot.restore(of("full"), snapshot.read(saved())),
    ),
    Case(
        "as_ids",
        "token_ids of shape",
        lambda: held().save(folder() / "a", token_ids=[1, 2]),
        lambda: held().save(folder() / "a", token_ids=[1, 2, 3, 4, 5, 6]),
    ),
    Case("_usable", "was saved from", lambda: snapshot._usable("cuda:77"), lambda: snapshot._usable("cpu")),
    Case(
        "_unpack",
        "unknown dtype",
        lambda: snapshot._unpack({"dtype": "float3"}, {}, None),
        lambda: snapshot._unpack({"dtype": "float32"}, {}, None),
    ),
    # positions, attention
    Case(
        "rotary", "M-RoPE", lambda: of("expected", mrope()), lambda: (of("snapkv", mrope()), of("sink(1,4)", mrope()))
    ),
    Case("find_rope", "leave out", lambda: of("sink(1,4,reposition)", mrope()), lambda: of("sink(1,4)", mrope())),
    Case(
        "rotary",
        "no rotary",
        lambda: of("sink(1,4,reposition)", GPT2Config(n_layer=1)),
        lambda: of("sink(1,4)", GPT2Config(n_layer=1)),
    ),
    Case(
        "_known",
        "unknown option",
        lambda: QuantizedCache(llama_config(2), "int8", retentoin="all"),
        lambda: QuantizedCache(llama_config(2), "int8", retention="all"),
    ),
    Case(
        "WindowLayer.check_crop",
        "a sliding layer",
        lambda: windowed().rollback(1),
        lambda: windowed(record=True).rollback(1),
    ),
    Case("PaddedLayer.update", "start at different", lambda: padded_then("sdpa"), lambda: padded_then("kvcache")),
    Case(
        "PaddedLayer.update", "no gradients", lambda: padded_then("kvcache", grad=True), lambda: padded_then("kvcache")
    ),
    Case(
        "PaddedLayer.check_crop",
        "exact are up to",
        lambda: padded_then("kvcache").rollback(9),
        lambda: padded_then("kvcache", "int8").rollback(2),
    ),
    Case(
        "PrefixStore._resolve",
        "another process",
        lambda: second_store().match(IDS),
        lambda: second_store().match(IDS, llama_config(2)),
    ),
    Case("restore", "is not as", lambda: load(edited("kind", "knd")), lambda: load(saved())),
    Case("restore", "layer …: …$", lambda: load(edited("KVLayer", "XVLayer")), lambda: load(saved())),
    Case(
        "Rope.__init__",
        "depends on the length",
        lambda: of("sink(1,4,reposition)", yarn("dynamic")),
        lambda: of("sink(1,4)", yarn("dynamic")),
    ),
    Case("KVCache._update", "already holds", lambda: generated_twice(), lambda: generated_twice(back=1)),
    Case(
        "View.look",
        "already holds",
        lambda: fed_twice("full", positions=False),
        lambda: fed_twice("full", back=1, positions=False),
    ),
    Case(
        "kvcache_mask",
        "already holds",
        lambda: fed_twice("full", "kvcache", positions=False),
        lambda: fed_twice("full", "kvcache", back=1),
    ),
    Case(
        "History._plain",
        "turns queries",
        lambda: dropped_out("sink(1,4,reposition)"),
        lambda: (dropped_out("sink(1,4)"), dropped_out("sink(1,4,reposition)", train=False)),
    ),
    Case(
        "_attend",
        "dropout beside",
        lambda: attended("full", dropout=0.5, softcap=3.0),
        lambda: attended("full", softcap=3.0),
    ),
    Case(
        "_attend",
        "gradients through a residual",
        lambda: attended("int4(group=2,residual=1,sinks=0)", grad=True, softcap=3.0),
        lambda: (
            attended("int4(group=2,residual=1,sinks=0)", softcap=3.0),
            [attended(x, grad=True, softcap=3.0) for x in ("full", "int8", "fp8")],
        ),
    ),
    Case(
        "_attend",
        "does not know",
        lambda: attended("full", slopes=torch.ones(4)),
        lambda: attended("full"),
    ),
    Case(
        "Visible.by_depth",
        "branch",
        lambda: drafted("sink(1,2)"),
        lambda: (drafted("full"), drafted("sink(1,2)", known=True), drafted("sink(1,2)", branch=False)),
    ),
    Case(
        "check_width",
        "columns",
        lambda: masked_by(8, "int8"),
        lambda: (masked_by(9, "int8"), masked_by(9, "sink(2,6)")),
    ),
    Case(
        "_attend",
        "columns for",
        lambda: masked_by(9, "full", MistralConfig(**SMALL, sliding_window=4)),
        lambda: masked_by(9, "full", MistralConfig(**SMALL, sliding_window=4), flat=True),
    ),
    Case(
        "KVCache.get_mask_sizes", "no token left", lambda: generated_anew(), lambda: [generated_anew(x) for x in WAYS]
    ),
    # families, identity, forwards that died
    Case("stock_layers", "has no cache in this", lambda: KVCache(of_type("strange")), lambda: DynamicCache()),
    Case("stock_layers", "has no layers", lambda: KVCache(PreTrainedConfig()), lambda: KVCache(llama_config(1))),
    Case("trust", "give the model_type", lambda: trust(""), lambda: trusting("strange")),
    Case("trust", "was tried", lambda: trust("gpt_neo"), lambda: [of(x, NEO) for x in ("full", "int8", "fp8")]),
    Case(
        "refuse",
        "hands nothing",
        lambda: KVCache(XLNetConfig(n_layer=1, d_model=16, n_head=2, d_inner=16)),
        lambda: KVCache(llama_config(1)),
    ),
    Case(
        "refuse",
        "this family",
        lambda: of("sink(1,4)", NEO),
        lambda: [of(x, NEO) for x in ("full", "int8", "fp8")],
    ),
    Case(
        "refuse",
        "never tried",
        lambda: of("sink(1,4)", Strange()),
        lambda: (trusting("strange"), [of(x, Strange()) for x in ("full", "int8", "fp8")]),
    ),
    Case(
        "of",
        "models of different weights",
        lambda: of_two().save(folder() / "a"),
        lambda: save_of_two(),
    ),
    Case("check_unchanged", "were changed", lambda: trained(), lambda: (trained("before"), trained("again"))),
    Case(
        "KVCache._whose",
        "made for another config",
        lambda: held().save(folder() / "a", model=llama(layers=1)),
        lambda: fed(llama()).save(folder() / "a", model=llama()),
    ),
    Case(
        "KVCache._raise_if_uneven",
        "rollback",
        lambda: updated(died(), ONES),
        lambda: updated_all(cropped_to(died(), -3), 3),
    ),
    Case(
        "KVCache._raise_if_uneven",
        "reset",
        lambda: updated(updated(of("full"), ONES), ONES),
        lambda: updated_all(again(updated(of("full"), ONES)), 3),
    ),
    Case(
        "KVCache.check_crop",
        "at least the",
        lambda: died().crop(-1),
        lambda: (cropped(died(), -3), cropped(died(), -4)),
    ),
    Case(
        "KVCache.check_crop",
        "^crop…: …: reset".replace("crop…", r"crop\(…\)"),
        lambda: torn().crop(-1),
        lambda: updated_all(again(torn()), 3),
    ),
    Case(
        "KVCache._check_layer",
        "reset",
        lambda: died("int4(group=2,residual=1,sinks=0)").crop(-4),
        lambda: updated_all(again(died("int4(group=2,residual=1,sinks=0)")), 3),
    ),
    # states from elsewhere
    Case(
        "KVCache._check_states",
        "needs keys and values",
        lambda: given(llama_config(2), (None, None)),
        lambda: given(llama_config(2), (ONES, ONES)),
    ),
    Case(
        "KVCache._check_states",
        "states do not bring",
        lambda: given(config_of("kvcache"), (ONES, ONES), spec="snapkv"),
        lambda: [given(config_of("kvcache"), (ONES, ONES), spec=x) for x in ("knorm", "keydiff", "random")],
    ),
    Case(
        "KVCache._check_states",
        "pass as many",
        lambda: KVCache.from_states(llama_config(2), [(ONES, ONES), (ONES[:, :, :2], ONES[:, :, :2])]),
        lambda: given(llama_config(2), (ONES, ONES)),
    ),
    Case(
        "KVCache._check_states",
        "not an integer >=",
        lambda: given(llama_config(2), (ONES, ONES), tokens_seen=2),
        lambda: given(llama_config(2), (ONES, ONES), tokens_seen=3),
    ),
    Case(
        "KVCache._check_states",
        "needs the position",
        lambda: given(llama_config(2), (ONES, ONES), tokens_seen=9, spec="knorm"),
        lambda: [given(llama_config(2), (ONES, ONES), tokens_seen=9, spec=x) for x in ("full", "sink(1,4)")],
    ),
    # prefix
    Case("PrefixStore.flush", "no directory", lambda: stored().flush(), lambda: PrefixStore(1 << 20, folder()).flush()),
    Case(
        "private_directory", "symbolic link", lambda: PrefixStore(1, link(folder())), lambda: PrefixStore(1, folder())
    ),
    Case(
        "private_directory",
        "written to by others",
        lambda: PrefixStore(1, folder(0o777)),
        lambda: PrefixStore(1, folder(0o700)),
    ),
    Case(
        "store_spec",
        "pass spec=",
        lambda: generate_with_prefix(llama(), mixed(), input_ids=IDS, max_new_tokens=1),
        lambda: generate_with_prefix(llama(), mixed(), input_ids=IDS, spec="int8", max_new_tokens=1),
    ),
    Case("PrefixStore.__init__", "number of bytes", lambda: PrefixStore(0), lambda: PrefixStore(1)),
    Case(
        "PrefixStore.__init__",
        "limits a folder",
        lambda: PrefixStore(1, disk_bytes=1),
        lambda: (PrefixStore(1), PrefixStore(1, folder(), disk_bytes=1)),
    ),
    Case("PrefixStore._keep", "token ids for", lambda: PrefixStore(1 << 20).put([1, 2], held()), lambda: stored()),
    Case(
        "PrefixStore._resolve",
        "pass config= and spec=",
        lambda: stored("full", "int8").match([1, 2, 3]),
        lambda: stored("full", "int8").match([1, 2, 3], llama_config(2), spec="int8"),
    ),
    Case(
        "rewind",
        "cached ids for",
        lambda: rewind(held(), [1, 2], [1, 2, 3]),
        lambda: rewind(held(), [1, 2, 3, 4, 5, 6], [1, 2, 3]),
    ),
    Case("row", "give one row", lambda: stored().match(IDS.repeat(2, 1)), lambda: stored().match(IDS)),
    Case(
        "check_cache",
        "cannot be reused: make",
        lambda: stored().put(IDS, DynamicCache()),
        lambda: stored().put(IDS, held()),
    ),
    Case(
        "check_cache",
        "batch_select_indices",
        lambda: stored().put(IDS, held(batch=2)),
        lambda: stored().put(IDS, first_row()),
    ),
    Case("texts", "not a string", lambda: stored().match(IDS, namespace=3), lambda: stored().match(IDS, namespace="3")),
    Case(
        "_checked_inputs",
        "one row",
        lambda: generate_with_prefix(llama(), stored(), input_ids=IDS.repeat(2, 1)),
        lambda: generated(),
    ),
    Case(
        "_checked_inputs",
        "hides tokens",
        lambda: generated(attention_mask=torch.zeros_like(IDS)),
        lambda: generated(attention_mask=torch.ones_like(IDS)),
    ),
    Case(
        "_checked_inputs",
        "encoder-decoder",
        lambda: generate_with_prefix(t5(), stored(), input_ids=IDS),
        lambda: t5().generate(IDS, max_new_tokens=1),
    ),
    Case("_checked_inputs", "does not take …: use", lambda: generated(pixel_values=ONES), lambda: generated()),
]


def folder(mode: int = 0o700) -> Path:
    path = Path(tempfile.mkdtemp())
    path.chmod(mode)
    return path


def link(path: Path) -> Path:
    new = folder() / "link"
    new.symlink_to(path)
    return new


def on_disk(path: Path) -> KVCache:
    return OffloadedCache(llama_config(1), directory=path)


def without_flock() -> None:
    with mock.patch.dict(sys.modules, {"fcntl": None}):
        disk._flock(0)


def saved(damage: Callable[[bytes], bytes] = lambda data: data) -> Path:
    path = folder() / "cache"
    held().save(path)
    path.write_bytes(damage(path.read_bytes()))
    return path


def load(path: Path, config: Any = None) -> KVCache:
    cache = KVCache.load(path, config or llama_config(2))
    assert cache.get_seq_length() == 6
    return cache


def of_version(version: str) -> Path:
    path = folder() / "cache"
    with mock.patch.object(snapshot, "VERSION", version):
        held().save(path)
    return path


def edited(old: str, new: str) -> Path:
    """A file of something else, sound in itself."""
    path, real = folder() / "cache", snapshot.json.dumps
    with mock.patch.object(snapshot.json, "dumps", lambda value, **options: real(value, **options).replace(old, new)):
        held().save(path)
    return path


def mrope() -> Any:
    rope = dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2])
    small = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, vocab_size=97)
    return Qwen2VLConfig(text_config=dict(**small, rope_parameters=rope)).get_text_config()


def windowed(record: bool = False) -> KVCache:
    small = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, vocab_size=97)
    cache = of("full", MistralConfig(sliding_window=4, **small))
    if record:
        cache.activate_past_recording()
    for _ in range(6):
        cache.update(*states(1, 1), 0)
    return cache


def padded_then(attention: str, name: str = "int4(group=2,residual=1)", grad: bool = False) -> KVCache:
    """A padded prompt under "kvcache", and one more token under another attention."""
    model = build(llama_config(2), "kvcache")
    cache, mask = of(name, model.config), torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0
    feed(model, prompt(9, batch=2), cache, attention_mask=mask[:, :9])
    model.set_attn_implementation(attention)
    with torch.set_grad_enabled(grad):
        model(prompt(1, batch=2), past_key_values=cache, attention_mask=mask)
    return cache


def second_store() -> PrefixStore:
    path = folder()
    first = PrefixStore(1 << 20, path)
    first.put(IDS, held())
    first.flush()
    return PrefixStore(1 << 20, path)


def generated_twice(back: int = 0) -> None:
    """The whole prompt again by ``generate``, or after a rollback."""
    model = llama()
    cache = fed(model)
    cache.rollback(back)
    model.generate(IDS, past_key_values=cache, max_new_tokens=1, do_sample=False)


WAYS = ("together", "rewind", "rollback", "reset")


def generated_anew(way: str = "") -> None:
    """Another, shorter prompt with a cache of six tokens."""
    model = llama()
    cache, new = fed(model), IDS[:, 3:5]
    if way == "rewind":
        rewind(cache, IDS, new)
    elif way:
        cache.rollback(6 if way == "rollback" else 0)
    if way == "reset":
        cache.reset()
    model.generate(
        torch.cat([IDS, new], 1) if way == "together" else new, past_key_values=cache, max_new_tokens=2, do_sample=False
    )


def fed(model: Any, name: str = "full") -> KVCache:
    cache = of(name, model.config)
    feed(model, IDS, cache)
    return cache


def saved_by(model: Any, named: Any = None) -> Path:
    path = folder() / "cache"
    fed(model).save(path, model=named)
    return path


def rewritten(**metadata: Any) -> Path:
    """A file that says something else of itself, sound in itself."""
    path, read = folder() / "cache", snapshot.read(saved())
    snapshot.write(path, read.tensors, {**read.metadata, **metadata})
    return path


def trained(when: str = "after") -> None:
    """A cache is saved after its model was trained; before that; or when it was fed again."""
    model = build(llama_config(1))
    identity.of(model.config)  # from here on the model is known
    cache = fed(model)
    if when == "before":
        cache.save(folder() / "a")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(1)
    if when == "again":
        cache.reset()
        feed(model, IDS, cache)
    if when != "before":
        cache.save(folder() / "a")


TWO: list[Any] = []


def of_two() -> KVCache:
    """A cache of a config that two models hold."""
    if not TWO:
        config = llama_config(1)
        TWO.extend(LlamaForCausalLM(config) for _ in range(2))
    return fed(TWO[0].eval())


def save_of_two() -> None:
    of_two().save(folder() / "a", model=TWO[0])


class Strange(LlamaConfig):
    model_type = "strange"


def trusting(name: str) -> None:
    with mock.patch.object(families, "_trusted", set()):
        trust(name)
        of("sink(1,4)", Strange())


def of_type(layers: str) -> Any:
    config = llama_config(2)
    config.layer_types = [layers] * 2
    return config


def config_of(attention: str, layers: int = 2) -> Any:
    config = llama_config(layers)
    config._attn_implementation = attention
    return config


def given(config: Any, pair: Any, **options: Any) -> KVCache:
    return KVCache.from_states(config, [pair] * config.num_hidden_layers, **options)


def beginning() -> KVCache:
    return given(llama_config(2), (ONES, ONES), tokens_seen=9)


def updated_all(cache: KVCache, tokens: int) -> KVCache:
    for layer in range(len(cache)):
        cache.update(*states(tokens, 1), layer)
    return cache


def cropped_to(cache: KVCache, tokens: int) -> KVCache:
    cache.crop(tokens)
    return cache


def again(cache: KVCache) -> KVCache:
    cache.reset()
    return cache


def twice(cache: KVCache) -> KVCache:
    cache.batch_repeat_interleave(2)
    return cache


def recording(name: str, tokens: int) -> KVCache:
    cache = of(name)
    cache.activate_past_recording()
    return updated_all(cache, tokens)


def died(name: str = "full") -> KVCache:
    """A forward of 3 more tokens reached the first layer only."""
    return updated(held(name), ONES)


def torn() -> KVCache:
    cache = held()
    cache.layers[1].torn = True  # a hard stop in the middle of a write
    return cache


def touched(name: str) -> None:
    """A model that does something with its keys before attention sees them."""
    keys, _ = on("kvcache", name).update(ONES, ONES, 0)
    assert torch.equal(keys[:, :1], ONES[:, :1])


def attended(name: str, grad: bool = False, **options: Any) -> None:
    keys, values = states(9, 1)
    with torch.set_grad_enabled(grad):
        stored = on("kvcache", name).update(keys.requires_grad_(grad), values.requires_grad_(grad), 0)
        model = llama("kvcache").model.layers[0].self_attn
        kvcache_attention(model, torch.randn(1, 4, 9, 8), *stored, None, **options)


def fed_twice(name: str, attention: str = "sdpa", back: int = 0, positions: bool = True) -> None:
    """The whole prompt again, or after a rollback its last token, as ``generate`` feeds it."""
    model = llama(attention)
    cache = of(name, model.config)
    feed(model, IDS, cache)
    cache.rollback(back)
    new = IDS[:, -back:] if back else IDS
    at = torch.arange(6)[None, 6 - new.shape[1] :]
    model(
        new, past_key_values=cache, attention_mask=torch.ones_like(IDS), **({"position_ids": at} if positions else {})
    )


def dropped_out(name: str, train: bool = True) -> None:
    model = build(llama_config(1, attention_dropout=0.5), "kvcache").train(train)
    feed(model, prompt(9), of(name, model.config))


def drafted(name: str, known: bool = False, branch: bool = True) -> None:
    """Two drafts after six tokens, side by side or one after the other, and a third after the first."""
    cache, mask = given(config_of("sdpa", 1), states(6, 1), spec=name), torch.ones(1, 1, 3, 9).tril(6).bool()
    mask[..., 1, 6] = not branch
    extra = dict(kwargs={"position_ids": torch.tensor([[6, 6, 7]])}) if known else {}
    keys, values = cache.update(ONES, ONES, 0, **extra)
    torch.nn.functional.scaled_dot_product_attention(ONES, keys, values, attn_mask=mask)


def masked_by(columns: int, name: str, config: Any = None, flat: bool = False) -> None:
    """Three more tokens after six, under a mask of so many columns."""
    model = build(config or llama_config(2), "kvcache")
    cache, mask = of(name, model.config), torch.ones(1, 1, 3, columns, dtype=torch.bool)
    feed(model, IDS, cache)
    feed(model, IDS[:, :3], cache, attention_mask=mask[:, 0, 0].long() if flat else mask)


def late_mask(hides: bool) -> Any:
    """Attention that comes after somebody asked what the layer holds, so that its tokens are stored, pads and all."""
    cache = on("kvcache", "sink(1,8)")
    handles = cache.update(*states(6, 2), 0)
    assert cache.layers[0].keys.shape[2] == 6  # type: ignore[attr-defined]
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    mask[1, ..., 0] = not hides
    return kvcache_attention(torch.nn.Identity(), torch.ones(2, 2, 6, 8), *handles, mask)


def padded_rows(name: str, attention: str, more: int = 0) -> None:
    model, mask = llama(attention), torch.ones(2, 9 + more, dtype=torch.long)
    mask[0, :3] = 0
    cache = of(name, model.config)
    feed(model, prompt(9, batch=2), cache, attention_mask=mask[:, :9])
    if more:
        feed(model, prompt(more, batch=2), cache, attention_mask=mask)


def feed_rows(name: str, attention: str) -> None:
    """Rows of equal length."""
    model = llama(attention)
    feed(model, prompt(14, batch=2), of(name, model.config), chunk=7)


def mixed() -> PrefixStore:
    store, config = PrefixStore(1 << 20), llama().config
    for name in ("full", "int8"):
        cache = of(name, config)
        feed(llama(), IDS, cache)
        store.put(IDS, cache)
    return store


def knorm() -> KVCache:
    cache = on("kvcache", "knorm(budget=4,sinks=1,recent=2)")
    for layer in range(2):
        updated(cache, torch.randn(1, 2, 6, 8), layer=layer)
        cache.layers[layer].settle(None, None, None)
    return cache


def yarn(kind: str) -> Any:
    return llama_config(2, rope_parameters=dict(rope_type=kind, factor=2.0, rope_theta=1e4))


def without_grad(name: str) -> None:
    with torch.no_grad():
        updated(on("kvcache", name), ONES.clone().requires_grad_())


def repeated() -> None:
    """The three ways out: reset, more rows, fewer rows."""
    cache = held(batch=2)
    cache.reset()
    updated(cache, ONES)
    cache = held()
    cache.batch_repeat_interleave(2)
    updated(cache, ONES.repeat(2, 1, 1, 1))
    updated(first_row(), ONES)


def first_row() -> KVCache:
    cache = held(batch=2)
    cache.batch_select_indices(torch.tensor([0]))
    return cache


def feed_t5(whole: bool = True) -> None:
    from transformers import EncoderDecoderCache

    model = t5()
    cache = KVCache(model.config)
    both = EncoderDecoderCache(cache, DynamicCache(config=model.config)) if whole else cache
    model(IDS, decoder_input_ids=IDS, past_key_values=both, use_cache=True)


def scored(step: int = 1, context: tuple[int, ...] = (1, 2)) -> Any:
    model = llama()
    return likelihood.score(model, [likelihood.Request(context, (3, 4))], lambda: of("full", model.config), step=step)


def generated(**inputs: Any) -> Any:
    model = llama()
    return generate_with_prefix(
        model, PrefixStore(1 << 20, spec="full"), input_ids=IDS, max_new_tokens=1, do_sample=False, **inputs
    )


# Sites whose input takes more than a line: the test that raises it.
ELSEWHERE = {
    ("layers", "KVLayer._store_again"): "test_masks.py::test_a_pad_that_comes_alone_when_tokens_are_gone_is_refused",
    ("lm_eval_model", "KVCacheLM.__init__"): "test_lm_eval.py::test_what_is_refused",
    ("lm_eval_model", "KVCacheLM._fitted"): "test_lm_eval.py::test_what_is_refused",
    ("lm_eval_model", "model_args"): "test_lm_eval.py::test_commas_in_brackets_do_not_separate",
    ("shapes", "outline"): "test_planner.py::test_refused_in_one_line",
    ("shapes", "_trace"): "test_planner.py::test_refused_in_one_line",
    ("prefix", "private_directory"): "test_prefix.py::test_folders_that_are_not_safe_are_refused",
    ("snapshot", "_load_slab"): "test_snapshot.py::test_tensors_that_do_not_fit_are_refused",
    ("prefix", "PrefixStore._read"): "test_prefix.py::test_a_file_that_another_process_replaced_is_not_served",
    ("masked", "MaskedStates._carry"): (
        "test_callers.py::test_a_model_that_decodes_its_keys_is_not_told_to_feed_them_one_by_one"
    ),
    ("masked", "View.look"): (
        "test_families.py::test_latents_take_no_mask_that_is_more_than_causal_once_tokens_are_evicted"
    ),
    ("compat", "rotary"): "test_eviction.py::test_normalisation_after_rotation_is_refused",
    ("snapshot", "_load_layer"): "test_snapshot.py::test_tensors_that_do_not_fit_are_refused",
    ("snapshot", "read"): "test_snapshot.py::test_a_file_that_shrinks_while_it_is_read",
    ("caches", "KVCache._numbers"): "test_callers.py::test_ends_and_numbers_on_a_model_with_recurrent_layers",
    (
        "caches",
        "KVCache._make_layer",
    ): "test_callers.py::test_layers_of_attention_and_recurrent_state_are_refused_as_that",
    ("caches", "KVCache._check_batch"): "test_callers.py::test_another_batch_is_refused_before_anything_changes",
    ("caches", "KVCache._check_states"): "test_callers.py::test_a_position_that_cannot_be_is_refused",
    ("caches", "KVCache.check_crop"): "test_rollback.py::test_a_recurrent_state_is_named_and_nothing_changes",
    ("caches", "_refuse_backward"): "test_callers.py::test_gradients_into_stored_tokens_are_refused_not_dropped",
}

# Sites that nobody has put to the test here yet: their rows in the table are all that is checked.
LATER = {
    ("rope", "Rope.__init__"),
}


def table() -> list[str]:
    """The messages in docs/errors.md."""
    rows = re.findall(r"^\| `(.+?)` \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    assert len(rows) > 100
    return rows


def test_every_error_is_in_the_table():
    rows = table()
    own = [site for site in SITES if (site.module, site.function) not in PASSED_ON]
    missing = [f"{s.module}.{s.function}: {s.words}" for s in own if not any(fits(row, s.words) for row in rows)]
    assert not missing, "no row in docs/errors.md for\n" + "\n".join(missing)


def test_the_table_has_no_error_that_is_gone():
    warnings_from = table().index(next(row for row in table() if "changes nothing" in row))
    gone = [row for row in table()[:warnings_from] if not any(fits(row, site.words) for site in SITES)]
    assert not gone


def test_every_error_has_a_case():
    covered = {case.site for case in CASES}
    missing = [s for s in SITES if s not in covered and (s.module, s.function) not in {*ELSEWHERE, *LATER}]
    assert not missing, "no case for\n" + "\n".join(f"{s.module} {s.function}: {s.words}" for s in missing)


@pytest.mark.parametrize("place", sorted(set(ELSEWHERE.values())))
def test_the_tests_elsewhere_are_there(place):
    file, name = place.split("::")
    assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text()


def test_what_is_left_out_exists():
    assert {*ELSEWHERE, *LATER} <= {(site.module, site.function) for site in SITES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.function}-{case.words}"[:60])
def test_the_error_is_raised_and_its_way_out_works(case, recwarn):
    if case.function == "KVCache._update" and case.words == "already holds" and not compat_gives_positions(llama()):
        pytest.skip("this transformers hands no positions to its caches: the mask tells (View.look)")
    with pytest.raises(ValueError) as caught:
        case.wrong()
    message = str(caught.value)
    words = f"…{case.site.words}…" if case.site.module in INSIDE else case.site.words
    assert fits(words, message), (words, message)
    assert "\n" not in message and message[-1] not in ".!"
    case.right()
