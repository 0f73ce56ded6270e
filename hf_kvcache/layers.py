"""How does transformers call us? One attention layer: the only place where storage, retention and placement meet.

    update(k, v)  ->  encode once, append  ->  what this call's queries attend to

Every key and value that attention sees has been through the codec, the tokens of the current call included. That is what
makes one-shot, chunked and token-by-token feeding agree: a token looks the same to every later query, whenever it came.
"""

from __future__ import annotations

from typing import Any

import torch

from . import compat
from .attention import NAME, History, Part, Stored
from .codecs import CODECS, Codec, Scaled
from .masked import FED_TWICE, MaskedKeys
from .retention import KeepAll, Retention
from .store import Slab, concat, map_state

# Stock attention functions that read their keys through torch ops, where MaskedKeys can apply its mask.
MASKABLE = ("sdpa", "eager")


class Run:
    """Keys and values of one run of tokens, each in a slab of its own codec."""

    def __init__(self, key_codec: Codec, value_codec: Codec, **slab: Any) -> None:
        self.key_codec, self.value_codec = key_codec, value_codec
        self.keys, self.values = Slab(**slab), Slab(**slab)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def slabs(self) -> tuple[Slab, Slab]:
        return self.keys, self.values

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> Part:
        return Part(self.key_codec, self.key_codec.encode(keys), self.value_codec, self.value_codec.encode(values))

    def append(self, part: Part) -> None:
        self.keys.append(part.keys)
        self.values.append(part.values)

    def part(self) -> Part:
        return Part(self.key_codec, self.keys.view(), self.value_codec, self.values.view())

    def last(self, count: int) -> Part:
        return Part(self.key_codec, self.keys.last(count), self.value_codec, self.values.last(count))


class KVLayer(compat.CacheLayerMixin):
    """The cache of one full-attention layer.

    Args:
        key_codec, value_codec: how bits are stored.
        retention: which tokens stay.
        config: the decoder's config; its ``_attn_implementation`` says at every call who reads the result.
        index: the layer's number, for messages and for spreading growth over steps.
    """

    is_compileable = False
    is_sliding = False

    def __init__(
        self, key_codec: Codec, value_codec: Codec, retention: Retention, config: Any, index: int
    ) -> None:
        # CacheLayerMixin.__init__ would assign `keys` and `values`, which are views of the store here.
        self.key_codec, self.value_codec, self.retention = key_codec, value_codec, retention
        self.config, self.index = config, index
        self.is_initialized = False
        self.reset()

    # -- transformers: growing ---------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.batch_size, self.heads = key_states.shape[:2]
        self.widths = (key_states.shape[-1], value_states.shape[-1])
        self.dtypes = (key_states.dtype, value_states.dtype)
        self.device = key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Store new tokens; return all that they attend to.

        Args:
            key_states: [B, H, q, Dk], rotated.
            value_states: [B, H, q, Dv].
            *args, **kwargs: whatever this transformers passes on; of it, ``position_ids`` is looked at.

        Returns:
            Keys and values, [B, H, ``get_mask_sizes(q)[0]``, D] in the dtype of the arguments: tensors, or handles that
            turn into tensors when touched (only while the model's attention is "kvcache").

        Raises:
            ValueError: another batch size, shape or dtype than before; a prompt fed a second time; non-finite states
                into a lossy storage; a window inside a chunk under an attention that cannot apply it.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check(key_states, value_states)
        positions = _position_ids(args, kwargs)
        if self.index == 0 and positions is not None:
            self._check_positions(positions, key_states.shape[2])
        with_grad = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        with torch.no_grad():
            history = self._append(key_states, value_states, ordered=with_grad, positions_known=positions is not None)
        return self._present(history, (key_states, value_states) if with_grad else None)

    def _append(self, keys: torch.Tensor, values: torch.Tensor, ordered: bool, positions_known: bool) -> History:
        seen, new = self.seen, keys.shape[2]
        sinks, window = self.retention.sinks, self.retention.window
        inside = window is None or seen + new <= sinks + window  # nothing leaves before the last query has run
        if not inside and new > 1 and self._attention() not in (*MASKABLE, NAME, None):
            raise ValueError(
                f"layer {self.index}: {self.retention.spec} needs a window inside this chunk of {new} tokens, which "
                f'attention {self._attention()!r} cannot apply: call hf_kvcache.register() and '
                f'model.set_attn_implementation("{NAME}")'
            )
        own = min(max(len_sinks(self) - seen, 0), new)
        encoded = self.sealed.encode(keys[:, :, own:], values[:, :, own:])
        self._check_finite(encoded)
        if inside or (new == 1 and not ordered):
            self._write(keys, values, own, encoded)
            parts = self._parts()
        else:
            # Early queries still need what late tokens overwrite: join before writing.
            past = self.sealed.last(window - 1) if len(self.sealed) else None  # type: ignore[operator]
            joined = encoded if past is None else encoded._replace(
                keys=concat([past.keys, encoded.keys]), values=concat([past.values, encoded.values])
            )
            self._write(keys, values, own, encoded)
            parts = ([self.sinks.part()] if len(self.sinks) else []) + [joined]
        self.seen += new
        visible = None
        if not inside and (new > 1 or ordered):
            visible = self.retention.visible(seen, new).to(keys.device)  # type: ignore[union-attr]
        elif new > 1 and seen and not positions_known and self._attention() != NAME:
            # No position ids to tell a prompt that is fed twice: the keys look at the mask instead.
            visible = torch.ones(new, self.seen, dtype=torch.bool, device=keys.device).tril(seen)
        elif self.retention.evicts and not seen and self._attention() != NAME:
            visible = torch.ones(new, new, dtype=torch.bool, device=keys.device).tril()  # to see pads
        return History(parts, visible, seen == 0, self.retention.evicts, keys.dtype, values.dtype)

    def _write(self, keys: torch.Tensor, values: torch.Tensor, own: int, encoded: Part) -> None:
        if own:
            self.sinks.append(self.sinks.encode(keys[:, :, :own], values[:, :, :own]))
        if encoded.tokens:
            self.sealed.append(encoded)
        elif self.sealed.keys.state is None:
            self.sealed.append(encoded)  # shapes for an empty store

    def _parts(self) -> list[Part]:
        parts = [run.part() for run in (self.sinks, self.sealed) if len(run)]
        return parts or [self.sealed.part()]

    def _present(self, history: History, with_grad: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[Any, Any]:
        if with_grad is None and self._attention() == NAME:
            return Stored(history, 0), Stored(history, 1)
        keys, values = history.decode()
        if with_grad is not None:
            keys, values = (_attach(out, new) for out, new in zip((keys, values), with_grad, strict=True))
        if history.visible is not None:
            keys = MaskedKeys.wrap(keys, history.visible, history.first and history.evicts)
        return keys, values

    def _attention(self) -> str | None:
        return getattr(self.config, "_attn_implementation", None)

    # -- transformers: asking ----------------------------------------------------------------------------------------

    def get_seq_length(self) -> int:
        """Tokens seen, evicted ones included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys that the next ``update`` of ``query_length`` tokens returns, position of the first of them)."""
        held = self.retention.held(self.seen, query_length)
        return held, self.seen + query_length - held

    def get_max_length(self) -> int:
        """-1: any number of tokens may be fed."""
        return -1

    @property
    def is_croppable(self) -> bool:
        """Whether ``crop`` is exact at any time: not where tokens may already be gone."""
        return not self.retention.evicts

    @property
    def kept(self) -> int:
        """Tokens held per row."""
        return len(self.sinks) + len(self.sealed)

    @property
    def keys(self) -> torch.Tensor | None:
        """What is held, decoded, in token order: [B, H, kept, Dk]; ``None`` before the first update."""
        return self._decoded(0)

    @property
    def values(self) -> torch.Tensor | None:
        """As ``keys``: [B, H, kept, Dv]."""
        return self._decoded(1)

    def _decoded(self, side: int) -> torch.Tensor | None:
        if not self.is_initialized or self.sealed.keys.state is None:
            return None
        runs = [run for run in (self.sinks, self.sealed) if len(run)] or [self.sealed]
        pieces = []
        for run in runs:
            slab, codec = (run.keys, run.key_codec) if side == 0 else (run.values, run.value_codec)
            slots = slab.order().to(self.device)
            ordered = map_state(slab.state, lambda t, slots=slots: t.index_select(2, slots))
            pieces.append(codec.decode(ordered, self.dtypes[side]))
        return torch.cat(pieces, 2)

    # -- transformers: changing --------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything, shapes and dtypes included: equal to a new layer."""
        full, plain = CODECS["full"], self.key_codec.lossless and self.value_codec.lossless
        sinks, window = self.retention.sinks, self.retention.window
        limit = None if window is None else window + (sinks if plain else 0)
        self.sinks = Run(full, full, phase=self.index)
        self.sealed = Run(
            self.key_codec, self.value_codec, limit=limit, pinned=sinks if plain else 0, phase=self.index
        )
        self.seen = 0
        self.is_initialized = False
        self.__dict__.pop("batch_size", None)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens.

        Raises:
            ValueError: a positive number, or the tokens that would come back are evicted.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass minus the number of tokens to remove, crop(-{tokens_to_remove})"
            )
        remove = min(-tokens_to_remove, self.seen)
        if not remove:
            return
        evicted = self.seen - self.kept
        if evicted:
            raise ValueError(
                f"crop({tokens_to_remove}): layer {self.index} has evicted {evicted} tokens, and a rollback would need "
                "them back; fork() the cache before the tokens that may be taken back, or use retention 'all'"
            )
        self.seen -= remove
        for slab in self.sinks.slabs:
            slab.truncate(self.seen)
        for slab in self.sealed.slabs:
            slab.truncate(self.seen - len(self.sinks))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row ``i`` becomes what row ``beam_idx[i]`` was."""
        self._map_rows(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times, next to each other."""
        self._map_rows(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only the rows ``indices`` (integers or a bool mask)."""
        self._map_rows(lambda t: t[indices.to(t.device)])

    def _map_rows(self, fn: Any) -> None:
        if not self.is_initialized:
            return
        with torch.no_grad(), torch.inference_mode(False):
            probe = fn(torch.arange(self.batch_size))
            for run in (self.sinks, self.sealed):
                for slab in run.slabs:
                    slab.select_rows(fn)
        self.batch_size = probe.shape[0]

    def offload(self) -> None:
        """Placement is the cache's own business (see ``placement``)."""

    def prefetch(self) -> None:
        """See ``offload``."""

    # -- checks ------------------------------------------------------------------------------------------------------

    def _check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if keys.shape[0] != self.batch_size:
            raise ValueError(
                f"layer {self.index} holds a batch of {self.batch_size}, got {keys.shape[0]}: reset() the cache, or "
                "use batch_repeat_interleave / batch_select_indices first"
            )
        for name, states, width, dtype in zip(("keys", "values"), (keys, values), self.widths, self.dtypes, strict=True):
            if states.shape[1] != self.heads or states.shape[-1] != width or states.shape[2] != keys.shape[2]:
                expected = (self.batch_size, self.heads, keys.shape[2], width)
                raise ValueError(f"layer {self.index}: {name} of shape {tuple(states.shape)}, expected {expected}")
            if states.dtype != dtype:
                raise ValueError(
                    f"layer {self.index} holds {name} of {dtype}, got {states.dtype}: keep one dtype, or reset() the cache"
                )

    def _check_positions(self, position_ids: torch.Tensor, new: int) -> None:
        """A prompt that is fed twice starts again at position 0 although tokens were seen."""
        if self.seen and position_ids.dim() == 2 and position_ids.numel() and (new > 1 or not position_ids.is_cuda):
            if position_ids.shape[1] == new and int(position_ids[:, -1].max()) < new and int(position_ids[:, 0].max()) == 0:
                raise ValueError(FED_TWICE)

    def _check_finite(self, part: Part) -> None:
        """Non-finite input leaves a non-finite scale, one number per token to look at."""
        for name, state in (("keys", part.keys), ("values", part.values)):
            if isinstance(state, Scaled) and not bool(state.scale.isfinite().all()):
                raise ValueError(
                    f"layer {self.index}: non-finite {name} cannot be stored in 8 bits; check the model's dtype "
                    "(float16 overflows), or use storage 'full'"
                )


class WindowLayer(compat.DynamicSlidingWindowLayer):
    """The native window of a sliding or chunked layer: stock, except that ``reset`` leaves nothing behind."""

    def reset(self) -> None:
        self.__init__(self.sliding_window)  # type: ignore[misc]


def len_sinks(layer: KVLayer) -> int:
    """First tokens that are kept apart in full precision: the sinks of a lossy storage."""
    lossless = layer.key_codec.lossless and layer.value_codec.lossless
    return 0 if lossless else layer.retention.sinks


def _position_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """``update`` is called with nothing more, with a dict in third place, or with ``kwargs={...}``."""
    extra = kwargs.get("kwargs") or next((a for a in args if isinstance(a, dict)), None) or kwargs
    found = extra.get("position_ids") if isinstance(extra, dict) else None
    return found if isinstance(found, torch.Tensor) else None


def _attach(stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Stored states with the gradient path of the newest tokens put back (straight through the codec)."""
    n = new.shape[2]
    past, current = stored[:, :, :-n], stored[:, :, -n:]
    return torch.cat([past.detach(), new + (current - new).detach()], 2)
