"""How fast is a step, and which bytes had to move for it?

Machines are shared and noisy, so no cache is timed alone: all of them take one step each, in turn (A B C A
B C ...), on the same tokens. What is quoted are medians, the 10th to 90th percentile, and the median over
rounds of the ratio to `DynamicCache` in the same round. Switching the attention implementation between
turns is not timed.

A decode step must read every weight and every stored byte once. That sum over the step's time is the achieved
bandwidth; a cache that copies or dequantizes its history shows as a low one.

The model fills one `DynamicCache` with real text; its keys and values are then replayed into each cache
through `update`, which costs no attention. Models with sliding layers do not keep what a replay needs:
there, the model fills each cache itself.
"""

from __future__ import annotations

import inspect
import time
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from eval import contenders
from eval.memory import PeakBytes
from eval.models import cache_argument

CHUNK = 512  # tokens fed at a time while a cache is filled
WARMUP = 3

States = list[tuple[torch.Tensor, torch.Tensor]]  # per layer: keys, values [1, H, T, D]


class Lap(NamedTuple):
    """One cache at one context: its step times in seconds, round by round, and what it predicted."""

    seconds: list[float]
    predicted: list[int]
    nbytes: int
    peak_bytes: int
    cpu_seconds: list[float]
    operators: int  # that one step dispatches


class Operators(TorchDispatchMode):
    """Counts what is dispatched inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def wait_for(model: Any) -> None:
    """Until the device has done what it was given."""
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def _feed(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Feed tokens [1, S]; the last one's logits [V]."""
    options: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
    if "logits_to_keep" in inspect.signature(type(model).forward).parameters:
        options["logits_to_keep"] = 1
    return model(ids, **options).logits[0, -1]


def timed(model: Any, ids: torch.Tensor, cache: Any) -> tuple[float, int]:
    """Seconds to feed tokens [1, S], and the token that is predicted after them."""
    wait_for(model)
    start = time.perf_counter()
    predicted = int(_feed(model, ids, cache).argmax())
    wait_for(model)
    return time.perf_counter() - start, predicted


@torch.inference_mode()
def states_of(model: Any, ids: torch.Tensor) -> States | None:
    """Keys and values of tokens [1, T]; None where the stock cache does not keep all of them."""
    cache: Any = DynamicCache(config=model.config)
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        return None
    attention = model.config._attn_implementation
    contenders.use_attention(model, contenders.BASELINE, contenders.stock_attention(model))
    for chunk in ids.split(CHUNK, dim=1):
        _feed(model, chunk, cache)
    model.set_attn_implementation(attention)
    return [(layer.keys, layer.values) for layer in cache.layers]


def replays(spec: str) -> bool:
    """Whether a cache can be filled with states: not where its policy looks at attention."""
    return not any(policy in spec for policy in ("snapkv", "h2o", "tova", "expected"))


def _fill(model: Any, ids: torch.Tensor, cache: Any, states: States | None) -> None:
    """Bring tokens [1, T] into a cache, by replay where there are states."""
    if states is None:
        for chunk in ids.split(CHUNK, dim=1):
            _feed(model, chunk, cache)
        return
    for start in range(0, ids.shape[1], CHUNK):
        end = min(start + CHUNK, ids.shape[1])
        for index, (keys, values) in enumerate(states):
            cache.update(keys[:, :, start:end], values[:, :, start:end], index)


@torch.inference_mode()
def race(
    model: Any,
    ids: torch.Tensor,
    context: int,
    specs: list[str],
    attn: str,
    states: States | None,
    rounds: int,
) -> dict[str, Lap]:
    """Fill each cache with `context` tokens of [1, T], then time single-token steps in turns."""
    caches, nbytes, peaks = {}, {}, {}
    for spec in specs:
        contenders.use_attention(model, spec, attn)
        with PeakBytes(model.device) as peak:
            cache = contenders.make_cache(spec, model.config)
            _fill(model, ids[:, :context], cache, states if replays(spec) else None)
            _feed(model, ids[:, context : context + 1], cache)
        caches[spec], peaks[spec], nbytes[spec] = cache, peak.bytes, contenders.stored_bytes(cache)
    laps = {spec: Lap([], [], nbytes[spec], peaks[spec], [], 0) for spec in specs}
    for turn in range(WARMUP + rounds):
        token = ids[:, context + 1 + turn : context + 2 + turn]
        for spec, cache in caches.items():
            contenders.use_attention(model, spec, attn)
            if turn == WARMUP - 1:
                with Operators() as counted:
                    timed(model, token, cache)
                laps[spec] = laps[spec]._replace(operators=counted.count)
                continue
            busy = time.process_time()
            seconds, predicted = timed(model, token, cache)
            if turn >= WARMUP:
                laps[spec].cpu_seconds.append(time.process_time() - busy)
                laps[spec].seconds.append(seconds)
                laps[spec].predicted.append(predicted)
    return laps


def weight_bytes(model: Any) -> int:
    """The weights one token must read: all, less an input embedding that is not also the output."""
    total = sum(p.nbytes for p in model.parameters())
    entry, exit_ = model.get_input_embeddings(), model.get_output_embeddings()
    tied = exit_ is not None and exit_.weight is entry.weight
    return total if tied else total - entry.weight.nbytes


def metrics(lap: Lap, baseline: Lap, weights: int, context: int) -> dict[str, Any]:
    """A lap as the flat numbers of a record."""
    seconds = torch.tensor(lap.seconds, dtype=torch.float64)
    against = torch.tensor(baseline.seconds, dtype=torch.float64)
    low, median, high = seconds.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    same = [a == b for a, b in zip(lap.predicted, baseline.predicted, strict=True)]
    return {
        "step_ms": 1e3 * median,
        "step_ms_p10": 1e3 * low,
        "step_ms_p90": 1e3 * high,
        "tokens_per_second": 1 / median,
        "speed_ratio": (against / seconds).median().item(),
        "top1_agreement": sum(same) / len(same),
        "nbytes": lap.nbytes,
        "peak_bytes": lap.peak_bytes,
        "bytes_per_token": lap.nbytes / (context + 1),
        "bytes_moved": weights + lap.nbytes,
        "gb_per_second": (weights + lap.nbytes) / median / 1e9,
    }
