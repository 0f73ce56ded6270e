"""A pytest plugin for transformers' own tests: ``KVCache`` wherever they, or what they test, make a ``DynamicCache``.

Loaded by ``scripts/peer_tests.py``, which sets

    PEER_SPEC        the cache, such as "int8+sink(4,1000)"; empty: stock
    PEER_ATTENTION   "kvcache": what a model gets that asks for no attention of its own; else stock
    PEER_TESTS       a JSON list of the tests to run, or null: all
    PEER_TREE        the checkout that the tests come from; empty: an sdist
    PEER_OUT         where to append one JSON line per test: of "test", "outcome", "error", "caches"

Only this process is changed, and nothing of the package. ``caches`` counts the caches that the test made, or had made:
in a stock run ``DynamicCache``, otherwise those that we put in its place.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import zlib
from collections.abc import Generator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

import hf_kvcache
from hf_kvcache import KVCache

STOCK = DynamicCache


OUT_OF_SCOPE = ("fsdp", "tensor_parallel", "expert_parallel", "training", "pipeline")  # mixins of the common tests
EMPTY = ("tests.exporters", *(f"tests.test_{name}_mixin" for name in OUT_OF_SCOPE))


class Empty(MetaPathFinder, Loader):
    """Modules whose classes are all empty, so that who inherits from them has less tests.

    What shards, exports and trains has no part in this, and needs more than this process; and an sdist has no more
    than the common tests.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        known = name in self.names or name.startswith(tuple(f"{parent}." for parent in self.names))
        return ModuleSpec(name, self, is_package=True) if known else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = self.empty  # type: ignore[method-assign]

    @staticmethod
    def empty(name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def helpers_of(tree: Path) -> None:
    """Names that the tests of another version import from ``transformers.testing_utils`` and that are gone from it."""
    sys.modules.setdefault("httpx", importlib.import_module("httpx2" if find_spec("httpx") is None else "httpx"))
    installed = importlib.import_module("transformers.testing_utils")
    spec = spec_from_file_location("transformers.peer_testing_utils", tree / "src/transformers/testing_utils.py")
    assert spec is not None and spec.loader is not None
    other = module_from_spec(spec)
    spec.loader.exec_module(other)
    for name, value in vars(other).items():
        if not hasattr(installed, name):
            setattr(installed, name, value)


made = 0


class InPlace(type):
    """``DynamicCache`` for whoever asks ``isinstance``; a call makes ours."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (STOCK, KVCache))

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, (STOCK, KVCache))

    def __call__(cls, *args: Any, **options: Any) -> Any:
        global made
        config = options.get("config")
        if args or config is None or set(options) - {"config"}:
            return STOCK(*args, **options)  # offloaded, or without a config, which ours needs
        made += 1
        return make(config)


class Replacement(metaclass=InPlace):
    pass


def make(config: Any) -> Any:
    return KVCache.from_spec(config, os.environ["PEER_SPEC"])


def count_stock() -> None:
    init = STOCK.__init__

    def counted(self: Any, *args: Any, **options: Any) -> None:
        global made
        made += "config" in options and set(options) == {"config"} and not args
        init(self, *args, **options)

    STOCK.__init__ = counted  # type: ignore[method-assign]


def keep_cross_attention() -> None:
    """What an encoder said is read whole at every step and never grows: it stays in a ``DynamicCache``."""
    init = EncoderDecoderCache.__init__

    def split(self: Any, *caches: Any) -> None:
        if len(caches) == 2 and isinstance(caches[1], KVCache):
            caches = (caches[0], STOCK())
        init(self, *caches)

    EncoderDecoderCache.__init__ = split  # type: ignore[method-assign]


def replace() -> None:
    """In every module of models, of generation and of the tests: some are imported by a test only."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("transformers.models.", "transformers.generation.", "tests.")):
            if vars(module).get("DynamicCache") is STOCK:
                module.DynamicCache = Replacement  # type: ignore[attr-defined]


def attend(name: str) -> None:
    """The attention of every model that does not ask for one."""
    hf_kvcache.register()
    original = PreTrainedModel.get_correct_attn_implementation

    def ours(self: Any, requested_attention: str | None, is_init_check: bool = False) -> str:
        return original(self, requested_attention or name, is_init_check)

    PreTrainedModel.get_correct_attn_implementation = ours  # type: ignore[method-assign]


def pytest_configure(config: pytest.Config) -> None:
    tree = os.environ["PEER_TREE"]
    sys.meta_path.insert(0, Empty(EMPTY if tree else (*EMPTY, "tests.generation")))
    if tree:
        helpers_of(Path(tree))
    if os.environ["PEER_SPEC"]:
        keep_cross_attention()
    else:
        count_stock()
    if os.environ["PEER_ATTENTION"] == "kvcache":
        attend("kvcache")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What the stock run chose: tests that pass there and make a cache."""
    with open(os.environ["PEER_TESTS"]) as file:
        chosen = json.load(file)
    if chosen is not None:
        chosen = set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]


def seed(name: str) -> None:
    """The same weights and inputs whatever ran before."""
    number = zlib.crc32(name.encode())
    random.seed(number)
    torch.manual_seed(number)
    common = sys.modules.get("tests.test_modeling_common")
    if common is not None:
        common.global_rng.seed(number)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, None, None]:
    global made
    made = 0
    seed(item.nodeid)
    if os.environ["PEER_SPEC"]:
        replace()
    yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    report = (yield).get_result()
    if report.when != "call" and report.outcome == "passed":
        return
    error = ""
    if report.failed and call.excinfo is not None:
        error = f"{call.excinfo.typename}: {(str(call.excinfo.value).strip().splitlines() or [''])[0]}"
    line = dict(test=item.nodeid, outcome=report.outcome, error=error, caches=made)
    with open(os.environ["PEER_OUT"], "a") as out:
        out.write(json.dumps(line) + "\n")
