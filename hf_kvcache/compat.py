"""Which transformers is this? Every private import and version difference, from 5.17 up to below 6."""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.generation import GenerationMixin
from transformers.initialization import no_init_weights
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask, sdpa_mask

EMPTY_LAYERS: tuple[type, ...]
try:  # 5.24: layers that reuse another layer's cache, or have no attention at all
    from transformers.cache_utils import DummyLayer

    EMPTY_LAYERS = (DummyLayer,)
except ImportError:
    EMPTY_LAYERS = ()

GENERATE = inspect.unwrap(GenerationMixin.generate).__code__

# 5.24 asks a cache for every recurrent state before using it; older models took it from the layer.
ASKS_FOR_STATES = hasattr(Cache, "get_conv_state")

__all__ = [
    "ASKS_FOR_STATES",
    "AttentionInterface",
    "AttentionMaskInterface",
    "Cache",
    "CacheLayerMixin",
    "DynamicSlidingWindowLayer",
    "LinearAttentionCacheLayerMixin",
    "PreTrainedModel",
    "beside_the_text",
    "cache_argument",
    "decoder_config",
    "drops_caches_at",
    "eager_mask",
    "flash_with_lse",
    "has_cross_attention",
    "inside_generate",
    "is_causal_mask",
    "is_composite",
    "is_empty_layer",
    "is_plain_causal",
    "is_plain_full_attention",
    "is_stock_layer",
    "last_reader",
    "no_init_weights",
    "position_bias",
    "rotary",
    "sdpa_attention_forward",
    "sdpa_mask",
    "stock_layers",
    "takes_attention",
    "uses_rotary",
    "warn_if_dropped",
]


def decoder_config(config: Any) -> Any:
    """The part of a model's config that its decoder reads, never a copy: a copy would not hear of
    ``set_attn_implementation``. Of older encoder-decoder models, whose config is flat, it is the whole."""
    found = config.get_text_config(decoder=True)
    flat = found.is_encoder_decoder and type(found) is type(config)
    return config if flat else found


def has_cross_attention(config: Any) -> bool:
    """Whether this decoder hands keys of something else to its cache, too, under the numbers of its own layers."""
    crosses = config.is_encoder_decoder or (
        getattr(config, "add_cross_attention", False) and getattr(config, "is_decoder", False)
    )
    return bool(crosses or config.model_type == "blip_text_model")


def _modeling(config: Any) -> Any:
    return importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))


def takes_attention(config: Any) -> bool:
    """Whether models of this config ask for their attention function by name; where that is not known, yes."""
    try:
        return hasattr(_modeling(config), "ALL_ATTENTION_FUNCTIONS")
    except ImportError:
        return True


def drops_caches_at(config: Any) -> int | None:
    """The most tokens after which ``generate`` takes any cache away from this model (Phi-3 and its like): where prompt
    and answer pass this number, the model's ``prepare_inputs_for_generation`` goes on without one."""
    limit = getattr(config, "original_max_position_embeddings", None)
    if limit is None:
        return None
    try:
        classes = [value for value in vars(_modeling(config)).values() if isinstance(value, type)]
    except ImportError:
        return None
    own = [inspect.unwrap(c.__dict__[PREPARE]) for c in classes if PREPARE in c.__dict__]
    return limit if any("original_max_position_embeddings" in function.__code__.co_names for function in own) else None


PREPARE = "prepare_inputs_for_generation"


def warn_if_dropped(spec: str, limit: int) -> None:
    """Warn if a cache of at most ``limit`` tokens is asked for its length by code that is about to drop it.

    Nothing is handed to a dropped cache that could tell: this question is the last that it hears, and only its caller
    knows how long the input is.
    """
    caller = sys._getframe(2)  # of get_seq_length
    if caller.f_code.co_name != PREPARE:
        return
    ids = caller.f_locals.get("input_ids")
    if ids is not None and ids.shape[1] > limit:
        name = type(caller.f_locals.get("self")).__name__
        warnings.warn(
            f"{name} starts anew where a sequence passes {limit} tokens, so generate drops this {spec!r} cache at "
            f"{ids.shape[1]} tokens and goes on with a DynamicCache: only a cache into which one call of model(...) "
            f"has put more than {limit} tokens before is kept",
            stacklevel=4,
        )


def last_reader(config: Any, layer: int) -> int:
    """The last layer that attends to the keys of ``layer``: a later one where layers share them (Gemma 3n, 4)."""
    first = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
    types = getattr(config, "layer_types", None)
    if first == config.num_hidden_layers or not types or types[layer] in types[layer + 1 : first]:
        return layer
    return max(i for i, kind in enumerate(types) if i in (layer, *range(first, len(types))) and kind == types[layer])


def stock_layers(config: Any) -> list[Any]:
    """The layers that ``DynamicCache`` would use for this model, one per decoder layer.

    Raises:
        ValueError: a layer type that transformers has no cache for.
    """
    if not hasattr(config, "num_hidden_layers"):
        raise ValueError(
            f"{type(config).__name__} has no layers that a cache could be made for: give the decoder's own"
        )
    try:
        return list(DynamicCache(config=config).layers)
    except KeyError as error:
        raise ValueError(
            f"layer type {error.args[0]!r} of {type(config).__name__} has no cache in this transformers: "
            "update transformers, or use the cache class that the model brings"
        ) from None


FlashKernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def flash_with_lse(device: torch.device) -> FlashKernel | None:
    """torch's own flash kernel that also returns the log-sum-exp (a private operator), ``None`` where there is none.

    It takes query [b, h, s, D], keys and values [b, h, n, D], the scaling, and an additive bias [b or 1, h or 1, s, n]
    in the query's dtype or ``None``; it returns out [b, h, s, D] and lse [b, h, s] float32.
    """
    return {"cpu": _flash_cpu, "cuda": _flash_cuda}.get(device.type) if _has_flash(device.type) else None


@lru_cache
def _has_flash(device: str) -> bool:
    name = {"cpu": "_scaled_dot_product_flash_attention_for_cpu", "cuda": "_scaled_dot_product_efficient_attention"}
    return hasattr(torch.ops.aten, name.get(device, "none"))


def _flash_cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, bias: torch.Tensor | None) -> Any:
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return run(q, k, v, 0.0, False, attn_mask=bias, scale=scaling)


def _flash_cuda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, bias: torch.Tensor | None) -> Any:
    if bias is not None:  # rows of it have to begin at multiples of 16 values
        n = bias.shape[-1]
        room = bias.new_empty(*bias.shape[:-1], -(-n // 16) * 16)[..., :n].copy_(bias)
        bias = room.expand(q.shape[0], q.shape[1], q.shape[2], n)
    run = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse = run(q, k, v, bias, True, 0.0, False, scale=scaling)[:2]
    return out, lse[..., : q.shape[2]]  # it comes in whole blocks of queries


def position_bias(config: Any) -> str:
    """How this model biases scores by position, "" if it does not."""
    attention = getattr(config, "attn_config", None)
    if config.model_type == "bloom" or getattr(config, "alibi", False) or getattr(attention, "alibi", False):
        return "ALiBi"
    return "relative attention" if getattr(config, "relative_attention_num_buckets", 0) else ""


def inside_generate() -> bool:
    """Whether ``generate`` is what calls. Walks up the stack: for rare cases only."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not GENERATE:
        frame = frame.f_back
    return frame is not None


def is_causal_mask(function: Any) -> bool:
    """Whether a mask is one of self-attention over a growing sequence, as far as its function says."""
    return function is not bidirectional_mask_function


def is_plain_causal(options: dict[str, Any]) -> bool:
    """Whether a mask function is asked for "up to the query's own token" and nothing else."""
    function = options.get("mask_function", causal_mask_function)
    return function is causal_mask_function and options.get("allow_is_causal_skip", True)


def beside_the_text(config: Any) -> tuple[int, ...]:
    """Layers that attend to images: they hold as many tokens as those have, or none (Mllama)."""
    return tuple(getattr(config, "cross_attention_layers", None) or ())


def is_plain_full_attention(layer: Any) -> bool:
    return type(layer) is DynamicLayer


def is_stock_layer(layer: Any) -> bool:
    """Recurrent states, and layers that hold nothing: kept as transformers makes them."""
    return isinstance(layer, (LinearAttentionCacheLayerMixin, *EMPTY_LAYERS)) and not is_composite(layer)


def is_composite(layer: Any) -> bool:
    """Attention and a recurrent state in one layer (Falcon H1, Zaya)."""
    return isinstance(layer, LinearAttentionCacheLayerMixin) and isinstance(layer, CacheLayerMixin)


def is_empty_layer(layer: Any) -> bool:
    """Nothing of its own: it reads another layer's keys, or has no attention."""
    return isinstance(layer, EMPTY_LAYERS)


def cache_argument(forward: Callable[..., Any]) -> str:
    """``"cache"`` (5.24 on) or ``"past_key_values"``: what this forward calls its cache."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def rotary(config: Any, layer: int) -> tuple[Any, Callable[..., Any], str | None, str]:
    """(module giving cos and sin, function applying them to one tensor, layer type to ask for, kind of scaling).

    Raises:
        ValueError: no rotary positions, or a form of them that is not known.
    """
    name = type(config).__name__
    module = _modeling(config)
    parameters = getattr(config, "rope_parameters", None)
    apply = getattr(module, "apply_rotary_pos_emb", None)
    found = [
        value
        for key, value in vars(module).items()
        if key.endswith("RotaryEmbedding") and "Vision" not in key and value.__module__ == module.__name__
    ]
    if not parameters or apply is None or len(found) != 1:
        raise ValueError(f"{name} has no rotary positions that are known here")
    if config.model_type.startswith("hunyuan"):
        raise ValueError(f"{name} normalises keys after their rotation, which cannot be undone")
    types = getattr(config, "layer_types", None)
    kind = types[layer] if types else None
    if isinstance(parameters.get(kind), dict):
        parameters = parameters[kind]
    else:
        kind = None
    if "mrope_section" in parameters:
        raise ValueError(f"{name} has positions in three dimensions (M-RoPE), which cannot be moved")
    embed = found[0](config)
    if "k" in inspect.signature(apply).parameters:
        return embed, lambda x, cos, sin: apply(x, x, cos, sin)[0], kind, parameters["rope_type"]
    return embed, apply, kind, parameters["rope_type"]


ROTATES_SLIDING = ("afmoe", "cohere2", "cohere2_moe", "flint")  # in their sliding layers only
ROTATES_SLIDING_IF_ANY = ("exaone4", "exaone4_5", "exaone_moe", "kolibri1")  # or everywhere, without a window


def uses_rotary(config: Any, layer: int) -> bool:
    """Whether this layer rotates at all: some models leave it out in a few layers (NoPE)."""
    flags = getattr(config, "no_rope_layers", None)
    if flags:
        return bool(flags[layer])
    kind = config.model_type
    if kind in (*ROTATES_SLIDING, *ROTATES_SLIDING_IF_ANY) and config.layer_types[layer] != "sliding_attention":
        if kind == "cohere2_moe" and config.mlp_layer_types[layer] == "dense":
            return bool(config.prefix_dense_sliding_window_pattern == 1)
        return kind in ROTATES_SLIDING_IF_ANY and config.sliding_window is None
    if not getattr(config, "use_mem_rope", True):  # Zamba2
        return False
    return bool(getattr(config, "rope_parameters", None) or getattr(config, "rotary_dim", None))
