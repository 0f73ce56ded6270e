"""How do rows lie in a far tier? Token after token, so that new ones are one write and many are one read.

    on the device, for attention      [B, H, n, ...]  of each tensor of a state, with spare rows
    far away                          [n, B, H, ...]  of each tensor, one after the other (Layout)

    HostRows    chunks of host memory that grow geometrically and never move
    DiskRows    blocks of equal size: the one being written to is in memory, the others are in the layer's file

A row is a token, or a group of tokens that were encoded together. A slot is a row's number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from .disk import Folder, LayerFile
from .transfer import HostMemory, Lane

ALIGN = 64  # bytes
Rearrange = Callable[[torch.Tensor], torch.Tensor]  # changes the batch axis, which leads
Runs = Iterator[tuple[int, list[torch.Tensor]]]  # (first slot, tensors [n, B, H, ...] or [m, n / m, B, H, ...])


class Layout:
    """Rows of one kind of state: for n rows, ``[n, B, H, ...]`` of each tensor, at multiples of ALIGN."""

    def __init__(self, state: Any) -> None:
        self.kind = type(state)
        self.shapes = [(*t.shape[:2], *t.shape[3:]) for t in state]  # of one row
        self.dtypes = [t.dtype for t in state]
        self.sizes = [math.prod(s) * d.itemsize for s, d in zip(self.shapes, self.dtypes, strict=True)]

    @property
    def row_bytes(self) -> int:
        return sum(self.sizes)

    def offsets(self, rows: int) -> list[int]:
        """Where each tensor begins, in bytes, and where the last one ends."""
        starts = [0]
        for size in self.sizes:
            starts.append(starts[-1] + -(-rows * size // ALIGN) * ALIGN)
        return starts

    def views(self, flat: torch.Tensor, rows: int) -> list[torch.Tensor]:
        """The tensors in memory for ``rows`` rows, [rows, B, H, ...]."""
        return [
            flat[start : start + rows * size].view(dtype).view(rows, *shape)
            for start, size, dtype, shape in zip(self.offsets(rows), self.sizes, self.dtypes, self.shapes, strict=False)
        ]

    def strided(self, flat: torch.Tensor, rows: int, record: int, offset: int) -> list[torch.Tensor]:
        """The tensors in equal records that each hold ``rows`` rows from ``offset`` on, [records, rows, B, H, ...]."""
        out = []
        for start, size, dtype, shape in zip(self.offsets(rows), self.sizes, self.dtypes, self.shapes, strict=False):
            base = flat[offset + start :].view(dtype)
            inner = torch.empty(0, *shape, device="meta").stride()[1:]
            strides = (record // dtype.itemsize, size // dtype.itemsize, *inner)
            out.append(base.as_strided((len(flat) // record, rows, *shape), strides))
        return out

    def empty(self, rows: int, device: torch.device | str = "cpu") -> Any:
        """A state with room for ``rows`` rows as attention wants them, [B, H, rows, ...]."""
        with torch.inference_mode(False):
            return self.kind(
                *(
                    torch.empty((*shape[:2], rows, *shape[2:]), dtype=dtype, device=device)
                    for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
                )
            )

    def parts(self, total: int, rows: int) -> dict[str, int]:
        """``total`` bytes that hold ``rows`` rows, by part."""
        names = [field in ("scale", "zero") for field in self.kind._fields]
        scales = rows * sum(size for size, is_scale in zip(self.sizes, names, strict=True) if is_scale)
        payload = rows * self.row_bytes - scales
        return {"payload": payload, "scales": scales, "spare": total - payload - scales}


def lay(target: torch.Tensor, source: torch.Tensor) -> None:
    """``source`` [n, B, H, ...] or [m, n / m, B, H, ...] into ``target`` [B, H, n, ...]."""
    if source.dim() > target.dim():
        target.unflatten(2, source.shape[:2]).copy_(source.movedim((0, 1), (2, 3)))
    else:
        target.copy_(source.movedim(0, 2))


class Rows(Protocol):
    """Rows far away."""

    layout: Layout

    def write(self, slot: int, state: Any, lane: Lane) -> None:
        """Rows of the device, [B, H, n, ...], to the slots from ``slot`` on."""

    def read(self, start: int, stop: int) -> Runs:
        """Slots ``start:stop`` as they lie."""

    def rearrange(self, fn: Rearrange) -> None:
        """Apply ``fn`` to the batch axis. No copy may be under way."""

    def settle(self) -> None:
        """What has to be done once after a deep copy."""

    def bytes_by_tier(self, used: int) -> dict[str, dict[str, int]]:
        """Bytes by tier and part, of which the first ``used`` slots count as used."""


class HostRows:
    """Rows in host memory, or in files that are mapped like it."""

    def __init__(self, layout: Layout, host: HostMemory | Folder, pin: bool) -> None:
        self.layout, self.host, self.pin = layout, host, pin
        self.chunks: list[tuple[int, int, torch.Tensor]] = []  # (first slot, rows, memory)
        self.copied = False

    @property
    def room(self) -> int:
        return sum(rows for _, rows, _ in self.chunks)

    def read(self, start: int, stop: int) -> Runs:
        for first, rows, flat in self.chunks:
            a, b = max(start, first), min(stop, first + rows)
            if a < b:
                yield a, [t[a - first : b - first] for t in self.layout.views(flat, rows)]

    def write(self, slot: int, state: Any, lane: Lane) -> None:
        stop = slot + state[0].shape[2]
        if stop > self.room:
            self._grow(stop - self.room)
        for first, views in self.read(slot, stop):
            for view, rows in zip(views, state, strict=True):
                lane.send(view, rows[:, :, first - slot : first - slot + len(view)])

    def scatter(self, index: torch.Tensor, tensors: list[torch.Tensor]) -> None:
        """One row of host memory, [B, H, ...], whose heads each go to a slot of their own, ``index`` [B, H]."""
        for first, views in self.read(0, self.room):
            row, head = ((index >= first) & (index < first + len(views[0]))).nonzero(as_tuple=True)
            for view, t in zip(views, tensors, strict=True):
                view[index[row, head] - first, row, head] = t[row, head]

    def _grow(self, rows: int) -> None:
        first = self.room
        rows = max(rows, first // 4, 16 if first else 0)
        if self.pin:  # the allocator rounds pinned memory up to a power of two: use what it takes
            most = 1 << (self.layout.offsets(rows)[-1] - 1).bit_length()
            rows = max(rows, (most - ALIGN * len(self.layout.sizes)) // self.layout.row_bytes)
        self.chunks.append((first, rows, self.host.take(self.layout.offsets(rows)[-1], self.pin)))

    def rearrange(self, fn: Rearrange) -> None:
        old, self.layout = self.layout, changed(self.layout, fn)
        for number, (first, rows, flat) in enumerate(self.chunks):
            memory = self.host.take(self.layout.offsets(rows)[-1], self.pin)
            rewrite(flat, old, memory, self.layout, rows, fn)
            self.chunks[number] = (first, rows, memory)

    @property
    def on_disk(self) -> bool:
        return all(getattr(flat, "on_disk", False) for _, _, flat in self.chunks)

    def settle(self) -> None:
        """A copy of pinned memory is not pinned, and one of a file is in host memory."""
        if self.copied and (self.pin or isinstance(self.host, Folder)):
            self.chunks = [(first, rows, self.host.take(len(f), self.pin).copy_(f)) for first, rows, f in self.chunks]
        self.copied = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "copied": True}

    def bytes_by_tier(self, used: int) -> dict[str, dict[str, int]]:
        return {"cpu": self.layout.parts(sum(len(flat) for _, _, flat in self.chunks), used)}


class DiskRows:
    """Rows in blocks of ``rows`` rows.

    ``open`` are the blocks that are in memory, and what they say goes: the one written to last (``current``), and those
    that the home has not been able to write to its file yet.

    Args:
        file: gives the layer's file, if there is one; block b of this side is piece ``side`` of record b.
    """

    def __init__(self, layout: Layout, host: HostMemory, pin: bool, home: HasFile, side: int, rows: int) -> None:
        self.layout, self.host, self.pin = layout, host, pin
        self.home, self.side, self.rows = home, side, rows
        self.open: dict[int, torch.Tensor] = {}
        self.current = -1

    @property
    def size(self) -> int:
        """Bytes of a block."""
        return self.layout.offsets(self.rows)[-1]

    @property
    def sealed(self) -> int:
        """Blocks that the file has room for."""
        return 0 if self.home.file is None else self.home.file.blocks

    def write(self, slot: int, state: Any, lane: Lane) -> None:
        done, count = 0, state[0].shape[2]
        while done < count:
            block, inside = divmod(slot + done, self.rows)
            run = min(count - done, self.rows - inside)
            if block not in self.open:
                memory = self.host.take(self.size, self.pin)
                self.open[block] = memory.copy_(self._memory(block)) if block < self.sealed else memory.zero_()
            for view, t in zip(self.layout.views(self.open[block], self.rows), state, strict=True):
                lane.send(view[inside : inside + run], t[:, :, done : done + run])
            done, self.current = done + run, block

    def read(self, start: int, stop: int) -> Runs:
        slot = start
        while slot < stop:
            block, inside = divmod(slot, self.rows)
            last = block
            while not inside and last < stop // self.rows and last not in self.open:
                last += 1
            if last > block:  # whole blocks of the file, at once
                run = (last - block) * self.rows
                yield slot, [t[block:last] for t in self._blocks()]
            else:
                run = min(stop - slot, self.rows - inside)
                yield slot, [t[inside : inside + run] for t in self.layout.views(self._memory(block), self.rows)]
            slot += run

    def _memory(self, block: int) -> torch.Tensor:
        if block in self.open:
            return self.open[block]
        assert self.home.file is not None
        return self.home.file.piece(self.side, block)

    def _blocks(self) -> list[torch.Tensor]:
        """All blocks of the file, [blocks, rows, B, H, ...]."""
        file = self.home.file
        assert file is not None and file.mapped is not None
        return self.layout.strided(file.mapped, self.rows, file.record, sum(file.sizes[: self.side]))

    def rearrange(self, fn: Rearrange) -> None:
        """Everything comes into memory; the home writes it again."""
        old, layout = self.layout, changed(self.layout, fn)
        for block in {*self.open, *range(self.sealed)}:
            memory = self.host.take(layout.offsets(self.rows)[-1], self.pin)
            rewrite(self._memory(block), old, memory, layout, self.rows, fn)
            self.open[block] = memory
        self.layout = layout

    def settle(self) -> None:
        """The open block is written to the file soon, and as a whole: not worth pinning again."""

    def bytes_by_tier(self, used: int) -> dict[str, dict[str, int]]:
        fill = {b: min(max(used - b * self.rows, 0), self.rows) for b in {*self.open, *range(self.sealed)}}
        near = sum(rows for block, rows in fill.items() if block in self.open)
        far = sum(fill.values()) - near
        return {
            "cpu": self.layout.parts(len(self.open) * self.size, near),
            "disk": self.layout.parts(self.sealed * (self.home.file.sizes[self.side] if self.home.file else 0), far),
        }


class HasFile(Protocol):
    file: LayerFile | None


def changed(layout: Layout, fn: Rearrange) -> Layout:
    """The layout after ``fn``."""
    return Layout(layout.kind(*map(fn, layout.empty(0))))


def rewrite(flat: torch.Tensor, old: Layout, memory: torch.Tensor, new: Layout, rows: int, fn: Rearrange) -> None:
    """``rows`` rows from ``flat`` to ``memory``, with ``fn`` applied."""
    for source, target in zip(old.views(flat, rows), new.views(memory, rows), strict=True):
        target.copy_(fn(source.movedim(0, 2)).movedim(2, 0))
