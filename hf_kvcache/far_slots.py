"""Where do the slots of importance eviction live, when not on the device? In host memory or a file, unit by unit.

Keys and values of the kept tokens lie in a far tier, as those of a ``FarSlab`` do (``placement.py``): a layer's turn
brings them all, as a staged copy. Their numbers and scores, 8 bytes a token, stay on the device. While decoding, a new
token takes the slot of the worst one, another slot in each head: one unit goes out, and is put into its slots before
the layer is staged for the next time. Where a prompt or a group was laid out anew, everything goes out anew.
"""

from __future__ import annotations

from typing import Any

import torch

from .codecs import Codec
from .part import Part, narrow
from .placement import Home, Tiers
from .slots import Slots, add_bytes
from .tiers import HostRows, Layout


class FarSlots(Slots):
    """``Slots`` whose keys and values live in a far tier; ``keys`` and ``values`` bring them where they are not."""

    def __init__(self, key_codec: Codec, value_codec: Codec, group: int, home: Home) -> None:
        self.home = home
        home.slabs.append(self)
        self.rows: list[HostRows] | None = None  # keys and values; None while nothing lies elsewhere
        self.row_bytes = 0
        self._held: list[Any] = [None, None]
        self._late: list[list[torch.Tensor]] = []  # index [1, B, H] and tensors of units that wait for their slots
        super().__init__(key_codec, value_codec, group)

    @property
    def keys(self) -> Any:
        return self._bring()[0]

    @keys.setter
    def keys(self, state: Any) -> None:
        self._held[0] = state

    @property
    def values(self) -> Any:
        return self._bring()[1]

    @values.setter
    def values(self, state: Any) -> None:
        self._held[1] = state

    def _bring(self) -> list[Any]:
        if self.rows is not None:
            self.home.bring()
        return self._held

    # -- out ---------------------------------------------------------------------------------------------------------

    def fill(self, part: Part, position: torch.Tensor, score: torch.Tensor) -> None:
        super().fill(part, position, score)
        self.send_all()

    def keep(self, index: torch.Tensor, position: torch.Tensor, score: torch.Tensor, new: Part | None = None) -> None:
        super().keep(index, position, score, new)
        self.send_all()

    def send_all(self) -> None:
        """Everything that is held on the device goes out."""
        layouts = [Layout(state) for state in self._held]
        self.row_bytes, self._late = sum(layout.row_bytes for layout in layouts), []
        self.home.offloader.bytes_out += self.far_bytes
        if self.home.in_place:
            return
        self.rows = [HostRows(layout, self.home.memory(), self.home.lane.pins) for layout in layouts]
        for rows, state in zip(self.rows, self._held, strict=True):
            rows.write(0, narrow(state, 0, self.used), self.home.lane)
        self.home.staged = True

    def append(self, unit: Part, position: torch.Tensor, score: torch.Tensor, limit: int | None) -> None:
        if not self.used:
            return self.fill(unit, position, score)
        super().append(unit, position, score, limit)
        self._send_last()

    def open(self, limit: int) -> None:
        super().open(limit)
        self._send_last()

    def _send_last(self) -> None:
        self.home.offloader.bytes_out += self.row_bytes
        for rows, state in zip(self.rows or (), self._held, strict=False):
            rows.write(self.used - 1, narrow(state, self.used - 1, self.used), self.home.lane)

    def put(
        self, index: torch.Tensor, unit: Part, position: torch.Tensor, score: torch.Tensor, real: torch.Tensor
    ) -> None:
        super().put(index, unit, position, score, real)
        self._send_unit(index.masked_fill(~real[:, None], -1)[:, :, None], unit)  # -1: no slot

    def replace(self, index: torch.Tensor, unit: Part, number: int, score: torch.Tensor) -> None:
        super().replace(index, unit, number, score)
        self._send_unit(index, unit)

    def _send_unit(self, index: torch.Tensor, unit: Part) -> None:
        self.home.offloader.bytes_out += self.row_bytes
        if self.rows is None:
            return
        sent = []
        for t in (index, *unit.keys, *unit.values):  # [B, H, 1, ...]
            shape = (1, *t.shape[:2], *t.shape[3:])
            memory = self.home.offloader.host.take(t.numel() * t.itemsize, self.home.lane.pins)
            sent.append(memory.view(t.dtype).view(shape))
            self.home.lane.send(sent[-1], t)
        self._late.append(sent)

    def _place_late(self) -> None:
        """Units that came since the last time, into their slots."""
        if not self._late:
            return
        self.home.lane.drain()
        for index, *tensors in self._late:
            for rows in self.rows or ():
                mine, tensors = tensors[: len(rows.layout.shapes)], tensors[len(rows.layout.shapes) :]
                rows.scatter(index[0], [t[0] for t in mine])
        self._late = []

    # -- in: see ``Home`` --------------------------------------------------------------------------------------------

    @property
    def far_bytes(self) -> int:
        """Stored bytes."""
        return self.used * self.row_bytes

    def stage(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Make room on the device; what has to be copied there."""
        assert self.rows is not None and self.home.device is not None
        self._place_late()
        copies = []
        for side, rows in enumerate(self.rows):
            rows.settle()
            self._held[side] = rows.layout.empty(self.score.shape[2], self.home.device)
            for slot, tensors in rows.read(0, self.used):
                for target, source in zip(self._held[side], tensors, strict=True):
                    copies.append((target[:, :, slot : slot + len(source)], source))
        return copies

    def warm(self) -> None:
        """Nothing is kept on the device beside what was staged."""

    def drop_copy(self) -> None:
        if self.rows is not None:
            self._held = [None, None]

    # -- changing ----------------------------------------------------------------------------------------------------

    def map_rows(self, fn: Any) -> None:
        if self.rows is None:
            super().map_rows(fn)
            self.row_bytes = sum(Layout(state).row_bytes for state in self._held if state is not None)
            return
        self.home.discard()
        self._place_late()
        self.home.lane.drain()
        for rows in self.rows:
            rows.rearrange(fn)
        self.row_bytes = sum(rows.layout.row_bytes for rows in self.rows)
        self.position, self.score = fn(self.position), fn(self.score)

    def bytes_by_tier(self, device: dict[str, int]) -> Tiers:
        """Bytes of the tiers by part; the staged copy counts in ``device``."""
        if self.rows is None:
            parts = {"payload": 0, "scales": 0}
            add_bytes(parts, "payload", *(state for state in self._held if state is not None))
            return {"cpu": parts}
        held = [t for state in self._held if state is not None for t in state]
        late = [t for unit in self._late for t in unit]
        device["staging"] = sum(t.untyped_storage().nbytes() for t in held)
        sides = [rows.bytes_by_tier(self.used)["cpu"] for rows in self.rows]
        parts = {name: sum(side[name] for side in sides) for name in sides[0]}
        waiting = sum(t.untyped_storage().nbytes() for t in late)
        if all(rows.on_disk for rows in self.rows):
            return {"cpu": {"spare": waiting}, "disk": parts}
        parts["spare"] += waiting
        return {"cpu": parts}

    def __getstate__(self) -> dict[str, Any]:
        self._place_late()
        return {**self.__dict__, "_held": self._held if self.rows is None else [None, None]}
