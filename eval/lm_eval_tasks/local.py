"""The files of a local data folder (`$HF_KVCACHE_DATA`) as data sets of lm-eval; `eval/tasks.py` says their forms."""

from __future__ import annotations

from typing import Any

import datasets

from eval import tasks


def _load(name: str) -> dict[str, Any]:
    folder, file = tasks.data_folder(None), tasks.task(name).file
    if folder is None or file is None or not (folder / file).is_file():
        raise FileNotFoundError(f"task {name!r} reads {file}: name its folder in the environment as HF_KVCACHE_DATA")
    return {"test": datasets.Dataset.from_list(tasks.read_lines(folder / file))}


def lambada(**metadata: Any) -> dict[str, Any]:
    """lm-eval calls this with the model's arguments and the metadata of the command line."""
    return _load("lambada")


def arc_easy(**metadata: Any) -> dict[str, Any]:
    """See `lambada`."""
    return _load("arc_easy")


def piqa(**metadata: Any) -> dict[str, Any]:
    """See `lambada`."""
    return _load("piqa")


def gsm8k(**metadata: Any) -> dict[str, Any]:
    """See `lambada`."""
    return _load("gsm8k")
