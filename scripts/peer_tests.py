"""Do transformers' own tests pass with ``KVCache`` where they, or what they test, make a ``DynamicCache``?

    python scripts/peer_tests.py --tree DIR            a checkout of transformers: tests of models and of generation
    python scripts/peer_tests.py                       an sdist, which pip fetches: the common tests of models
    python scripts/peer_tests.py --families llama bart --specs full "sink(4,1000)"

First a stock run: the tests that pass there and make a cache are the ones that count. Then the same tests with each
spec, under "sdpa" (a model's default) and under "kvcache". A test that does not pass, or for which no cache of ours was
made, is a difference. Those in ``scripts/peer_expected.json`` are known, with a reason; any other is a failure, and so
is one that is known and is no more. Needs the extra ``peer``.

An sdist has ``tests/test_modeling_common.py``, and neither ``tests/generation`` nor ``tests/models``: the models of its
run are in ``scripts/peer_models.py``. A checkout may be of another version than the one installed; the common tests are
those of the installed version all the same, from its sdist.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import transformers

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
CACHE = ROOT / "build" / "peer"
EXPECTED = SCRIPTS / "peer_expected.json"
PAGE = ROOT / "docs" / "peers.md"
VERSION = transformers.__version__

FAMILIES = ["llama", "mistral", "gemma2", "gemma3", "qwen3", "qwen3_next", "gpt2", "gpt_neox", "t5", "bart"]
SPECS = ["full", "int8", "int8+cpu", "sink(4,1000)"]
ATTENTIONS = ["sdpa", "kvcache"]


def sdist() -> Path:
    """The unpacked sdist of the installed version; fetched once."""
    folder = CACHE / f"transformers-{VERSION}"
    if not folder.exists():
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "transformers"]
        subprocess.run([*fetch, "--dest", str(CACHE), f"transformers=={VERSION}"], check=True)
        with tarfile.open(CACHE / f"transformers-{VERSION}.tar.gz") as archive, tempfile.TemporaryDirectory() as part:
            members = [member for member in archive if "/tests/" in member.name]
            archive.extractall(part, members, filter="data")
            shutil.move(str(Path(part) / folder.name), CACHE)
    return folder


def version_of(tree: Path) -> str:
    found = re.search(r'^__version__ = "(.+)"', (tree / "src/transformers/__init__.py").read_text(), re.M)
    if found is None:
        raise ValueError(f"{tree} is no checkout of transformers: src/transformers/__init__.py has no __version__")
    return found.group(1)


@dataclass
class Suite:
    """Tests to run in ``folder``, which holds a package ``tests``."""

    folder: Path
    files: list[str]
    family: str  # a pattern that finds the family in the name of a test
    source: str = ""
    tree: Path | None = None
    families: list[str] = field(default_factory=list)
    workers: int = 0
    plugin: str = "peer_plugin"

    def run(self, spec: str, attention: str, chosen: list[str] | None = None) -> dict[str, Result]:
        """Results by test; ``spec`` "" is the stock cache."""
        out, selection = self.folder / "out.jsonl", self.folder / "chosen.json"
        out.write_text("")
        selection.write_text(json.dumps(chosen))
        path = [str(self.folder), str(SCRIPTS), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PEER_SPEC": spec,
            "PEER_ATTENTION": attention,
            "PEER_OUT": str(out),
            "PEER_TESTS": str(selection),
            "PEER_ROOT": str(ROOT),
            "PEER_FAMILIES": " ".join(self.families),
            "PEER_TREE": str(self.tree or ""),
            "PYTHONPATH": os.pathsep.join(path),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", self.plugin, "-p", "no:cacheprovider", "--tb=line"]
        command += ["-m", "not torch_compile_test"]  # minutes, and what they compile is a static cache
        command += ["--disable-warnings", "-o", "addopts=", "--rootdir", ".", "-n", str(self.workers), *self.files]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        if done.returncode not in (0, 1):  # of pytest: passed, or tests failed
            raise RuntimeError(f"pytest: {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        return read(out.read_text().splitlines())


def from_sdist(folder: Path, families: list[str]) -> Suite:
    tests = folder / "tests"
    shutil.copytree(sdist() / "tests", tests)
    (tests / "peer").mkdir()
    for package in (tests, tests / "peer"):
        (package / "__init__.py").touch()
    shutil.copy(SCRIPTS / "peer_models.py", tests / "peer" / "test_models.py")
    source = f"the common tests of models of transformers {VERSION} (its sdist)"
    return Suite(folder, ["tests/peer/test_models.py"], r"::(\w+)_Test::", source, families=families)


def from_tree(folder: Path, families: list[str], tree: Path) -> Suite:
    version, source = version_of(tree), "the tests of models and of generation of transformers "
    files = [f"tests/models/{family}/test_modeling_{family}.py" for family in families]
    for file in ("tests/generation/test_utils.py", *files):
        if not (tree / file).exists():
            raise ValueError(f"{tree} has no {file}: give a checkout of transformers' repository")
    shutil.copytree(tree / "tests", folder / "tests", ignore=shutil.ignore_patterns("fixtures"))
    for name in ("src", "utils"):  # that the tests import from
        (folder / name).symlink_to(tree / name)
    if version != VERSION:
        for common in (sdist() / "tests").glob("*.py"):
            shutil.copy(common, folder / "tests")
        version += f", the common ones those of {VERSION}"
    return Suite(folder, files, r"^tests/models/(\w+)/", source + version, tree, families)


@dataclass
class Result:
    """Of a test and its subtests."""

    outcome: str = "skipped"
    error: str = ""
    caches: int = 0

    def add(self, outcome: str, error: str, caches: int) -> None:
        worst = ("skipped", "passed", "failed")
        self.outcome = max(self.outcome, outcome, key=worst.index)
        self.error = self.error or error
        self.caches = max(self.caches, caches)


def read(lines: Iterable[str]) -> dict[str, Result]:
    results: dict[str, Result] = {}
    for line in lines:
        one = json.loads(line)
        results.setdefault(one["test"], Result()).add(one["outcome"], one["error"], one["caches"])
    return results


def counting(stock: dict[str, Result]) -> list[str]:
    """Tests that a cache can make fail."""
    return [test for test, result in stock.items() if result.outcome == "passed" and result.caches]


def by_family(suite: Suite, tests: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for test in tests:
        match = re.search(suite.family, test)
        assert match is not None, test
        found.setdefault(match.group(1), []).append(test)
    return found


def differences(chosen: list[str], ours: dict[str, Result]) -> dict[str, str]:
    """What went wrong, by test."""
    found = {}
    for test in chosen:
        result = ours.get(test, Result(error="not run"))
        if result.outcome != "passed":
            found[test] = result.error or result.outcome
        elif not result.caches:
            found[test] = "made no cache of ours"
    return found


@dataclass(frozen=True)
class Known:
    """Differences that are as they should be."""

    reason: str
    test: str
    families: tuple[str, ...]
    specs: tuple[str, ...]
    attentions: tuple[str, ...]
    always: bool = True  # False: it passes on one machine and not on another, by the last bit of a sum

    def covers(self, family: str, spec: str, attention: str, test: str) -> bool:
        return (
            family in self.families
            and spec in self.specs
            and attention in self.attentions
            and re.search(self.test, test.partition("::")[2]) is not None
        )


def known() -> list[Known]:
    return [
        Known(
            reason=entry["reason"],
            test=entry["test"],
            families=tuple(entry["families"]),
            specs=tuple(entry["specs"]),
            attentions=tuple(entry.get("attentions", ATTENTIONS)),
            always=entry.get("always", True),
        )
        for entry in json.loads(EXPECTED.read_text())
    ]


Cell = tuple[str, str, str]  # family, spec, attention


def judge(
    ran: dict[Cell, list[str]], found: dict[Cell, dict[str, str]], expected: list[Known]
) -> tuple[list[str], list[str]]:
    """Unexpected differences, and the known ones that are no more."""
    new = [
        f"{' '.join(cell)} {test}: {error}"
        for cell, errors in found.items()
        for test, error in errors.items()
        if not any(entry.covers(*cell, test) for entry in expected)
    ]
    gone = [
        f"{' '.join(cell)}: no test of {entry.test!r} differs any more ({entry.reason})"
        for entry in expected
        for cell, tests in ran.items()
        if entry.always
        and any(entry.covers(*cell, test) for test in tests)
        and not any(entry.covers(*cell, test) for test in found[cell])
    ]
    return new, gone


HEAD = """# transformers' own tests, with our cache

Written by `python scripts/peer_tests.py --tree DIR --write`; do not edit.

These are {source}, run with transformers {version}. Counted are the tests that pass with `DynamicCache` and make one.
Then `KVCache` takes its place wherever these tests, or the code that they test, make a `DynamicCache` (in
`EncoderDecoderCache`: as the self-attention cache), in the process of the tests only. A cell is how many pass, of how
many; "sdpa" is what a model attends with by default, "kvcache" is `hf_kvcache.register()` and that attention for every
model which asks for none. `make peer` does the same for two families with the tests that the sdist of transformers has.
"""


def render(source: str, ran: dict[Cell, list[str]], found: dict[Cell, dict[str, str]], expected: list[Known]) -> str:
    """The page."""
    specs = list(dict.fromkeys(spec for _, spec, _ in ran))
    lines = [HEAD.format(source=source, version=VERSION)]
    lines += [row("model", "attention", *(f"`{spec}`" for spec in specs)), "|---" * (len(specs) + 2) + "|"]
    for family, attention in dict.fromkeys((family, attention) for family, _, attention in ran):
        cells = [(family, spec, attention) for spec in specs]
        lines.append(row(family, attention, *(f"{len(ran[c]) - len(found[c])}/{len(ran[c])}" for c in cells)))
    lines += ["", "What differs, and is as it should be:", ""]
    for entry in expected:
        where = f"{', '.join(entry.families)}; {', '.join(f'`{spec}`' for spec in entry.specs)}"
        lines.append(f"- `{entry.test}` ({where}; {', '.join(entry.attentions)}): {entry.reason}")
    return "\n".join(lines) + "\n"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, metavar="DIR")
    parser.add_argument("--families", nargs="+", default=FAMILIES, metavar="NAME")
    parser.add_argument("--specs", nargs="+", default=SPECS, metavar="SPEC")
    parser.add_argument("--attentions", nargs="+", default=ATTENTIONS, choices=ATTENTIONS)
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    parser.add_argument("--plugin", default="peer_plugin", help="another replacement, to see that this notices it")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    ran: dict[Cell, list[str]] = {}
    found: dict[Cell, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder), args.families
        suite = from_tree(*at, args.tree.resolve()) if args.tree else from_sdist(*at)
        suite.workers, suite.plugin = args.workers, args.plugin
        chosen = counting(suite.run("", "sdpa"))
        counts = by_family(suite, chosen)
        print(f"{suite.source}: {len(chosen)} tests make a cache and pass", flush=True)
        for attention in args.attentions:
            for spec in args.specs:
                ours = suite.run(spec, attention, chosen)
                for family in args.families:
                    cell = family, spec, attention
                    ran[cell] = counts.get(family, [])
                    found[cell] = differences(ran[cell], ours)
                    print(
                        f"{family:12} {spec:14} {attention:8} {len(found[cell])} of {len(ran[cell])} differ", flush=True
                    )
    new, gone = judge(ran, found, known())
    print(*[f"UNEXPECTED {line}" for line in new], *[f"NO MORE {line}" for line in gone], sep="\n")
    if args.write and not new and not gone:
        PAGE.write_text(render(suite.source, ran, found, known()))
    return bool(new or gone or not all(ran.values()))


if __name__ == "__main__":
    sys.exit(main())
