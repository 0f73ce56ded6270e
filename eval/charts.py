"""The pictures of a report and of a command, each from records alone.

Every function draws one figure. Figures are narrow enough to be read on a phone; a cache has the same colour in all of
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eval.contenders import BASELINE
from eval.findings import Answer, Findings
from eval.records import Record, one_setting

FLOOR = 1e-8  # a KL divergence below this is rounding; a logarithm needs something
WIDTH = 5.2  # inches
STYLES = ("-o", "-^", "--s", "--D", ":v")


def draw(found: Findings) -> dict[str, Any]:
    """Figures by name, those for which there are records."""
    colours = _colours([*(row.spec for row in found.rows), "fresh"])
    figures = {}
    if found.quality:
        figures["frontier"] = frontier(found.quality, colours)
    if [answer for answer in found.answers if answer.spec != BASELINE]:
        figures["answers"] = answers(found.answers, colours)
    if found.speed:
        figures["step_time"] = step_time(found.speed, colours)
    if found.retrieval:
        figures["retrieval"] = retrieval(found.retrieval)
    if found.streaming:
        figures["streaming"] = streaming(found.streaming, colours)
    return figures


def plot(records: list[Record], folder: Path) -> list[Path]:
    """Draw what the latest records of one setting allow into ``folder``; return the files made."""
    made = []
    for name, task, picture in (
        ("quality_vs_bytes.png", "quality", frontier),
        ("step_time_vs_context.png", "speed", step_time),
        ("streaming_perplexity.png", "streaming", streaming),
    ):
        chosen = one_setting(records, task)
        if chosen:
            figure = picture(chosen, _colours(record["spec"] for record in chosen))
            settings = chosen[-1]["settings"]
            figure.suptitle(f"{chosen[-1]['model']}, {settings['dtype']}, {settings['device']}", fontsize=10)
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(folder / name, dpi=120)
            made.append(folder / name)
    return made


def _colours(specs: Iterable[str]) -> dict[str, Any]:
    try:
        from matplotlib import colormaps
    except ImportError as error:
        raise ValueError("plots need the package matplotlib, which is not installed; pip install matplotlib") from error
    palette = colormaps["tab20"]  # ten strong colours at even places, their pale twins at odd ones
    return {spec: palette((2 * i) % 20 + (2 * i) // 20 % 2) for i, spec in enumerate(dict.fromkeys(specs))}


def _figure(height: float = 3.9, width: float = WIDTH, **options: Any) -> Any:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 10}):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots(**options)


def on_frontier(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (bytes, KL) points that no other beats in both, by bytes."""
    best: list[tuple[float, float]] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def frontier(records: list[Record], colours: dict[str, Any]) -> Any:
    """Mean KL divergence against stored bytes, and the line of the best trades: these have names, others numbers."""
    points = {r["spec"]: (r["metrics"]["bytes_ratio"], max(r["metrics"]["kl_mean"], FLOOR)) for r in records}
    best = on_frontier(list(points.values()))
    others = sorted((spec for spec in points if points[spec] not in best), key=lambda spec: points[spec][1])
    figure, axes = _figure(3.9 + 0.09 * len(others))
    axes.step(*zip(*best, strict=True), where="post", color="0.75", zorder=1)
    for spec in [spec for spec in points if spec not in others]:
        axes.scatter(*points[spec], color=colours.get(spec), zorder=2)
        axes.annotate(spec, points[spec], (5, 4), textcoords="offset points", fontsize=8)
    for number, spec in enumerate(others, 1):
        axes.scatter(*points[spec], color=colours.get(spec), zorder=2, label=f"{number}  {spec}")
        x, side = (-5, "right") if number % 2 else (5, "left")
        axes.annotate(str(number), points[spec], (x, -3), textcoords="offset points", fontsize=8, ha=side)
    if others:
        figure.legend(fontsize=7, ncols=2, loc="outside lower center")
    axes.set_yscale("log")
    axes.set_xlim(0, 1.12 * max(x for x, _ in points.values()))
    axes.set_xlabel("stored bytes, as a share of the stock cache's")
    axes.set_ylabel("mean KL divergence (nats a token)")
    axes.grid(alpha=0.3)
    return figure


def answers(found: list[Answer], colours: dict[str, Any]) -> Any:
    """Differences in right answers with 95 % intervals, a panel for each task."""
    shown = [answer for answer in found if answer.spec != BASELINE and answer.verdict != "control"]
    tasks = list(dict.fromkeys(answer.task for answer in shown))
    specs = list(dict.fromkeys(answer.spec for answer in shown))
    figure, panels = _figure(0.7 + len(tasks) * (0.5 + 0.24 * len(specs)), nrows=len(tasks), sharex=True, squeeze=False)
    for axes, task in zip(panels[:, 0], tasks, strict=True):
        for answer in shown:
            if answer.task == task:
                x, error = 100 * answer.difference, 196 * answer.difference_se
                axes.errorbar(
                    x, specs.index(answer.spec), xerr=error, marker="o", capsize=3, color=colours.get(answer.spec)
                )
        axes.axvline(0, color="0.5", linewidth=1)
        axes.set_yticks(range(len(specs)), specs, fontsize=8)
        axes.set_ylim(len(specs) - 0.5, -0.5)
        axes.set_title(task, fontsize=9, loc="left")
        axes.grid(alpha=0.3, axis="x")
    panels[-1, 0].set_xlabel("points against the stock cache, with 95 % intervals")
    return figure


def step_time(records: list[Record], colours: dict[str, Any]) -> Any:
    """Median time of a decode step against context, with the 10th to 90th percentile."""
    figure, axes = _figure()
    for spec in dict.fromkeys(record["spec"] for record in records):
        mine = sorted((r for r in records if r["spec"] == spec), key=lambda r: r["settings"]["context"])
        style = STYLES[list(colours).index(spec) // 10 % len(STYLES)]  # colours come again
        x = [r["settings"]["context"] for r in mine]
        low, y, high = ([r["metrics"][key] for r in mine] for key in ("step_ms_p10", "step_ms", "step_ms_p90"))
        axes.plot(x, y, style, label=spec, color=colours.get(spec))
        axes.fill_between(x, low, high, alpha=0.12, color=colours.get(spec))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("decode step (ms)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def retrieval(records: list[Record]) -> Any:
    """Heat maps of accuracy by depth and length, one for each cache."""
    specs = list(dict.fromkeys(record["spec"] for record in records))
    lengths = sorted({record["settings"]["length"] for record in records})
    depths = sorted({record["settings"]["depth"] for record in records})
    cells = {(r["spec"], r["settings"]["depth"], r["settings"]["length"]): r["metrics"]["accuracy"] for r in records}
    lines = -(-len(specs) // 2)
    figure, panels = _figure(0.4 + lines * (0.75 + 0.28 * len(depths)), nrows=lines, ncols=2, squeeze=False)
    for axes in panels.flat[len(specs) :]:
        axes.set_axis_off()
    for axes, spec in zip(panels.flat, specs, strict=False):
        grid = [[cells.get((spec, depth, length), float("nan")) for length in lengths] for depth in depths]
        axes.imshow(grid, vmin=0, vmax=1, cmap="RdYlBu", aspect="auto")
        axes.set_title(spec, fontsize=min(9, 9 * 26 / len(spec)))  # as wide as its panel
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=8)
        for i, line in enumerate(grid):
            for j, value in enumerate(line):
                if value == value:
                    dark = not 0.2 < value < 0.85
                    axes.text(
                        j, i, f"{value:.2f}", ha="center", va="center", fontsize=8, color="white" if dark else "black"
                    )
    figure.supxlabel("tokens of context", fontsize=9)
    figure.supylabel("depth of the answer (0 %: start)", fontsize=9)
    return figure


def streaming(records: list[Record], colours: dict[str, Any]) -> Any:
    """Perplexity of consecutive buckets of one text."""
    figure, axes = _figure()
    bucket = records[-1]["settings"]["bucket"]
    for record in records:
        y, spec = record["metrics"]["perplexity"], record["spec"]
        style = "--" if spec.startswith("fresh") else "-"
        axes.plot([bucket * (i + 1) for i in range(len(y))], y, style, marker="o", label=spec, color=colours.get(spec))
    trained = records[-1]["metrics"].get("trained_length")
    if trained and trained < records[-1]["settings"]["tokens"]:
        axes.axvline(trained, color="0.5", linestyle=":", label="trained length")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("tokens of the stream")
    axes.set_ylabel(f"perplexity of {bucket:,} tokens")
    axes.grid(alpha=0.3, which="both")
    figure.legend(fontsize=7, ncols=2, loc="outside lower center")
    return figure
