"""`python -m eval doctor`: which storage does this model bear, and which of its layers do not?

    python -m eval doctor --model smollm2 --max-kl 0.01

Keys of some models have a few channels far larger than the rest, often a constant that a bias adds. A storage with one
scale for a whole token pays for them in every other channel; groups along a channel subtract the constant. So the
doctor looks at the keys first, per layer:

    amplitude of a channel = max over tokens |k|
    outlier ratio          = largest amplitude / median amplitude
    constant               = share of that channel's energy that does not change within 32 tokens

Then it measures: the KL divergence from the full cache over the second half of a few hundred tokens (in the first half
a storage with a residual has encoded little), and the bytes at `--context` tokens, from a cache that holds as many.
The cheapest storage within `--max-kl` is recommended. Of every cheaper one that is not within it, each layer is
measured alone, and the worst layers are left in full precision (`skip_layers`), as few as it takes; what comes out
cheaper wins. All of that is measured; nothing is added up.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eval import contenders, models, quality, records, scoring

TASK = "doctor"
STORAGES = ["int8", "fp8", "k8v4", "int4", "k4v2", "int2"]
GROUP = 32  # tokens within which a constant stays one
OUTLIER = 20.0  # a ratio from which a layer is named
LOCKSTEP = 8  # caches that share one pass of the baseline


class Keys(NamedTuple):
    """What a layer's keys look like."""

    layer: int
    ratio: float
    constant: float
    head: int
    channel: int


class Patient(NamedTuple):
    """What is examined: one model, its tokens [1, T + 1], and how."""

    loaded: models.Loaded
    text: models.Text
    ids: torch.Tensor
    args: argparse.Namespace


# ---- looking -----------------------------------------------------------------------------------------------


def look(layer: int, keys: torch.Tensor) -> Keys:
    """The outlier among the channels of keys [1, H, n, D]."""
    width = keys.shape[-1]
    by_channel = keys[0].float().transpose(1, 2).flatten(0, 1)  # [H * D, n]
    amplitude = by_channel.abs().amax(1)
    worst = int(amplitude.argmax())
    whole = by_channel[worst, : max(by_channel.shape[1] // GROUP, 1) * GROUP]
    means = torch.stack([piece.mean() for piece in whole.split(GROUP)])
    median = amplitude.median().clamp_min(torch.finfo(torch.float32).tiny)
    constant = means.square().mean() / whole.square().mean().clamp_min(torch.finfo(torch.float32).tiny)
    return Keys(layer, float(amplitude[worst] / median), float(constant), worst // width, worst % width)


@torch.inference_mode()
def filled(patient: Patient) -> Any:
    """A full cache of the patient's tokens: its keys are looked at, its shapes are those of every storage."""
    model = patient.loaded.model
    contenders.use_attention(model, "full", patient.args.attn)
    cache = contenders.make_cache("full", model.config)
    for fed, _ in scoring.steps(patient.ids, patient.args.step):
        scoring.forward(model, fed, cache)
    return cache


def states(cache: Any) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values [1, H, n, D] of every layer that holds some."""
    pairs = {i: (getattr(layer, "keys", None), getattr(layer, "values", None)) for i, layer in enumerate(cache.layers)}
    return {i: (k, v) for i, (k, v) in pairs.items() if k is not None and v is not None and k.dim() == 4}


# ---- measuring ---------------------------------------------------------------------------------------------


@torch.inference_mode()
def divergences(model: Any, ids: torch.Tensor, specs: list[str], step: int, attn: str) -> dict[str, scoring.Score]:
    """Scores of caches against `DynamicCache` over the second half of tokens [1, T + 1]."""
    baseline = contenders.make_cache(contenders.BASELINE, model.config)
    caches = {spec: contenders.make_cache(spec, model.config) for spec in specs}
    tallies = {spec: scoring.Tally() for spec in specs}
    seen, half = 0, (ids.shape[1] - 1) // 2
    for fed, targets in scoring.steps(ids, step):
        contenders.use_attention(model, contenders.BASELINE, attn)
        reference = scoring.forward(model, fed, baseline)
        skip = min(max(half - seen, 0), len(targets))
        for spec, cache in caches.items():
            contenders.use_attention(model, spec, attn)
            tallies[spec].add(reference[skip:], scoring.forward(model, fed, cache)[skip:], targets[skip:])
        seen += len(targets)
    for spec, cache in caches.items():
        if spec != "full" and not cache.stats().tokens_quantized:
            raise ValueError(
                f"{spec} has encoded none of {seen} tokens, so this says nothing about it; use more --tokens"
            )
    return {spec: tally.score() for spec, tally in tallies.items()}


def bytes_at(model: Any, spec: str, like: dict[int, tuple[torch.Tensor, torch.Tensor]], context: int) -> int:
    """Bytes of a cache that holds `context` tokens of those shapes; what they are does not matter to it."""
    contenders.use_attention(model, spec, "kvcache")  # so that nothing is decoded
    cache = contenders.make_cache(spec, model.config)
    for layer, pair in like.items():
        cache.update(*(x.new_zeros(*x.shape[:2], context, x.shape[3]) for x in pair), layer)
    return contenders.stored_bytes(cache)


def skipping(storage: str, layers: list[int]) -> str:
    """The storage with these layers in full precision."""
    if not layers:
        return storage
    name, _, options = storage.rstrip(")").partition("(")
    skip = f"skip_layers={'|'.join(map(str, sorted(layers)))}"  # first, as in canonical specs
    return f"{name}({skip}{',' if options else ''}{options})"


def encoded_layers(spec: str, config: Any) -> list[int]:
    """Numbers of the layers that this spec does not keep in full precision."""
    storages = [getattr(layer, "storage", None) for layer in contenders.make_cache(spec, config).layers]
    return [i for i, storage in enumerate(storages) if storage is not None and not storage.lossless]


class Chart:
    """Measured specs, each once: in `--out` already, or measured and appended to it.

    Args:
        patient: what is examined.
        like: states whose shapes every cache has.
    """

    def __init__(self, patient: Patient, like: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.patient, self.like = patient, like
        self.known = {records.identity(record): record for record in records.read(patient.args.out)}

    def __call__(self, specs: list[str], tick: Callable[[int], object] = lambda specs: None) -> list[dict[str, Any]]:
        """The metrics of specs."""
        frames = {spec: self._frame(spec) for spec in specs}
        missing = [spec for spec in specs if records.identity(frames[spec]) not in self.known]
        tick(len(specs) - len(missing))
        for start in range(0, len(missing), LOCKSTEP):
            some = missing[start : start + LOCKSTEP]
            self._measure({spec: frames[spec] for spec in some})
            tick(len(some))
        return [self.known[records.identity(frames[spec])]["metrics"] for spec in specs]

    def kl(self, spec: str) -> float:
        return self([spec])[0]["kl_mean"]

    def nbytes(self, spec: str) -> int:
        """Bytes at `--context` tokens; cheap enough not to be filed alone."""
        return bytes_at(self.patient.loaded.model, spec, self.like, self.patient.args.context)

    def _measure(self, frames: dict[str, records.Record]) -> None:
        loaded, _, ids, args = self.patient
        for spec, score in divergences(loaded.model, ids, list(frames), args.step, args.attn).items():
            metrics: dict[str, Any] = {**score._asdict(), "nbytes": self.nbytes(spec)}
            if spec == "full":
                metrics["keys"] = [look(layer, keys)._asdict() for layer, (keys, _) in self.like.items()]
            record = {**frames[spec], "metrics": metrics}
            records.append(args.out, record)
            self.known[records.identity(record)] = record

    def _frame(self, spec: str) -> records.Record:
        loaded, text, ids, args = self.patient
        sizes = {"tokens": ids.shape[1] - 1, "step": args.step, "attn": args.attn, "context": args.context}
        return {
            "task": TASK,
            "model": loaded.name,
            "spec": spec,
            "settings": {**quality.setting(loaded, text, args.seed), **sizes},
            "versions": records.versions(),
            "machine": records.machine(),
        }


# ---- advising ----------------------------------------------------------------------------------------------


class Advice(NamedTuple):
    """The cheapest spec within the budget."""

    spec: str
    kl: float
    nbytes: int


def advise(chart: Chart, storages: list[str], max_kl: float, config: Any, say: Callable[[str], object]) -> Advice:
    """Look for the cheapest spec: whole storages first, then cheaper ones that leave out their worst layers."""
    sizes = {spec: chart.nbytes(spec) for spec in ["full", *storages]}
    kls = dict(zip(["full", *storages], [0.0, *(m["kl_mean"] for m in chart(storages))], strict=True))
    within = [spec for spec in kls if kls[spec] <= max_kl]
    best = min((Advice(spec, kls[spec], sizes[spec]) for spec in within), key=lambda advice: advice.nbytes)
    for storage in sorted(storages, key=sizes.__getitem__):
        if kls[storage] > max_kl and sizes[storage] < best.nbytes:
            order = worst_first(chart, storage, config, say)
            best = remedy(chart, storage, order, max_kl, best)
    return best


def worst_first(chart: Chart, storage: str, config: Any, say: Callable[[str], object]) -> list[int]:
    """Layers by the KL that encoding one of them alone costs, the largest first."""
    from tqdm import tqdm

    layers = encoded_layers(storage, config)
    alone = [skipping(storage, [other for other in layers if other != layer]) for layer in layers]
    with tqdm(total=len(alone), desc=f"{storage} by layer", unit="layer", leave=False) as bar:
        costs = dict(zip(layers, (m["kl_mean"] for m in chart(alone, bar.update)), strict=True))
    order = sorted(layers, key=costs.__getitem__, reverse=True)
    shown = ", ".join(f"layer {layer} {costs[layer]:.1e}" for layer in order[:6])
    say(f"{storage} in one layer only costs a KL of: {shown}{', ...' if len(order) > 6 else ''}")
    return order


def remedy(chart: Chart, storage: str, order: list[int], max_kl: float, best: Advice) -> Advice:
    """The fewest of the worst layers to leave out that bring a storage within the budget; `best` if none is cheaper."""
    most = len(order) - 1
    while most and chart.nbytes(skipping(storage, order[:most])) >= best.nbytes:
        most -= 1
    low, high = 0, most + 1  # low is too few; high is enough, or not cheaper
    while high - low > 1:
        middle = (low + high) // 2
        spec = skipping(storage, order[:middle])
        if chart.kl(spec) <= max_kl:
            high, best = middle, Advice(spec, chart.kl(spec), chart.nbytes(spec))
        else:
            low = middle
    return best


# ---- command -----------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    quality.add_model_arguments(parser)
    parser.add_argument("--storages", nargs="+", default=STORAGES, help=f"to choose from ({' '.join(STORAGES)})")
    parser.add_argument("--max-kl", type=float, default=0.01, help="mean KL that is bearable (%(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens fed; the second half counts (%(default)s)")
    parser.add_argument("--step", type=int, default=64, help="tokens fed at a time (%(default)s)")
    parser.add_argument("--context", type=int, default=4096, help="tokens at which bytes are compared (%(default)s)")
    parser.add_argument("--attn", choices=["sdpa", "eager", "kvcache"], default="kvcache", help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/doctor.jsonl"), help="(%(default)s)")


def check(args: argparse.Namespace) -> None:
    """Refuse what has no meaning before a model is loaded."""
    if not args.max_kl > 0:
        raise ValueError(f"--max-kl {args.max_kl}: give a divergence above 0")
    for name in ("tokens", "context"):
        if getattr(args, name) < 2:
            raise ValueError(f"--{name} {getattr(args, name)}: give at least 2")
    for storage in args.storages:
        if "+" in storage or "skip_layers" in storage:
            raise ValueError(
                f"--storages {storage}: give plain storages; which layers to skip is what the doctor finds"
            )


def run(args: argparse.Namespace) -> None:
    """Examine the model, print what was found, and recommend."""
    check(args)
    loaded, text = models.load_model(args.model, args.device, args.dtype), models.load_text(args.text)
    config = loaded.model.config
    storages = list(dict.fromkeys(contenders.canonical(name, config) for name in args.storages))
    plain = [storage for storage in storages if not encoded_layers(storage, config)]
    if plain:
        raise ValueError(f"--storages {plain[0]} encodes no layer of {loaded.name}; leave it out")
    patient = Patient(loaded, text, models.token_ids(loaded, text, args.tokens + 1), args)
    chart = Chart(patient, states(filled(patient)))
    print(report(chart(["full"])[0], dict(zip(storages, chart(storages), strict=True)), args), flush=True)
    print(conclusion(advise(chart, storages, args.max_kl, config, print), chart.nbytes("full"), args.max_kl))


def report(full: dict[str, Any], scored: dict[str, dict[str, Any]], args: argparse.Namespace) -> str:
    """What the keys look like and what each storage costs."""
    lines = [f"{'layer':>5}{'outlier ratio':>15}{'constant':>10}   largest key channel"]
    keys = [Keys(**row) for row in full["keys"]]
    lines += [
        f"{k.layer:>5}{k.ratio:>15.1f}{k.constant:>10.2f}   head {k.head}, channel {k.channel}"
        + ("   <- outlier" if k.ratio >= OUTLIER else "")
        for k in keys
    ]
    named = [str(k.layer) for k in keys if k.ratio >= OUTLIER]
    lines += ["", f"layers with outlier keys (ratio {OUTLIER:.0f} or more): {', '.join(named) or 'none'}", ""]
    lines += [f"{'storage':<34}{'mean KL':>10}{'p99.9 KL':>10}{'top-1':>8}{'MB':>9}{'of full':>9}"]
    for spec, m in sorted(scored.items(), key=lambda row: row[1]["nbytes"]):
        row = f"{spec:<34}{m['kl_mean']:>10.1e}{m['kl_p999']:>10.1e}{m['top1_agreement']:>8.3f}"
        lines.append(f"{row}{m['nbytes'] / 1e6:>9.2f}{m['nbytes'] / full['nbytes']:>9.3f}")
    return "\n".join(
        [*lines, f"KL over the last {args.tokens - args.tokens // 2} of {args.tokens} tokens; MB at {args.context}", ""]
    )


def conclusion(advice: Advice, full: int, max_kl: float) -> str:
    """The recommendation in one line."""
    share = f"{advice.nbytes / full:.3f} of full's bytes"
    what = f"recommended: {advice.spec}  (mean KL {advice.kl:.1e} <= {max_kl:g}, {share})"
    return what if advice.spec != "full" else f"{what}: no storage is both cheaper and within the budget"
