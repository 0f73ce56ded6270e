"""How do results survive a killed run?

Results are JSON Lines: one record per (model, spec, task, settings), one line per record, one write per
line. A run that is started again skips the records it finds. A run killed in the middle of a write leaves a
half line at the end: it is reported and dropped, and its record is measured again. A broken line anywhere
else is an error, for it was not this program that wrote it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

Record = dict[str, Any]
IDENTITY = ("task", "model", "spec", "settings")


def identity(record: Record) -> str:
    """What makes two records the same measurement."""
    return json.dumps({key: record[key] for key in IDENTITY}, sort_keys=True)


def read(path: Path) -> list[Record]:
    """All records of a file; none if it does not exist yet. Repairs a half-written last line."""
    if not path.exists():
        return []
    _drop_half_line(path)
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            records.append(json.loads(line))
            identity(records[-1])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path.name}:{number} is not a result record; repair or remove that line") from error
    return records


def _drop_half_line(path: Path) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        note = f"note: {path.name} ended in a half-written line of {len(content) - whole} bytes; dropped it"
        print(note, file=sys.stderr)
        os.truncate(path, whole)


def append(path: Path, record: Record) -> None:
    """Add one record as one line, in one write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(record, sort_keys=True) + "\n").encode()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        if os.write(file, line) != len(line):
            raise OSError(f"{path.name}: the disk took only part of a record; free some space and run again")
    finally:
        os.close(file)


def latest(records: list[Record]) -> list[Record]:
    """One record per measurement: where a file holds several, the last."""
    return list({identity(record): record for record in records}.values())


def one_setting(records: list[Record], task: str) -> list[Record]:
    """The latest records of a task that can share a picture: model and settings are the last one's."""

    def shared(record: Record) -> tuple[str, dict[str, Any]]:
        free = ("attn", "context")  # these may differ within one picture
        return record["model"], {k: v for k, v in record["settings"].items() if k not in free}

    mine = [record for record in latest(records) if record["task"] == task]
    return [record for record in mine if shared(record) == shared(mine[-1])]


def versions() -> dict[str, str]:
    """Of everything that could change a number."""
    try:
        ours = importlib.metadata.version("hf-kvcache")
    except importlib.metadata.PackageNotFoundError:
        ours = "not installed"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_kvcache": ours,
    }


def machine() -> dict[str, Any]:
    """What it ran on, without names of hosts or paths."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
