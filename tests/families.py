"""Model families at tiny size with random weights, and what a cell of ``docs/support_caches.md`` means.

``check(family, cache, attention)`` feeds the same tokens through a cache of the library and through a slow oracle: the
same model with stock attention and a cache of plain tensors that rounds and drops tokens by the rules of the spec,
written here a second time. The tests, ``scripts/support_table.py`` and ``scripts/stock_suite.py`` run this module.
"""

from __future__ import annotations

import functools
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers
from models import ReferenceLayer, low_bits, prompt
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

import hf_kvcache
from hf_kvcache import KVCache
from hf_kvcache.eviction import EvictionLayer
from hf_kvcache.layers import KVLayer
from hf_kvcache.policies import POLICIES

BASE: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.4,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)
MOE = dict(num_local_experts=4, num_experts_per_tok=2)
HEAD = dict(head_dim=8)
HYBRID = ["sliding_attention", "full_attention"]
SHARED = dict(
    **HEAD,
    num_hidden_layers=4,
    num_kv_shared_layers=2,
    layer_types=HYBRID * 2,
    sliding_window=6,
    vocab_size_per_layer_input=97,
    hidden_size_per_layer_input=8,
)

# Settings beside BASE (None: not a setting of this family); "type:variant" names a second model of one type.
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": dict(sliding_window=6),
    "mixtral": MOE,
    "qwen2": {},
    "qwen3": HEAD,
    "qwen3_moe": dict(**HEAD, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "qwen3_next": dict(
        **HEAD,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "gemma2": dict(**HEAD, sliding_window=6, layer_types=HYBRID, query_pre_attn_scalar=8),
    "gemma3_text": dict(**HEAD, sliding_window=6, layer_types=HYBRID),
    "gemma3n_text": dict(**SHARED, laurel_rank=4, altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 4),
    "gemma4_text": dict(**SHARED, global_head_dim=16),
    "phi3": {},
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4, n_positions=256),
    "gpt_neox": {},
    "gptj": dict(n_embd=32, n_layer=2, n_head=4, n_positions=256, rotary_dim=4),
    "opt": dict(ffn_dim=64, word_embed_proj_dim=32, init_std=0.4),
    "bloom": dict(n_layer=2, n_head=4),
    "mpt": dict(d_model=32, n_layers=2, n_heads=4, max_seq_len=256),
    "falcon": dict(multi_query=True, alibi=False),
    "falcon:alibi": dict(multi_query=False, new_decoder_architecture=False, alibi=True),
    "cohere2": dict(sliding_window=6, layer_types=HYBRID),
    "olmo2": {},
    "glm4": HEAD,
    "smollm3": {},
    "granite": {},
    "starcoder2": {},
    "deepseek_v3": dict(
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    "gpt_oss": dict(**HEAD, **MOE, sliding_window=6, layer_types=HYBRID),
    "llama4_text": dict(
        **HEAD, num_local_experts=2, attention_chunk_size=8, intermediate_size_mlp=64, interleave_moe_layer_step=2
    ),
    "jamba": dict(
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        use_mamba_kernels=False,
        mamba_d_state=4,
        mamba_expand=2,
        mamba_dt_rank=4,
    ),
}
SEQ2SEQ = dict(
    vocab_size=97,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    init_std=0.4,
    decoder_start_token_id=1,
    forced_eos_token_id=None,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=0,
)
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "t5": dict(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=1),
    "bart": SEQ2SEQ,
    "whisper": dict(
        SEQ2SEQ,
        num_mel_bins=8,
        max_source_positions=12,
        max_target_positions=64,
        begin_suppress_tokens=None,
        suppress_tokens=None,
    ),
}
IMAGE, START, END = 90, 92, 93  # token ids
VISION = dict(hidden_size=32, num_heads=4, patch_size=4)
IMAGES: dict[str, dict[str, Any]] = {
    "qwen2_vl": dict(
        text_config=dict(BASE, rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2])),
        vision_config=dict(VISION, depth=1, embed_dim=32, mlp_ratio=2, spatial_merge_size=2, temporal_patch_size=2),
        image_token_id=IMAGE,
        video_token_id=91,
        vision_start_token_id=START,
        vision_end_token_id=END,
    ),
    "gemma3": dict(
        text_config=dict(BASE, **HEAD, sliding_window=6, layer_types=HYBRID),
        vision_config=dict(VISION, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, image_size=16),
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    ),
}
EVERY = [*DECODERS, *ENCODER_DECODERS, *IMAGES]
FAMILIES = [name for name in EVERY if name.split(":")[0] in transformers.CONFIG_MAPPING]

LOW = "(group=4,residual=3,sinks=2)"  # a tiny budget for a tiny prompt: groups are sealed, tokens are dropped
SMALL = "(budget=8,sinks=2,recent=3)"
CACHES: dict[str, str] = {
    **{name: name for name in ("full", "int8", "fp8")},
    **{name: name + LOW for name in ("int4", "int2", "k4v2")},
    "sink": "sink(2,6)",
    **{name: name + SMALL for name in POLICIES},
    "adaptive": "snapkv(budget=8,sinks=2,recent=3,adaptive=on)",
    "cpu": "cpu",
    "disk": "disk",
    "int8+sink": "int8+sink(2,6)",
    "int8+cpu": "int8+cpu",
}
AT_ONCE = ("full", "int8", "fp8", "cpu", "disk", "int8+cpu")  # the oracle can take a whole prompt, too
ATTENTIONS = ("stock", "kvcache")
TOKENS, PROMPT = 20, 12  # of the sequence, of what ``generate`` is given
EXACT, OURS = 1e-5, 2e-4  # largest difference of a logit: stock attention and the same schedule, anything else
OF_CODEC = 0.1  # of the codec's own error: roundings of schedules flip a code here and there


class Case:
    """A family that is ready to run."""

    def __init__(self, family: str) -> None:
        self.family, self.type = family, family.split(":")[0]
        torch.manual_seed(0)
        self.model = _build(self.type, family).eval()
        self.stock = self.model.config._attn_implementation
        self.encodes, self.head = family in ENCODER_DECODERS, 1
        self.extra: dict[str, Any] = {}
        self.ids = prompt(PROMPT, 2, 90)
        settings = self.model.generation_config
        settings.eos_token_id, settings.pad_token_id = None, 0
        if self.encodes:
            self._listen()
        elif family in IMAGES:
            self._look()

    def _listen(self) -> None:
        features = torch.randn(2, 8, 24)
        self.given = dict(input_features=features) if self.type == "whisper" else dict(input_ids=prompt(9, 2))
        with torch.no_grad():
            encoded = self.model.get_encoder()(next(iter(self.given.values())))
        self.ids = prompt(PROMPT, 2, 90)
        self.ids[:, 0] = 1
        self.extra = dict(encoder_outputs=encoded)

    def _look(self) -> None:
        self.head = 7  # start, four tokens of an image, end: they come in one forward
        self.ids[:, 1], self.ids[:, 2:6], self.ids[:, 6] = START, IMAGE, END
        kinds = (self.ids == IMAGE).long()
        if self.type == "qwen2_vl":
            grid = torch.tensor([[1, 4, 4]] * 2)
            self.extra = dict(pixel_values=torch.randn(32, 96), image_grid_thw=grid, mm_token_type_ids=kinds)
        else:
            self.extra = dict(pixel_values=torch.randn(2, 3, 16, 16), token_type_ids=kinds)

    @contextmanager
    def attention(self, name: str) -> Iterator[None]:
        """Run with this attention ("stock", "kvcache" or another name)."""
        before = self.model.config._attn_implementation
        try:
            self.model.set_attn_implementation(self.stock if name == "stock" else name)
            yield
        finally:
            self.model.set_attn_implementation(before)

    @property
    def takes_ours(self) -> bool:
        """Whether this model asks transformers for its attention function at all."""
        with self.attention("kvcache"):
            return self.model.config._attn_implementation == "kvcache"

    def wrap(self, cache: Any) -> Any:
        return EncoderDecoderCache(cache, DynamicCache()) if self.encodes else cache

    def sizes(self, schedule: str) -> list[int]:
        """Tokens per forward."""
        if schedule == "once":
            return [TOKENS]
        if schedule == "prompt":
            return [PROMPT, *[1] * (TOKENS - PROMPT)]
        step = 1 if schedule == "steps" else 7
        first = max(self.head, step)
        rest = TOKENS - first
        return [first, *[step] * (rest // step), *([rest % step] if rest % step else [])]

    @torch.no_grad()
    def feed(self, ids: torch.Tensor, cache: Any, schedule: str, between: Callable[[], None] = lambda: None) -> Any:
        """Logits [B, n, V] of ``ids``, and ``between`` after every forward."""
        pieces, wrapped, start = [], self.wrap(cache), 0
        for size in self.sizes(schedule):
            piece = ids[:, start : start + size]
            if self.encodes:
                inputs = dict(self.extra, decoder_input_ids=piece)
            else:
                inputs = dict(input_ids=piece, **({} if start else self._first(size)))
            pieces.append(self.model(**inputs, past_key_values=wrapped).logits)
            start += size
            between()
        return torch.cat(pieces, 1)

    def _first(self, size: int) -> dict[str, Any]:
        """Inputs beside the ids of a first forward."""
        kinds = {name: torch.zeros(2, size, dtype=torch.long) for name in self.extra if name.endswith("type_ids")}
        for name, value in kinds.items():
            value[:, : min(size, PROMPT)] = self.extra[name][:, :size]
        return {**self.extra, **kinds}

    def generate(self, cache: Any, rows: int = 2, **options: Any) -> Any:
        """Tokens and logits of a greedy ``generate`` over the prompt, or over its first row."""
        inputs = dict(input_ids=self.ids, attention_mask=torch.ones_like(self.ids), **self.extra)
        if self.encodes:
            inputs = dict(self.given, decoder_input_ids=self.ids)
        inputs = {name: value[: len(value) * rows // 2] for name, value in inputs.items()}
        new = TOKENS - PROMPT
        settings = dict(do_sample=False, max_new_tokens=new, min_new_tokens=new, past_key_values=self.wrap(cache))
        return self.model.generate(
            **{**inputs, **settings, **options}, return_dict_in_generate=True, output_logits=True
        )


def _build(kind: str, family: str) -> Any:
    if family in DECODERS:
        config, maker = AutoConfig.for_model(kind, **{**BASE, **DECODERS[family]}), AutoModelForCausalLM.from_config
    else:
        table, make = (IMAGES, "ForConditionalGeneration") if family in IMAGES else (ENCODER_DECODERS, "")
        config = AutoConfig.for_model(kind, **table[family])
        name = type(config).__name__.removesuffix("Config") + (make or "ForConditionalGeneration")
        maker = getattr(transformers, name)._from_config
    if kind == "t5":
        config.eos_token_id, config.pad_token_id = None, 0
    for name in ("sdpa", "eager"):
        if kind == "gemma2" and name == "sdpa":  # before 5.24 sdpa leaves its softcap out
            continue
        try:
            return maker(config, attn_implementation=name)
        except ValueError:
            continue
    raise ValueError(kind)


@functools.cache
def case(family: str) -> Case:
    """A shared case; its model stays with stock attention."""
    hf_kvcache.register()
    return Case(family)


# -- the oracle --------------------------------------------------------------------------------------------------------


def oracle(config: Any, make: Callable[[], Any]) -> Any:
    """A stock cache whose full-attention layers are made by ``make``."""
    cache = DynamicCache(config=config)
    cache.layers = [make() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class GroupedLayer(ReferenceLayer):
    """Low bits: the oldest tokens, but for the first few, are rounded in whole groups. Fed token by token."""

    def __init__(self, bits: tuple[int, int]) -> None:
        super().__init__("full")
        self.bits = bits

    def update(self, key_states, value_states, *args, **kwargs):  # noqa: ANN001
        keys, values = super().update(key_states, value_states)
        sinks, residual, group = 2, 3, 4
        end = sinks + max(keys.shape[2] - sinks - residual, 0) // group * group
        sealed = slice(sinks, end)
        keys, values = keys.clone(), values.clone()
        if end > sinks:
            across = keys[:, :, sealed].unflatten(2, (-1, group))
            keys[:, :, sealed] = low_bits(across, 3, self.bits[0])[0].flatten(2, 3)
            pieces = values[:, :, sealed].split(group, -1)
            values[:, :, sealed] = torch.cat([low_bits(piece, 3, self.bits[1])[0] for piece in pieces], -1)
        return keys, values


class KeptLayer(DynamicLayer):
    """Everything, of which queries attend to the tokens ``kept`` [B, H, n] (-1: none) and to those that come along."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: torch.Tensor | None = None

    def update(self, key_states, value_states, *args, **kwargs):  # noqa: ANN001
        everything, new = super().update(key_states, value_states), key_states.shape[2]
        if self.kept is None:
            return everything
        index = self.kept.clamp_min(0)[..., None]
        out = [torch.cat([x.gather(2, index.expand(-1, -1, -1, x.shape[-1])), x[:, :, -new:]], 2) for x in everything]
        hidden = torch.nn.functional.pad(self.kept < 0, (0, new))
        out[0].hidden = hidden if hidden.any() else None  # type: ignore[attr-defined]
        return tuple(out)

    def get_mask_sizes(self, query_length):  # noqa: ANN001
        total = self.get_seq_length() + query_length
        held = total if self.kept is None else self.kept.shape[2] + query_length
        return held, total - held


def attend_hidden(module, query, key, value, attention_mask, **kwargs):  # noqa: ANN001, ANN201
    """The model's own eager attention, without the keys that ``KeptLayer`` hides head by head."""
    hidden = getattr(key, "hidden", None)
    if attention_mask is not None and attention_mask.shape[-1] != key.shape[2]:
        attention_mask = None  # made for another layer's width, and one query sees all that is held
    if hidden is not None:
        mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill(hidden, torch.finfo(query.dtype).min)
        mask = mask.repeat_interleave(query.shape[1] // key.shape[1], 1)[:, :, None]
        attention_mask = mask if attention_mask is None else attention_mask + mask
    return sys.modules[type(module).__module__].eager_attention_forward(
        module, query, key, value, attention_mask, **kwargs
    )


transformers.AttentionInterface.register("hidden", attend_hidden)
transformers.AttentionMaskInterface.register("hidden", transformers.masking_utils.eager_mask)


class Kept:
    """What a cache held after each forward, by layer: written down beside our cache, played back to the oracle."""

    def __init__(self, cache: Any) -> None:
        self.cache, self.steps = cache, []

    def note(self) -> None:
        for layer in self.cache.layers:
            if isinstance(layer, EvictionLayer):
                layer._catch_up()  # where no attention of ours ran, the last forward's tokens are still waiting
        self.steps.append([getattr(layer, "positions", None) for layer in self.cache.layers])

    def play(self, oracle: Any) -> Callable[[], None]:
        steps = iter(self.steps)

        def between() -> None:
            for layer, kept in zip(oracle.layers, next(steps), strict=True):
                if isinstance(layer, KeptLayer):
                    layer.kept = kept

        return between


# -- a cell ------------------------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    kind: str  # "equal", "within codec error" or "refused"
    message: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind


def check(family: str, name: str, attention: str) -> Verdict:
    """What this cache is worth with this model.

    Raises:
        AssertionError: it differs from the oracle.
    """
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), case(family).attention(attention):
        warnings.simplefilter("ignore")
        return _Cell(case(family), name, attention, folder).verdict()


class _Cell:
    def __init__(self, case: Case, name: str, attention: str, folder: str) -> None:
        self.case, self.name, self.attention, self.folder = case, name, attention, folder
        self.spec = CACHES[name]
        self.policy = name in POLICIES or name == "adaptive"
        self.lossy = name.split("+")[0] in ("int8", "fp8", "int4", "int2", "k4v2")

    def cache(self) -> KVCache:
        spec = f"disk({self.folder})" if self.spec == "disk" else self.spec
        return KVCache.from_spec(self.case.model.config, spec)

    def verdict(self) -> Verdict:
        try:
            cache = self.cache()
        except ValueError as error:
            return Verdict("refused", _first_line(error))
        works = any(isinstance(layer, KVLayer) for layer in cache.layers)
        if not works:  # native windows only: whatever the spec, the model keeps them
            self.lossy = self.policy = False
            self.name = "full"
        refusals = {}
        for schedule in self.schedules():
            try:
                self.compare(schedule)
            except ValueError as error:
                refusals[schedule] = _first_line(error)
        right = "within codec error" if self.lossy else "equal"
        if not refusals:
            return Verdict(right)
        beside = f" (token by token: {right})" if "steps" in self.schedules() and "steps" not in refusals else ""
        return Verdict("refused", "; ".join(dict.fromkeys(refusals.values())) + beside)

    def schedules(self) -> list[str]:
        if self.policy:
            return ["generate", "prompt"]
        # the recurrent layers of Jamba cannot go on in chunks, with any cache
        return ["generate", "steps", *(["chunks"] if self.case.family != "jamba" else []), "once"]

    def compare(self, schedule: str) -> None:
        ids = sequence(self.case.family)
        if schedule == "generate":
            out = self.case.generate(self.cache())
            ids, mine = out.sequences, torch.stack(out.logits, 1)
            if self.case.encodes and ids.shape[1] < TOKENS:
                ids = torch.cat([self.case.ids, ids], 1)  # whisper gives its new tokens only
            assert torch.equal(mine.argmax(-1), ids[:, PROMPT:])
        kept = None
        if self.policy:
            cache = self.cache()
            kept = Kept(cache)
            logits = self.case.feed(ids, cache, "prompt", kept.note)
            self.check_budget(kept)
            if schedule == "generate":
                self.close(mine, logits[:, PROMPT - 1 : -1], OURS)
            mine = logits
        elif schedule != "generate":
            mine = self.case.feed(ids, self.cache(), schedule)
        right = self.expected(ids, schedule, kept)
        if self.lossy:
            return self.close_to_codec(mine[:, : right.shape[1]], right)
        same = self.attention == "stock" and self.name in ("full", "cpu", "disk")
        self.close(mine[:, : right.shape[1]], right, EXACT if same else OURS)

    def expected(self, ids: torch.Tensor, schedule: str, kept: Kept | None) -> torch.Tensor:
        """Logits of the oracle; of ``generate`` those of the steps, up to the first one that gives another token."""
        family, config = self.case.family, self.case.model.config
        if kept is not None:
            other = oracle(config, KeptLayer)
            with self.case.attention("hidden" if self.name == "adaptive" else "stock"):
                return self.case.feed(ids, other, "prompt", kept.play(other))
        if schedule == "generate" and self.name in AT_ONCE:
            tokens, logits = _oracle_generates(family, self.name)
            differ = (tokens != ids[:, PROMPT:]).any(0).nonzero()
            return logits[:, : int(differ[0]) + 1] if len(differ) else logits
        if self.name in ("full", "cpu", "disk"):
            with self.case.attention("stock"):
                return self.case.feed(ids, oracle(config, DynamicLayer), schedule)
        right = _oracle_logits(family, self.name, _key(ids))
        return right[:, PROMPT - 1 : -1] if schedule == "generate" else right

    def check_budget(self, kept: Kept) -> None:
        """What is kept are tokens, ascending; and no more of them than the budget allows."""
        for seen, layers in zip((sum(self.case.sizes("prompt")[: n + 1]) for n in range(99)), kept.steps, strict=False):
            for held in filter(lambda held: held is not None, layers):
                real = held >= 0
                assert (held < seen).all() and (held[..., 1:] > held[..., :-1])[real[..., 1:]].all()
                most = real.sum((1, 2)) / held.shape[1]
                assert (most <= 8).all() and (most == min(8, seen)).all()

    def close(self, mine: torch.Tensor, right: torch.Tensor, tolerance: float) -> None:
        gap = (mine - right).abs().max().item()
        assert gap <= tolerance * max(1.0, right.abs().max().item() / 10), f"differs by {gap:.1e} from the oracle"

    def close_to_codec(self, mine: torch.Tensor, right: torch.Tensor) -> None:
        family, plain = self.case.family, "sink" if "sink" in self.name else "full"
        key = _key(sequence(family))
        codec = (_oracle_logits(family, self.name, key) - _oracle_logits(family, plain, key)).abs().mean().item()
        gap = (mine - right).abs().mean().item()
        assert codec > 1e-4, "nothing was quantized"
        assert gap <= OF_CODEC * codec, f"differs by {gap:.1e} from the oracle, whose codec costs {codec:.1e}"


def _key(ids: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, ids.tolist()))


@functools.cache
def sequence(family: str) -> torch.Tensor:
    """The prompt and what the stock cache goes on with."""
    this = case(family)
    with this.attention("stock"):
        ids = this.generate(DynamicCache(config=this.model.config)).sequences
    return ids if ids.shape[1] == TOKENS else torch.cat([this.ids, ids], 1)


def _oracle_layer(name: str) -> Any:
    storage = name.split("+")[0]
    bits = {"int4": (4, 4), "int2": (2, 2), "k4v2": (4, 2)}.get(storage)
    if bits:
        return GroupedLayer(bits)
    plain = {"int8": "int8", "fp8": "fp8_e4m3"}.get(storage, "full")
    return ReferenceLayer(plain, *((2, 6) if "sink" in name else (0, None)))


@functools.cache
def _oracle_logits(family: str, name: str, ids: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    this = case(family)
    with this.attention("stock"):
        return this.feed(torch.tensor(ids), oracle(this.model.config, lambda: _oracle_layer(name)), "steps")


@functools.cache
def _oracle_generates(family: str, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """New tokens [B, n], and their logits [B, n, V]."""
    this = case(family)
    with this.attention("stock"):
        out = this.generate(oracle(this.model.config, lambda: _oracle_layer(name)))
    return out.sequences[:, PROMPT - TOKENS :], torch.stack(out.logits, 1)


def _first_line(error: ValueError) -> str:
    """The message, with the spec of the cell left out."""
    return re.sub(r"^'[^']*\(.*?\)' is not", "this cache is not", str(error).split("\n")[0])


def sample() -> list[tuple[str, str, str]]:
    """Cells that the tests run: every family and every cache, and those that once were wrong."""
    names = list(CACHES)
    chosen = [(family, "full", attention) for family in FAMILIES for attention in ATTENTIONS]
    for i, family in enumerate(FAMILIES):
        chosen += [(family, names[(3 * i + j) % len(names)], ATTENTIONS[(i + j) % 2]) for j in range(3)]
    chosen += [
        *(("gemma3", name, attention) for name in ("sink", "int4") for attention in ATTENTIONS),
        *(("gemma4_text", name, attention) for name in ("sink", "knorm") for attention in ATTENTIONS),
        *(("gemma3n_text", name, "kvcache") for name in ("snapkv", "expected", "adaptive")),
        ("deepseek_v3", "int4", "stock"),
        ("bloom", "sink", "kvcache"),
        ("t5", "int8", "kvcache"),
    ]
    return [cell for cell in dict.fromkeys(chosen) if cell[0] in FAMILIES]
