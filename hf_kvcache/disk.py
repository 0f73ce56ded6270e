"""Where do scratch files live? In a private folder that one process owns, and that does not outlive it.

    directory/                          the caller's; no symlink, not writable by everyone
        hf_kvcache-<pid>-<random>/      0700, one per cache and its copies
            owner                       0600, locked (flock) for as long as its process lives; names it
            layer3-<random>             0600, one per layer: sealed blocks, one after the other

Files go when their layer lets go of them, the folder with the last user of it: at ``close()``, when the cache is
collected, or when the interpreter exits. A process that was killed leaves both; its lock is gone with it, so the next
cache that is placed in the same directory removes them. Creating and cleaning happen under a lock on the directory
itself, so that no folder is taken for a leftover before it is locked.

A file is written with ``pwrite``, and read through a private memory map that is made anew after each write. Rows that
are replaced in place (importance eviction) lie in shared maps of files that have no name (``Folder.take``).
"""

from __future__ import annotations

import errno
import os
import platform
import secrets
import shutil
import stat
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

PREFIX = "hf_kvcache-"


class Folder:
    """A private folder inside ``directory``, which is made if it does not exist.

    Raises:
        ValueError: ``directory`` is a symlink, no directory, or writable by everyone; or this system has no flock.
        OSError: it cannot be made or written to.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory, self.warned = Path(directory).expanduser().absolute(), False
        if not os.path.lexists(self.directory):
            self.directory.mkdir(mode=0o700, parents=True)
        with _only_one(self.directory):
            remove_leftovers(self.directory)
            self.path = self.directory / f"{PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
            self.path.mkdir(mode=0o700)
            lock = os.open(self.path / "owner", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            _flock(lock)
            os.write(lock, f"{os.getpid()} {platform.node()}\n".encode())
        self._finalizer = weakref.finalize(self, _remove_folder, self.path, lock, os.getpid())

    def take(self, size: int, pin: bool = False) -> torch.Tensor:
        """``size`` bytes of the disk, [size] uint8 with the attribute ``on_disk``: a mapped file without a name, gone
        with its last user. Where there is no room it is host memory, and a warning says so once."""
        with torch.inference_mode(False):
            try:
                flat = _map_new(self.path / f"rows-{secrets.token_hex(4)}", size)
            except OSError as error:
                if not self.warned:
                    self.warned = True
                    text = f"no room in {str(self.path)!r} ({error.strerror}): kept tokens stay in host memory"
                    warnings.warn(text, stacklevel=2)
                return torch.empty(size, dtype=torch.uint8)
        flat.on_disk = True  # type: ignore[attr-defined]
        return flat

    def __deepcopy__(self, memo: dict[int, Any]) -> Folder:
        return self  # copies of a cache share the folder, not the files

    def __reduce__(self) -> tuple[Any, ...]:
        return Folder, (self.directory,)


class LayerFile:
    """The blocks of one layer: ``blocks`` records, each made of pieces of ``sizes`` bytes (keys, values)."""

    def __init__(self, folder: Folder, index: int, sizes: list[int]) -> None:
        self.folder, self.index, self.sizes = folder, index, sizes
        self.blocks, self.record = 0, sum(sizes)
        self.mapped: torch.Tensor | None = None  # [blocks * record] uint8
        self.path = folder.path / f"layer{index}-{secrets.token_hex(4)}"
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._finalizer = weakref.finalize(self, _remove_file, self.path, self.fd, os.getpid())

    def write(self, block: int, pieces: list[torch.Tensor]) -> None:
        """One record of uint8 tensors. It counts once all of it is written; ``map`` shows it.

        Raises:
            OSError: the disk is full, or broken.
        """
        offset = block * self.record
        for piece in pieces:
            offset = write_fully(self.fd, piece, offset)
        self.blocks = max(self.blocks, block + 1)

    def map(self) -> None:
        """See what was written since."""
        if self.blocks:
            size = self.blocks * self.record
            self.mapped = torch.from_file(str(self.path), shared=False, size=size, dtype=torch.uint8)

    def piece(self, side: int, block: int) -> torch.Tensor:
        """One piece of one record, [size] uint8."""
        assert self.mapped is not None
        self.check()
        start = block * self.record + sum(self.sizes[:side])
        return self.mapped[start : start + self.sizes[side]]

    def close(self) -> None:
        """Remove it. What is mapped stays readable."""
        self._finalizer()

    def check(self) -> None:
        """Raise ``OSError`` if the file has lost bytes: reading beyond its end would kill the process."""
        size, needed = os.fstat(self.fd).st_size, self.blocks * self.record
        if size < needed:
            raise OSError(f"{self.path} was cut from outside to {size} of {needed} bytes: reset() the cache")

    def reserve(self, blocks: int) -> None:
        """Room on the disk for so many records, where the file system can promise it.

        Raises:
            OSError: there is none.
        """
        if blocks <= self.blocks:
            return
        try:
            allocate(self.fd, blocks * self.record)
        except OSError:
            os.ftruncate(self.fd, self.blocks * self.record)
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerFile:
        return _restore(self.folder, self.index, self.sizes, self.mapped)

    def __reduce__(self) -> tuple[Any, ...]:
        content = None if self.mapped is None else self.mapped.clone()
        return _restore, (self.folder, self.index, self.sizes, content)


def allocate(fd: int, size: int) -> bool:
    """Reserve that many bytes on the disk for a file; whether its file system can promise them.

    Raises:
        OSError: there is no room.
    """
    if not hasattr(os, "posix_fallocate"):
        return False
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        return False
    return True


def _map_new(path: Path, size: int) -> torch.Tensor:
    """A file of that size without a name, mapped for writing; its bytes are the disk's before the map is written to:
    where the disk is full, a sparse file would kill the process."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if not allocate(fd, size):
            step = 1 << 24
            for start in range(0, size, step):
                write_fully(fd, torch.zeros(min(step, size - start), dtype=torch.uint8), start)
        return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    finally:
        os.close(fd)
        path.unlink()


def write_fully(fd: int, piece: torch.Tensor, offset: int) -> int:
    """All bytes of a uint8 tensor at ``offset``; the offset behind them."""
    view = memoryview(piece.numpy())  # type: ignore[arg-type]
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
    return offset


def remove_leftovers(directory: Path) -> list[Path]:
    """Remove our folders whose owner is gone; which ones they were. Hold the directory's lock."""
    removed = []
    for entry in os.scandir(directory):
        if not entry.name.startswith(PREFIX) or not entry.is_dir(follow_symlinks=False):
            continue
        try:
            owner = entry.stat(follow_symlinks=False).st_uid
        except FileNotFoundError:  # its owner has just removed it
            continue
        if owner != os.geteuid() or _is_owned(Path(entry.path)):
            continue
        shutil.rmtree(entry.path, ignore_errors=True)
        removed.append(Path(entry.path))
    return removed


def _is_owned(folder: Path) -> bool:
    try:
        lock = os.open(folder / "owner", os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False  # killed before it was locked
    except OSError:
        return True
    try:
        return not _flock(lock, wait=False)
    finally:
        os.close(lock)


@contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    """The directory, looked at and locked."""
    mode = os.lstat(directory).st_mode
    if stat.S_ISLNK(mode) or not stat.S_ISDIR(mode):
        kind = "a symlink" if stat.S_ISLNK(mode) else "no directory"
        raise ValueError(f"disk directory {str(directory)!r} is {kind}: name a directory of your own")
    if mode & stat.S_IWOTH:
        raise ValueError(
            f"disk directory {str(directory)!r} is writable by everyone: name a directory of your own, for example "
            f"{str(directory / 'kvcache')!r} (it is made if it does not exist)"
        )
    lock = os.open(directory, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        _flock(lock)
        yield
    finally:
        os.close(lock)


def _flock(fd: int, wait: bool = True) -> bool:
    """Lock an open file for this process; whether that worked."""
    try:
        import fcntl
    except ImportError:
        raise ValueError("the disk tier needs flock, which this system does not have: use placement 'cpu'") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _remove_file(path: Path, fd: int, owner: int) -> None:
    if os.getpid() != owner:  # a forked child must not take its parent's files away
        return
    os.close(fd)
    path.unlink(missing_ok=True)


def _remove_folder(path: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:
        return
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _restore(folder: Folder, index: int, sizes: list[int], content: torch.Tensor | None) -> LayerFile:
    """A file of its own with the same blocks."""
    file = LayerFile(folder, index, sizes)
    if content is not None:
        write_fully(file.fd, content, 0)
        file.blocks = len(content) // file.record
        file.map()
    return file
