"""The deliberate faults of ``scripts/mutations.py`` still fit the source; whether tests catch them, the script says."""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("mutations", TREE / "scripts" / "mutations.py")
mutations = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mutations)


@functools.cache
def functions(file):
    return {node.name for node in ast.parse((TREE / file).read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_fault_applies(mutation):
    changed = mutations.mutated(mutation)
    ast.parse(changed)
    assert changed != (TREE / mutation.file).read_text()
    for test in mutation.node_ids:
        file, _, name = test.partition("::")
        assert name.partition("[")[0] in functions(file), test


def test_faults_have_names_of_their_own():
    assert len({mutation.name for mutation in mutations.MUTATIONS}) == len(mutations.MUTATIONS) >= 24


def test_a_stale_entry_is_an_error(tmp_path):
    gone = mutations.MUTATIONS[0]._replace(old="no such text")
    with pytest.raises(mutations.Stale, match="found 0 times"):
        mutations.mutated(gone)
    (tmp_path / "hf_kvcache").mkdir()
    copy = tmp_path / gone.file
    copy.write_text("twice twice")
    with pytest.raises(mutations.Stale, match="found 2 times"):
        mutations.outcome(gone._replace(old="twice"), tmp_path)
    assert copy.read_text() == "twice twice"
