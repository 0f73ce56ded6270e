"""B11: every Python block of README and docs runs, on a tiny model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from models import build, llama_config, prompt

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_b11_every_code_block_runs(page):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks or page.name != "README.md"
    names = {"model": build(llama_config()), "inputs": {"input_ids": prompt(5)}}
    for block in blocks:
        exec(block, names)
    if blocks:
        assert names["cache"].get_seq_length() == 5 + 20 - 1


def test_the_specs_of_the_storages_page_exist():
    from hf_kvcache import KVCache

    text = (ROOT / "docs" / "storages.md").read_text()
    for spec in re.findall(r'from_spec\(config, "([^"]+)"\)|"(int4\([^"]*\))"', text):
        KVCache.from_spec(llama_config(), next(filter(None, spec)))
