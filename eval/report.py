"""`python -m eval report`: one page that one can look at, made from result records alone.

    python -m eval report results/ -o report.html

Reads every `.jsonl` file in the folder. Writes the page (no network: pictures are inside), the same as Markdown beside
it, and the pictures as PNG files: `report.html`, `report.md`, `report_frontier.png`, ...
"""

from __future__ import annotations

import argparse
import html
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval import charts, findings, records
from eval.findings import Findings, Row

# name -> (heading, what it shows)
PICTURES = {
    "frontier": (
        "Quality against memory",
        "Down and left is better. The grey line joins the caches that no other beats in both.",
    ),
    "answers": (
        "Right answers",
        "Differences from the stock cache on the same items, with 95 % intervals. One that crosses zero is no finding.",
    ),
    "step_time": (
        "Step time against context",
        "Median time of one decode step; the band is the 10th to 90th percentile. All caches took turns.",
    ),
    "retrieval": ("Retrieval by depth and length", "Share of items whose hidden answer was found."),
    "streaming": (
        "A stream longer than the window",
        "Perplexity by bucket. Compare caches within a bucket: buckets are different text.",
    ),
}
Table = tuple[list[str], list[list[str]]]

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.55 system-ui, sans-serif; color: #1c2330; background: #f5f6f8; margin: 0; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 4px; }
h2 { font-size: 1.15rem; margin: 0 0 8px; }
section { background: #fff; border: 1px solid #dfe3e8; border-radius: 10px; padding: 18px; margin-top: 18px; }
p { margin: 0 0 10px; max-width: 80ch; }
.note, .by { color: #566070; font-size: 0.9rem; }
.advice { border-left: 5px solid #2563a8; }
.advice p:first-of-type { font-size: 1.1rem; }
.pictures { columns: 440px; column-gap: 18px; margin-top: 18px; }
.pictures section { margin: 0 0 18px; break-inside: avoid; }
.pictures + section { margin-top: 0; }
svg { width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: right; padding: 6px 9px; border-bottom: 1px solid #e8ebef; white-space: nowrap; }
th { color: #566070; font-weight: 600; white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; font-family: ui-monospace, monospace; position: sticky; left: 0;
  background: #fff; }
.wide + .note { margin-top: 12px; }
@media (max-width: 600px) { table { font-size: 0.8rem; } th, td { padding: 5px 6px; } section { padding: 14px; } }
td.worse { color: #a3271f; font-weight: 600; }
td.better { color: #1d6f3a; font-weight: 600; }
"""


# ---- the command -------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("results", type=Path, help="a folder with result records, or one file")
    parser.add_argument("-o", "--out", type=Path, default=Path("report.html"), help="the page (%(default)s)")
    parser.add_argument("--model", help="the model to report on (the one with the most records)")


def run(args: argparse.Namespace) -> None:
    """Write the page, its Markdown twin, and the pictures."""
    if args.out.suffix != ".html":
        raise ValueError(f"--out {args.out.name} is not a page; name it {args.out.stem}.html")
    found = findings.find(load(args.results), args.model)
    figures = charts.draw(found)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    pictures = {name: args.out.with_name(f"{args.out.stem}_{name}.png") for name in figures}
    for name, path in pictures.items():
        figures[name].savefig(path, dpi=150)
    args.out.with_suffix(".md").write_text(markdown(found, pictures), encoding="utf-8")
    args.out.write_text(page(found, {name: svg(figure) for name, figure in figures.items()}), encoding="utf-8")
    for path in (args.out, args.out.with_suffix(".md"), *pictures.values()):
        print(f"wrote {path}")
    print("\n" + "\n\n".join(findings.recommend(found)))


def load(results: Path) -> list[records.Record]:
    """The records of all files; a file that holds other things is named and passed over."""
    files = sorted(results.rglob("*.jsonl")) if results.is_dir() else [results]
    if not files or not all(file.is_file() for file in files):
        raise FileNotFoundError(f"{str(results)!r} holds no result records (.jsonl)")
    known = []
    for file in files:
        try:
            known += [record for record in records.read(file) if "metrics" in record]
        except ValueError as error:
            print(f"note: left out {file.name}: {error}", file=sys.stderr)
    return known


# ---- tables ------------------------------------------------------------------------------------------------


def ranked(found: Findings) -> Table:
    """The caches, best first, over all tasks."""
    tasks = list(dict.fromkeys(answer.task for answer in found.answers))
    head = ["cache", "bytes", "verdict", "mean KL", "perplexity"] + [f"{task}, points" for task in tasks]
    head += [f"prompt speed at {found.prompt:,}"] if found.prompt else []
    head += [f"speed at {found.context:,}"] if found.context else []
    head += ["retrieval"] if found.retrieval else []
    return head, [_ranked(row, tasks, found) for row in found.rows]


def _ranked(row: Row, tasks: list[str], found: Findings) -> list[str]:
    by_task = {answer.task: answer for answer in row.answers}
    cells = [row.spec, _number(row.bytes_ratio, "{:.3f}"), row.verdict, _number(row.kl, "{:.1e}")]
    cells.append(_number(None if row.perplexity_change is None else 100 * row.perplexity_change, "{:+.2f} %"))
    for task in tasks:
        answer = by_task.get(task)
        cells.append("" if answer is None else f"{100 * answer.difference:+.1f} ± {100 * answer.difference_se:.1f}")
    cells += [_number(row.first, "{:.2f}x")] if found.prompt else []
    cells += [_number(row.speed, "{:.2f}x")] if found.context else []
    return cells + ([_number(row.retrieval, "{:.2f}")] if found.retrieval else [])


def answered(found: Findings) -> Table:
    """Every comparison, with its test."""
    head = ["cache", "task", "items", "right, %", "difference", "better", "worse", "p", "p, adjusted", "verdict"]
    lines = []
    for a in found.answers:
        tested = a.verdict not in ("baseline", "control")
        lines.append([a.spec, a.task, str(a.items), f"{100 * a.accuracy:.1f} ± {100 * a.accuracy_se:.1f}"])
        lines[-1] += [f"{100 * a.difference:+.1f} ± {100 * a.difference_se:.1f}", str(a.better), str(a.worse)]
        lines[-1] += [f"{a.sign_p:.3f}" if tested else "", f"{a.adjusted:.3f}" if tested else "", a.verdict]
    return head, lines


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def made_with(found: Findings) -> str:
    """Where the numbers come from."""
    told = lambda key: "; ".join(  # noqa: E731
        dict.fromkeys(", ".join(f"{k} {v}" for k, v in r[key].items() if v is not None) for r in found.used)
    )
    text = f"{len(found.used)} records of {found.model}. Made with {told('versions')}. On {told('machine')}."
    if found.left_out:
        text += f" {found.left_out} records with other settings are not shown."
    if found.others:
        text += f" There are records of {', '.join(found.others)}, too: --model."
    return text


RULE = (
    f"No loss shown: mean KL at most {findings.KEPT_KL} nats a token, perplexity up by at most "
    f"{100 * findings.KEPT_PERPLEXITY:.0f} %, and no sign test below {findings.LEVEL} after adjustment for all "
    "comparisons. Ranked by bytes; caches that lack a measurement others have follow, then those with a loss, the "
    "smallest loss first. Prompt speed (one forward, to the first token) and speed (a decode step) are the stock "
    "cache's time over this one's."
)


# ---- HTML --------------------------------------------------------------------------------------------------


def svg(figure: Any) -> str:
    """A figure as an element that a page can hold; text stays text."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "hf_kvcache"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def page(found: Findings, pictures: dict[str, str]) -> str:
    """The whole page."""
    advice = "".join(f"<p>{html.escape(text)}</p>" for text in findings.recommend(found))
    shown = "".join(
        f"<section><h2>{heading}</h2><p class=note>{html.escape(told)}</p>{_own_ids(pictures[name], name)}</section>"
        for name, (heading, told) in PICTURES.items()
        if name in pictures
    )
    tests = f"<section><h2>Every comparison</h2>{_table(answered(found))}</section>" if found.answers else ""
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>KV caches of {html.escape(found.model)}</title><style>{STYLE}</style></head><body><main>"
        f"<h1>What does a KV cache cost {html.escape(found.model)}?</h1>"
        f"<section class=advice><h2>Recommendation</h2>{advice}</section>"
        f"<section><h2>Caches, ranked</h2>{_table(ranked(found))}<p class=note>{html.escape(RULE)}</p></section>"
        f"<div class=pictures>{shown}</div>{tests}"
        f"<section><h2>How it was made</h2><p class=by>{html.escape(made_with(found))}</p></section>"
        "</main></body></html>\n"
    )


def _own_ids(picture: str, name: str) -> str:
    """Ids of several pictures on one page must differ."""
    for mark in ('id="', 'href="#', "url(#"):
        picture = picture.replace(mark, f"{mark}{name}-")
    return picture


def _table(table: Table) -> str:
    head, lines = table
    mark = {"worse": " class=worse", "loss": " class=worse", "better": " class=better"}
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    rows = "".join(
        "<tr>" + "".join(f"<td{mark.get(cell, '')}>{html.escape(cell)}</td>" for cell in line) + "</tr>"
        for line in lines
    )
    return f"<div class=wide><table><thead><tr>{top}</tr></thead><tbody>{rows}</tbody></table></div>"


# ---- Markdown ----------------------------------------------------------------------------------------------


def markdown(found: Findings, pictures: dict[str, Path]) -> str:
    """The same as Markdown, with the pictures beside it."""
    parts = [f"# What does a KV cache cost {found.model}?", "## Recommendation", *findings.recommend(found)]
    parts += ["## Caches, ranked", _rows(ranked(found)), RULE]
    for name, (heading, told) in PICTURES.items():
        if name in pictures:
            parts += [f"## {heading}", told, f"![{heading}]({pictures[name].name})"]
    if found.answers:
        parts += ["## Every comparison", _rows(answered(found))]
    return "\n\n".join([*parts, "## How it was made", made_with(found)]) + "\n"


def _rows(table: Table) -> str:
    head, lines = table
    cells: Sequence[list[str]] = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in cells)
