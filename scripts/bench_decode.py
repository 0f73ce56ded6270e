"""How does a decode step grow with context? Step times from 512 to 16K tokens, per spec.

    python scripts/bench_decode.py                                        # the embedded model
    python scripts/bench_decode.py --dtype bfloat16 --specs full int8 --contexts 2000 8000
    python scripts/bench_decode.py --short --specs dynamic full "h2o(budget=256)" "knorm(budget=256)"

All caches take their steps in turn on the same history (see ``eval/speed.py``), so the ratios hold on a noisy machine.
The model's own keys and values for the first ``--filled`` tokens are repeated up to the context: attention costs what
the number of tokens makes it cost, and a prefill of 16K tokens on two cores would take longer than the measurement.

``history`` is the share of a step that the history takes: one minus the step time on an almost empty cache, timed in
the same rounds, over the step time. ``slope`` is microseconds per token of context, by least squares, against
``DynamicCache``'s; ``p99`` the 99th percentile step over the median (a cache that re-encodes its history jumps here).
``CPU``: processor time of a step over ``DynamicCache``'s, which other programs on the machine disturb less. ``ops``:
operators that a step dispatches, per layer, the model's own included; with ``--short``, contexts of 64 and 512, they
are what a step's time goes into. Caches whose policy looks at attention are fed instead of replayed.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch

from eval import contenders, models, quality, records, speed
from eval.charts import plot

TASK = "decode"
SPECS = ["dynamic", "stock:fp8", "stock:hqq8", "full", "int8", "fp8"]
SHORT = [64, 512]
EMPTY = 16  # tokens in the almost empty cache


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    quality.add_model_arguments(parser)
    parser.add_argument("--specs", nargs="+", default=SPECS, help=f"({' '.join(SPECS)})")
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 2048, 4096, 8000, 16000])
    parser.add_argument("--short", action="store_true", help="contexts of 64 and 512")
    parser.add_argument("--filled", type=int, default=2048, help="tokens of real history (%(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each cache (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/decode.jsonl"), help="(%(default)s)")
    args = parser.parse_args(argv)
    args.contexts = SHORT if args.short else args.contexts
    return args


def tiled(states: speed.States, tokens: int) -> speed.States:
    """The history repeated up to ``tokens`` tokens, [1, H, tokens, D]."""
    times = -(-tokens // states[0][0].shape[2])
    return [(k.repeat(1, 1, times, 1)[:, :, :tokens], v.repeat(1, 1, times, 1)[:, :, :tokens]) for k, v in states]


def slopes(rows: list[records.Record]) -> dict[str, float]:
    """Microseconds per token of context, per spec, by least squares over the contexts."""
    found = {}
    for spec in dict.fromkeys(row["spec"] for row in rows):
        points = [(r["settings"]["context"], r["metrics"]["step_ms"]) for r in rows if r["spec"] == spec]
        x, y = (torch.tensor(column, dtype=torch.float64) for column in zip(*points, strict=True))
        x = x - x.mean()
        found[spec] = 1e3 * float((x * y).sum() / (x * x).sum()) if len(points) > 1 else float("nan")
    return found


def measure(args: argparse.Namespace, loaded: models.Loaded, text: models.Text, specs: list[str]) -> None:
    """One record per spec and context."""
    model, contexts = loaded.model, sorted({EMPTY, *args.contexts})
    ids = models.token_ids(loaded, text, args.filled)
    states = speed.states_of(model, ids)
    if states is None:
        raise ValueError(f"{loaded.name} has sliding layers, whose history cannot be repeated: use scripts/compare.py")
    weights = speed.weight_bytes(model)
    empty: dict[str, float] = {}
    needed = contexts[-1] + 1 + speed.WARMUP + args.rounds
    ids = ids.repeat(1, -(-needed // ids.shape[1]))[:, :needed]
    for context in contexts:
        laps = speed.race(model, ids, context, specs, "kvcache", tiled(states, context), args.rounds)
        for spec, lap in laps.items():
            metrics = speed.metrics(lap, laps[contenders.BASELINE], weights, context)
            empty.setdefault(spec, metrics["step_ms"])
            if context == EMPTY:
                continue
            seconds = torch.tensor(lap.seconds)
            base = laps[contenders.BASELINE].cpu_seconds
            metrics["cpu_ratio"] = statistics.median(a / b for a, b in zip(lap.cpu_seconds, base, strict=True))
            metrics["operators"] = lap.operators / loaded.model.config.get_text_config().num_hidden_layers
            metrics["history_share"] = max(1 - empty[spec] / metrics["step_ms"], 0.0)
            metrics["p99_over_median"] = (seconds.quantile(0.99) / seconds.median()).item()
            frame = quality.frame(loaded, text, ids, spec, 1, "kvcache", args.seed)
            frame["task"], frame["settings"] = TASK, {**frame["settings"], "context": context, "rounds": args.rounds}
            records.append(args.out, {**frame, "metrics": metrics})
        print(f"{context} tokens: done", flush=True)


def table(rows: list[records.Record]) -> str:
    """The records for a reader."""
    slope = slopes(rows)
    base = slope.get(contenders.BASELINE, float("nan"))
    lines = [f"{'context':>8} {'cache':<16}{'ms':>8}{'speed':>8}{'CPU':>7}{'ops':>7}{'history':>9}{'p99':>6}"]
    lines[0] += f"{'same':>6}{'MB':>8}{'GB/s':>7}"
    for row in sorted(rows, key=lambda r: r["settings"]["context"]):
        m: dict[str, Any] = row["metrics"]
        lines.append(
            f"{row['settings']['context']:>8} {row['spec']:<16}{m['step_ms']:>8.1f}{m['speed_ratio']:>7.2f}x"
            f"{m['cpu_ratio']:>7.2f}{m['operators']:>7.1f}"
            f"{m['history_share']:>9.2f}{m['p99_over_median']:>6.2f}{m['top1_agreement']:>6.2f}"
            f"{m['nbytes'] / 1e6:>8.1f}{m['gb_per_second']:>7.1f}"
        )
    lines += ["", *(f"slope {spec:<16}{us:>8.2f} us/token{us / base:>8.2f} of dynamic" for spec, us in slope.items())]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measure, file, print, draw."""
    args = parse(argv)
    try:
        records.read(args.out)
        loaded = models.load_model(args.model, args.device, args.dtype)
        specs = contenders.available(args.specs, loaded.model.config)
        measure(args, loaded, models.load_text(args.text), specs)
        rows = [record for record in records.latest(records.read(args.out)) if record["task"] == TASK]
        rows = [row for row in rows if row["settings"]["dtype"] == str(loaded.model.dtype).removeprefix("torch.")]
        pictures = plot([{**row, "task": "speed"} for row in rows], args.out.parent / "decode")
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from error
    print(f"\n{table(rows)}\n\nrecords: {args.out}\nplots: {', '.join(map(str, pictures))}")


if __name__ == "__main__":
    main()
