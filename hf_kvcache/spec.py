"""How is a cache named? ``int8+sink(4,508)``: parts joined by ``+`` in any order, options in brackets.

    spec   = part *("+" part)            part   = name [ "(" option *("," option) ")" ]
    option = value | name "=" value      value  = integer | float | name | list ("0|1|29")

Each part belongs to one axis (storage, retention, placement); an axis that is not named keeps its default.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from .codecs import ALIASES, ALWAYS, CODECS, NEVER, Codec, PerToken, find_codec
from .lowbit import GroupedCodec
from .placement import Offload, OnDevice
from .retention import Retention, make_retention, options_by_name

FLAGS = ("pyramid", "adaptive", "reposition")  # options that may be given by their name alone
PLACEMENTS = {"device": (), "cpu": ("keep_layers", "keep_recent", "max_pinned")}
PLACEMENTS["disk"] = PLACEMENTS["cpu"]  # after the path
PART = re.compile(r"^\s*([A-Za-z_][A-Za-z0-9_]*)\s*(?:\((.*)\))?\s*$", re.DOTALL)


class Storage(NamedTuple):
    """The storage axis: a codec per side, what stays plain beside it, and the layers it leaves alone."""

    name: str
    key_codec: Codec
    value_codec: Codec
    skip_layers: tuple[int, ...] | str = ()  # numbers, negative ones from the end; or "ends"
    sinks: int = 0  # first tokens, plain
    residual: int = 0  # most recent tokens, plain
    quantize_after: int = 0  # nothing is encoded until more tokens than this were seen
    options: str = ""  # canonical text of what differs from the defaults

    @property
    def lossless(self) -> bool:
        return self.key_codec.lossless and self.value_codec.lossless

    @property
    def group(self) -> int:
        """Tokens that are encoded together."""
        return max(self.key_codec.group, self.value_codec.group)

    @property
    def has_tail(self) -> bool:
        """Whether the most recent tokens are plain before they are sealed."""
        return bool(self.residual or self.group > 1 or self.quantize_after)

    @property
    def spec(self) -> str:
        return f"{self.name}({self.options})" if self.options else self.name


def axis_of(name: str) -> str:
    """The axis that a part's name belongs to."""
    if re.fullmatch(r"k[842]v[842]", name):
        return "storage"
    axes = {
        "storage": [*CODECS, *ALIASES, "int4", "int2", "k4v2 (any of 8, 4, 2 for each side)"],
        "retention": list(options_by_name()),
        "placement": list(PLACEMENTS),
    }
    for axis, names in axes.items():
        if name in names:
            return axis
    known = ", ".join(name for names in axes.values() for name in names)
    raise ValueError(f"unknown spec part {name!r}: known are {known}")


def split(spec: str) -> dict[str, str]:
    """``"int8+sink(4,508)"`` -> ``{"storage": "int8", "retention": "sink(4,508)"}``."""
    axes: dict[str, str] = {}
    for part in re.split(r"\+(?![^(]*\))", spec):
        axis = axis_of(parse_part(part)[0])
        if axis in axes:
            raise ValueError(f"spec {spec!r} names two {axis}s, {axes[axis]!r} and {part.strip()!r}: keep one")
        axes[axis] = part.strip()
    return axes


def parse_part(part: str) -> tuple[str, list[Any], dict[str, Any]]:
    """``"sink(4, window=508)"`` -> ``("sink", [4], {"window": 508})``."""
    match = PART.match(part) if isinstance(part, str) else None
    if match is None:
        raise ValueError(f"spec part {part!r} is not a name with options in brackets, such as int8 or sink(4,508)")
    name, inside = match.groups()
    args: list[Any] = []
    options: dict[str, Any] = {}
    for item in filter(None, (piece.strip() for piece in (inside or "").split(","))):
        key, equals, value = item.partition("=")
        if (equals and key.strip() in options) or (not equals and item in FLAGS and item in args):
            raise ValueError(f"spec part {part!r} gives {key.strip()!r} twice: keep one")
        if equals:
            options[key.strip()] = _value(value.strip())
        else:
            args.append(_value(item))
    return name, args, options


# rotate=: the head sizes of which rows are rotated. Small heads gain little, and stay easy to check by hand. Where keys
# have a step for each channel, rotation also mixes channels that were well apart: it divides the KL divergence of int4
# by 2.3 on SmolLM2 (head size 64) and multiplies it by 3.5 on Gemma 3 270M (256, normalised keys).
ROTATED = {"auto": range(64, sys.maxsize), "on": ALWAYS, "off": NEVER}
ROTATED_CHANNELS = {**ROTATED, "auto": range(64, 129)}
EIGHT_BITS = {"skip_layers": (), "sinks": 0, "residual": 0, "quantize_after": 0, "rotate": "auto"}
LOW_BITS = {**EIGHT_BITS, "sinks": 4, "residual": 128, "group": 32, "key_axis": "channel"}


def storage(part: str | Storage, skip_layers: int | str | Sequence[int] = ()) -> Storage:
    """The storage that a part names; ``ValueError`` for an unknown name or option."""
    skip = layer_numbers("skip_layers", skip_layers)
    if isinstance(part, Storage):
        if skip:
            raise ValueError(f"skip_layers is given twice, in the storage and as {skip_layers!r}: keep one")
        return part
    name, args, given = parse_part(part)
    if skip and "skip_layers" in given:
        raise ValueError(f"skip_layers is given twice, in {part!r} and as {skip_layers!r}: keep one")
    name = ALIASES.get(name, name)
    bits = _bits(name)
    low = any(b in (4, 2) for b in bits)
    defaults: dict[str, Any] = dict(LOW_BITS) if low else {"skip_layers": ()} if name == "full" else dict(EIGHT_BITS)
    if not bits and not isinstance(find_codec(name), PerToken):
        defaults.pop("rotate", None)
    if bits and bits[0] == 8:  # keys of 8 bits have one scale per token
        defaults.pop("key_axis", None)
    wrong = [*map(str, args), *(key for key in given if key not in defaults)]
    if wrong:
        raise ValueError(f"storage {name!r} has no option {', '.join(wrong)!r}: known are {', '.join(defaults)}")
    options = {**defaults, **given}
    options["skip_layers"] = layer_numbers("skip_layers", given.get("skip_layers", skip))
    for key in ("sinks", "residual", "quantize_after"):
        value = options.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"storage {name!r}: {key}={value!r} is not an integer >= 0")
    if options.get("rotate", "auto") not in ROTATED:
        raise ValueError(f"storage {name!r}: rotate={options['rotate']!r}, known are {', '.join(ROTATED)}")
    codecs = [_codec(name, bits, side, options) for side in (0, 1)]
    text = ",".join(f"{key}={_text(value)}" for key, value in options.items() if value != defaults[key])
    plain = {key: options.get(key, 0) for key in ("skip_layers", "sinks", "residual", "quantize_after")}
    return Storage(name, codecs[0], codecs[1], options=text, **plain)


def _bits(name: str) -> tuple[int, ...]:
    """(key bits, value bits) of an integer storage by name, () for the others; ``ValueError`` if unknown."""
    pair = re.fullmatch(r"k([842])v([842])", name)
    if pair:
        return int(pair[1]), int(pair[2])
    if name in ("int4", "int2"):
        return int(name[3]), int(name[3])
    find_codec(name)
    return ()


def _codec(name: str, bits: tuple[int, ...], side: int, options: dict[str, Any]) -> Codec:
    rotate = options.get("rotate", "off")
    if bits and bits[side] != 8:
        axis = options.get("key_axis", "token") if side == 0 else "token"
        rotated = (ROTATED_CHANNELS if axis == "channel" else ROTATED)[rotate]
        return GroupedCodec(bits[side], options["group"], axis, rotated)
    codec = find_codec("int8" if bits else name)
    # Values have no large channels to spread: rotating them in 8 bits gains nothing.
    return codec.rotating(ROTATED[rotate]) if side == 0 and isinstance(codec, PerToken) else codec


def _text(value: Any) -> str:
    return "|".join(map(str, value)) if isinstance(value, tuple) else str(value)


def retention(part: str | Retention) -> Retention:
    """The retention that a part names; ``ValueError`` for an unknown name or option."""
    if isinstance(part, Retention):
        return part
    name, args, options = parse_part(part)
    all_options = options_by_name()
    if name not in all_options:
        raise ValueError(f"unknown retention {name!r}: known are {', '.join(all_options)}")
    known = all_options[name]
    flags = [arg for arg in args if arg in FLAGS and arg in known]
    twice = [flag for flag in flags if flag in options]
    if twice:
        raise ValueError(f"spec part {part!r} gives {twice[0]!r} twice: keep one")
    args = [arg for arg in args if arg not in flags]
    options |= dict.fromkeys(flags, True)
    by_place = [key for key in known if key not in FLAGS]
    unknown = [key for key in options if key not in known]
    if unknown or len(args) > len(by_place) or any(key in options for key in by_place[: len(args)]):
        given = ", ".join([*map(str, args), *(f"{k}={v}" for k, v in options.items())])
        raise ValueError(f"retention {name!r} cannot take ({given}): known options are {', '.join(known) or 'none'}")
    return make_retention(name, *args, **options)


def placement(part: str | OnDevice | Offload) -> OnDevice | Offload:
    """The placement that a part names; ``ValueError`` for an unknown name or option."""
    if isinstance(part, (OnDevice, Offload)):
        return part
    name, args, options = parse_part(part)
    if name not in PLACEMENTS:
        raise ValueError(f"unknown placement {part!r}: known are device, cpu and disk(/path)")
    directory = None
    if name == "disk":
        directory, args, options = _path_and_options(part)
    unknown = [*map(str, args), *(key for key in options if key not in PLACEMENTS[name])]
    if unknown:
        known = ", ".join(PLACEMENTS[name]) or "none"
        raise ValueError(f"placement {name!r} has no option {', '.join(unknown)!r}: known are {known}")
    if name == "device":
        return OnDevice()
    layers = layer_numbers("keep_layers", options.pop("keep_layers", ()))
    return Offload(directory, layers, **options)


def _path_and_options(part: str) -> tuple[str, list[Any], dict[str, Any]]:
    """``"disk(/path,keep_recent=8)"``: the path may hold anything but a comma followed by an option."""
    inside = part.strip()[len("disk") :].strip()[1:-1]
    path, *rest = re.split(r",(?=\s*[a-z_]+\s*=)", inside)
    if not path.strip():
        raise ValueError("placement 'disk' needs a directory: disk(/path)")
    return path.strip(), *parse_part(f"disk({','.join(rest)})")[1:]


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def layer_numbers(name: str, layers: int | str | Sequence[int]) -> tuple[int, ...] | str:
    """What is given for ``skip_layers`` or ``keep_layers``, as a tuple or ``"ends"``."""
    if layers == "ends":
        return "ends"
    if isinstance(layers, str):
        layers = [_value(item) for item in layers.split("|") if item]
    if not isinstance(layers, (int, list, tuple, set, frozenset, range)):
        raise ValueError(f"{name}={layers!r}: give layer numbers, or 'ends'")
    layers = (layers,) if isinstance(layers, int) else tuple(layers)
    for index in layers:
        if isinstance(index, bool) or not isinstance(index, int):
            raise ValueError(f"{name}: {index!r} is not a layer number")
    return layers
