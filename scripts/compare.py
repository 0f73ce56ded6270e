"""What does each cache cost, and what does it save? One table, on your model and your text.

    python scripts/compare.py                               # the embedded model and text
    python scripts/compare.py --model NAME --text FILE      # yours

Stock caches run with sdpa attention, ours with "kvcache", which reads the stored form. Results are appended
to `--out` as JSON Lines; the two plots beside it are drawn from that file alone.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from eval import contenders, models, prefill, proofs, quality, records, speed
from eval.charts import plot
from eval.records import one_setting

SPECS = ["dynamic", "stock:fp8", "stock:hqq8", "stock:quanto4", *quality.SPECS, "int4", "snapkv(budget=256)"]
PROMPTS = 3  # timed prompts of each cache


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    quality.add_model_arguments(parser)
    parser.add_argument("--specs", nargs="+", default=SPECS, help=f"({' '.join(SPECS)})")
    parser.add_argument("--tokens", type=int, default=768, help="tokens scored for quality (%(default)s)")
    parser.add_argument("--step", type=int, default=32, help="tokens scored at a time (%(default)s)")
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 8000], help="for speed (1024 8000)")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each cache (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/compare.jsonl"), help="(%(default)s)")
    return parser.parse_args(argv)


def measure_quality(args: argparse.Namespace, loaded: models.Loaded, text: models.Text, specs: list[str]) -> None:
    """Score all caches in one pass beside the baseline."""
    from tqdm import tqdm

    ids = models.token_ids(loaded, text, args.tokens + 1)
    frames = {spec: quality.frame(loaded, text, ids, spec, args.step, "kvcache", args.seed) for spec in specs}
    print(proofs.line(proofs.prove(loaded.model, ids, step=args.step, attn="kvcache")), flush=True)
    with tqdm(total=args.tokens, desc="quality", unit="tok", leave=False) as bar:
        for record in quality.measure(loaded.model, ids, frames, bar.update):
            records.append(args.out, record)


def measure_speed(args: argparse.Namespace, loaded: models.Loaded, text: models.Text, specs: list[str]) -> None:
    """A prompt of the first context in one forward; decode and memory at each context."""
    model, contexts = loaded.model, sorted(set(args.contexts))
    ids = models.token_ids(loaded, text, contexts[-1] + 1 + speed.WARMUP + args.rounds)
    bench = prefill.Bench(model, ids[:, : contexts[0]], contexts[0])
    prompt = bench.scenes(["once"], contexts[:1])
    for record in prefill.measure(loaded, text, bench, prompt, specs, attn="kvcache", rounds=PROMPTS, seed=args.seed):
        records.append(args.out, record)
    states = speed.states_of(model, ids[:, : contexts[-1]])
    weights = speed.weight_bytes(model)
    for context in contexts:
        laps = speed.race(model, ids, context, specs, "kvcache", states, args.rounds)
        for spec, lap in laps.items():
            measured = speed.metrics(lap, laps[contenders.BASELINE], weights, context)
            frame = quality.frame(loaded, text, ids, spec, speed.CHUNK, "kvcache", args.seed)
            frame["task"] = "speed"
            frame["settings"] |= {"context": context, "rounds": args.rounds}
            records.append(args.out, {**frame, "metrics": measured})


def table(results: list[records.Record]) -> str:
    """The latest results of one model and setting, for a reader."""
    lines = []
    scored = one_setting(results, "quality")
    if scored:
        first = scored[0]["metrics"]
        lines += [f"Quality and stored bytes after {first['tokens_seen']} tokens", ""]
        lines += [f"{'cache':<24}{'perplexity':>11}{'change':>9}{'mean KL':>10}{'p99.9 KL':>10}{'top-1':>8}"]
        lines[-1] += f"{'MB':>8}{'of full':>9}{'kept':>7}"
        lines += [_quality_row(record) for record in scored]
    fed = one_setting(results, prefill.TASK)
    if fed:
        scene, rounds = fed[0]["settings"]["scene"], fed[0]["settings"]["rounds"]
        lines += [
            "",
            f"A prompt of {scene.removeprefix('once ')} tokens in one forward, {rounds} interleaved times",
            "",
        ]
        lines += [f"{'cache':<24}{'s':>8}{'time':>8}{'min-max':>12}{'MB':>8}{'peak MB':>9}"]
        lines += [_prompt_row(record) for record in fed if record["settings"]["scene"] == scene]
    raced = one_setting(results, "speed")
    for context in sorted({record["settings"]["context"] for record in raced}):
        mine = [record for record in raced if record["settings"]["context"] == context]
        lines += [
            "",
            f"Decoding at {context} tokens of context, {mine[0]['settings']['rounds']} interleaved steps",
        ]
        lines += ["", f"{'cache':<24}{'ms':>8}{'p10-p90':>15}{'tok/s':>7}{'speed':>8}{'same':>6}{'MB':>8}"]
        lines[-1] += f"{'peak MB':>9}{'moved MB':>10}{'GB/s':>6}"
        lines += [_speed_row(record) for record in mine]
    return "\n".join(lines)


def _quality_row(record: records.Record) -> str:
    m = record["metrics"]
    change = 100 * (m["perplexity"] / m["baseline_perplexity"] - 1)
    return (
        f"{record['spec']:<24}{m['perplexity']:>11.3f}{change:>+8.2f}%{m['kl_mean']:>10.1e}{m['kl_p999']:>10.1e}"
        f"{m['top1_agreement']:>8.3f}{m['nbytes'] / 1e6:>8.2f}{m['bytes_ratio']:>9.3f}{m['tokens_kept']:>7}"
    )


def _prompt_row(record: records.Record) -> str:
    m = record["metrics"]
    spread = f"{m['ratio_min']:.2f}-{m['ratio_max']:.2f}"
    return (
        f"{record['spec']:<24}{m['seconds']:>8.2f}{m['ratio']:>7.2f}x{spread:>12}{m['nbytes'] / 1e6:>8.1f}"
        f"{m['peak_bytes'] / 1e6:>9.1f}"
    )


def _speed_row(record: records.Record) -> str:
    m = record["metrics"]
    spread = f"{m['step_ms_p10']:.1f}-{m['step_ms_p90']:.1f}"
    return (
        f"{record['spec']:<24}{m['step_ms']:>8.1f}{spread:>15}{m['tokens_per_second']:>7.1f}"
        f"{m['speed_ratio']:>7.2f}x{m['top1_agreement']:>6.2f}{m['nbytes'] / 1e6:>8.1f}"
        f"{m['peak_bytes'] / 1e6:>9.1f}{m['bytes_moved'] / 1e6:>10.1f}{m['gb_per_second']:>6.1f}"
    )


LEGEND = """
change, KL, top-1: against DynamicCache on the same tokens.  of full: stored bytes against DynamicCache's.
time, speed: ratios to DynamicCache, medians over rounds.  same: share of timed steps with DynamicCache's next token.
peak: most bytes alive while the cache was filled and read once.  moved: weights and stored bytes, which a
step must read once; GB/s is that over the step's time."""


def main(argv: list[str] | None = None) -> None:
    """Measure, file, print, draw."""
    args = parse(argv)
    began = time.perf_counter()
    try:
        records.read(args.out)  # refuse a broken file before measuring for minutes
        loaded = models.load_model(args.model, args.device, args.dtype)
        text = models.load_text(args.text)
        specs = contenders.available(args.specs, loaded.model.config)
        machine, versions = records.machine(), records.versions()
        where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
        print(f"{loaded.name}, {loaded.model.dtype}, {where}")
        print(", ".join(f"{name} {version}" for name, version in versions.items()), flush=True)
        measure_quality(args, loaded, text, specs)
        print(f"now the times of {len(specs)} caches, in turns: some minutes", flush=True)
        measure_speed(args, loaded, text, specs)
        results = records.read(args.out)
        pictures = plot(results, args.out.parent)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from error
    print(f"\n{table(results)}\n{LEGEND}\n\nrecords: {args.out}\nplots: {', '.join(map(str, pictures))}")
    print(f"took {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
