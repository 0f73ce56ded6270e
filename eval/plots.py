"""Pictures made from result records alone: quality against bytes, step time against context, a stream in buckets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eval.records import Record, latest

FLOOR = 1e-8  # a KL divergence below this is rounding; a logarithm needs something


def plot(records: list[Record], folder: Path) -> list[Path]:
    """Draw what the records allow into `folder`; return the files made."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ValueError("plots need the package matplotlib, which is not installed; pip install matplotlib") from error
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, task, draw in (
        ("quality_vs_bytes.png", "quality", _quality),
        ("step_time_vs_context.png", "speed", _speed),
        ("streaming_perplexity.png", "streaming", _streaming),
    ):
        chosen = one_setting(records, task)
        if chosen:
            figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
            draw(axes, chosen)
            axes.grid(alpha=0.3)
            settings = chosen[-1]["settings"]
            axes.set_title(f"{chosen[-1]['model']}, {settings['dtype']}, {settings['device']}", fontsize=10)
            figure.savefig(folder / name, dpi=120)
            pyplot.close(figure)
            made.append(folder / name)
    return made


def one_setting(records: list[Record], task: str) -> list[Record]:
    """The latest records of a task that can share a picture: model and settings are the last one's."""

    def shared(record: Record) -> tuple[str, dict[str, Any]]:
        free = ("attn", "context")  # these may differ within one picture
        return record["model"], {k: v for k, v in record["settings"].items() if k not in free}

    mine = [record for record in latest(records) if record["task"] == task]
    return [record for record in mine if shared(record) == shared(mine[-1])]


def _quality(axes: Any, records: list[Record]) -> None:
    for record in records:
        m = record["metrics"]
        axes.scatter(m["bytes_per_token"], max(m["kl_mean"], FLOOR), label=record["spec"])
        axes.annotate(
            record["spec"],
            (m["bytes_per_token"], max(m["kl_mean"], FLOOR)),
            xytext=(5, 4),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set_yscale("log")
    axes.set_xlim(0, 1.25 * max(record["metrics"]["bytes_per_token"] for record in records))
    axes.set_xlabel("stored bytes per token seen")
    axes.set_ylabel("mean KL from DynamicCache (nats)")


def _speed(axes: Any, records: list[Record]) -> None:
    for spec in dict.fromkeys(record["spec"] for record in records):
        mine = sorted((r for r in records if r["spec"] == spec), key=lambda r: r["settings"]["context"])
        x = [r["settings"]["context"] for r in mine]
        y = [r["metrics"]["step_ms"] for r in mine]
        below = [r["metrics"]["step_ms"] - r["metrics"]["step_ms_p10"] for r in mine]
        above = [r["metrics"]["step_ms_p90"] - r["metrics"]["step_ms"] for r in mine]
        axes.errorbar(x, y, yerr=[below, above], marker="o", capsize=3, label=spec)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("decode step (ms), median, 10th to 90th percentile")
    axes.legend(fontsize=8)


def _streaming(axes: Any, records: list[Record]) -> None:
    bucket = records[-1]["settings"]["bucket"]
    for record in records:
        y = record["metrics"]["perplexity"]
        axes.plot([bucket * (i + 1) for i in range(len(y))], y, marker="o", label=record["spec"])
    trained = records[-1]["metrics"]["trained_length"]
    if trained is not None and trained < records[-1]["settings"]["tokens"]:
        axes.axvline(trained, color="grey", linestyle=":", label="trained length")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("end of the bucket, in tokens of the stream")
    axes.set_ylabel(f"perplexity of {bucket:,} tokens")
    axes.figure.legend(fontsize=8, ncols=3, loc="outside lower center")
