"""How long does everything before decode take? Forwards of more than one token, against the stock cache.

Scenes: ``once`` (a prompt in one forward: the time to the first token), ``chunks`` (of 512), ``turn`` (256 new tokens
on a long history), ``draft5`` and ``draft16`` (drafted tokens to verify on it), ``padded`` (four left-padded rows),
``step`` (one decode step at 512 tokens, for policies). All caches take their turn in every round. Histories are the
model's own keys and values of ``filled`` tokens, repeated.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from eval import contenders, models, quality, records, speed
from eval.memory import PeakBytes

TASK = "prefill"
SCENES = ("once", "chunks", "turn", "draft5", "draft16", "padded", "step")
ROWS = (2048, 1500, 900, 300)  # tokens of the padded batch
HISTORY, CHUNK, TURN, SHORT = 8000, 512, 256, 512

Scene = tuple[Callable[[str], Any], Callable[[Any], None]]  # a filled cache for a spec; what is timed


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
    """Seconds of each round, stored bytes and the peak, per spec; all take their turn in every round.

    The peak is the most bytes alive at once of what a forward made (``eval.memory``), in a first round, not timed.
    """
    fill, run = scene
    found: dict[str, dict[str, Any]] = {}
    for spec in specs:
        contenders.use_attention(bench.model, spec, attn)
        cache = fill(spec)
        with PeakBytes(bench.model.device) as peak:
            run(cache)
        found[spec] = {"nbytes": contenders.stored_bytes(cache), "peak_bytes": peak.bytes}
        found[spec] |= {"seconds": [], "cpu_seconds": []}
    for _ in range(rounds):
        for spec in specs:
            contenders.use_attention(bench.model, spec, attn)
            cache = fill(spec)
            speed.wait_for(bench.model)
            start, busy = time.perf_counter(), time.process_time()
            run(cache)
            speed.wait_for(bench.model)
            found[spec]["seconds"].append(time.perf_counter() - start)
            found[spec]["cpu_seconds"].append(time.process_time() - busy)
            del cache
    return found


def metrics(mine: dict[str, Any], base: dict[str, Any]) -> dict[str, float]:
    """Of one spec against the stock cache.

    ``ratio`` is the median over rounds of its time over that of ``DynamicCache`` under stock attention, ``cpu_ratio``
    the same of processor time, which other programs on the machine disturb less (where threads wait asleep:
    OMP_WAIT_POLICY=PASSIVE).
    """
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


def measure(
    loaded: models.Loaded, text: models.Text, bench: Bench, named: dict[str, Scene], specs: list[str], **how: Any
) -> Iterator[records.Record]:
    """A record of every spec in every scene; ``how`` is attn, rounds and seed."""
    for name, scene in named.items():
        found = race(bench, scene, specs, how["attn"], how["rounds"])
        for spec in specs:
            frame = quality.frame(loaded, text, bench.ids, spec, 1, how["attn"], how["seed"])
            settings = {**frame["settings"], "scene": name, "rounds": how["rounds"]}
            base = found[contenders.BASELINE]
            yield {**frame, "task": TASK, "settings": settings, "metrics": metrics(found[spec], base)}
