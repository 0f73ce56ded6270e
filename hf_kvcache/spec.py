"""How is a cache named? ``int8+sink(4,508)``: parts joined by ``+`` in any order, options in brackets.

    spec   = part *("+" part)            part   = name [ "(" option *("," option) ")" ]
    option = value | name "=" value      value  = integer | float | name | list ("0|1|29")

Each part belongs to one axis (storage, retention, placement); an axis that is not named keeps its default.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from .codecs import ALIASES, CODECS, Codec, find_codec
from .retention import RETENTIONS, Retention

PLACEMENTS = ("device",)
PART = re.compile(r"^\s*([A-Za-z_][A-Za-z0-9_]*)\s*(?:\((.*)\))?\s*$", re.DOTALL)


class Storage(NamedTuple):
    """The storage axis: a codec per side, and the layers that stay in full precision."""

    name: str
    key_codec: Codec
    value_codec: Codec
    skip_layers: tuple[int, ...]  # may be negative, as in a list

    @property
    def lossless(self) -> bool:
        return self.key_codec.lossless and self.value_codec.lossless

    @property
    def spec(self) -> str:
        skip = "|".join(map(str, self.skip_layers))
        return f"{self.name}(skip_layers={skip})" if skip else self.name


def axis_of(name: str) -> str:
    """The axis that a part's name belongs to."""
    for axis, names in (
        ("storage", [*CODECS, *ALIASES]),
        ("retention", list(RETENTIONS)),
        ("placement", list(PLACEMENTS)),
    ):
        if name in names:
            return axis
    known = ", ".join([*CODECS, *ALIASES, *RETENTIONS, *PLACEMENTS])
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
        if equals:
            options[key.strip()] = _value(value.strip())
        else:
            args.append(_value(item))
    return name, args, options


def storage(part: str | Storage, skip_layers: int | str | Sequence[int] = ()) -> Storage:
    """The storage that a part names; ``ValueError`` for an unknown name or option."""
    if isinstance(part, Storage):
        return part
    name, args, options = parse_part(part)
    codec = find_codec(name)
    skip = options.pop("skip_layers", None)
    if args or options:
        wrong = ", ".join([*map(str, args), *options])
        raise ValueError(f"storage {codec.name!r} has no option {wrong!r}: known is skip_layers")
    return Storage(codec.name, codec, codec, _indices(skip_layers if skip is None else skip))


def retention(part: str | Retention) -> Retention:
    """The retention that a part names; ``ValueError`` for an unknown name or option."""
    if not isinstance(part, str):
        return part
    name, args, options = parse_part(part)
    if name not in RETENTIONS:
        raise ValueError(f"unknown retention {name!r}: known are {', '.join(RETENTIONS)}")
    known = () if name == "all" else ("sinks", "window")
    unknown = [key for key in options if key not in known]
    if unknown or len(args) + len(options) > len(known) or any(key in options for key in known[: len(args)]):
        given = ", ".join([*map(str, args), *(f"{k}={v}" for k, v in options.items())])
        raise ValueError(f"retention {name!r} cannot take ({given}): known options are {', '.join(known) or 'none'}")
    return RETENTIONS[name](*args, **options)


def placement(part: str) -> str:
    """The placement that a part names; only ``device`` so far."""
    name, args, options = parse_part(part)
    if name not in PLACEMENTS or args or options:
        raise ValueError(f"unknown placement {part!r}: known are {', '.join(PLACEMENTS)}")
    return name


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _indices(layers: int | str | Sequence[int]) -> tuple[int, ...]:
    if isinstance(layers, str):
        layers = [_value(item) for item in layers.split("|") if item]
    layers = (layers,) if isinstance(layers, int) else tuple(layers)
    for index in layers:
        if isinstance(index, bool) or not isinstance(index, int):
            raise ValueError(f"skip_layers: {index!r} is not a layer number")
    return layers
