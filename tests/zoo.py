"""Every decoder that this transformers can build, at tiny size: what ``docs/support.md`` is a table of.

``build(name)`` makes a model of a family from its default config with the known fields shrunk (``SIZES``), plus what a
few families need beside (``SETTINGS``). ``check(name, spec, attention)`` feeds it the same tokens at once, in chunks of
seven and one by one, and compares with oracles that drop no slot and give no token two of them, so that they also hold
for models whose own masks go by slot:

    full                 ``DynamicCache``, fed in the same way
    int8, int4, ...      all tokens, rounded by the rules of the spec, fed one by one
    sink, knorm          all tokens stay where they are; attention hides what the cache no longer holds

A family is named by its ``model_type``; "type:decoder" is the decoder alone of an encoder-decoder type.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import transformers
from families import DECODERS, GroupedLayer, Kept, KeptLayer, Verdict, _first_line, oracle
from models import ReferenceLayer, prompt, round_trip, sink_mask
from transformers import CONFIG_MAPPING, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.auto import modeling_auto

import hf_kvcache
from hf_kvcache import KVCache, compat
from hf_kvcache import families as known
from hf_kvcache.eviction import EvictionLayer
from hf_kvcache.layers import KVLayer

SPECS = (
    "full",
    "int8",
    "int8(residual=3)",
    "int4(group=4,residual=3,sinks=2)",
    "sink(2,6)",
    "knorm(budget=8,sinks=2,recent=3)",
)
ATTENTIONS = ("stock", "kvcache")
SCHEDULES = {"once": [11, 1], "chunks": [7, 4, 1], "steps": [1] * 12}
TOKENS, VOCABULARY = 12, 97
EXACT, OURS, OF_CODEC = 1e-5, 2e-4, 0.1  # as in ``families``
LARGEST = 60_000_000  # parameters

MAPPINGS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")


def mapping(name: str) -> dict[str, str]:
    """Class names by model type, {} where this transformers has no such mapping."""
    return dict(getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {}))


def names() -> dict[str, str]:
    """The class of every family."""
    found: dict[str, str] = {}
    for kind in MAPPINGS:
        for model_type, name in mapping(kind).items():
            found.setdefault(model_type, name)
    for model_type, name in mapping("IMAGE_TEXT_TO_TEXT").items():  # the whole of it, where there is a whole
        found[model_type] = name
    for kind in ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"):
        for model_type, name in mapping(kind).items():
            alone = mapping("CAUSAL_LM").get(model_type)
            if alone and alone != name:
                found[model_type], found[f"{model_type}:decoder"] = name, alone
    return dict(sorted((found | {name: cls for name, cls in DECODERS_ALONE.items() if name in found}).items()))


# -- tiny configs ------------------------------------------------------------------------------------------------------

WIDTH = "hidden_size d_model n_embd embed_dim word_embed_proj_dim projection_dim projector_hidden_size dim"
HIDDEN = "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim mlp_dim n_inner ffn_hidden_size ffn_size"
HEADS = "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads"
DEPTH = "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers depth"
SIZES: dict[str, Any] = {
    **dict.fromkeys(WIDTH.split(), 32),
    **dict.fromkeys(HIDDEN.split(), 64),
    **dict.fromkeys(HEADS.split(), 4),
    **dict.fromkeys(DEPTH.split(), 2),
    "encoder_num_hidden_layers": 1,
    "decoder_num_hidden_layers": 2,
    "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4,
    "encoder_num_key_value_heads": 2,
    "decoder_num_key_value_heads": 2,
    "num_key_value_heads": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "num_sliding_attention_heads": 4,
    "swa_head_dim": 8,
    "head_dim": 8,
    "kv_channels": 8,
    "global_head_dim": 8,
    "d_kv": 8,
    "vocab_size": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_hidden_size": 32,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "qk_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_d_state": 4,
    "mamba_dt_rank": 4,
    "mamba_d_head": 8,
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "use_mamba_kernels": False,
    "sliding_window": 6,
    "sliding_window_size": 6,
    "window_size": 6,
    "attention_chunk_size": 8,
    "rotary_dim": 4,
    "query_pre_attn_scalar": 8,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "max_seq_len": 256,
    "max_target_positions": 64,
    "max_source_positions": 16,
    "num_mel_bins": 8,
    "patch_size": 4,
    "image_size": 16,
    "num_position_embeddings": 16,
    "spatial_merge_size": 2,
    "out_hidden_size": 32,
    "output_dim": 32,
    "num_filters": 4,
    "base_channels": 32,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
    "use_cache": True,
}
HYBRID = ["linear_attention", "full_attention"]
SECTIONS = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_expand=2, mamba_d_state=4)
AUDIO = dict(text_config={}, audio_config={})
SETTINGS: dict[str, dict[str, Any]] = {
    "bamba": dict(attn_layer_indices=[1], **MAMBA),
    "granitemoehybrid": dict(layer_types=HYBRID, num_hidden_layers=2, shared_intermediate_size=32, **MAMBA),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "falcon_h1": dict(mamba_d_ssm=64, **MAMBA),
    "nemotron_h": dict(
        mamba_num_heads=8, mamba_head_dim=8, n_groups=1, ssm_state_size=4, moe_shared_expert_intermediate_size=16
    ),
    "mamba2": dict(num_heads=8, head_dim=8, n_groups=1, state_size=4),
    "blt": dict(encoder_hash_byte_group_vocab=64),
    "chameleon": dict(vocabulary_map={"<image>": 1}),
    "dbrx": dict(attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0), ffn_config=dict(moe_top_k=2)),
    "deepseek_ocr2": dict(text_config=dict(mlp_layer_types=["dense", "sparse"])),
    "dory": dict(
        n_input_layers=1,
        n_recurrent_layers=1,
        n_output_layers=1,
        n_recurrent_loops=2,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    ),
    "emu3": dict(vocabulary_map={"<image>": 1}, image_token_id=1, vq_config=dict(channel_multiplier=(1, 1))),
    "ernie4_5_vl_moe": dict(
        text_config=dict(moe_intermediate_size=[16, 16], rope_parameters=dict(SECTIONS, mrope_section=[1, 1, 2]))
    ),
    "florence2": dict(
        vision_config=dict(
            embed_dim=(8, 8, 8, 8),
            num_heads=(1, 1, 1, 1),
            num_groups=(1, 1, 1, 1),
            depths=(1, 1, 1, 1),
            patch_size=(7, 3, 3, 3),
            projection_dim=32,
        )
    ),
    "fun_asr_nano": dict(adaptor_config=dict(intermediate_size=8)),
    "gemma3n_text": dict(
        intermediate_size=64,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        laurel_rank=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
        altup_num_inputs=2,
    ),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "granite_speech": dict(
        projector_config=dict(encoder_hidden_size=32),
        encoder_config=dict(hidden_dim=32, dim_head=8, input_dim=16, output_dim=8),
    ),
    "granite_speech_plus": dict(
        projector_config=dict(encoder_hidden_size=32),
        encoder_config=dict(hidden_dim=32, dim_head=8, input_dim=16, output_dim=8),
    ),
    "granite4_vision": dict(
        downsample_rate="1/2",
        deepstack_layer_map=[],
        spatial_target_layers=[],
        vision_config=dict(hidden_size=64),
        qformer_config=dict(encoder_hidden_size=64, hidden_size=64),
    ),
    "inkling2": dict(vision_config=dict(text_hidden_size=32), audio_config=dict(text_hidden_size=32)),
    "inkling2_loop": dict(vision_config=dict(text_hidden_size=32), audio_config=dict(text_hidden_size=32)),
    "inkling_mm_model": dict(vision_config=dict(text_hidden_size=32), audio_config=dict(text_hidden_size=32)),
    "janus": dict(
        vq_config=dict(
            base_channels=32, channel_multiplier=(1, 1), latent_channels=8, num_embeddings=16, image_token_embed_dim=32
        ),
        vision_config=dict(num_image_tokens=16),
    ),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_hidden_layers=2, num_dense_layers=1),
    "longcat_flash": dict(zero_expert_num=2, expert_ffn_hidden_size=16, num_layers=2),
    "mistral_large4": {},
    "molmo2": dict(
        adapter_config=dict(vision_feature_layer=[1, 0], text_hidden_size=32), vision_config=dict(image_size=[16, 16])
    ),
    "moonshine_streaming": dict(num_key_value_heads=4, encoder_config=dict(sliding_windows=[[16, 4], [16, 4]])),
    "qwen4_exp_text": dict(
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=4,
        indexer_compress_ratio=2,
        hc_lowrank=8,
        ngram_vocab_size_base=64,
        ple_embed_dim=32,
    ),
    "xlm": dict(emb_dim=32, causal=True, is_encoder=False),
    "zamba": dict(
        attention_hidden_size=64,
        attention_head_dim=16,
        layers_block_type=["linear_attention", "hybrid"] * 2,
        num_hidden_layers=4,
        num_key_value_heads=4,
    ),
    "zaya": dict(num_experts_per_tok=1, router_hidden_size=16),
    "reformer": dict(attn_layers=("local", "local"), num_hidden_layers=2, axial_pos_embds=False, is_decoder=True),
    "step3p7": dict(text_config=dict(share_expert_dim=16, sliding_window=6)),
    "dia": dict(
        decoder_config=dict(
            num_channels=1,
            cross_num_attention_heads=4,
            cross_head_dim=8,
            cross_hidden_size=32,
            cross_num_key_value_heads=4,
        ),
        delay_pattern=[0],
    ),
    "glm5_next": dict(text_config=dict(num_key_value_heads=4, qk_rope_head_dim=0)),
    "deepseek_v4": dict(
        num_key_value_heads=1,
        compress_rates=dict(compressed_sparse_attention=2, heavily_compressed_attention=4),
        o_groups=2,
        o_lora_rank=8,
        hc_mult=2,
    ),
    "muse_spark": dict(audio_config=dict(hidden_sizes=(8, 8, 8, 32))),
    "cohere_compass_text": dict(rope_parameters=dict(full_attention=dict(rope_type="default", rope_theta=1e4))),
    "hunyuan_vl": dict(text_config=dict(rope_parameters=dict(SECTIONS, mrope_section=[1, 1, 1, 1]))),
    "moonshine": dict(encoder_num_key_value_heads=4, decoder_num_key_value_heads=4),
    "recurrent_gemma": dict(block_types=["recurrent", "attention"], attention_window_size=6),
    "dots3_note": dict(
        vision_config=dict(adapter_in_dim=32, adapter_out_dim=32),
        audio_config=dict(adapter_input_size=32, adapter_out_dim=32, downsample_hidden_size=8),
    ),
    **{
        name: dict(text_config=dict(rope_parameters=SECTIONS))
        for name in (
            "glm46v",
            "glm4v",
            "glm_ocr",
            "glmga",
            "paddleocr_vl",
            "qwen2_5_omni_thinker",
            "qwen2_5_vl",
            "qwen2_vl",
        )
    },
    "glm4v_moe": dict(
        text_config=dict(rope_parameters=dict(SECTIONS, partial_rotary_factor=0.5, mrope_section=[1, 1, 0]))
    ),
    "qwen4_exp": {},
}
for _name in ("gemma4_text", "gemma3n_text"):
    SETTINGS[_name] = DECODERS[_name]
for _name in ("gemma4", "gemma4_unified_text"):
    SETTINGS[_name] = dict(text_config=SETTINGS["gemma4_text"]) if _name == "gemma4" else SETTINGS["gemma4_text"]
SETTINGS["gemma4_unified"] = SETTINGS["diffusion_gemma"] = SETTINGS["gemma4"]
for _name in ("encoder-decoder", "speech-encoder-decoder", "vision-encoder-decoder"):
    SETTINGS[_name] = dict(decoder=dict(is_decoder=True, add_cross_attention=True))
SETTINGS["nemotron_h_omni"] = dict(text_config=SETTINGS["nemotron_h"], vision_config=dict(video_temporal_patch_size=2))
SETTINGS["qwen4_exp"] = dict(text_config=SETTINGS["qwen4_exp_text"])
SETTINGS["cohere_compass"] = dict(text_config=SETTINGS["cohere_compass_text"])
TOWER = transformers.SiglipVisionConfig(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=16, patch_size=4
)  # in the place of one that needs another package
SETTINGS["gemma3n_text"] = dict(DECODERS["gemma3n_text"], intermediate_size=[64] * 4)
SETTINGS["fast_vlm"] = dict(vision_config=TOWER)
START: dict[str, dict[str, Any]] = {
    "gemma4_assistant": dict(text_config=dict(model_type="gemma4_text", hidden_size_per_layer_input=0)),
}
# Wholes that cannot be built or run without images, sound or other packages: their decoder is built, in their name.
DECODERS_ALONE = {
    "apertus1p5": "Apertus1p5TextForCausalLM",
    "blip-2": "OPTForCausalLM",
    "gemma3n": "Gemma3nForCausalLM",
    "inkling_mm_model": "InklingForCausalLM",
    "instructblip": "OPTForCausalLM",
    "instructblipvideo": "OPTForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "nemo_speechlm": "NemotronHForCausalLM",
    "perception_lm": "LlamaForCausalLM",
}
UNBUILT: dict[str, str] = {
    "gemma4_assistant": "drafts for another model and reads that model's cache",
    "gemma4_unified_assistant": "drafts for another model and reads that model's cache",
    "diffusion_gemma": "denoises blocks of tokens: no causal decoder",
    "pi0": "denoises actions of a robot: no decoder of text",
    "xlm": "transformers has its encoder only",
    "qwen2_5_omni": "has no forward of its own; its decoder is qwen2_5_omni_thinker",
    "qwen3_omni_moe": "has no forward of its own; its decoder is qwen3_omni_moe_thinker",
    "kyutai_speech_to_text": "its input is text and 32 audio codes at once; all layers have a native window",
    "cpmant": "puts 32 tokens of its own before every forward, with which DynamicCache fails, too",
    "minimax": "takes no cache but its own MiniMaxCache",
}
# Wholes without a forward: as right as the part that generates.
BY_PART = {"qwen2_5_omni": "qwen2_5_omni_thinker", "qwen3_omni_moe": "qwen3_omni_moe_thinker"}
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")


def tiny(config: Any, extra: dict[str, Any]) -> Any:
    """A config like ``config``, a default one, with every known size shrunk and every nested config as well."""
    cls, fields, values = type(config), known_fields(config), vars(config)
    settings = {
        name: SIZES[name] for name in fields if name in SIZES and keeps_kind(cls, values.get(name), name, SIZES[name])
    }
    settings |= shorter(config, fields)
    if isinstance(values.get("kv_lora_rank"), int) and "num_key_value_heads" in fields:
        settings["num_key_value_heads"] = 4  # latents are expanded to as many heads as queries have
    settings |= rotations(values)
    for name, value in values.items():
        if hasattr(value, "get_text_config"):
            more = extra.get(name, {})
            settings[name] = more if hasattr(more, "get_text_config") else tiny(value, more)
    nested = {name for name, value in values.items() if hasattr(value, "get_text_config")}
    settings |= {name: value for name, value in extra.items() if name not in nested}
    return cls(**settings)


def known_fields(config: Any) -> list[str]:
    base = set(getattr(transformers.PretrainedConfig, "__dataclass_fields__", {}))
    own = getattr(type(config), "__dataclass_fields__", {})
    return [name for name in own if name not in base or name in SIZES]


def rotations(values: dict[str, Any]) -> dict[str, Any]:
    """Sections of rotary positions in three dimensions, for the tiny head size."""
    found = values.get("rope_parameters") or values.get("rope_scaling")
    if not isinstance(found, dict) or "mrope_section" not in found:
        return {}
    share = found.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1
    half = int(8 * share) // 2
    sections = [half - half // 4 * 2 if half > 3 else 1, *([half // 4] * 2 if half > 3 else [half - 1, 0])]
    return {"rope_parameters": {**found, "mrope_section": sections}}


OFF = ("sliding_window", "window_size", "q_lora_rank", "num_experts", "num_local_experts")


def keeps_kind(cls: type, value: Any, name: str, size: Any) -> bool:
    """Whether ``size`` may be put in the place of this default: an option that is off stays off."""
    if size is None:
        hints = (c.__dict__.get("__annotations__", {}) for c in cls.__mro__)
        return "None" in str(next((found[name] for found in hints if name in found), "None"))
    if value is None:
        return name not in OFF
    return not isinstance(value, (list, tuple, dict)) and not (isinstance(value, bool) and name != "use_mamba_kernels")


def shorter(config: Any, fields: list[str]) -> dict[str, Any]:
    """Fields that list something for each layer, for the first layer of each kind (two at least), and their number."""
    count, values = getattr(config, "num_hidden_layers", None), vars(config)
    lists = {
        name: values[name]
        for name in fields
        if isinstance(values.get(name), (list, tuple)) and len(values[name]) == count
    }
    if not lists or not count:
        return {}
    telling = [lists[name] for name in lists if name in PER_LAYER] or list(lists.values())
    telling = list(map(repr, zip(*telling, strict=True)))
    chosen = sorted(telling.index(kind) for kind in dict.fromkeys(telling))[:6]
    chosen = chosen if len(chosen) > 1 else [0, 1]
    taken: dict[str, Any] = {name: type(values)(values[i] for i in chosen) for name, values in lists.items()}
    depth = next((name for name in ("num_hidden_layers", *DEPTH.split()) if name in fields), None)
    return {**taken, **({depth: len(chosen)} if depth else {})}


def text_of(config: Any) -> Any:
    """The decoder's part of a config."""
    try:
        return config.get_text_config(decoder=True)
    except ValueError:  # Musicgen has two that might be meant
        return config.decoder


class Unbuilt(Exception):
    """This family cannot be built, or not be run with a stock cache; the message says why."""


def build(name: str) -> Any:
    """The model of a family, with random weights.

    Raises:
        Unbuilt: why it cannot be.
    """
    kind, _, part = name.partition(":")
    if kind in UNBUILT:
        raise Unbuilt(UNBUILT[kind])
    try:
        settings = SETTINGS.get(name, SETTINGS.get(kind, {}))
        config = CONFIG_MAPPING[kind](**START.get(kind, {}))
        if kind in DECODERS_ALONE:
            config = text_of(config)
            settings = SETTINGS.get(config.model_type, {})
        config = tiny(config, settings)
        if part:
            config.is_decoder, config.is_encoder_decoder, config.add_cross_attention = True, False, False
        elif name in mapping("CAUSAL_LM") and hasattr(config, "is_decoder") and not config.is_encoder_decoder:
            config.is_decoder = True
        maker = getattr(transformers, names()[name])
        if type(config) is not maker.config_class and type(text_of(config)) is maker.config_class:
            config = text_of(config)
        config = full_attention_somewhere(config)
        with torch.device("meta"):
            size = sum(p.numel() for p in maker._from_config(copy.deepcopy(config)).parameters())
        if size > LARGEST:
            raise Unbuilt(f"still {size / 1e6:.0f} million parameters")
        torch.manual_seed(0)
        model = make(maker, config)
    except Unbuilt:
        raise
    except Exception as error:
        raise Unbuilt(f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}") from error
    spread(model)
    return model.eval()


def make(maker: Any, config: Any) -> Any:
    for attention in ("sdpa", "eager"):
        try:
            return maker._from_config(config, attn_implementation=attention)
        except ValueError as error:
            last = error
    raise last


def full_attention_somewhere(config: Any) -> Any:
    """Without the sliding window, where the family has nothing else: native windows are kept whatever the spec."""
    text = text_of(config)
    try:
        layers = DynamicCache(config=text).layers
    except Exception:  # noqa: BLE001 (what is wrong with it will be seen)
        return config
    if any(type(layer) is DynamicLayer for layer in layers) or not getattr(text, "sliding_window", None):
        return config
    types = getattr(text, "layer_types", None)
    if types and all(kind == "sliding_attention" for kind in types):
        text.layer_types = [*types[:-1], "full_attention"]
    elif not types and keeps_kind(type(text), None, "sliding_window", None):
        text.sliding_window = None
    return config


@torch.no_grad()
def spread(model: Any) -> None:
    """Random weights that are large enough for attention to matter."""
    torch.manual_seed(1)
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            if weight.dim() >= 2 and weight.is_floating_point() and "conv" not in type(module).__name__.lower():
                weight.normal_(0.0, 0.4 if weight.shape[-1] <= 64 else 0.1)
            elif not torch.isfinite(weight).all():
                weight.zero_()
            elif not weight.any() and type(module).__module__.startswith("transformers"):
                weight.normal_(0.0, 0.4)  # gates and the like, which would hide what they open


# -- running -----------------------------------------------------------------------------------------------------------


def _image(family: Any, start: int, size: int) -> dict[str, Any]:
    torch.manual_seed(4)
    return dict(pixel_values=torch.randn(2, 3, 16, 16))


# What a forward has to be given beside its tokens, by model type.
INPUTS: dict[str, Callable[[Any, int, int], dict[str, Any]]] = {
    "blip": _image,
    "paligemma": lambda family, start, size: dict(token_type_ids=torch.ones(2, size, dtype=torch.long)),
    "idefics": lambda family, start, size: dict(
        image_encoder_embeddings=torch.zeros(2, 1, 17, 32), image_attention_mask=torch.ones(2, size, 1).long()
    ),
    "kosmos-2": lambda family, start, size: dict(
        image_embeds=torch.zeros(2, 0, 32), image_embeds_position_mask=torch.zeros(2, size, dtype=torch.bool)
    ),
    "voxtral_realtime": lambda family, start, size: dict(encoder_inputs_embeds=torch.zeros(2, 4 * size, 32)),
}


class Family:
    """A family that is ready to run."""

    def __init__(self, name: str, seed: int = 3) -> None:
        hf_kvcache.register()
        self.name, self.kind = name, name.partition(":")[0]
        self.model = build(name)
        self.config = self.model.config
        self.whole = self.config  # what a user would give to a cache
        if self.kind in DECODERS_ALONE:
            self.whole = CONFIG_MAPPING[self.kind]()
            self.whole.text_config = self.config
        self.stock = self.attends = self.config._attn_implementation
        self.encodes = bool(self.config.is_encoder_decoder)
        self.ids = prompt(TOKENS, 2, 90, seed=seed).clamp_min(5)
        self.text = text_of(self.config)
        known._trusted.update(self.types)  # what goes its own way is refused all the same
        if hasattr(self.model, "set_default_language"):  # XMOD
            self.model.set_default_language("en_XX")
        self.extra: dict[str, Any] = {}
        if self.encodes:
            torch.manual_seed(2)
            encoded = BaseModelOutput(last_hidden_state=torch.randn(2, 9, self.width()))
            encoded.attention_mask = encoded.router_logits = encoded.router_probs = None  # some encoders say more
            self.extra = dict(encoder_outputs=encoded)

    def width(self) -> int:
        encoder = getattr(self.config, "encoder", None) or self.config
        for config in (encoder, self.config, self.text):
            for field in ("hidden_size", "d_model"):
                if isinstance(getattr(config, field, None), int):
                    return getattr(config, field)
        return 32

    @property
    def types(self) -> list[str]:
        """Model types that a cache for this family may be asked for: of the whole, and of its decoder."""
        return list(dict.fromkeys((self.kind, self.whole.model_type, self.text.model_type)))

    @contextmanager
    def attention(self, name: str) -> Iterator[None]:
        """Run with this attention ("stock", "kvcache" or another name)."""
        before = self.attends
        try:
            self.attends = self.stock if name == "stock" else name
            self.model.set_attn_implementation(self.attends)
            yield
        finally:
            self.attends = before
            self.model.set_attn_implementation(before)

    @property
    def takes_ours(self) -> bool:
        try:
            with self.attention("kvcache"):
                return self.text._attn_implementation == "kvcache"
        except ValueError:
            return False

    @torch.no_grad()
    def feed(self, cache: Any, schedule: str, between: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Logits [2, 16, V], and ``between`` after every forward."""
        pieces, start = [], 0
        if self.encodes or self.kind == "blip":
            cache = EncoderDecoderCache(cache, DynamicCache())
        for size in SCHEDULES[schedule]:
            piece = self.ids[:, start : start + size]
            if self.kind in ("musicgen", "musicgen_melody"):
                piece = piece.repeat_interleave(4, 0)  # one row for each of four codebooks
            inputs = {"decoder_input_ids" if self.encodes else "input_ids": piece, **self.extra}
            if self.encodes:  # Moonshine adds to it in place
                inputs["encoder_outputs"] = copy.deepcopy(self.extra["encoder_outputs"])
            if self.kind in INPUTS:
                inputs |= INPUTS[self.kind](self, start, size)
            inputs[compat.cache_argument(self.model.forward)] = cache
            pieces.append(self.model(**inputs, use_cache=True).logits)
            start += size
            between()
        return torch.cat([piece[:, -size:] for piece, size in zip(pieces, SCHEDULES[schedule], strict=True)], 1)

    # -- oracles -----------------------------------------------------------------------------------------------------

    @functools.cache  # noqa: B019 (as long as the family)
    def plain(self, schedule: str) -> torch.Tensor:
        """What ``DynamicCache`` gives."""
        with self.attention("stock"):
            try:
                return self.feed(DynamicCache(config=self.text), schedule)
            except Exception as error:
                raise Unbuilt(
                    f"with DynamicCache {type(error).__name__}: {str(error).strip().splitlines()[-1]}"
                ) from error

    def agrees(self, schedule: str) -> bool:
        """Whether the stock cache gives the same for this way of feeding as one by one."""
        return self._apart(self.plain(schedule)) is not None

    def _apart(self, other: torch.Tensor) -> float | None:
        """How far from one by one; ``None`` where that is more than rounding."""
        gap, size = (other - self.plain("steps")).abs().max().item(), self.plain("steps").abs().max().item()
        return gap if gap <= 1e-3 * max(1.0, size / 10) else None

    @functools.cache  # noqa: B019
    def noise(self) -> float:
        """What rounding of floats makes of another order of the same sums: in other pieces, or by eager attention."""
        others = [self.plain("once"), self.plain("chunks")]
        with suppress(ValueError), self.attention("eager"):
            others.append(self.feed(DynamicCache(config=self.text), "once"))
        return max((gap for gap in map(self._apart, others) if gap is not None), default=0.0)

    @functools.cache  # noqa: B019
    def rounded(self, spec: str) -> torch.Tensor:
        with self.attention("stock"):
            return self.feed(oracle(self.text, lambda: ROUNDED[spec]()), "steps")

    @functools.cache  # noqa: B019
    def windowed(self) -> tuple[torch.Tensor, bool]:
        """What a window of ``sink(2,6)`` gives, and whether the oracle is independent of slots."""
        layers: list[HiddenLayer] = []
        with self.attention(hiding(self)):
            out = self.feed(oracle(self.text, lambda: HiddenLayer(layers, in_window)), "steps")
        if all(layer.hid for layer in layers):
            return out, True
        with self.attention("stock"), torch.no_grad():
            mask = sink_mask(TOKENS, 2, 6).expand(2, -1, -1, -1)
            causal = sink_mask(TOKENS, 0, None).expand(2, -1, -1, -1)
            try:
                key = "decoder_attention_mask" if self.encodes else "attention_mask"
                ids = {"decoder_input_ids" if self.encodes else "input_ids": self.ids}
                same = self.model(**ids, **copy.deepcopy(self.extra), **{key: causal}, use_cache=False).logits
                out = self.model(**ids, **copy.deepcopy(self.extra), **{key: mask}, use_cache=False).logits
                if (same - self.plain("once")).abs().max() < OURS and (out - same).abs().max() > 0.01:
                    return out, True
            except Exception:  # noqa: BLE001 (a model without 4-D masks)
                pass
            return self.feed(oracle(self.text, lambda: ReferenceLayer("full", 2, 6)), "steps"), False

    def kept(self, kept: Kept, schedule: str) -> torch.Tensor:
        """What attention over exactly these tokens gives."""
        layers: list[HiddenLayer] = []
        other = oracle(self.text, lambda: HiddenLayer(layers))
        steps = iter(kept.steps)

        def between() -> None:
            for layer, held in zip(other.layers, next(steps), strict=True):
                if isinstance(layer, HiddenLayer):
                    layer.kept = held

        with self.attention(hiding(self)):
            out = self.feed(other, schedule, between)
        if all(layer.hid for layer in layers) or all(s is None or s.shape[-1] == TOKENS for s in kept.steps[-1]):
            return out
        other = oracle(self.text, KeptLayer)
        with self.attention("stock"):
            return self.feed(other, schedule, kept.play(other))


class RoundedLayer(DynamicLayer):
    """8 bits: every token but the last ``residual`` is rounded. Fed one by one."""

    def __init__(self, residual: int) -> None:
        super().__init__()
        self.residual = residual

    def update(self, key_states, value_states, *args, **kwargs):  # noqa: ANN001
        out = super().update(key_states, value_states)
        end = out[0].shape[2] - self.residual
        return tuple(torch.cat([round_trip(x[:, :, :end], "int8"), x[:, :, end:]], 2) for x in out) if end > 0 else out


ROUNDED: dict[str, Callable[[], Any]] = {
    SPECS[1]: lambda: ReferenceLayer("int8"),
    SPECS[2]: lambda: RoundedLayer(3),
    SPECS[3]: lambda: GroupedLayer((4, 4)),
}


def in_window(total: int) -> torch.Tensor:
    """Which of ``total`` tokens the last one may not see under ``sink(2,6)``, [1, 1, total] bool."""
    return ~sink_mask(total, 2, 6)[:, :, -1]


class HiddenLayer(DynamicLayer):
    """All tokens, of which attention ("hiding") leaves out those that are not ``kept`` [B, H, n], or by a rule."""

    def __init__(self, layers: list[Any], rule: Any = None) -> None:
        super().__init__()
        self.kept, self.rule, self.hid = None, rule, False
        layers.append(self)

    def update(self, key_states, value_states, *args, **kwargs):  # noqa: ANN001
        keys, values = super().update(key_states, value_states)
        total, new = keys.shape[2], key_states.shape[2]
        hidden = None
        if self.rule is not None:
            hidden = self.rule(total)
        elif self.kept is not None:
            held = torch.zeros(*self.kept.shape[:2], total - new + 1, dtype=torch.bool)
            held.scatter_(2, self.kept.masked_fill(self.kept < 0, total - new), True)
            hidden = torch.cat([~held[..., : total - new], held.new_zeros(*held.shape[:2], new)], -1)
        keys = keys.view_as(keys)
        keys.hides = (self, hidden)
        return keys, values


def hiding(family: Family) -> str:
    return "hiding" if family.takes_ours else "stock"


def attend_hiding(module, query, key, value, attention_mask, **kwargs):  # noqa: ANN001, ANN201
    """The model's own eager attention, without the keys that ``HiddenLayer`` hides."""
    import sys

    layer, hidden = getattr(key, "hides", (None, None))
    if layer is not None:
        layer.hid = True
    if hidden is not None:
        mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill(hidden, torch.finfo(query.dtype).min)
        if hidden.shape[1] > 1:
            mask = mask.repeat_interleave(query.shape[1] // key.shape[1], 1)
        mask = mask[:, :, None]
        attention_mask = (
            mask if attention_mask is None else (attention_mask + mask).clamp_min(torch.finfo(mask.dtype).min)
        )
    return sys.modules[type(module).__module__].eager_attention_forward(
        module, query, key, value, attention_mask, **kwargs
    )


transformers.AttentionInterface.register("hiding", attend_hiding)
transformers.AttentionMaskInterface.register("hiding", transformers.masking_utils.eager_mask)


# -- a cell ------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def family(name: str, seed: int = 3) -> Family:
    return Family(name, seed)


@functools.cache
def check(name: str, spec: str, attention: str) -> Verdict:
    """What this cache is worth with this family: "equal", "within codec error", "refused", "wrong", "raw error".

    Raises:
        Unbuilt: nothing can be said.
    """
    this = family(name)
    if attention != "stock" and not this.takes_ours:
        return check(name, spec, "stock")
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with this.attention(attention):
                found = verdict(this, spec, attention)
            if found.kind == "wrong" and spec in ROUNDED:
                # A number on the edge between two codes goes either way with the last bit of a sum, and a single code
                # may be a tenth of what all of them cost: what is really wrong is so with other tokens, too.
                other = family(name, 5)
                with other.attention(attention):
                    found = verdict(other, spec, attention)
            return found
    except Unbuilt:
        raise
    except ValueError as error:
        return Verdict("refused", _first_line(error))
    finally:
        transformers.logging.set_verbosity(level)


def verdict(this: Family, spec: str, attention: str) -> Verdict:
    try:
        cache = KVCache.from_spec(this.whole, spec)
    except ValueError as error:
        return Verdict("refused", _first_line(error))
    except Exception as error:  # noqa: BLE001
        return Verdict("raw error", f"making it: {type(error).__name__}: {error}".split("\n")[0])
    this.plain("steps")
    if not any(isinstance(layer, KVLayer) for layer in cache.layers):
        spec_for_oracle = "full"
    else:
        spec_for_oracle = spec
    found = {}
    for schedule in SCHEDULES if this.kind != "fsmt" else ("once", "steps"):  # it takes the last token of a chunk only
        try:
            found[schedule] = compare(this, spec, spec_for_oracle, attention, schedule)
        except ValueError as error:
            found[schedule] = Verdict("refused", _first_line(error))
        except AssertionError as error:
            found[schedule] = Verdict("wrong", f"{schedule}: {error}")
        except Unbuilt as error:
            found[schedule] = Verdict("stock fails", f"{schedule}: {error}")
        except Exception as error:  # noqa: BLE001
            found[schedule] = Verdict("raw error", f"{schedule}: {type(error).__name__}: {str(error).splitlines()[0]}")
    return worst(found)


RIGHT = ("equal", "within codec error")
ORDER = ("raw error", "wrong", "refused", "stock fails", "stock differs", "within codec error", "equal")


def worst(found: dict[str, Verdict]) -> Verdict:
    kind = next(kind for kind in ORDER if any(v.kind == kind for v in found.values()))
    messages = "; ".join(dict.fromkeys(v.message for v in found.values() if v.kind == kind and v.message))
    last = list(found.values())[-1].kind
    if kind == "refused" and last in RIGHT:
        messages += f" (token by token: {last})"
    if kind in ("stock fails", "stock differs") and last in RIGHT:
        return Verdict(last, messages)
    if kind in ("stock fails", "stock differs"):
        raise Unbuilt(messages)
    return Verdict(kind, messages)


def compare(this: Family, spec: str, ruled: str, attention: str, schedule: str) -> Verdict:
    """The verdict of one way of feeding; AssertionError where it is wrong."""
    this.plain(schedule)
    cache = KVCache.from_spec(this.whole, spec)
    kept = Kept(cache)
    policy = ruled.startswith("knorm")
    mine = this.feed(cache, schedule, kept.note if policy else lambda: None)
    if ruled == "full":
        if not this.agrees(schedule) and (mine - this.plain("steps")).abs().max() <= OURS:
            return Verdict("equal", f"{schedule}: as token by token, from which DynamicCache differs")
        return close(mine, this.plain(schedule), EXACT if attention == "stock" else max(OURS, 2 * this.noise()))
    if policy:
        held = [p for p in kept.steps[-1] if p is not None]
        budgets = [
            n.shape[-1] for n, layer in zip(held, cache.layers, strict=False) if isinstance(layer, EvictionLayer)
        ]
        assert held and all(n <= 8 for n in budgets), f"holds {budgets} tokens"
        if not this.agrees(schedule):
            return Verdict("stock differs", f"{schedule}: DynamicCache itself differs from token by token")
        return close(mine, this.kept(kept, schedule), max(OURS, 2 * this.noise()))
    if not this.agrees(schedule):
        return Verdict("stock differs", f"{schedule}: DynamicCache itself differs from token by token")
    if ruled.startswith("sink"):
        right, sure = this.windowed()
        return close(mine, right, max(OURS, 2 * this.noise()))._replace(
            message="" if sure else "compared by slots only"
        )
    right, codec = this.rounded(ruled), (this.rounded(ruled) - this.plain("steps")).abs().mean().item()
    gap = (mine - right).abs().mean().item()
    assert codec > 1e-6, "nothing was quantized"
    assert gap <= max(OF_CODEC * codec, 1e-5), f"differs by {gap:.1e} where the codec costs {codec:.1e}"
    return Verdict("within codec error")


def close(mine: torch.Tensor, right: torch.Tensor, tolerance: float) -> Verdict:
    gap = (mine - right).abs().max().item()
    assert gap <= tolerance * max(1.0, right.abs().max().item() / 10), f"differs by {gap:.1e}"
    return Verdict("equal")
