"""How does a cache get into a file and back? One safetensors file, written whole or not at all, checked before use.

    8 bytes     length of the header, little endian
    header      JSON: for each tensor its dtype, shape and place; "__metadata__" as below; padded to 64 bytes
    data        the tensors as the codecs store them, one after the other, without holes

    __metadata__   format, version    what this is
                   model              whose states: config and weights (see ``identity``)
                   spec, layers       the cache, and per layer what is no tensor (JSON)
                   tokens_seen        tokens per row
                   last_position      the largest position of each row
                   rotated            regime and number of the tokens that can begin a prompt (see ``regime``)
                   checksums          CRC-32 of every tensor (JSON)
                   checksum           SHA-256 of the rest of the header

A token is saved as it is stored, so a loaded cache continues with the very bits of the saved one. Nothing is pickled.

Saving writes a temporary file beside the target, flushes it to the disk and renames it: whoever opens the target finds
the old file or the new one. Loading reads everything into memory of its own and checks that: a mapping of the file
would follow whoever writes to it, and the process would die when somebody cuts it. Loaded tokens are never written to
(they are *frozen* as those of a fork are, see ``store``), a ring is copied before its next write.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import mmap
import os
import secrets
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import identity
from . import spec as specs
from .eviction import EvictionLayer
from .layers import KVLayer, Run
from .padded import PaddedLayer, count_by_row
from .part import map_state
from .regime import Rotated
from .store import Slab

FORMAT, VERSION = "hf_kvcache snapshot", "4"
LARGEST_HEADER = 100 << 20
ALIGN = 64
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PADDED = ("own", "slots", "solid", "real")  # of a layer of padded rows
FACTS = ("model", "spec", "tokens_seen", "last_position", "rotated", "layers")


class Snapshot(NamedTuple):
    """A file that was read and checked."""

    path: Path
    metadata: dict[str, str]
    tensors: dict[str, torch.Tensor]  # views of a private copy of the file

    @property
    def token_ids(self) -> torch.Tensor | None:
        """The ids that were saved with it, int64, ``[n]`` or ``[B, n]``."""
        return self.tensors.get("token_ids")


# -- a cache as tensors and text ---------------------------------------------------------------------------------------


def save(
    cache: Any, path: str | os.PathLike[str], token_ids: Any = None, whose: str | None = None, **metadata: str
) -> None:
    """Write a cache to ``path``; see ``KVCache.save``. ``whose``: the identity of the weights that made it."""
    tensors: dict[str, torch.Tensor] = {}
    layers = [_save_layer(layer, f"layers.{index}", tensors) for index, layer in enumerate(cache.layers)]
    if token_ids is not None:
        tensors["token_ids"] = as_ids(token_ids, cache.get_seq_length())
    write(path, tensors, {
        "format": FORMAT,
        "version": VERSION,
        "model": cache._whose() if whose is None else whose,
        "spec": cache.spec,
        "tokens_seen": str(cache.get_seq_length()),
        "last_position": ",".join(map(str, cache._last_positions)),
        "rotated": json.dumps(cache._rotated),
        "layers": json.dumps(layers),
        **metadata,
    })  # fmt: skip


def restore(cache: Any, snapshot: Snapshot, device: Any = None) -> None:
    """Fill a new cache of the snapshot's spec; see ``KVCache.load``."""
    path, metadata = snapshot.path, snapshot.metadata
    layers = fact(snapshot, "layers", json.loads, lambda found: all(isinstance(item, dict) for item in found))
    positions = fact(
        snapshot, "last_position", lambda text: [*map(int, text.split(","))], lambda found: min(found) >= 0
    )
    seen = fact(snapshot, "tokens_seen", int, lambda count: count >= 0)
    if len(layers) != len(cache.layers):
        raise ValueError(f"{path} holds {len(layers)} layers, the model has {len(cache.layers)}")
    for index, (layer, facts) in enumerate(zip(cache.layers, layers, strict=True)):
        try:
            _load_layer(layer, facts, f"layers.{index}", snapshot.tensors, device)
        except (KeyError, TypeError, IndexError, AttributeError, OverflowError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"{path}: layer {index} is not as a snapshot of {cache.spec!r} has it ({reason})"
            ) from None
        except ValueError as error:
            raise ValueError(f"{path}: layer {index}: {error}") from None
    cache._last_positions, cache._rotated = positions, rotated(snapshot)
    held = {cache.get_seq_length(), *(cache.layers[index].get_seq_length() for index in cache._progress.attention)}
    if held != {seen}:
        count = " and ".join(map(str, sorted(held)))
        raise ValueError(f"{path} holds {count} tokens, and says tokens_seen={metadata['tokens_seen']}")


def fact(snapshot: Snapshot, name: str, parse: Callable[[str], Any], fits: Callable[[Any], bool]) -> Any:
    """What the metadata says under this name, parsed.

    Raises:
        ValueError: nothing of that name, or nothing that can be understood.
    """
    text = snapshot.metadata.get(name)
    try:
        value = parse(text)  # type: ignore[arg-type]
        if fits(value):
            return value
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    raise ValueError(f"{snapshot.path} is not a snapshot as this library writes them: its {name} is {text!r:.60}")


def rotated(snapshot: Snapshot) -> Rotated:
    """What the metadata says of the rotation of the tokens."""

    def fits(found: Any) -> bool:
        regime, length = found if type(found) is list else (None, None)
        return type(length) is int and length >= 0 and (regime is None or type(regime) is int)

    return Rotated(*fact(snapshot, "rotated", json.loads, fits))


def check(snapshot: Snapshot, source: Any) -> None:
    """Refuse a file of another model, or of other weights; ``source``: the model or its config."""
    path, saved, mine = snapshot.path, snapshot.metadata["model"], identity.of(source)
    if saved == mine:
        return
    config = identity.config_of(source)
    name = f"{type(config).__name__} ({getattr(config, '_name_or_path', '') or 'unnamed'})"
    if not identity.same_config(saved, mine) or not (identity.has_weights(saved) or identity.has_weights(mine)):
        raise ValueError(f"{path} was saved for another model than {name}: load it with the config it was saved with")
    if not identity.has_weights(saved):
        raise ValueError(
            f"{path} does not say whose weights made it: it was saved while no model held its config. Save it with "
            "cache.save(path, model=model)"
        )
    if not identity.has_weights(mine):
        raise ValueError(
            f"{path} belongs to certain weights, and no model here holds this {name}: pass the model itself, "
            "KVCache.load(path, model)"
        )
    raise ValueError(
        f"{path} was made by other weights than those of the model with this {name}, as they are now: load it for the "
        "model that made it, with the same adapters"
    )


def check_spec(snapshot: Snapshot, spec: str) -> None:
    """Refuse a file of another storage or retention than the spec asked for; bytes may be placed anywhere."""
    content = {"storage": "full", "retention": "all"}
    mine = content | specs.split(spec) | {"placement": ""}
    if mine != fact(snapshot, "spec", lambda saved: content | specs.split(saved) | {"placement": ""}, lambda _: True):
        raise ValueError(
            f"{snapshot.path} holds a cache of spec {snapshot.metadata['spec']!r}, not {spec!r}: ask for that "
            "one (it may have another placement)"
        )


def as_ids(token_ids: Any, seen: int) -> torch.Tensor:
    """Token ids on the CPU, int64, as many per row as the cache has seen."""
    ids = torch.as_tensor(token_ids).detach().to("cpu", torch.int64)
    if ids.dim() not in (1, 2) or ids.shape[-1] != seen:
        raise ValueError(f"token_ids of shape {tuple(ids.shape)} for a cache that has seen {seen} tokens")
    return ids


def _save_layer(layer: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(layer, EvictionLayer):
        return {
            "kind": "EvictionLayer",
            "fields": {k: _pack(v, f"{name}.{k}", tensors) for k, v in layer.export().items()},
        }
    if type(layer) not in (KVLayer, PaddedLayer):
        fields = {key: _pack(value, f"{name}.{key}", tensors) for key, value in vars(layer).items()}
        return {"kind": type(layer).__name__, "fields": fields}
    layer.catch_up()
    padded = layer.export() if isinstance(layer, PaddedLayer) else {}
    if layer.is_initialized:
        for part, run in _runs(layer):
            for side, slab in (("keys", run.keys), ("values", run.values)):
                if slab.state is not None:
                    state = slab.view() if layer.home is None else map_state(slab.view(), torch.Tensor.cpu)
                    tensors.update({f"{name}.{part}.{side}.{key}": t for key, t in state._asdict().items()})
        if layer.home is not None and not layer.home.in_place:
            layer.home.discard()  # one staged copy at a time
    facts = ("seen", "batch_size", "heads", "widths", "dtypes", "device") if layer.is_initialized else ()
    fields = {key: getattr(layer, key) for key in facts} | padded
    if layer.skipped:
        fields |= {"given": layer.given, "skipped": layer.skipped}
    return {"kind": "KVLayer", "fields": {k: _pack(v, f"{name}.{k}", tensors) for k, v in fields.items()}}


def _load_layer(layer: Any, facts: Any, name: str, tensors: Mapping[str, torch.Tensor], device: Any) -> None:
    kind = type(layer).__name__
    if facts["kind"] != kind:
        raise ValueError(f"a {facts['kind']} was saved, the model has a {kind}")
    fields = {key: _unpack(value, tensors, device) for key, value in facts["fields"].items()}
    _check_fields(layer, fields)
    if isinstance(layer, EvictionLayer):
        if fields:
            _check_evicted(layer, fields)
        return layer.restore(fields)
    if not isinstance(layer, KVLayer):
        if set(fields) != set(vars(layer)) and not set(vars(layer)) <= set(fields):
            raise ValueError(f"another transformers saved this {kind}: it has no {set(vars(layer)) - set(fields)}")
        vars(layer).update(fields)
        return
    if not fields:
        return
    vars(layer).update({key: value for key, value in fields.items() if key not in PADDED})
    layer.is_initialized = True
    if layer.home is not None:
        layer.home.device = layer.device
    if "own" in fields:
        _check_rows(fields["own"], fields["real"], fields)
        padded = count_by_row(layer)
        padded.restore(fields["own"], fields["solid"], fields["real"])
        tokens = dict(zip(("sinks", "sealed", "tail"), fields["slots"], strict=True))
        _check("solid", fields["solid"], type(fields["solid"]) is int and 0 <= fields["solid"] <= layer.seen)
        sound = all(type(n) is int and n >= least for n, least in zip(tokens.values(), padded.needed(), strict=True))
        _check("slots", fields["slots"], sound)
    else:
        sinks = min(layer.apart, layer.seen)
        sealed = layer.boundary(layer.seen) - sinks
        tokens = {"sinks": sinks, "sealed": sealed, "tail": layer.seen - sinks - sealed}
    for part, run in _runs(layer):
        for side, slab, codec in (("keys", run.keys, run.key_codec), ("values", run.values, run.value_codec)):
            number = ("keys", "values").index(side)
            shape = (layer.batch_size, layer.heads, 0, layer.widths[number])
            like: Any = codec.encode(torch.empty(shape, dtype=layer.dtypes[number], device=layer.device))
            _load_slab(slab, like, f"{name}.{part}.{side}", tokens[part] // codec.group, tensors, layer.device)


COUNTS: dict[str, Any] = {"seen": int, "batch_size": int, "heads": int, "device": torch.device}
PAIRS: dict[str, Any] = {"widths": int, "dtypes": torch.dtype}
SCALARS = (torch.dtype, torch.device, int)


def _check_fields(layer: Any, fields: dict[str, Any]) -> None:
    """What is no tensor has to be of the type that such a layer holds."""
    ours = isinstance(layer, KVLayer)
    for key, value in fields.items():
        if ours and key in COUNTS:
            sound = type(value) is COUNTS[key] and (not isinstance(value, int) or value >= 0)
        elif ours and key in PAIRS:
            sound = type(value) is tuple and len(value) == 2 and all(isinstance(side, PAIRS[key]) for side in value)
        else:
            sound = ours or _alike(key, value, vars(layer).get(key))
        _check(key, value, sound and not (key == "sliding_window" and value != layer.sliding_window))


def _check(name: str, value: Any, sound: bool) -> None:
    if not sound:
        value = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else value
        raise ValueError(f"its {name} cannot be {str(value)!r:.60}")


def _is(value: Any, dtype: torch.dtype, *shape: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == dtype and value.shape == shape


def _check_rows(own: Any, real: Any, fields: dict[str, Any]) -> None:
    """How many tokens each row has, and which tokens fed those were."""
    batch, seen = fields["batch_size"], fields["seen"]
    _check("own", own, _is(own, torch.int64, batch))
    sound = isinstance(real, torch.Tensor) and _is(real, torch.bool, batch, *real.shape[1:2]) and real.shape[1] <= seen
    _check("real", real, sound and torch.equal(own.cpu(), real.cpu().sum(1) + seen - real.shape[1]))


def _check_evicted(layer: EvictionLayer, fields: dict[str, Any]) -> None:
    """Slots, scores and positions of the shapes that such a layer has, and of tokens that it has seen.

    Raises:
        ValueError: a field that cannot be.
    """
    batch, heads, widths, held = (fields[name] for name in ("batch_size", "heads", "widths", "held"))
    if fields["own"] is None:
        _check("real", fields["real"], isinstance(fields["real"], torch.Tensor) and not fields["real"].numel())
    else:
        _check_rows(fields["own"], fields["real"], fields)
    memory = fields["memory"]
    sound = isinstance(memory, dict) and all(isinstance(t, torch.Tensor) for t in memory.values())
    sound = sound and (layer.policy.remembers(memory, batch, heads, widths[0]) or not (memory or held))
    _check("memory", ", ".join(memory) if isinstance(memory, dict) else memory, sound)
    _check("held", held, isinstance(held, dict) and set(held) <= {"kept", *(["tail"] if layer.two else [])})
    numbers = [torch.full((batch, heads, 0), -1)]
    for name, slots in held.items():
        own = layer.kept_slots if name == "kept" else layer.tail_slots
        _check(f"held.{name}", slots, isinstance(slots, dict))
        numbers.append(_check_slots(own, f"held.{name}", slots, fields, layer.retention.adaptive))
    number = torch.cat(numbers, -1).sort(-1).values
    most = fields["seen"] if fields["own"] is None else fields["own"].cpu()[:, None, None]
    twice = (number.diff(dim=-1) == 0) & (number[..., 1:] >= 0)
    _check("positions", f"{int(number.max()) if number.numel() else 0}", not bool((number >= most).any() | twice.any()))
    if layer.two or layer.retention.adaptive or not held:
        return  # how many of a head's tokens are left is a matter of its history there
    rows = [fields["seen"]] * batch if fields["own"] is None else fields["own"].tolist()
    kept = torch.tensor([layer.kept_at(n) for n in rows])[:, None]
    _check("held", [*held], bool(((number >= 0).sum(-1) == kept).all()))


def _check_slots(slots: Any, name: str, fields: dict[str, Any], layer: dict[str, Any], adaptive: bool) -> torch.Tensor:
    """The tokens that are held, [B, H, n] int64; -1: none."""
    batch, heads, used, ragged = layer["batch_size"], layer["heads"], fields["used"], "size" in fields
    _check(f"{name}.used", used, type(used) is int and used > 0 and (adaptive or not ragged))
    position, score = fields["position"], fields["score"]
    lead: tuple[int, ...] = (batch, heads, score.shape[-1])
    if ragged:
        size, lead = fields["size"], (score.shape[-1],)
        sound = _is(size, torch.int64, batch, heads) and int(size.min()) >= 0 and int(size.max()) == used
        _check(f"{name}.size", size, sound and int(size.sum()) == lead[0])
        starts = (size.flatten().cumsum(0) - size.flatten()).view_as(size)
        _check(f"{name}.start", fields["start"], _is(fields["start"], torch.int64, batch, heads))
        _check(f"{name}.start", fields["start"], torch.equal(fields["start"], starts))
    _check(f"{name}.score", score, _is(score, torch.float32, *lead) and (ragged or used <= lead[-1]))
    shape = lead if ragged else (*lead, slots.group)
    _check(f"{name}.position", position, _is(position, torch.int32, *shape) and int(position.min()) >= -1)
    for side, codec, width, dtype in zip(
        ("keys", "values"), (slots.key_codec, slots.value_codec), layer["widths"], layer["dtypes"], strict=True
    ):
        like: Any = codec.encode(torch.empty((1, 1, 0, width), dtype=dtype))
        units = () if codec.group == slots.group else (slots.group // codec.group,)
        sound = isinstance(fields[side], tuple) and len(fields[side]) == len(like)
        _check(f"{name}.{side}", fields[side], sound)
        for t, empty in zip(fields[side], like, strict=True):
            _check(f"{name}.{side}", t, _is(t, empty.dtype, *lead, *units, *empty.shape[3:]))
    if not ragged:
        number = position[:, :, :used].flatten(2).cpu().long()
        _check(f"{name}.position", position, layer["own"] is not None or int(number.min()) >= 0)
        return number
    number = torch.full((batch, heads, used), -1)
    number[torch.arange(used) < fields["size"].cpu()[..., None]] = position.cpu().long()
    return number


def _alike(name: str, value: Any, fresh: Any) -> bool:
    """Whether a field can be what the same one of a new layer became."""
    if isinstance(fresh, dict):
        return (
            type(value) is dict
            and value.keys() == fresh.keys()
            and all(_alike(name, value[key], fresh[key]) for key in fresh)
        )
    if fresh is None:  # until the first token
        later = torch.Tensor if name in ("keys", "values") or name.endswith("_states") else (*SCALARS, torch.Tensor)
        return value is None or (isinstance(value, later) and value is not True)
    return type(value) is type(fresh) or (isinstance(value, torch.Tensor) and isinstance(fresh, (tuple, torch.Tensor)))


def _load_slab(
    slab: Slab, like: Any, name: str, appended: int, tensors: Mapping[str, torch.Tensor], device: torch.device
) -> None:
    """``like``: an empty state of the slab's codec, which says what every tensor has to look like."""
    if not appended and f"{name}.{like._fields[0]}" not in tensors:
        return
    rows = appended if slab.limit is None else min(appended, slab.limit)
    found = [tensors[f"{name}.{field}"] for field in like._fields]
    for field, t, empty in zip(like._fields, found, like, strict=True):
        shape = (*empty.shape[:2], rows, *empty.shape[3:])
        if t.shape != shape or t.dtype != empty.dtype:
            raise ValueError(f"{name}.{field} is {t.dtype} {tuple(t.shape)}, should be {empty.dtype} {tuple(shape)}")
    slab.adopt(type(like)(*(t.to(device) for t in found)), like, appended)


def _runs(layer: KVLayer) -> list[tuple[str, Run]]:
    """The runs that this layer uses, by name."""
    names = [("sinks", layer.apart), ("sealed", True), ("tail", layer.storage.has_tail)]
    return [(name, getattr(layer, name)) for name, used in names if used]


def _pack(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """What is no tensor as JSON; tensors go to ``tensors``."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {"tensor": name, "device": str(value.device)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, (list, tuple)):
        return {"list": [_pack(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        return {"dict": [[key, _pack(item, f"{name}.{key}", tensors)] for key, item in value.items()]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{name} is a {type(value).__name__}, which a snapshot cannot hold: keep this cache in memory")


def _unpack(value: Any, tensors: Mapping[str, torch.Tensor], device: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:  # written to in place by stock layers: a copy
        return tensors[value["tensor"]].clone().to(_usable(device or value["device"]))
    if "dtype" in value:
        dtype = getattr(torch, value["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"unknown dtype {value['dtype']!r}")
        return dtype
    if "device" in value:
        return _usable(device or value["device"])
    if "list" in value:
        return tuple(_unpack(item, tensors, device) for item in value["list"])
    return {key: _unpack(item, tensors, device) for key, item in value["dict"]}


def _usable(device: Any) -> torch.device:
    device = torch.device(device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"was saved from {device}, which is not here: pass device=, for example device='cpu'")
    return device


# -- tensors as a file -------------------------------------------------------------------------------------------------


def write(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with checksums, at once or not at all, readable by the user alone.

    Raises:
        ValueError: ``path`` is a symbolic link, or a tensor's dtype is unknown to the format.
        OSError: the folder cannot be written to, or the disk is full; nothing is left behind.
    """
    path = Path(path)
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link: a snapshot is not written through one")
    for name, t in tensors.items():
        if t.dtype not in NAMES:
            raise ValueError(f"{name} is {t.dtype}, which a snapshot cannot hold")
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())  # so that every tensor is aligned
    with replacing(path) as file:
        file.write(_header(order, tensors, metadata))
        for name in order:
            file.write(_bytes(tensors[name]))


def _header(order: Sequence[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {}
    end = 0
    for name in order:
        t, start = tensors[name], end
        end += t.nbytes
        entries[name] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [start, end]}
    sums = {name: zlib.crc32(_bytes(tensors[name])) for name in order}
    metadata = {**metadata, "checksums": json.dumps(sums)}
    header = {"__metadata__": {**metadata, "checksum": _checksum(metadata, entries)}, **entries}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGN)
    return len(text).to_bytes(8, "little") + text


def _checksum(metadata: Mapping[str, str], entries: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps([metadata, entries], sort_keys=True).encode()).hexdigest()


def _bytes(t: torch.Tensor) -> memoryview:
    """The bytes of a tensor in order of its elements."""
    return t.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A new private file that takes the place of ``path`` when the block ends without an error."""
    temporary = path.parent / f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(temporary, flags, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    with contextlib.suppress(OSError):  # not every system can flush a folder; the file is whole, and in its place
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name survives a power cut
        finally:
            os.close(folder)


def read(path: str | os.PathLike[str], only: Sequence[str] | None = None) -> Snapshot:
    """Read a snapshot and check all of it: the format, the bounds of every tensor, every checksum.

    Args:
        only: names of the tensors that are wanted; the others are neither read nor returned.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a symbolic link, no snapshot, one of another version, or one that is damaged.
    """
    path = Path(path)
    with _open(path) as file:
        length = os.fstat(file.fileno()).st_size
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= min(LARGEST_HEADER, length - 8):
            raise ValueError(f"{path} is not a snapshot, or it is cut off")
        metadata, entries, sums = _parse(path, file.read(size))
        _check_places(path, entries, length - 8 - size)
        # Memory of nobody else's; its pages come into being when they are written to.
        data = mmap.mmap(-1, max(length - 8 - size, 1))
        tensors: dict[str, torch.Tensor] = {}
        for name, entry in entries.items():
            if only is not None and name not in only:
                continue
            start, end = entry["data_offsets"]
            with memoryview(data)[start:end] as room:
                file.seek(8 + size + start)
                if file.readinto(room) != end - start:
                    raise ValueError(f"{path} is cut off or damaged at {name}: it became shorter while it was read")
                if zlib.crc32(room) != sums[name]:
                    raise ValueError(f"{path} is damaged: the checksum of {name} differs")
            tensors[name] = _tensor(data, entry)
    return Snapshot(path, metadata, tensors)


def _open(path: Path) -> io.BufferedReader:
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link: a snapshot is not read through one")
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode) or not about.st_size:
        os.close(descriptor)
        raise ValueError(f"{path} is empty, or not a file")
    return open(descriptor, "rb")  # noqa: SIM115


def _parse(path: Path, header: bytes) -> tuple[dict[str, str], dict[str, Any], dict[str, int]]:
    """(metadata, entries, checksums of the tensors) of a header that is sound and of this version."""
    try:
        entries = json.loads(header)
        metadata = entries.pop("__metadata__")
        stated = metadata.pop("checksum")
        sound = metadata["format"] == FORMAT and stated == _checksum(metadata, entries)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is not a snapshot, or its header is damaged") from None
    if not sound:
        raise ValueError(f"{path} is not a snapshot, or its header is damaged: checksums differ")
    if metadata.get("version") != VERSION:
        raise ValueError(f"{path} is of version {metadata.get('version')}, this library reads version {VERSION}")
    for name in FACTS:
        if name not in metadata:
            raise ValueError(f"{path} is not a snapshot as this library writes them: it has no {name}")
    strange = [name for name, value in metadata.items() if not isinstance(value, str)]
    if strange:
        raise ValueError(f"{path} is not a snapshot as this library writes them: its {strange[0]} is no text")
    sums = fact(Snapshot(path, metadata, {}), "checksums", json.loads, lambda found: found.keys() == entries.keys())
    return metadata, entries, sums


def _check_places(path: Path, entries: Mapping[str, Any], length: int) -> None:
    """The tensors have to cover the data without holes and without overlap."""
    at = 0
    places = []
    for name, entry in entries.items():
        try:
            start, end = entry["data_offsets"]
            size = math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize
            sound = all(type(side) is int and side >= 0 for side in (*entry["shape"], start, end))
        except (KeyError, TypeError, ValueError):
            sound = False
        if not sound:
            raise ValueError(f"{path} is not a snapshot as this library writes them: {name} has no place in it")
        places.append((start, end, size, name))
    for start, end, size, name in sorted(places):
        if start != at or end - start != size or end > length:
            raise ValueError(f"{path} is cut off or damaged at {name}")
        at = end
    if at != length:
        raise ValueError(f"{path} has {length - at} bytes more than its header says")


def _tensor(data: mmap.mmap, entry: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape, start = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"][0]
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=start).view(shape)
