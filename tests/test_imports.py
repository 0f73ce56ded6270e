"""Modules import one way: what is stored knows nothing of attention, and nothing imports in a circle."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hf_kvcache"
KNOWN = {("layers", "padded")}  # a layer becomes a padded one when it sees a pad
STORED = ("codecs", "lowbit", "part", "store", "slots", "far_slots", "policies", "retention", "rope", "plan")


def imports(package: Path) -> dict[str, set[str]]:
    """The modules of the package that each of its modules imports, anywhere in the file."""
    found: dict[str, set[str]] = {}
    for file in package.glob("*.py"):
        nodes = ast.walk(ast.parse(file.read_text()))
        own = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 1]
        names = {name for node in own for name in ([node.module] if node.module else [a.name for a in node.names])}
        found[file.stem] = {name for name in names if (package / f"{name}.py").exists()}
    return found


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """Every module that an import of ``start`` can bring in."""
    seen: set[str] = set()
    left = [start]
    while left:
        for name in graph[left.pop()] - seen:
            seen.add(name)
            left.append(name)
    return seen


def circles(graph: dict[str, set[str]]) -> list[str]:
    return sorted(name for name in graph if name in reached(graph, name))


def test_nothing_imports_in_a_circle():
    graph = imports(PACKAGE)
    for module, other in KNOWN:
        assert other in graph[module], "it is gone: take it from KNOWN"
        graph[module].discard(other)
    assert circles(graph) == []


@pytest.mark.parametrize("module", STORED)
def test_what_is_stored_knows_nothing_of_attention(module):
    above = {"attention", "cpu_decode", "triton_decode", "view", "layers", "padded", "eviction", "caches"}
    assert not reached(imports(PACKAGE), module) & above


def test_a_circle_is_found(tmp_path):
    for name, text in (("a", "from .b import x"), ("b", "def f():\n    from . import c"), ("c", "from .a import x")):
        (tmp_path / f"{name}.py").write_text(text)
    assert circles(imports(tmp_path)) == ["a", "b", "c"]
    (tmp_path / "c.py").write_text("import torch")
    assert circles(imports(tmp_path)) == [] and reached(imports(tmp_path), "a") == {"b", "c"}
