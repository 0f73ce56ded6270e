"""Who answers which items, where one run has several processes?

    accelerate launch --multi_gpu --num_processes 8 -m eval run --config FILE

Every process holds the model and answers its share of a task's items; the shares are put together, and the main process
alone writes and prints. The batches are those of a serial run, dealt out whole, so that the record is the same, too. A
process that dies ends the launch (with `--max_restarts 1` it starts again), and cells in the results are not repeated.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")
SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # torchrun's, and those of MPIs
LONGEST = timedelta(days=7)  # that the others may wait for one process; a dead one is the launcher's business


class Ranks(NamedTuple):
    """The processes of one launch, seen from one of them; or this one alone. `rank` 0 is the main process."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"  # that the launcher gave to this process

    @property
    def main(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def device_of(self, asked: str | None) -> str | None:
        """Where this process's model goes: each to its own GPU."""
        if self.size == 1:
            return asked
        if asked == "auto":
            raise ValueError(f'device "auto" spreads one model over all GPUs, and there are {self.size}: leave it out')
        return self.device if asked in (None, "cuda") else asked

    def gather(self, mine: T) -> list[T]:
        """What each process has, in the order of their ranks."""
        if self.size == 1:
            return [mine]
        from accelerate.utils import gather_object

        return gather_object([mine])

    def from_main(self, thing: Any) -> Any:
        """What the main process has."""
        if self.size == 1:
            return thing
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([thing])[0]

    @contextlib.contextmanager
    def one_voice(self) -> Iterator[None]:
        """Nothing is printed by the others."""
        with contextlib.ExitStack() as stack:
            if not self.main:
                void = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(contextlib.redirect_stdout(void))
                stack.enter_context(contextlib.redirect_stderr(void))
            yield


def join() -> Ranks:
    """This process's place in its launch; alone, if there was none."""
    if launched() > 1:
        from accelerate import PartialState

        meet()
        state = PartialState(cpu=not torch.cuda.is_available(), timeout=LONGEST)
        return Ranks(state.process_index, state.num_processes, str(state.device))
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ:
        print("note: accelerate started one process; on CPUs, too, several need --multi_gpu", file=sys.stderr)
    return Ranks()


def meet() -> None:
    """The process group of this attempt, where a launcher counts attempts.

    Its store outlives a restart and would hand out the addresses of dead processes, so keys carry the attempt's number.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if attempt is None or torch.distributed.is_initialized():
        return
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://"))
    store = torch.distributed.PrefixStore(f"attempt_{attempt}", store)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=LONGEST)


def launched() -> int:
    """How many processes a launcher says there are."""
    return max(int(os.environ.get(name) or 1) for name in SIZES)
