"""How long does everything before decode take? Forwards of more than one token, per spec, against the stock cache.

    python scripts/bench_prefill.py                                          # the embedded model, all scenes
    python scripts/bench_prefill.py --dtype bfloat16 --scenes once chunks --lengths 8192 --specs int4 "sink(4,508)"

Scenes: ``once`` (a prompt in one forward), ``chunks`` (of 512), ``turn`` (256 new tokens on a long history), ``draft5``
and ``draft16`` (drafted tokens to verify on it), ``padded`` (four left-padded rows), ``step`` (one decode step at 512
tokens, for policies). All caches take their turn in every round: ``ratio`` is the median over rounds of a cache's time
over ``DynamicCache``'s under stock attention, ``CPU`` the same of processor time, which other programs on the machine
disturb less (threads have to wait asleep: OMP_WAIT_POLICY=PASSIVE). ``peak`` is the most bytes alive at once of what a
forward made (``eval/memory.py``), measured in one more run.

Histories are the model's own keys and values of ``--filled`` tokens, repeated.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eval import contenders, models, quality, records, speed
from eval.memory import PeakBytes

TASK = "prefill"
SPECS = ["dynamic", "full", "int8", "fp8", "int4", "int2", "k4v2", "sink(4,508)", "int8+sink(4,508)"]
SCENES = ("once", "chunks", "turn", "draft5", "draft16", "padded", "step")
ROWS = (2048, 1500, 900, 300)  # tokens of the padded batch
HISTORY, CHUNK, TURN, SHORT = 8000, 512, 256, 512

Scene = tuple[Callable[[str], Any], Callable[[Any], None]]  # a filled cache for a spec; what is timed


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    quality.add_model_arguments(parser)
    parser.add_argument("--specs", nargs="+", default=SPECS, help=f"({' '.join(SPECS)})")
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES), metavar="SCENE")
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192], help="of once and chunks (%(default)s)")
    parser.add_argument("--filled", type=int, default=1024, help="tokens of real history (%(default)s)")
    parser.add_argument("--attn", choices=["sdpa", "eager", "kvcache"], default="kvcache", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each cache (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/prefill.jsonl"), help="(%(default)s)")
    return parser.parse_args(argv)


class Bench:
    """One model and text, and the scenes over them."""

    def __init__(self, model: Any, ids: torch.Tensor, filled: int) -> None:
        self.model, self.ids, self.filled = model, ids, filled
        self._states: speed.States | None = None

    def scenes(self, names: list[str], lengths: list[int]) -> dict[str, Scene]:
        """By name, with the number of tokens where there is a choice."""
        found: dict[str, Scene] = {}
        for name in names:
            if name in ("once", "chunks"):
                for n in lengths:
                    size = n if name == "once" else CHUNK
                    found[f"{name} {n}"] = (self._empty, partial(self._feed, n, size))
            elif name == "padded":
                found[name] = (self._empty, self._padded)
            elif name == "step":
                found[name] = (partial(self._settled, SHORT), partial(self._more, 1))
            else:
                new = TURN if name == "turn" else int(name.removeprefix("draft"))
                found[name] = (partial(self._filled, HISTORY), partial(self._more, new))
        return found

    def _empty(self, spec: str) -> Any:
        return contenders.make_cache(spec, self.model.config)

    def _filled(self, tokens: int, spec: str) -> Any:
        if self._states is None:
            self._states = speed.states_of(self.model, self.ids[:, : self.filled])
        if self._states is None:
            raise ValueError("a model with sliding layers, whose history cannot be repeated: leave out turn and drafts")
        cache, times = contenders.make_cache(spec, self.model.config), -(-tokens // self.filled)
        if not speed.replays(spec):
            self._feed(tokens, tokens, cache)
            return cache
        for index, (k, v) in enumerate(self._states):
            keys, values = (t.repeat(1, 1, times, 1)[:, :, :tokens] for t in (k, v))
            cache.update(keys, values, index)
        contenders.stored_bytes(cache)  # a layer that waits for attention stores them now
        return cache

    def _settled(self, tokens: int, spec: str) -> Any:
        """One step later: what a replayed history leaves to it (evicting, growing) is no step's cost."""
        cache = self._filled(tokens, spec)
        self._more(1, cache)
        return cache

    def _call(self, ids: torch.Tensor, cache: Any, **more: Any) -> None:
        self.model(ids, **{models.cache_argument(self.model): cache, "use_cache": True, "logits_to_keep": 1}, **more)

    def _feed(self, tokens: int, size: int, cache: Any) -> None:
        for piece in self.ids[:, :tokens].split(size, 1):
            self._call(piece, cache)

    def _more(self, tokens: int, cache: Any) -> None:
        self._call(self.ids[:, :tokens], cache)

    def _padded(self, cache: Any) -> None:
        mask = torch.zeros(len(ROWS), ROWS[0], dtype=torch.long)
        for row, n in enumerate(ROWS):
            mask[row, ROWS[0] - n :] = 1
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        ids = self.ids[:, : ROWS[0]].expand(len(ROWS), -1) * mask
        self._call(ids, cache, attention_mask=mask, position_ids=positions)


@torch.inference_mode()
def race(bench: Bench, scene: Scene, specs: list[str], attn: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of each round, stored bytes and the peak, per spec; all take their turn in every round."""
    fill, run = scene
    found: dict[str, dict[str, Any]] = {spec: {"seconds": [], "cpu_seconds": []} for spec in specs}
    for turn in range(rounds + 1):
        for spec in specs:
            contenders.use_attention(bench.model, spec, attn)
            cache = fill(spec)
            if bench.model.device.type == "cuda":
                torch.cuda.synchronize()
            start, busy = time.perf_counter(), time.process_time()
            run(cache)
            if bench.model.device.type == "cuda":
                torch.cuda.synchronize()
            if turn:  # the first one warms up
                found[spec]["seconds"].append(time.perf_counter() - start)
                found[spec]["cpu_seconds"].append(time.process_time() - busy)
            del cache
    for spec in specs:
        contenders.use_attention(bench.model, spec, attn)
        cache = fill(spec)
        with PeakBytes(bench.model.device) as peak:
            run(cache)
        found[spec] |= {"nbytes": contenders.stored_bytes(cache), "peak_bytes": peak.bytes}
    return found


def metrics(mine: dict[str, Any], base: dict[str, Any]) -> dict[str, float]:
    """Of one spec against the stock cache."""
    ratios = [a / b for a, b in zip(mine["seconds"], base["seconds"], strict=True)]
    busy = [a / b for a, b in zip(mine["cpu_seconds"], base["cpu_seconds"], strict=True)]
    return {
        "seconds": statistics.median(mine["seconds"]),
        "cpu_ratio": statistics.median(busy),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "nbytes": mine["nbytes"],
        "peak_bytes": mine["peak_bytes"],
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, file, print."""
    args = parse(argv)
    try:
        loaded = models.load_model(args.model, args.device, args.dtype)
        specs, text = contenders.available(args.specs, loaded.model.config), models.load_text(args.text)
        needed = max([ROWS[0], SHORT, args.filled, *args.lengths])
        ids = models.token_ids(loaded, text, args.filled)
        ids = ids.repeat(1, -(-needed // ids.shape[1]))[:, :needed]
        bench = Bench(loaded.model, ids, args.filled)
        print(f"{'scene':<14}{'cache':<22}{'s':>8}{'ratio':>8}{'min-max':>14}{'CPU':>8}{'MB':>9}{'peak MB':>9}")
        for name, scene in bench.scenes(args.scenes, args.lengths).items():
            found = race(bench, scene, specs, args.attn, args.rounds)
            for spec in specs:
                m = metrics(found[spec], found[contenders.BASELINE])
                spread = f"{m['ratio_min']:.2f}-{m['ratio_max']:.2f}"
                print(
                    f"{name:<14}{spec:<22}{m['seconds']:>8.2f}{m['ratio']:>8.2f}{spread:>14}{m['cpu_ratio']:>8.2f}"
                    f"{m['nbytes'] / 1e6:>9.1f}{m['peak_bytes'] / 1e6:>9.1f}",
                    flush=True,
                )
                frame = quality.frame(loaded, text, ids, spec, 1, args.attn, args.seed)
                frame["task"] = TASK
                frame["settings"] = {**frame["settings"], "scene": name, "rounds": args.rounds}
                records.append(args.out, {**frame, "metrics": m})
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from error
    print(f"\nrecords: {args.out}")


if __name__ == "__main__":
    main()
