"""B11: every Python block of README, CONTRIBUTING and docs runs on a tiny model; every command in them exists."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from models import build, llama_config, prompt

import eval.__main__
import hf_kvcache.__main__
from hf_kvcache.codecs import CODECS
from hf_kvcache.policies import POLICIES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def registries():
    """What a page registers is gone afterwards."""
    before = [(registry, dict(registry)) for registry in (CODECS, POLICIES)]
    yield
    for registry, held in before:
        registry.clear()
        registry.update(held)


@every_page
def test_b11_every_code_block_runs(page, registries):
    """A block that cannot run is marked, with the reason: ```python no-run: it downloads 16 GB."""
    fences = FENCE.findall(page.read_text())
    for language, _ in fences:
        assert language in ("", "python", "yaml", "json") or re.fullmatch(r"python no-run: .{10,}", language), language
    blocks = [block for language, block in fences if language == "python"]
    assert blocks or page.name != "README.md"
    names = {"model": build(llama_config()), "inputs": {"input_ids": prompt(5)}}
    for block in blocks:
        exec(block, names)
    if any("generate(**inputs" in block for block in blocks):
        assert names["cache"].get_seq_length() == 5 + 20 - 1


# ---- commands ----------------------------------------------------------------------------------------------

COMMAND = re.compile(r"(?:python -m |python scripts/|make |accelerate launch |pip install ).*")


def commands(text: str) -> list[str]:
    """Command lines in blocks without a language and in inline code."""
    fenced = [block for language, block in FENCE.findall(text) if not language]
    lines = [line for block in fenced for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    return [line.strip() for line in [*lines, *inline] if COMMAND.match(line.strip())]


def check(command: str) -> None:
    """Parse one command with its own parser; an unknown one, or an unknown option of it, raises."""
    words = shlex.split(command, comments=True)
    if words[:2] == ["python", "-m"]:
        check_module(words[2], words[3:])
    elif words[0] == "python":
        source = (ROOT / words[1]).read_text()
        unknown = [word for word in words[2:] if word.startswith("--") and f'"{word}"' not in source]
        assert not unknown, f"{words[1]} has no {unknown}"
    elif words[0] == "make":
        known = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        variables = re.findall(r"^([A-Z]+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE)
        for word in words[1:]:
            assert word in known or word.partition("=")[0] in variables, f"make has no {word}"
    elif words[0] == "accelerate":
        from accelerate.commands.launch import launch_command_parser

        parsed = launch_command_parser().parse_args(words[2:])
        assert parsed.module
        check_module(parsed.training_script, parsed.training_script_args)
    else:
        extras = re.findall(r"^([a-z]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        for word in words[2:]:
            name, _, inside = word.rstrip("]").partition("[")
            assert name != "hf-kvcache" or set(filter(None, inside.split(","))) <= set(extras), word


def check_module(module: str, arguments: list[str]) -> None:
    parsers = {"eval": eval.__main__.parser, "hf_kvcache": hf_kvcache.__main__.parser}
    if module in parsers:
        parsers[module]().parse_args(arguments)
    else:
        assert importlib.util.find_spec(module), f"there is no module {module}"


@every_page
def test_every_command_exists(page):
    for command in commands(page.read_text()):
        try:
            check(command)
        except SystemExit:
            pytest.fail(f"{page.name}: {command}")


@pytest.mark.parametrize(
    "command",
    [
        "python -m eval qualitty",
        "python -m eval quality --spec int8 --token 3 --no-such",
        "python -m hf_kvcache plan --contexts 3 --model x",
        "python -m hf_kvcache.nothing",
        "python scripts/nothing.py",
        "python scripts/compare.py --no-such",
        "make nothing",
        "make test NOTHING=1",
        "accelerate launch --no-such 2 -m eval run --config FILE",
        "accelerate launch --num_processes 2 -m eval run --no-such",
        "pip install 'hf-kvcache[nothing]'",
    ],
)
def test_a_command_that_does_not_exist_is_found(command):
    assert commands(f"Say `{command}`.") == [command] == commands(f"```\n{command}\n```")
    with pytest.raises((SystemExit, AssertionError, OSError, ImportError)):
        check(command)


def test_the_pages_have_commands():
    assert len([command for page in PAGES for command in commands(page.read_text())]) > 30


def test_every_page_can_be_found():
    """From the README, and every relative link leads somewhere."""
    readme = (ROOT / "README.md").read_text()
    for page in PAGES[1:]:
        assert str(page.relative_to(ROOT)) in readme, page.name
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_specs_of_the_storages_page_exist():
    from hf_kvcache import KVCache

    text = (ROOT / "docs" / "storages.md").read_text()
    for spec in re.findall(r'from_spec\(config, "([^"]+)"\)|"(int4\([^"]*\))"', text):
        KVCache.from_spec(llama_config(), next(filter(None, spec)))


def test_eval_without_a_command_lists_all(capsys):
    eval.__main__.main([])
    printed = capsys.readouterr().out
    assert all(f"    {name} " in printed for name in eval.__main__.COMMANDS)
