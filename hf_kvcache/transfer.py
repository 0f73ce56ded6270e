"""How is a copy ordered? One lane per device, between its memory and the host's.

    mark      what the device has been given so far (its *current* stream, which need not be the default one)
    run       a job of copies that begins after such a mark, on a side stream
    wait      nothing that the device is given from now on begins before that job has ended

So events go both ways: a copy into memory that attention still reads waits for it, and attention waits for the copy.
Without CUDA a job runs at once. ``ReadAhead`` runs the jobs of another lane on a thread, for sources on disk.

Staged copies need no ``record_stream``: they are allocated on the current stream, a job starts after a mark that was
made after the allocation, and ``Ticket`` makes the current stream wait for it before their memory can be given away.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch


class Lane:
    """Copies between one device and the host. Here: at once, by the caller."""

    pins = False

    def mark(self) -> Any:
        """What the device has been given so far."""

    def run(self, start: Any, job: Callable[[], None]) -> Any:
        """Copy after ``start``; a ticket for the end of it."""
        job()

    def issue(self, job: Callable[[], None]) -> Any:
        """Copy after everything the device has been given so far; a ticket for the end of it."""
        return self.run(self.mark(), job)

    def wait(self, ticket: Any) -> bool:
        """Nothing that is given to the device from now on begins before the copy ends. Whether it had not ended."""
        return False

    def drain(self) -> None:
        """Return when all copies have ended."""

    def bring(self, source: torch.Tensor) -> torch.Tensor:
        """Host memory as a tensor that the device can read, within a job."""
        return source

    def send(self, target: torch.Tensor, rows: torch.Tensor) -> None:
        """``rows`` [B, H, n, ...] of the device to the contiguous ``target`` [n, B, H, ...]."""
        target.copy_(rows.movedim(2, 0))


class CudaLane(Lane):
    """A side stream, with events in both directions; the stream that counts is the current one, not the default one."""

    pins = True

    def __init__(self, device: torch.device, host: HostMemory) -> None:
        self.device, self.host = device, host
        self.side = torch.cuda.Stream(device)
        self.transit: torch.Tensor | None = None  # for blocks of a file, which are not contiguous
        self.sent: Any = None  # when the transit memory is free again

    def mark(self) -> Any:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def run(self, start: Any, job: Callable[[], None]) -> Any:
        self.side.wait_event(start)
        with torch.cuda.stream(self.side):
            job()
            done = torch.cuda.Event()
            done.record(self.side)
        return done

    def wait(self, ticket: Any) -> bool:
        late = not ticket.query()
        torch.cuda.current_stream(self.device).wait_event(ticket)
        return late

    def drain(self) -> None:
        self.side.synchronize()

    def bring(self, source: torch.Tensor) -> torch.Tensor:
        if source.is_contiguous():
            return source.to(self.device, non_blocking=True)
        if self.sent is not None:
            self.sent.synchronize()
        if self.transit is None or len(self.transit) < source.nbytes:
            self.transit = self.host.take(source.nbytes * 5 // 4, self.pins)
        source = self.transit[: source.nbytes].view(source.dtype).view(source.shape).copy_(source)
        out = source.to(self.device, non_blocking=True)
        self.sent = torch.cuda.Event()
        self.sent.record(self.side)
        return out

    def send(self, target: torch.Tensor, rows: torch.Tensor) -> None:
        rows = rows.movedim(2, 0).contiguous()
        self.issue(lambda: _copy(target, rows))
        rows.record_stream(self.side)  # read there while it may be freed here


class ReadAhead:
    """Jobs of a lane, on a thread: the disk is read while the model computes."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._submit = ThreadPoolExecutor(1, thread_name_prefix="hf_kvcache").submit

    def issue(self, job: Callable[[], None]) -> Future[Any]:
        return self._submit(self.lane.run, self.lane.mark(), job)

    def wait(self, ticket: Future[Any]) -> bool:
        late = not ticket.done()
        return self.lane.wait(ticket.result()) or late


class HostMemory:
    """Host memory, pinned where that is wanted, possible and within the limit."""

    def __init__(self, limit: int | None) -> None:
        self.limit, self.pinned = limit, 0
        self.warned = self.refused = False

    def take(self, size: int, pin: bool) -> torch.Tensor:
        """``size`` bytes, [size] uint8."""
        with torch.inference_mode(False):
            flat = self._pinned(size) if pin and not self.refused else None
            return torch.empty(size, dtype=torch.uint8) if flat is None else flat

    def _pinned(self, size: int) -> torch.Tensor | None:
        if self.limit is not None and self.pinned + size > self.limit:
            self._fall_back(f"max_pinned={self.limit} bytes are used up")
            return None
        try:
            flat = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            self.refused = True
            self._fall_back(str(error).splitlines()[0])
            return None
        self.pinned += size
        weakref.finalize(flat, self._give_back, size).atexit = False
        return flat

    def _give_back(self, size: int) -> None:
        self.pinned -= size

    def _fall_back(self, reason: str) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(f"offloading goes on in host memory that is not pinned, more slowly: {reason}", stacklevel=2)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pinned": 0}  # copies of pinned memory are not pinned


class Ticket:
    """A job under way. Its targets must not be freed before somebody has waited; the last resort is the collector."""

    def __init__(self, lane: Lane | ReadAhead, job: Callable[[], None], size: int) -> None:
        self.lane, self.size, self.owner = lane, size, os.getpid()  # size in bytes
        self.open, self.inner = True, lane.issue(job)

    def wait(self) -> bool:
        """Let the device wait for the job; whether it had not ended yet.

        Raises:
            OSError: what the job read is broken.
        """
        if not self.open:
            return False
        self.open = False
        return self.lane.wait(self.inner)

    def abandon(self) -> None:
        """Wait, and do not care how it went."""
        try:
            self.wait()
        except Exception:
            pass

    def __del__(self) -> None:
        if self.open and self.owner == os.getpid():  # a forked child has no thread that would do the job
            self.abandon()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
