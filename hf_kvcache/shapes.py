"""Which tensors does a model hand to its cache? The model itself answers, without memory and without weights.

Number and size of the KV heads, latents of MLA, shared layers and recurrent states are spelt differently in every
family's config. None of it is guessed here. The model is built on the meta device, where a tensor has a shape and no
storage, and one token is fed to it with the stock cache. What lies in the cache afterwards are the shapes of one token:

    keys [1, H, 1, Dk], values [1, H, 1, Dv]       grow with the context, up to a window
    conv [1, C, k], recurrent [1, ...]             do not grow

Blocks that look like an earlier one (same parameter shapes, same kind of cache) are not run again: they hand on what
that one returned. Where a family does not allow this, all blocks run, which takes some seconds for a large model.
"""

from __future__ import annotations

import copy
import json
import os
from typing import Any, NamedTuple

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from . import compat

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class LayerShapes(NamedTuple):
    """What one decoder layer hands to the cache."""

    heads: int = 0  # KV heads; 0: no keys and values
    widths: tuple[int, int] = (0, 0)  # of a key, of a value
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)
    state_bytes: int = 0  # of recurrent and convolution states, per sequence


class Outline(NamedTuple):
    """A model as far as its memory is concerned."""

    name: str
    config: Any  # of the decoder; a copy
    dtype: torch.dtype
    layers: list[LayerShapes]
    weight_bytes: int | None
    notes: tuple[str, ...]


def read_config(source: Any) -> Any:
    """The config that ``source`` names.

    Args:
        source: a config object (or a model), a dict with ``model_type``, a ``config.json``, a folder that holds one, or
            a name on the hub.

    Raises:
        ValueError: none of these, or a model type that this transformers does not know.
    """
    source = getattr(source, "config", source)
    if hasattr(source, "get_text_config"):
        return source
    if isinstance(source, dict):
        return _from_dict(source)
    if not isinstance(source, (str, os.PathLike)):
        raise ValueError(f"model {source!r}: give a config, a dict, a config.json, a folder, or a name on the hub")
    path = os.fspath(source)
    file = os.path.join(path, "config.json") if os.path.isdir(path) else path
    if os.path.isdir(path) and not os.path.isfile(file):
        raise ValueError(f"model {path!r}: the folder has no config.json")
    try:
        return transformers.AutoConfig.from_pretrained(file)
    except (OSError, ValueError, KeyError) as error:
        looks_like_file = file.endswith(".json") or os.path.isabs(file)
        missing = looks_like_file and not os.path.isfile(file)
        reason = "there is no such file" if missing else str(error).strip().split("\n")[0]
        raise ValueError(f"model {path!r}: no config could be read ({reason})") from None


def _from_dict(settings: dict[str, Any]) -> Any:
    kind = settings.get("model_type", "")
    if kind not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"model_type={kind!r} is not known to transformers {transformers.__version__}: name one it has"
        )
    return transformers.CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(settings)))


def find_dtype(config: Any, dtype: Any = None) -> tuple[torch.dtype, str]:
    """The dtype that keys and values have, and what had to be assumed for that ("" if nothing).

    Raises:
        ValueError: not one of bfloat16, float16, float32.
    """
    decoder = config.get_text_config(decoder=True)
    wanted = dtype or getattr(decoder, "dtype", None) or getattr(config, "dtype", None)
    if wanted is not None:
        found = getattr(torch, wanted.removeprefix("torch."), wanted) if isinstance(wanted, str) else wanted
        if found not in DTYPES:
            raise ValueError(f"dtype={wanted!r}: known are {', '.join(str(d)[6:] for d in DTYPES)}")
        return found, ""
    if decoder._attn_implementation is not None:  # a model was made from this config, in the default dtype
        return torch.get_default_dtype(), ""
    return torch.bfloat16, "the config names no dtype: bfloat16 is assumed"


def outline(source: Any, dtype: Any = None) -> Outline:
    """What a model hands to its cache, and the bytes of its weights.

    Args:
        source: as ``read_config``.
        dtype: of weights, keys and values; ``None``: what the config says.

    Raises:
        ValueError: as ``read_config`` and ``find_dtype``; an encoder-decoder model; a model that cannot be built or run
            on the meta device.
    """
    config = copy.deepcopy(read_config(source))
    name = str(source) if isinstance(source, (str, os.PathLike)) else config._name_or_path or config.model_type
    found, assumed = find_dtype(config, dtype)
    decoder = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise ValueError(f"{type(config).__name__} is an encoder-decoder model: only decoders are planned")
    weights: int | None
    layers, weights = _trace(decoder, found)
    if not any(layer.heads or layer.state_bytes for layer in layers):
        raise ValueError(f"{type(config).__name__} hands nothing to its cache: there is nothing to plan")
    notes = [assumed] if assumed else []
    if getattr(config, "quantization_config", None) is not None:
        weights = None
        notes.append("weights are unknown: the checkpoint is quantized; pass weight_bytes")
    elif decoder is not config:
        weights = _weights_of_whole(config, found)
        notes += [] if weights else ["weights are unknown: the whole model could not be built; pass weight_bytes"]
    return Outline(name, decoder, found, layers, weights, tuple(notes))


def _build(maker: Any, config: Any, dtype: torch.dtype) -> Any:
    """A model without storage; the config is left alone."""
    with torch.device("meta"), compat.no_init_weights():
        model = maker(copy.deepcopy(config), dtype=dtype, attn_implementation="eager").eval()
    model.tie_weights()  # part of the initialization that was left out
    return model


def _bytes_of(model: Any) -> int:
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def _weights_of_whole(config: Any, dtype: torch.dtype) -> int | None:
    """Bytes of a model with more parts than its decoder (vision, audio)."""
    maker = getattr(transformers, (config.architectures or [""])[0], None)
    try:
        return _bytes_of(_build(maker._from_config, config, dtype)) if maker else None
    except Exception:  # noqa: BLE001 (whatever a family raises: the weights stay unknown, and a note says so)
        return None


def _trace(config: Any, dtype: torch.dtype) -> tuple[list[LayerShapes], int]:
    """Shapes per layer and bytes of the weights; twins are skipped where the family allows it."""
    reason: Exception | None = None
    for skip in (True, False):
        try:
            model = _build(transformers.AutoModelForCausalLM.from_config, config, dtype)
            stock = compat.stock_layers(config)
            twins = _skip_twins(model, stock, config) if skip else {}
            _feed_one(model, stock)
            return [_shapes(stock[twins.get(i, i)]) for i in range(len(stock))], _bytes_of(model)
        except Exception as error:  # noqa: BLE001 (any code of any family runs here)
            reason = error
    text = str(reason).strip().split("\n")[0]
    raise ValueError(f"{type(config).__name__} cannot be run on the meta device ({type(reason).__name__}: {text})")


def _feed_one(model: Any, stock: list[Any]) -> None:
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # others are written for the values and dtypes of real tensors
    ids = torch.empty(1, 1, dtype=torch.long, device="meta")
    cache = {compat.cache_argument(model.forward): compat.Cache(layers=stock)}
    with torch.no_grad(), AnyValue():
        model(input_ids=ids, use_cache=True, **cache)


def _skip_twins(model: Any, stock: list[Any], config: Any) -> dict[int, int]:
    """Let blocks hand on what an earlier one of the same kind returned; ``{number: number of that one}``."""
    count, types = config.num_hidden_layers, getattr(config, "layer_types", None)
    blocks = next((m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count), ())
    first: dict[Any, int] = {}
    returned: dict[int, Any] = {}
    twins = {}
    for index, block in enumerate(blocks):
        cached = type(stock[index]) if index < len(stock) else None
        parameters = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
        twin = first.setdefault((type(block), cached, types and types[index], parameters), index)
        if twin != index:
            twins[index] = twin
            block.forward = lambda *args, _twin=twin, **kwargs: returned[_twin]
        else:
            block.register_forward_hook(lambda module, args, out, _index=index: returned.__setitem__(_index, out))
    return twins


def _shapes(layer: Any) -> LayerShapes:
    states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    fixed = sum(t.nbytes for t in states if t is not None)
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None:
        return LayerShapes(state_bytes=fixed)
    return LayerShapes(keys.shape[1], (keys.shape[-1], values.shape[-1]), (keys.dtype, values.dtype), fixed)


class AnyValue(TorchDispatchMode):
    """Answers questions about values, which meta tensors do not have, with yes, or 1: only shapes are looked at."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return torch.ones((), dtype=args[0].dtype).item()
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            return args[0].new_empty(0, args[0].dim(), dtype=torch.long)
        return func(*args, **(kwargs or {}))
