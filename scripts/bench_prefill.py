"""How long does everything before decode take? Forwards of more than one token, per spec, against the stock cache.

    python scripts/bench_prefill.py                                          # the embedded model, all scenes
    python scripts/bench_prefill.py --dtype bfloat16 --scenes once chunks --lengths 8192 --specs int4 "sink(4,508)"

Scenes and columns are those of ``eval/prefill.py``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from eval import contenders, models, prefill, quality, records

SPECS = ["dynamic", "full", "int8", "fp8", "int4", "int2", "k4v2", "sink(4,508)", "int8+sink(4,508)"]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    quality.add_model_arguments(parser)
    parser.add_argument("--specs", nargs="+", default=SPECS, help=f"({' '.join(SPECS)})")
    parser.add_argument("--scenes", nargs="+", choices=prefill.SCENES, default=list(prefill.SCENES), metavar="SCENE")
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192], help="of once and chunks (%(default)s)")
    parser.add_argument("--filled", type=int, default=1024, help="tokens of real history (%(default)s)")
    parser.add_argument("--attn", choices=["sdpa", "eager", "kvcache"], default="kvcache", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each cache (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/prefill.jsonl"), help="(%(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measure, file, print."""
    args = parse(argv)
    try:
        loaded = models.load_model(args.model, args.device, args.dtype)
        specs, text = contenders.available(args.specs, loaded.model.config), models.load_text(args.text)
        needed = max([prefill.ROWS[0], prefill.SHORT, args.filled, *args.lengths])
        ids = models.token_ids(loaded, text, args.filled)
        ids = ids.repeat(1, -(-needed // ids.shape[1]))[:, :needed]
        bench = prefill.Bench(loaded.model, ids, args.filled)
        print(f"{'scene':<14}{'cache':<22}{'s':>8}{'ratio':>8}{'min-max':>14}{'CPU':>8}{'MB':>9}{'peak MB':>9}")
        named, how = bench.scenes(args.scenes, args.lengths), dict(attn=args.attn, rounds=args.rounds, seed=args.seed)
        for record in prefill.measure(loaded, text, bench, named, specs, **how):
            m = record["metrics"]
            spread = f"{m['ratio_min']:.2f}-{m['ratio_max']:.2f}"
            print(
                f"{record['settings']['scene']:<14}{record['spec']:<22}{m['seconds']:>8.2f}{m['ratio']:>8.2f}"
                f"{spread:>14}{m['cpu_ratio']:>8.2f}{m['nbytes'] / 1e6:>9.1f}{m['peak_bytes'] / 1e6:>9.1f}",
                flush=True,
            )
            records.append(args.out, record)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from error
    print(f"\nrecords: {args.out}")


if __name__ == "__main__":
    main()
