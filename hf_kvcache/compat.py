"""Which transformers is this? Every private import and version difference, from 5.17 up to below 6."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.initialization import no_init_weights
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

EMPTY_LAYERS: tuple[type, ...]
try:  # 5.24: layers that reuse another layer's cache, or have no attention at all
    from transformers.cache_utils import DummyLayer

    EMPTY_LAYERS = (DummyLayer,)
except ImportError:
    EMPTY_LAYERS = ()

__all__ = [
    "AttentionInterface",
    "AttentionMaskInterface",
    "Cache",
    "CacheLayerMixin",
    "DynamicSlidingWindowLayer",
    "LinearAttentionCacheLayerMixin",
    "cache_argument",
    "decoder_config",
    "eager_mask",
    "has_cross_attention",
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


def position_bias(config: Any) -> str:
    """How this model biases scores by position, "" if it does not."""
    attention = getattr(config, "attn_config", None)
    if config.model_type == "bloom" or getattr(config, "alibi", False) or getattr(attention, "alibi", False):
        return "ALiBi"
    return "relative attention" if getattr(config, "relative_attention_num_buckets", 0) else ""


def is_plain_full_attention(layer: Any) -> bool:
    return type(layer) is DynamicLayer


def is_stock_layer(layer: Any) -> bool:
    """Recurrent states, and layers that hold nothing: kept as transformers makes them."""
    return isinstance(layer, (LinearAttentionCacheLayerMixin, *EMPTY_LAYERS))


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
