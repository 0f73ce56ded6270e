"""Where do bytes live? On the device, or in a far tier from which one layer at a time comes back.

    device    everything stays where the model put it
    cpu       what is sealed lies in host memory
    disk      the same in one file per layer, in blocks of BLOCK_TOKENS; host memory holds the block being filled

Stored bytes travel, never decoded ones. Offloaded layers take turns with two staged copies on the device, one that
attention reads and one that is being filled:

    layer i     append, attend ......... | i+1: append, attend .........
    copies      fetch i+1 .............. | fetch i+2 ..............        on a side stream (CUDA) or a thread (disk)

A token goes out once, when it is sealed (with ``keep_recent``, when so many newer ones are), and never again: a staged
copy that has been read is dropped. It is fresh memory every time, so that whoever holds on to what ``update`` returned
(layers that share keys and values do) finds it unchanged; otherwise the allocator gives the same memory out again. It
has the layout and the capacity of a resident slab, so attention computes the very same bits.

Where the tier and the device are the same memory (``cpu`` with a model on the CPU) nothing is staged.

What counts (``cache.stats()``): ``bytes_out`` is what was written to the far tier, ``bytes_in`` what attention read of
it, as a staged copy or, where nothing is staged, in place: the numbers say what moves on a GPU. ``waits`` are fetches
that had not ended, or not even begun, when attention asked for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .codecs import State
from .disk import Folder, LayerFile
from .part import map_state, narrow
from .store import Kept, Slab
from .tiers import DiskRows, HostRows, Layout, Rows, lay
from .transfer import CudaLane, HostMemory, Lane, ReadAhead, Ticket

BLOCK_TOKENS = 64  # rounded up to whole groups
PIECE = 1 << 25  # bytes that are transposed at a time on their way in
Tiers = dict[str, dict[str, int]]  # bytes by tier and part


class OnDevice:
    """Nothing moves."""

    offloads, spec = False, "device"


class Offload:
    """Sealed tokens live in host memory or, with a directory, on disk.

    Args:
        directory: where the files go (see ``disk``); ``None``: host memory.
        keep_layers: layers that stay on the device; negative numbers count from the end, "ends" is first and last.
        keep_recent: so many of the last tokens of each layer stay on the device, too.
        max_pinned: most bytes of pinned host memory; what is beyond it is not pinned. ``None``: any number.
        stage: copy even where the tier and the device are the same memory (to try the movement on a CPU).

    Raises:
        ValueError: ``keep_recent`` or ``max_pinned`` is no integer >= 0.
    """

    offloads = True

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        keep_layers: tuple[int, ...] | str = (),
        keep_recent: int = 0,
        max_pinned: int | None = None,
        stage: bool = False,
    ) -> None:
        for name, value in (("keep_recent", keep_recent), ("max_pinned", 0 if max_pinned is None else max_pinned)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"offloading: {name}={value!r} is not an integer >= 0")
        self.directory = None if directory is None else os.fspath(directory)
        self.keep_layers, self.keep_recent, self.max_pinned, self.stage = keep_layers, keep_recent, max_pinned, stage

    @property
    def tier(self) -> str:
        return "cpu" if self.directory is None else "disk"

    @property
    def spec(self) -> str:
        layers = self.keep_layers if isinstance(self.keep_layers, str) else "|".join(map(str, self.keep_layers))
        options = {"keep_layers": layers, "keep_recent": self.keep_recent, "max_pinned": self.max_pinned}
        given = [f"{name}={value}" for name, value in options.items() if value not in ("", 0, None)]
        given += ["max_pinned=0"] if self.max_pinned == 0 else []
        text = ",".join(([self.directory] if self.directory is not None else []) + given)
        return f"{self.tier}({text})" if text else self.tier

    def in_place(self, device: torch.device) -> bool:
        """Whether a model on ``device`` reads this tier where it is."""
        return device.type == "meta" or (self.tier == "cpu" and device.type == "cpu" and not self.stage)


class Offloader:
    """What the offloaded layers of one cache share: their order, the lanes, host memory, a folder, and the counters."""

    def __init__(self, placement: Offload) -> None:
        self.placement = placement
        self.folder = None if placement.directory is None else Folder(placement.directory)
        self.homes: list[Home] = []
        self.lanes: dict[torch.device, tuple[Lane, Lane | ReadAhead]] = {}
        self.reset()

    def reset(self) -> None:
        """As new; the layers reset their homes themselves."""
        self.host = HostMemory(self.placement.max_pinned)
        self.lanes.clear()
        self.bytes_out = self.bytes_in = self.waits = self.forwards = 0
        self.current: Home | None = None  # attention reads its staged copy
        self.coming: Home | None = None  # its staged copy is being filled

    def close(self) -> None:
        """Let go of the folder. The next use makes another one."""
        self.folder = None

    def home(self, index: int, residual: int) -> Home:
        """The home of layer ``index``; layers come in order. The last ``residual`` tokens are not sealed anyway."""
        self.homes.append(Home(self, index, max(self.placement.keep_recent - residual, 0)))
        return self.homes[-1]

    def lane(self, device: torch.device) -> tuple[Lane, Lane | ReadAhead]:
        """(way out, way in) of a device."""
        if device not in self.lanes:
            lane = CudaLane(device, self.host) if device.type == "cuda" else Lane()
            self.lanes[device] = (lane, ReadAhead(lane) if self.placement.tier == "disk" else lane)
        return self.lanes[device]

    def begin(self, tokens: int) -> None:
        """Before a forward of ``tokens`` tokens changes anything.

        Raises:
            OSError: the disk cannot take what is waiting for it, or what this forward will bring.
        """
        if self.placement.tier == "disk" and self.folder is None:
            self.folder = Folder(self.placement.directory or "")
        for home in self.homes:
            home.flush(strict=True)
            home.reserve(tokens)
        self.forwards += 1

    def enter(self, home: Home) -> None:
        """A layer's turn: its staged copy is there, the one before is dropped, the next one is on its way."""
        if self.current is not None and self.current is not home:
            self.current.discard()
        home.bring()
        if self.coming is not None and self.coming is not home:  # a layer was left out
            self.coming.discard()
        self.current, self.coming = home, None
        following = self.homes[(self.homes.index(home) + 1) % len(self.homes)]
        if following is not home and following.device is not None and not following.in_place:
            self.coming = following
            following.fetch()

    def forget(self, home: Home) -> None:
        self.current = None if self.current is home else self.current
        self.coming = None if self.coming is home else self.coming

    def staging(self) -> int:
        """Bytes of host memory through which blocks of a file pass."""
        transits = (lane.transit for lane, _ in self.lanes.values() if isinstance(lane, CudaLane))
        return sum(len(transit) for transit in transits if transit is not None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "lanes": {}, "current": None, "coming": None}


class Home:
    """The sealed run of one offloaded layer: a slab of keys and one of values, which travel together."""

    def __init__(self, offloader: Offloader, index: int, recent: int) -> None:
        self.offloader, self.index, self.recent = offloader, index, recent
        self.slabs: list[Any] = []  # ``FarSlab``, or one ``FarSlots``
        self.device: torch.device | None = None  # of the first keys; each layer has its own
        self.file: LayerFile | None = None
        self.ticket: Ticket | None = None
        self.staged = False  # the slabs hold complete copies on the device

    def clear(self) -> None:
        """As new."""
        self.discard()
        if self.file is not None:
            self.file.close()
        self.slabs, self.device, self.file = [], None, None

    def slab(self, limit: int | None = None, pinned: int = 0, phase: int = 0, group: int = 1) -> FarSlab:
        """A slab that lives here; keys first, then values."""
        self.slabs.append(FarSlab(self, -(-self.recent // group), limit, pinned, phase, group))
        return self.slabs[-1]

    @property
    def in_place(self) -> bool:
        return self.device is not None and self.offloader.placement.in_place(self.device)

    @property
    def lane(self) -> Lane:
        assert self.device is not None
        return self.offloader.lane(self.device)[0]

    def memory(self) -> HostMemory | Folder:
        """Of the far tier, for rows that are replaced in place."""
        return self.offloader.folder or self.offloader.host

    def make_rows(self, layout: Layout, group: int) -> Rows:
        """Room in the far tier for one of the slabs."""
        host, pin = self.offloader.host, self.lane.pins
        if self.offloader.placement.tier == "cpu":
            return HostRows(layout, host, pin)
        largest = max(slab.group for slab in self.slabs)
        tokens = -(-BLOCK_TOKENS // largest) * largest
        side = sum(slab.rows is not None for slab in self.slabs)
        return DiskRows(layout, host, pin, self, side, tokens // group)

    # -- in ----------------------------------------------------------------------------------------------------------

    def enter(self, device: torch.device) -> None:
        """The layer is about to append and attend, with new keys on ``device``."""
        self.device = device if self.device is None else self.device
        if self.in_place:
            self.offloader.bytes_in += sum(slab.far_bytes for slab in self.slabs)
        else:
            self.offloader.enter(self)

    def fetch(self) -> None:
        """Begin to fill a staged copy."""
        if self.staged or self.ticket is not None:
            return
        assert self.device is not None
        if self.file is not None:
            self.file.check()
        slabs = [slab for slab in self.slabs if slab.rows is not None]
        copies = [pair for slab in slabs for pair in slab.stage()]
        lane, way_in = self.offloader.lane(self.device)

        def job() -> None:
            for target, source in copies:
                inner = source.shape[1] if source.dim() > target.dim() else 1
                step = max(PIECE // max(source[0].nbytes, 1), 1)
                for a in range(0, len(source), step):
                    piece = source[a : a + step]
                    lay(target[:, :, a * inner : (a + len(piece)) * inner], lane.bring(piece))

        self.ticket = Ticket(way_in, job, sum(slab.far_bytes for slab in slabs))

    def bring(self) -> None:
        """The staged copy is complete."""
        if self.staged:
            return
        late = self.ticket is None
        if not any(slab.rows is not None for slab in self.slabs):
            self.staged = True
            return
        self.fetch()
        ticket, self.ticket = self.ticket, None
        assert ticket is not None
        late = ticket.wait() or late
        self.offloader.waits += bool(late and ticket.size)
        self.offloader.bytes_in += ticket.size
        self.staged = True
        for slab in self.slabs:
            slab.warm()

    def discard(self) -> None:
        """Drop the staged copy; nothing is reading the far tier afterwards."""
        if self.ticket is not None:
            self.ticket.abandon()
            self.offloader.bytes_in += self.ticket.size
            self.ticket = None
        self.staged = False
        for slab in self.slabs:
            slab.drop_copy()
        self.offloader.forget(self)

    # -- out: blocks on disk -----------------------------------------------------------------------------------------

    def flush(self, strict: bool = False) -> None:
        """Write the blocks to the file that are no longer written to.

        What cannot be written stays in memory, and nothing is lost.

        Raises:
            OSError: the disk is full or broken; only if ``strict``.
        """
        sides = [slab.rows for slab in self.slabs if isinstance(slab.rows, DiskRows)]
        if len(sides) < 2 or self.offloader.folder is None:
            return
        ready = set(sides[0].open).intersection(*(side.open for side in sides[1:]))
        ready -= {side.current for side in sides}
        if not ready:
            return
        self.lane.drain()
        try:
            self._write(sorted(ready), sides, self.offloader.folder)
        except OSError as error:
            if strict:
                raise OSError(
                    error.errno,
                    f"layer {self.index}: cannot write to {str(self.offloader.folder.path)!r} ({error.strerror}); the "
                    "cache holds what it held, in memory: free space there and go on, or reset() the cache",
                ) from error

    def _write(self, blocks: list[int], sides: list[DiskRows], folder: Folder) -> None:
        sizes = [side.size for side in sides]
        if self.file is None or self.file.sizes != sizes:  # of another batch size: by now everything is in memory
            if self.file is not None:
                self.file.close()
            self.file = LayerFile(folder, self.index, sizes)
        try:
            for block in blocks:
                self.file.write(block, [side.open[block] for side in sides])
                for side in sides:
                    del side.open[block]
        finally:
            self.file.map()

    def reserve(self, tokens: int) -> None:
        """Room on the disk for the blocks that ``tokens`` more tokens will fill."""
        if self.file is None:
            return
        self.file.check()
        slab = self.slabs[0]
        assert isinstance(slab.rows, DiskRows)
        rows = len(slab) + -(-tokens // slab.group)
        rows = rows if slab.limit is None else min(rows, slab.limit)
        try:
            self.file.reserve(max(rows - 1, 0) // slab.rows.rows)
        except OSError as error:
            raise OSError(
                error.errno,
                f"layer {self.index}: no room for {tokens} more tokens in {str(self.file.path.parent)!r} "
                f"({error.strerror}); nothing has changed: free space there and go on",
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        if self.device is not None and not self.in_place:
            self.lane.drain()
        return {**self.__dict__, "ticket": None, "staged": False}


class FarSlab(Slab):
    """A slab whose rows live in a far tier; ``state`` is a copy on the device, fetched when it is asked for.

    Rows have the slots they would have in a resident slab. ``hot`` of the newest rows, at most ``recent``, have not
    gone out: they are in ``near``. Where the tier is read in place, ``rows`` is None, ``held`` is all there is, and
    only the counting differs from a resident slab.
    """

    in_place = False  # no kernel may write into ``state`` by itself

    def __init__(
        self, home: Home, recent: int, limit: int | None = None, pinned: int = 0, phase: int = 0, group: int = 1
    ) -> None:
        self.home, self.recent = home, recent if limit is None else min(recent, limit - pinned)
        self.rows: Rows | None = None
        super().__init__(limit, pinned, phase, group)
        self.near, self.hot, self.row_bytes = Slab(self.recent or None), 0, 0

    @property
    def state(self) -> State | None:
        if self.rows is not None:
            self.home.bring()
        return self.held

    @state.setter
    def state(self, state: State | None) -> None:
        self.held = state

    @property
    def far_bytes(self) -> int:
        """Stored bytes of the rows that are not hot."""
        return (len(self) - self.hot) * self.row_bytes

    # -- out ---------------------------------------------------------------------------------------------------------

    def append(self, state: Any) -> None:
        """Write a run of tokens: into the copy on the device, and out."""
        if not self.row_bytes:
            self._settle_in(state)
        super().append(state)
        self._leave(state)
        self.home.flush(strict=self.home.offloader.forwards <= 1)

    def _settle_in(self, state: Any) -> None:
        layout = Layout(state)
        self.row_bytes = layout.row_bytes
        if not self.home.in_place:
            self.rows = self.home.make_rows(layout, self.group)

    def _leave(self, state: Any) -> None:
        """Send out what is no longer hot."""
        new, old = state[0].shape[2], self.hot
        self.hot = min(old + new, self.recent)
        gone, first = old + new - self.hot, self.appended - new - old  # so many tokens, from this one on
        from_near = min(gone, old)
        if from_near:
            self._send(first, from_near, self._oldest(from_near))
        if gone > from_near:
            self._send(first + from_near, gone - from_near, narrow(state, 0, gone - from_near))
        if self.recent and self.rows is not None:
            self.near.append(state)

    def _oldest(self, count: int) -> Any:
        """The first ``count`` hot rows, in token order."""
        if self.rows is None:
            return None
        slots = self.near.tokens().argsort()[:count]
        return map_state(self.near.state, lambda t: t.index_select(2, slots.to(t.device)))

    def _send(self, first: int, count: int, state: Any) -> None:
        """Tokens from ``first`` on to their slots, but for those that a ring has overwritten meanwhile."""
        for token, slot, run in self._runs(first, first + count):
            self.home.offloader.bytes_out += run * self.row_bytes
            if self.rows is not None:
                self.rows.write(slot, narrow(state, token - first, token - first + run), self.home.lane)

    def _runs(self, token: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(token, slot, count): tokens up to ``stop`` that are held, by runs of neighbouring slots."""
        while token < stop:
            slot, end = token, stop
            if self.limit is not None and token < self.pinned:
                end = min(stop, self.pinned)
            elif self.limit is not None:
                ring = self.limit - self.pinned
                token = max(token, self.appended - ring)
                slot = self.pinned + (token - self.pinned) % ring
                end = min(stop, token + self.limit - slot)
            if token < end:
                yield token, slot, end - token
            token = max(end, token)

    def adopt(self, state: Any, empty: Any, appended: int) -> None:
        """As ``Slab.adopt``, but the tokens are copied to the far tier, all of them."""
        self.clear()
        self.appended = appended
        self.capacity = len(self)
        self._settle_in(state)
        if self.rows is None:
            self.held = map_state(state, torch.clone)
        elif len(self):
            self.rows.write(0, state, self.home.lane)
            self.home.flush(strict=True)

    # -- in ----------------------------------------------------------------------------------------------------------

    def stage(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Make room on the device for all rows; what has to be copied there (see ``lay``)."""
        assert self.rows is not None and self.home.device is not None
        self.rows.settle()
        self.held = self.rows.layout.empty(self.capacity, self.home.device)
        copies = []
        for start, stop in self._far_slots():
            for slot, tensors in self.rows.read(start, stop):
                for target, source in zip(self.held, tensors, strict=True):
                    count = source.shape[0] * (source.shape[1] if source.dim() > target.dim() else 1)
                    copies.append((target[:, :, slot : slot + count], source))
        return copies

    def _far_slots(self) -> list[tuple[int, int]]:
        """Runs of slots that are not hot."""
        hot = sorted((slot, slot + n) for _, slot, n in self._runs(self.appended - self.hot, self.appended))
        starts, stops = [0, *(b for _, b in hot)], [*(a for a, _ in hot), len(self)]
        return [(a, b) for a, b in zip(starts, stops, strict=True) if a < b]

    def warm(self) -> None:
        """Put the hot rows into the copy on the device."""
        if not self.hot or self.rows is None:
            return
        tokens = self.near.tokens() + (self.appended - self.near.appended)
        slots = tokens
        if self.limit is not None:
            ring = self.pinned + (tokens - self.pinned) % (self.limit - self.pinned)
            slots = torch.where(tokens < self.pinned, tokens, ring)
        for target, rows in zip(self.held, self.near.view(), strict=True):  # type: ignore[arg-type]
            target.index_copy_(2, slots.to(target.device), rows)

    def drop_copy(self) -> None:
        if self.rows is not None:
            self.held = None

    # -- changing ----------------------------------------------------------------------------------------------------

    def truncate(self, tokens: int) -> None:
        """Forget all but the first ``tokens`` tokens. Only while nothing has been overwritten."""
        removed = max(self.appended - tokens, 0)
        if self.rows is not None and removed:
            self.home.discard()
            if self.hot:
                kept = self._oldest(max(self.hot - removed, 0))
                self.near.clear()
                self.near.append(kept)
        self.hot = max(self.hot - removed, 0)
        super().truncate(tokens)

    def select_rows(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``fn`` to every tensor; it may change the batch axis only."""
        if self.rows is None:
            super().select_rows(fn)
            self.row_bytes = Layout(self.held).row_bytes if self.held is not None else 0
            return
        self.home.discard()
        self.home.lane.drain()
        self.rows.rearrange(fn)
        self.near.select_rows(fn)
        self.row_bytes = self.rows.layout.row_bytes
        self.home.flush()

    def mark(self, keep: bool | None = False) -> tuple[dict[str, Any], Kept | None]:
        fields, kept = super().mark(keep)
        return (fields, kept) if self.rows is None else ({**fields, "held": None}, kept)

    def recalls(self, mark: tuple[dict[str, Any], Kept | None]) -> bool:
        return super().recalls(mark) if self.rows is None else not self.overwrote

    def recall(self, mark: tuple[dict[str, Any], Kept | None]) -> None:
        if self.rows is None:
            super().recall(mark)
        elif self.appended != mark[0]["appended"]:
            if self.limit is not None:  # it has gone round from nothing, or not at all
                self.appended = min(self.appended, self.limit)
            self.truncate(mark[0]["appended"])

    def clear(self) -> None:
        self.home.discard()
        super().clear()
        self.near.clear()
        self.rows, self.hot, self.row_bytes = None, 0, 0

    def bytes_by_tier(self) -> Tiers:
        """Bytes by tier and part; ``staging`` is the copy on the device."""
        if self.rows is None:
            return self._divided(self.bytes_by_part())
        staging = sum(t.untyped_storage().nbytes() for t in self.held or ())
        near = {"device": {**self.near.bytes_by_part(), "staging": staging}}
        return near | self.rows.bytes_by_tier(len(self) - self.hot)

    def _divided(self, parts: dict[str, int]) -> Tiers:
        """Hot rows count for the device, though one tensor holds them all."""
        hot = {name: 0 if name == "spare" else size * self.hot // max(len(self), 1) for name, size in parts.items()}
        return {"device": hot, "cpu": {name: size - hot[name] for name, size in parts.items()}}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "held": self.held if self.rows is None else None}
