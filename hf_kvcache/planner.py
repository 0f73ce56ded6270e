"""What will it cost? Bytes of a cache, and what fits into a device, before anything is allocated.

    cache bytes = batch * sum over layers of ( sum over runs  tokens held / group * bytes per row   +  state bytes )

Nothing here knows a family, a codec or a retention:

    bytes per row    the codec encodes one row of a tensor without storage, and the parts of its state are added up
    tokens held      the layers that ``KVCache`` would build answer for themselves (``KVLayer.held_at``)
    shapes           the model answers (``shapes.py``)

For ``full`` that is the exact payload, 2 * layers * KV heads * head size * tokens * bytes per value. What comes on top
for a moment, or as rows allocated ahead, is in ``workspace_bytes``, an estimate of what a decode step needs:

    rows allocated ahead by growing slabs (1/128, at least 16 tokens)
    + the largest layer in the model's dtype: a growing slab is copied, and stock attention is handed decoded states
    + attention scores and probabilities of one layer in float32, and one block of codes
    + two offloaded layers as they are stored: one that is read, one that is fetched
    + logits of one token per row, in the model's dtype and in float32

Reading a long prompt at once needs more, for the activations of all its tokens: feed it in chunks.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from . import spec as specs
from .caches import KVCache
from .codecs import Codec
from .layers import Held, KVLayer
from .reference import BLOCK
from .shapes import LayerShapes, Outline, outline

HEADROOM = 0.2  # share of the device that stays free
UNLIMITED = 2**31 - 1  # tokens; a bounded cache fits for any context
SPECS = ("full", "int8", "fp8", "int4", "k4v2", "int2", "sink(4,1020)", "int8+sink(4,1020)")
UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
UNITS |= {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

# The nearest that vLLM has for a storage; "" where there is nothing near. The "per_token_head" types are recent.
VLLM_DTYPES = {
    "full": "auto",
    "int8": "int8_per_token_head",
    "fp8_e4m3": "fp8_per_token_head",
    "fp8_e5m2": "fp8_e5m2",
    "int4": "int4_per_token_head",
}
VLLM_BLOCK = 16


@dataclass(frozen=True)
class Plan:
    """What a cache costs. All sizes in bytes, of the whole batch.

    ``largest_batch`` (at this context) and ``longest_context`` (at this batch; ``UNLIMITED`` where a cache is bounded)
    leave 20 % of ``device_memory`` free. They are ``None`` where memory or weights are unknown, 0 where nothing fits.
    """

    model: str
    spec: str
    context: int  # tokens per row
    batch: int
    dtype: str
    cache_bytes: int
    bytes_by_type: dict[str, int]  # full, sliding, latent (MLA), linear (recurrent states), shared and none (0)
    layers_by_type: dict[str, int]
    device_bytes: int  # of cache_bytes, what lies on the device
    far_bytes: int  # and what lies elsewhere
    weight_bytes: int | None
    workspace_bytes: int
    device_memory: int | None
    largest_batch: int | None
    longest_context: int | None
    notes: tuple[str, ...]
    _outline: Outline = field(repr=False, compare=False)

    @property
    def total_bytes(self) -> int | None:
        """Weights, cache and workspace on the device."""
        return None if self.weight_bytes is None else self.weight_bytes + self.device_bytes + self.workspace_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the total leaves the headroom free; ``None`` where memory or weights are unknown."""
        return None if self.largest_batch is None else self.batch <= self.largest_batch

    def at(self, *, spec: str | None = None, context: int | None = None, batch: int | None = None) -> Plan:
        """The same model under another spec, context or batch."""
        return _plan(
            self._outline,
            specs.split(self.spec if spec is None else spec),
            self.context if context is None else context,
            self.batch if batch is None else batch,
            self.device_memory,
        )

    def table(self, names: Sequence[str] = SPECS) -> str:
        """One line per spec: cache, share of ``full``, total, largest batch, longest context."""
        full = self.at(spec="full").cache_bytes
        rows = [("spec", "cache", "of full", "total", "largest batch", "longest context")]
        for plan in (self.at(spec=name) for name in names):
            share, total = f"{plan.cache_bytes / max(full, 1):.3f}", _size(plan.total_bytes)
            rows.append((plan.spec, _size(plan.cache_bytes), share, total, *plan._limits()))
        first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
        cells = ([name.ljust(first), *map(str.rjust, numbers, widths)] for name, *numbers in rows)
        return "\n".join("  ".join(line) for line in cells)

    def _limits(self) -> tuple[str, str]:
        if self.largest_batch is None or self.longest_context is None:
            return "-", "-"
        return f"{self.largest_batch:,}", "any" if self.longest_context == UNLIMITED else f"{self.longest_context:,}"

    @property
    def vllm(self) -> dict[str, str]:
        """The nearest settings of ``vllm serve``; a value of "" says that vLLM has nothing near."""
        axes = specs.split(self.spec)
        name = specs.storage(axes.get("storage", "full")).name
        settings = {
            "--kv-cache-dtype": VLLM_DTYPES.get(name, ""),
            "--block-size": str(VLLM_BLOCK),
            "--max-model-len": str(-(-self.context // VLLM_BLOCK) * VLLM_BLOCK),
            "--max-num-seqs": str(self.batch),
            "--gpu-memory-utilization": f"{1 - HEADROOM:.2f}",
        }
        if self.far_bytes:  # --swap-space, in versions that still have it
            settings["--kv-offloading-size"] = f"{self.far_bytes / UNITS['GIB']:.1f}"
        return settings

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if not f.name.startswith("_")}
        return {**fields, "total_bytes": self.total_bytes, "fits": self.fits, "vllm": self.vllm}

    def __str__(self) -> str:
        kinds = ", ".join(f"{n} {kind} {_size(self.bytes_by_type[kind])}" for kind, n in self.layers_by_type.items())
        lines = [
            f"{self.model}: {self.spec}, {self.batch} x {self.context:,} tokens, {self.dtype}",
            f"  cache      {_size(self.cache_bytes):>10}   layers: {kinds}",
            f"  weights    {_size(self.weight_bytes):>10}",
            f"  workspace  {_size(self.workspace_bytes):>10}   of a decode step (estimate)",
            f"  total      {_size(self.total_bytes):>10}",
        ]
        if self.far_bytes:
            lines.insert(2, f"    elsewhere {_size(self.far_bytes):>9}")
        if self.device_memory is not None:
            verdict = {True: "fits in", False: "does not fit in", None: "of"}[self.fits]
            lines[-1] += f"   {verdict} {_size(self.device_memory)}, of which {HEADROOM:.0%} stay free"
            batch, context = self._limits()
            lines.append(f"  largest batch {batch}; longest context at batch {self.batch} {context}")
        vllm = " ".join(f"{k} {v}" for k, v in self.vllm.items() if v)
        return "\n".join([*lines, f"  vLLM: {vllm}", *(f"  note: {note}" for note in self.notes)])


def plan(
    config_or_name: Any,
    context: int = 8192,
    batch: int = 1,
    storage: str = "full",
    retention: str = "all",
    placement: str = "device",
    spec: str | None = None,
    dtype: Any = None,
    device_memory: int | str | None = None,
    weight_bytes: int | None = None,
) -> Plan:
    """What a cache costs before it is made; see the module.

    Args:
        config_or_name: a config, a dict with ``model_type``, a ``config.json``, a folder that holds one, or a hub name.
        context: tokens per row, prompt and answer together.
        batch: rows.
        storage, retention, placement: as for ``KVCache``; or all three in one ``spec``.
        dtype: of weights, keys and values; ``None``: what the config says.
        device_memory: bytes, or text such as ``"80GiB"``; without it nothing is said about what fits.
        weight_bytes: bytes of the weights where the config does not tell them (quantized checkpoints).

    Raises:
        ValueError: an unknown spec, model or unit; numbers below 1; a model that cannot be outlined.
    """
    axes = {"storage": storage, "retention": retention, "placement": placement}
    if spec is not None:
        given = [name for name, value in axes.items() if value not in ("full", "all", "device")]
        if given:
            raise ValueError(f"spec={spec!r} names all axes: leave out {', '.join(given)}")
        axes = specs.split(spec)
    memory = None if device_memory is None else parse_memory(device_memory)
    _check(context, batch)
    made = outline(config_or_name, dtype)
    if weight_bytes is not None:
        notes = tuple(note for note in made.notes if not note.startswith("weights"))
        made = made._replace(weight_bytes=weight_bytes, notes=notes)
    return _plan(made, axes, context, batch, memory)


def _check(context: int, batch: int) -> None:
    for name, value in (("context", context), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} is not an integer >= 1")


def _plan(made: Outline, axes: dict[str, str], context: int, batch: int, memory: int | None) -> Plan:
    _check(context, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a spec changes nothing for a model is seen in the numbers
        cache = KVCache(made.config, **axes)
    layers = _kinds(cache, made)
    by_type, count = _by_type(layers, made, context)
    total, far = sum(by_type.values()), _far_bytes(layers, context)
    workspace = _workspace(layers, made, context)
    largest = longest = None
    if memory is not None and made.weight_bytes is not None:
        free = int(memory * (1 - HEADROOM)) - made.weight_bytes
        largest = max(free // (total - far + workspace), 0)
        longest = _longest(cache, layers, made, free // batch)
    return Plan(
        model=made.name,
        spec=cache.spec,
        context=context,
        batch=batch,
        dtype=str(made.dtype)[6:],
        cache_bytes=batch * total,
        bytes_by_type={kind: batch * size for kind, size in by_type.items()},
        layers_by_type=count,
        device_bytes=batch * (total - far),
        far_bytes=batch * far,
        weight_bytes=made.weight_bytes,
        workspace_bytes=batch * workspace,
        device_memory=memory,
        largest_batch=largest,
        longest_context=longest,
        notes=made.notes + _vllm_notes(cache),
        _outline=made,
    )


def _vllm_notes(cache: KVCache) -> tuple[str, ...]:
    name, retention, notes = cache.storage.name, cache.retention, []
    if retention.evicts:
        notes.append(f"vLLM has nothing like {retention.spec!r}: it keeps all tokens")
    if name not in VLLM_DTYPES:
        notes.append(f"vLLM has nothing near {name!r}")
    return tuple(notes)


class _Layer:
    """Bytes of one layer for one row, as a function of the context. ``count`` layers are like it."""

    def __init__(self, layer: Any, made: Outline, index: int) -> None:
        self.layer, self.count = layer, 1
        self.shapes = made.layers[index] if index < len(made.layers) else LayerShapes()
        self.window = getattr(layer, "sliding_window", None)
        self.home = getattr(layer, "home", None)
        self.empty = _empty_kind(made)
        self.query_heads = getattr(made.config, "num_attention_heads", None) or self.shapes.heads
        self.latent = self.shapes.heads == 1 and self.shapes.widths[0] == getattr(made.config, "kv_lora_rank", None)

    def looks(self) -> tuple[Any, ...]:
        """Layers with the same shapes that hold the same at these lengths are counted together."""
        home = None if self.home is None else self.home.recent
        return self.kind, self.shapes, self.window, home, *(tuple(self.held(n)) for n in (1, 1000, 10**6, UNLIMITED))

    @property
    def kind(self) -> str:
        if not self.shapes.heads:
            return "linear" if self.shapes.state_bytes else self.empty
        return "sliding" if self.window is not None else "latent" if self.latent else "full"

    def held(self, context: int) -> list[Held]:
        if not self.shapes.heads:
            return []
        if isinstance(self.layer, KVLayer):
            return self.layer.held_at(context)
        plain = specs.storage("full")  # a native window, or the attention of a hybrid layer
        return [Held(plain.key_codec, plain.value_codec, min(context, self.window or context))]

    def bytes(self, context: int, ahead: bool = False) -> int:
        """Keys and values, and what a policy remembers beside them (without tables of rotations, which rows share).

        With ``ahead`` also the rows that growing slabs may have allocated for later tokens.
        """
        shapes, total = self.shapes, 0
        for run in self.held(context):
            group = self.layer.storage.group if isinstance(self.layer, KVLayer) else 1
            extra = max(16, run.tokens // 128) + group if ahead and isinstance(self.layer, KVLayer) else 0
            codecs = (run.key_codec, run.value_codec)
            for codec, width, dtype in zip(codecs, shapes.widths, shapes.dtypes, strict=True):
                size = row_bytes(codec, shapes.heads, width, dtype)  # type: ignore[arg-type]  # (a codec is hashable)
                total += -(-(run.tokens + extra) // codec.group) * size
            total += (run.tokens + extra) * shapes.heads * run.beside
        if shapes.heads and isinstance(self.layer, KVLayer):
            total += self.layer.remembered_at(context, shapes.heads, self.query_heads, shapes.widths[0])
        return total

    def far(self, context: int) -> int:
        """Bytes of the sealed tokens that a placement moves off the device; see ``placement``."""
        home, shapes = self.home, self.shapes
        if home is None or not shapes.heads:
            return 0
        run = self.layer.far_at(context)
        tokens = max(run.tokens - home.recent, 0)
        tokens -= tokens % self.layer.storage.group  # groups move whole
        sides = zip((run.key_codec, run.value_codec), shapes.widths, shapes.dtypes, strict=True)
        return sum(tokens * row_bytes(codec, shapes.heads, w, dtype) // codec.group for codec, w, dtype in sides)

    def decoded(self, context: int) -> int:
        """Keys and values in the model's dtype."""
        shapes = self.shapes
        values = sum(width * dtype.itemsize for width, dtype in zip(shapes.widths, shapes.dtypes, strict=True))
        return sum(run.tokens for run in self.held(context)) * shapes.heads * values


def _empty_kind(made: Outline) -> str:
    """Why a layer has no cache of its own: it shares another's, or has no attention."""
    shares = getattr(made.config, "num_kv_shared_layers", 0) or getattr(made.config, "kv_sharing_modes", None)
    return "shared" if shares else "none"


def _kinds(cache: KVCache, made: Outline) -> list[_Layer]:
    """The layers, equal ones once."""
    kinds: dict[Any, _Layer] = {}
    for index, layer in enumerate(cache.layers):
        new = _Layer(layer, made, index)
        found = kinds.setdefault(new.looks(), new)
        found.count += found is not new
    return list(kinds.values())


@lru_cache(maxsize=512)
def row_bytes(codec: Codec, heads: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of one row of a codec's state: ``codec.group`` tokens of one sequence, all heads."""
    row = torch.empty(1, heads, codec.group, width, dtype=dtype, device="meta")
    return sum(part.nbytes for part in codec.encode(row))


def _by_type(layers: list[_Layer], made: Outline, context: int) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes per row and number of layers by type. A hybrid layer's states count as ``linear`` bytes."""
    size: dict[str, int] = {}
    count: dict[str, int] = {}
    for layer in layers:
        kind, states = layer.kind, layer.shapes.state_bytes
        count[kind] = count.get(kind, 0) + layer.count
        size[kind] = size.get(kind, 0) + layer.count * layer.bytes(context)
        if states:
            size["linear"] = size.get("linear", 0) + layer.count * states
    rest = made.config.num_hidden_layers - sum(count.values())  # older transformers make no entry for shared layers
    if rest > 0:
        kind = _empty_kind(made)
        size.setdefault(kind, 0)
        count[kind] = count.get(kind, 0) + rest
    return size, count


def _far_bytes(layers: list[_Layer], context: int) -> int:
    """Bytes per row that lie off the device."""
    return sum(layer.count * layer.far(context) for layer in layers)


def _workspace(layers: list[_Layer], made: Outline, context: int) -> int:
    """See the module; per row."""
    config, size = made.config, made.dtype.itemsize
    ahead = sum(layer.count * (layer.bytes(context, ahead=True) - layer.bytes(context)) for layer in layers)
    widest = max(layer.decoded(context) for layer in layers)
    most = max(sum(run.tokens for run in layer.held(context)) for layer in layers)
    scores = 2 * 4 * most * getattr(config, "num_attention_heads", 1)
    block = min(4 * BLOCK, 2 * widest)
    staged = 2 * max(layer.far(context) for layer in layers)
    return ahead + widest + scores + block + staged + config.vocab_size * (4 + size)


def _longest(cache: KVCache, layers: list[_Layer], made: Outline, room: int) -> int:
    """The most tokens per row for which everything fits into ``room`` bytes, on the way there too."""
    late = cache.storage.quantize_after  # until then all is plain: memory may peak before the end

    def fits(context: int) -> bool:
        points = {context, min(context, late)} - {0}
        return all(_needed(layers, made, point) <= room for point in points)

    if fits(UNLIMITED):
        return UNLIMITED
    low, high = 0, UNLIMITED
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _needed(layers: list[_Layer], made: Outline, context: int) -> int:
    held = sum(_by_type(layers, made, context)[0].values()) - _far_bytes(layers, context)
    return held + _workspace(layers, made, context)


def parse_memory(text: int | str) -> int:
    """``"80GiB"``, ``"24 GB"`` or a number of bytes -> bytes.

    Raises:
        ValueError: no number, or an unknown unit.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].upper() not in UNITS or float(match[1]) <= 0:
        raise ValueError(f"memory {text!r}: write bytes, or a number with a unit such as 80GiB or 24GB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def _size(count: int | None) -> str:
    if count is None:
        return "?"
    unit = next((u for u in ("TiB", "GiB", "MiB", "KiB") if count >= UNITS[u.upper()]), "B")
    return f"{count} B" if unit == "B" else f"{count / UNITS[unit.upper()]:.2f} {unit}"
