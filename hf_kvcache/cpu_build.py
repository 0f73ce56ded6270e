"""Where is the C kernel, and how is it compiled? ``cc`` once per instruction set, linked into one library.

    python -m hf_kvcache.cpu_build      compiles by hand, into the package folder, or where that cannot be written to,
                                        into the user's cache (~/.cache/hf_kvcache, private to the user)

An install does the same (``hatch_build.py``), and succeeds without a compiler. Nothing is compiled at import. The
library carries the SHA-256 of its source, and is not used beside another one. Only the standard library is imported
here, since an install has nothing else.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("cpu_decode.c")
NAME = "_cpu_decode.so"
FLAGS = "-O3 -std=gnu11 -fPIC -fvisibility=hidden -ffp-contract=fast -fno-math-errno -fno-trapping-math -Wno-psabi"
# Flags beyond FLAGS; the last level that a machine has is used.
LEVELS = {"base": "", "avx2": "-mavx2 -mfma -mf16c"}


def source_hash() -> str:
    """SHA-256 of the C source, in hexadecimal."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()


def user_cache() -> Path:
    """The library's file in the user's cache; one per version of the source."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "hf_kvcache" / f"{source_hash()[:16]}-{platform.machine()}" / NAME


def find() -> Path | None:
    """The compiled library: in the package folder, or else in the user's cache, where nobody else may write."""
    if os.name != "posix":
        return None
    if SOURCE.with_name(NAME).is_file():
        return SOURCE.with_name(NAME)
    cached = user_cache()
    return cached if cached.is_file() and _private(cached.parent) and _private(cached) else None


def _private(path: Path) -> bool:
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def compile_to(target: Path) -> None:
    """Compile into ``target``, whole or not at all.

    Raises:
        OSError: no compiler, one that fails (with its last line), or a folder that cannot be written to.
    """
    compiler = shlex.split(os.environ.get("CC", "cc"))
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = []
        for level, flags in LEVELS.items():
            if level != "base" and platform.machine() not in ("x86_64", "AMD64"):
                continue
            objects.append(f"{folder}/{level}.o")
            defines = [f"-DLEVEL={level}", f'-DSOURCE="{source_hash()}"', *shlex.split(FLAGS), *shlex.split(flags)]
            _run([*compiler, *defines, "-c", str(SOURCE), "-o", objects[-1]])
        _run([*compiler, "-shared", *objects, "-o", f"{folder}/{NAME}", "-lm"])
        os.replace(f"{folder}/{NAME}", target)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise OSError(f"{command[0]} failed: {last}")


def build() -> Path:
    """Compile into the package folder, or into the user's cache; where it is now. ``OSError`` as ``compile_to``."""
    target = SOURCE.with_name(NAME)
    if not os.access(target.parent, os.W_OK):
        target = user_cache()
        for folder in (target.parent.parent, target.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _private(target.parent):
            raise OSError(f"{target.parent} can be written to by others: remove it, or chmod go-w")
    compile_to(target)
    return target


def main() -> None:
    """Compile, and say where the result is."""
    try:
        print(f"built {build()}")
    except OSError as error:
        sys.exit(f"not built: {error}; the torch path is used")


if __name__ == "__main__":
    main()
