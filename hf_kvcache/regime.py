"""How long was the sequence when these were rotated? RoPE whose angles depend on the length.

    longrope   angles of one set up to ``original_max_position_embeddings`` tokens, of another beyond (arXiv:2402.13753)
    dynamic    the same angles below ``max_position_embeddings``, new ones at every length from there on

A forward rotates its own tokens by the length that it reaches. So keys of one token differ between a short prompt and a
long one, and what was stored in one regime is not what the other would compute. Every length has a *regime*; a cache
remembers that of its first tokens, and how many tokens share it. They can stand for a prompt of the same regime only.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Regimes:
    """The regimes of one model.

    Args:
        config: the decoder's config.
    """

    def __init__(self, config: Any) -> None:
        rope = getattr(config, "rope_parameters", None) or {}
        kinds = [rope, *(item for item in rope.values() if isinstance(item, dict))]  # also by layer type
        self.switches: set[int] = set()  # longest sequence before a switch
        self.changing: int | None = None  # from this length on, every length is a regime of its own
        for kind in kinds:
            name = kind.get("rope_type", "default")
            if name == "longrope" or "long_mscale" in kind:
                self.switches.add(
                    kind.get("original_max_position_embeddings")
                    or getattr(config, "original_max_position_embeddings", None)
                    or config.max_position_embeddings
                )
            elif "dynamic" in name and not kind.get("alpha"):  # HunYuan's alpha fixes the angles
                self.changing = config.max_position_embeddings

    def of(self, length: int) -> int | None:
        """The regime of a sequence of so many tokens; ``None``: one of its own."""
        if self.changing is not None and length >= self.changing:
            return None
        return sum(length > switch for switch in self.switches)

    def agree(self, first: int, second: int) -> bool:
        """Whether sequences of these lengths are rotated alike."""
        return self.of(first) is not None and self.of(first) == self.of(second)


class Rotated(NamedTuple):
    """The first ``length`` tokens of a cache were rotated in ``regime``."""

    regime: int | None = 0
    length: int = 0

    def fed(self, seen: int, new: int, regime: int | None) -> Rotated:
        """After ``new`` tokens more on top of ``seen`` (fewer than before, if some were taken back)."""
        if not seen:
            return Rotated(regime, 0 if regime is None else new)
        same = min(self.length, seen)
        return self._replace(length=same + new if same == seen and regime == self.regime else same)

    def usable(self, regime: int | None) -> int:
        """How many tokens can stand for the beginning of a prompt of this regime."""
        return self.length if regime is not None and regime == self.regime else 0
