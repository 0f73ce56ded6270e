"""Which machine measures which cell? `python -m eval run --ray [ADDRESS]`: whichever of a Ray cluster is free.

A cell (model, task, cache) is one Ray task, with one GPU where the cluster has GPUs, else with `--ray-cpus` CPUs.
Workers answer; this process alone compares and writes, so that a record is written once however often a cell was tried.
A lost worker costs its cell, which Ray starts again elsewhere. A worker keeps its model for the next cell.

Every node needs this package (`pip install 'hf-kvcache[eval,sweep]'`) and the models; items from files travel along.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eval import contenders, models, records, run, tasks

RETRIES = 5  # of a cell whose worker was lost

Items = list[tasks.Item] | None  # None: the worker makes them


def sweep(config: dict[str, Any], folder: Path | None, out: Path, address: str, cpus: int) -> list[str]:
    """Measure every cell that `out` does not hold yet. Returns what was refused."""
    done = {records.identity(record): record for record in records.read(out)}
    books: list[run.Book] = []
    refused: list[str] = []
    with connected(address) as ray:
        options = workers(ray, cpus)
        describe_there, answer_there = ray.remote(**options)(describe), ray.remote(**options)(answer)
        given = [ray.put(file_items(asked, folder, config)) for asked in config["tasks"]]
        described = {describe_there.remote(name, given, config): name for name in config["models"]}
        asked_for: dict[Any, tuple[run.Book, records.Record]] = {}
        taken: set[str] = set()
        while described or asked_for:
            (ref,), _ = ray.wait([*described, *asked_for], num_returns=1)
            found = fetch(ray, ref)
            if ref in asked_for:
                book, cell = asked_for.pop(ref)
                book.add(cell, found)
                continue
            name = described.pop(ref)
            if isinstance(found, str):
                refused.append(f"model {name!r}: {found}")
                continue
            for asked, items, frames in zip(config["tasks"], given, found, strict=True):
                books.append(run.Book(asked, frames, done, out))
                for cell in books[-1].missing():
                    if records.identity(cell) not in taken:  # or a task is named twice
                        taken.add(records.identity(cell))
                        asked_for[answer_there.remote(name, asked, items, cell["spec"], config)] = books[-1], cell
    return refused + [text for book in books for text in book.refused]


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """The module ray, with a cluster behind it."""
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            "--ray needs the package ray, which is not installed; pip install 'hf-kvcache[sweep]'"
        ) from error
    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ValueError(
            f"no Ray cluster at {address!r} ({reason}); start one with ray start --head, use --ray local, "
            "or set RAY_AUTH_MODE=token if that cluster asks for a token"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def workers(ray: Any, cpus: int) -> dict[str, Any]:
    """What a cell asks of a node."""
    if cpus < 1:
        raise ValueError(f"--ray-cpus {cpus}: a cell needs at least 1")
    has = ray.cluster_resources()
    gpus = int(has.get("GPU", 0))
    if not gpus and cpus > has.get("CPU", 0):
        raise ValueError(f"--ray-cpus {cpus}: the cluster has {has.get('CPU', 0):.0f}")
    print(f"ray: {len(ray.nodes())} nodes, {gpus} GPUs, {has.get('CPU', 0):.0f} CPUs", flush=True)
    # max_calls=0: with a GPU, Ray would start a process, and load the model, for every cell
    return {"num_gpus": 1 if gpus else 0, "num_cpus": 1 if gpus else cpus, "max_retries": RETRIES, "max_calls": 0}


def fetch(ray: Any, ref: Any) -> Any:
    """What a worker returned, or in words why there is nothing."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        return f"failed on a worker ({str(error).strip().splitlines()[-1]}); has every node this version of hf-kvcache?"
    except ray.exceptions.RayError as error:
        return f"no worker finished it in {RETRIES + 1} attempts ({str(error).strip().splitlines()[0]})"


def file_items(asked: dict[str, Any], folder: Path | None, config: dict[str, Any]) -> Items:
    """Items of a task from a file; generated ones need the model's tokenizer."""
    if tasks.task(asked["name"]).file is None:
        return None
    return tasks.load(asked["name"], folder, tasks.Made(None, asked["items"], 0, config["seed"]))


# ---- on the workers ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _load(name: str, device: str | None, dtype: str | None) -> models.Loaded:
    return models.load_model(name, device, dtype)


def describe(name: str, given: list[Any], config: dict[str, Any]) -> list[list[records.Record]] | str:
    """The frames of a model's cells, task by task; or why there are none."""
    import ray

    try:
        loaded = _load(name, config["device"], config["dtype"])
        specs = contenders.available(config["specs"], loaded.model.config)
        made = [
            (asked, _items(loaded, asked, items, config))
            for asked, items in zip(config["tasks"], ray.get(given), strict=True)
        ]
        return [[run.frame(loaded, asked, items, spec, config) for spec in specs] for asked, items in made]
    except (ValueError, FileNotFoundError) as error:
        return str(error)


def answer(name: str, asked: dict[str, Any], items: Items, spec: str, config: dict[str, Any]) -> run.Answers | str:
    """The answers of one cell; or why there are none."""
    loaded = _load(name, config["device"], config["dtype"])
    try:
        return run.measure(loaded, tasks.task(asked["name"]).kind, _items(loaded, asked, items, config), spec, config)
    except ValueError as error:
        return str(error)


def _items(loaded: models.Loaded, asked: dict[str, Any], items: Items, config: dict[str, Any]) -> list[tasks.Item]:
    return tasks.load(asked["name"], None, run.made(loaded, asked, config)) if items is None else items
