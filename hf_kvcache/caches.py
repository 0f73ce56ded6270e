"""How do I make one? A config becomes a list of layers; nothing here touches a tensor's values.

    KVCache(config, storage, retention, placement)      the general one
    QuantizedCache, SinkWindowCache, OffloadedCache     the same with one axis spelt out
    KVCache.from_spec(config, "int8+sink(4,508)")       the same from one string

Full-attention layers get a ``KVLayer``. Sliding and chunked layers keep their native window (it is small already),
recurrent and empty layers keep their stock class, and a layer type that is none of these is refused by name.
"""

from __future__ import annotations

import copy
import os
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from . import compat, families, identity, snapshot
from . import spec as specs
from .attention import NAME
from .eviction import EvictionLayer
from .layers import KVLayer, WindowLayer, as_rows, position_ids, refuse_positive
from .masked import FED_TWICE, MASKABLE, ROLL_BACK, MaskedStates, View, undoes
from .placement import Offload, Offloader
from .plan import causal
from .progress import RESET, Progress, Undo
from .regime import Regimes, Rotated
from .retention import Importance, Retention, SinkWindow


@dataclass(frozen=True)
class CacheStats:
    """Counters of a cache, in tokens per row of one full-attention layer and in bytes.

    Of an offloaded cache, ``bytes_out`` is what was written to the far tier, ``bytes_in`` what attention read of it (as
    a copy, or in place where the model runs on the CPU), and ``waits`` the fetches that attention had to wait for. They
    stay 0 while everything is placed on the device.
    """

    tokens_seen: int
    tokens_kept: int
    tokens_evicted: int
    tokens_quantized: int
    bytes_out: int = 0
    bytes_in: int = 0
    waits: int = 0


class KVCache(compat.Cache):
    """A cache for ``model.generate(..., past_key_values=cache)`` and ``model(...)``.

    Args:
        config: ``model.config`` (not a copy: its attention implementation is read at every call).
        storage: ``"full"``, ``"int8"``, ``"fp8"``, ``"fp8_e5m2"``, ``"int4"``, ``"int2"``, ``"k4v2"``, ... (options).
        retention: ``"all"`` or ``"sink(sinks,window)"``.
        placement: ``"device"``, ``"cpu"`` or ``"disk(/path)"`` (options: see ``OffloadedCache``).
        skip_layers: layers that stay in full precision; negative numbers count from the end.

    Raises:
        ValueError: an unknown part, option or layer type, or a model without full attention layers to work on.
    """

    def __init__(
        self,
        config: Any,
        storage: str = "full",
        retention: str | Retention = "all",
        placement: str | Offload = "device",
        *,
        skip_layers: int | str | Sequence[int] = (),
    ) -> None:
        if not hasattr(config, "get_text_config"):
            raise ValueError(f"{type(self).__name__} takes model.config, got {type(config).__name__}")
        self._source, self.config = config, compat.decoder_config(config)
        self._regimes, self._drop_at = Regimes(self.config), compat.drops_caches_at(self.config)
        self.storage = specs.storage(storage, skip_layers)
        self.retention = specs.retention(retention)
        self.placement = specs.placement(placement)
        self._refuse_position_bias()
        families.refuse((config, self.config), self.spec, self._needs())
        self._offloader = Offloader(self.placement) if isinstance(self.placement, Offload) else None
        super().__init__(layers=self._make_layers())
        attends = [isinstance(layer, (KVLayer, WindowLayer)) for layer in self.layers]
        self._first = attends.index(True)
        kinds = [(type(layer), getattr(getattr(layer, "storage", None), "spec", "")) for layer in self.layers]
        self._window = next((i for i, layer in enumerate(self.layers) if isinstance(layer, WindowLayer)), None)
        self._guarded = max(kinds.index(kind) for kind, ours in zip(kinds, attends, strict=True) if ours)
        self._progress = Progress(
            self.layers, compat.beside_the_text(self.config), getattr(self.config, "layer_types", None)
        )
        self._twin: tuple[weakref.ref[Any], ...] | None = None
        self._start()

    def _start(self) -> None:
        """What a forward has to be checked against, before there was one."""
        self._last_updated: int | None = None
        self._crosses = compat.has_cross_attention(self.config)
        self._last_positions = [0]  # of each row, or the smallest of all
        self._rotated = Rotated()
        self._made: int | None = None  # ``identity.mark`` of the model when the first token came
        self._with_grad: dict[int, int] = {}  # by layer, the first token that came with a gradient
        self._progress.begin(0)
        self._undo: Undo | None = None  # of the forward at work, until it has come to layer ``_guarded``

    def _needs(self) -> set[str]:
        """What this cache asks of a model, of ``families.NEEDS``: nothing where slots are all tokens, in order."""
        tail = {"tail"} if self.storage.has_tail else set()
        if not self.retention.evicts:
            return tail
        return tail | {"importance" if isinstance(self.retention, Importance) else "sink"}

    def _refuse_position_bias(self) -> None:
        """Scores that are biased by a key's column need columns to be tokens, which they are not with these. Windows
        and residuals say so when the first token would have to go (``KVLayer``)."""
        bias = compat.position_bias(self.config)
        if bias and isinstance(self.retention, Importance):
            raise ValueError(
                f"{self.spec!r} is not supported for {type(self.config).__name__}, which biases scores by key position "
                f"({bias}): use retention 'all' with storage 'full', 'int8' or 'fp8'"
            )

    def _make_layers(self) -> list[Any]:
        stock = compat.stock_layers(self.config)
        skip, keep = self._numbers("skip_layers", self.storage.skip_layers, stock), set(range(len(stock)))
        if isinstance(self.placement, Offload):
            keep = self._numbers("keep_layers", self.placement.keep_layers, stock)
        self._refuse_far_eviction()
        layers = [self._make_layer(layer, i, len(stock), i in skip, i in keep) for i, layer in enumerate(stock)]
        ours = [layer for layer in layers if isinstance(layer, KVLayer)]
        for layer in ours if len({layer.storage.spec for layer in ours}) > 1 else ():
            layer.mixed = True
        if not any(isinstance(layer, (KVLayer, WindowLayer)) for layer in layers):
            raise ValueError(
                f"{type(self.config).__name__} has no attention layers whose keys and values could be cached"
            )
        if self.spec != "full" and not any(isinstance(layer, KVLayer) for layer in layers):
            warnings.warn(
                f"{self.spec!r} changes nothing for this {type(self.config).__name__}: all of its attention layers "
                "have a native window and keep it",
                stacklevel=4,
            )
        if self._offloader is not None and not self._offloader.homes:
            warnings.warn(f"{self.spec!r} offloads nothing: no full attention layer is left to offload", stacklevel=4)
        return layers

    def _numbers(self, name: str, layers: tuple[int, ...] | str, stock: list[Any]) -> set[int]:
        count, own = len(stock), [i for i, layer in enumerate(stock) if isinstance(layer, compat.CacheLayerMixin)]
        if layers == "ends":
            return {own[0], own[-1]} if own else set()
        outside = [index for index in layers if not -count <= int(index) < count]
        if outside:
            raise ValueError(f"{name}={outside}: the model has {count} layers")
        for index in layers:
            if int(index) % count not in own:
                why = "reads the keys of another layer, or has no attention"
                why = why if compat.is_empty_layer(stock[int(index) % count]) else "keeps a recurrent state"
                raise ValueError(
                    f"{name}={index}: layer {int(index) % count} of {type(self.config).__name__} has no cache of its "
                    f"own, it {why}; the first and last that have one are {own[0]} and {own[-1]}"
                )
        return {int(index) % count for index in layers}

    def _refuse_far_eviction(self) -> None:
        if not isinstance(self.placement, Offload) or not isinstance(self.retention, Importance):
            return
        what = "adaptive budgets" if self.retention.adaptive else "keep_recent" if self.placement.keep_recent else ""
        if what:
            raise ValueError(
                f"{self.spec!r}: importance eviction replaces single tokens in place, which {what} cannot follow off "
                "the device: leave that out, or use placement 'device'"
            )

    def _make_layer(self, stock: Any, index: int, layers: int, skip: bool, keep: bool) -> Any:
        if compat.is_plain_full_attention(stock):
            storage = specs.storage("full") if skip else self.storage
            home = None if keep or self._offloader is None else self._offloader.home(index, storage.residual)
            if isinstance(self.retention, Importance):
                return EvictionLayer(storage, self.retention, self.config, index, layers, home)
            return KVLayer(storage, self.retention, self.config, index, home)
        if type(stock) is compat.DynamicSlidingWindowLayer:
            return WindowLayer(stock.sliding_window)
        if compat.is_stock_layer(stock):
            return stock
        if compat.is_composite(stock):
            raise ValueError(
                f"layer {index} of {type(self.config).__name__} holds attention and a recurrent state in one "
                f"({type(stock).__name__}), which this library does not support: use the stock DynamicCache for this "
                "model"
            )
        types = getattr(self.config, "layer_types", None)
        kind = types[index] if types else type(stock).__name__
        raise ValueError(
            f"layer {index} of {type(self.config).__name__} is of type {kind!r} ({type(stock).__name__}), which this "
            "library does not support: use the stock DynamicCache for this model"
        )

    # -- names -------------------------------------------------------------------------------------------------------

    @classmethod
    def from_spec(cls, config: Any, spec: str) -> KVCache:
        """A cache from one string, such as ``"int8+sink(4,508)"``.

        Raises:
            ValueError: an unknown part or option (the message lists the known ones), or one axis named twice.
        """
        if not isinstance(spec, str):
            raise ValueError(f"from_spec(config, spec): spec is a {type(spec).__name__}, write 'int8+sink(4,508)'")
        if not spec.strip():
            raise ValueError(f"spec {spec!r} is empty: write for example 'int8+sink(4,508)'")
        return KVCache(config, **specs.split(spec))

    @property
    def spec(self) -> str:
        """The canonical string that ``from_spec`` turns into a cache like this one."""
        parts = [self.storage.spec, self.retention.spec, self.placement.spec]
        return "+".join(part for part in parts if part not in ("full", "all", "device")) or "full"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec}, {len(self)} layers, {self.get_seq_length()} tokens seen)"

    # -- contract ----------------------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Store new keys and values of one layer; see ``KVLayer.update``."""
        try:
            return self._guard(layer_idx, *self._update(key_states, value_states, layer_idx, *args, **kwargs))
        except ValueError:
            self._take_back(self._undo)
            raise

    def _update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        if self._crosses:
            self._check_encoder_decoder(layer_idx)
        if layer_idx >= len(self.layers):
            raise ValueError(f"layer {layer_idx} does not exist: the cache was made for {len(self.layers)} layers")
        layer: Any = self.layers[layer_idx]
        self._enter(layer_idx, "keys")
        if layer_idx != self._first:
            before: Any = self.layers[layer_idx - 1]
            if isinstance(before, KVLayer):
                before.catch_up()  # no attention has come for what waits there, and none will
            keys, values = self._update_layer(layer_idx, key_states, value_states, *args, **kwargs)
            if layer_idx == self._window and keys.shape[2] < layer.get_seq_length() and key_states.shape[2] > 1:
                keys = self._looking(keys, layer.get_seq_length() - key_states.shape[2], key_states.shape[2])
            return keys, values
        positions, seen, new = position_ids(args, kwargs), layer.get_seq_length(), key_states.shape[2]
        self._raise_if_suspect()
        for each in self.layers:
            if isinstance(each, KVLayer):
                each.check_recording(new)
        last_positions, back = self._check_positions(positions, new)
        if back and compat.inside_generate():  # elsewhere they were given on purpose
            exact = self.can_rollback(back)
            raise ValueError(
                FED_TWICE.replace(ROLL_BACK, f"call cache.rollback({back})" if exact else "call cache.reset()")
            )
        if self._offloader is not None:
            self._offloader.begin(new)
        keys, values = self._update_layer(layer_idx, key_states, value_states, *args, **kwargs)
        self._last_positions = last_positions  # now that these tokens are accepted
        self._made = self._made if seen else identity.mark(self._source)
        reached = seen + new if positions is None else max(last_positions) + 1
        self._rotated = self._rotated.fed(seen, new, self._regimes.of(reached))
        if seen and (back or new > 1):  # only the mask shows a prompt that is fed twice
            keys = self._looking(keys, seen, new, 0 if getattr(layer, "mixed", False) else None)
        return keys, values

    def _looking(self, keys: Any, seen: int, new: int, columns: int | None = None) -> Any:
        """Keys that look at their mask, under an attention that lets them."""
        if self.config._attn_implementation not in MASKABLE or isinstance(keys, MaskedStates):
            return keys
        view = View(causal(new, keys.shape[2]), seen, needed=False, columns=columns)
        return MaskedStates.wrap(keys, view, "keys")

    def _update_layer(
        self, index: int, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        layer: Any = self.layers[index]
        if not isinstance(layer, (KVLayer, WindowLayer)):
            return layer.update(key_states, value_states, *args, **kwargs)
        grads = isinstance(layer, KVLayer) and torch.is_grad_enabled()
        new_grads = grads and (key_states.requires_grad or value_states.requires_grad)
        severed, seen = grads and index in self._with_grad, layer.get_seq_length()
        if severed and not new_grads:  # the model is frozen, what it was given is not
            key_states = key_states.detach().requires_grad_()
        if index > self._guarded:
            self._undo = None
        mark = layer.mark(self._undo is not None)
        try:
            keys, values = layer.update(key_states, value_states, *args, **kwargs)
        except BaseException as error:
            layer.recall(mark)
            if isinstance(error, OSError) and self._offloader is not None and self._offloader.forwards <= 1:
                self.reset()  # a full disk, and there was nothing before this forward
            raise
        if self._undo is not None:
            self._undo.marks.append((layer, mark))
        if new_grads:
            self._with_grad.setdefault(index, seen)
        for states in (keys, values) if severed else ():
            if isinstance(states, torch.Tensor) and states.requires_grad:
                with torch._C.DisableTorchFunctionSubclass():
                    states.register_hook(_refuse_backward)
        return keys, values

    # -- forwards that are refused, or die midway --------------------------------------------------------------------

    def _guard(self, index: int, keys: Any, values: Any) -> tuple[Any, Any]:
        """What attention refuses of the first layer of a kind leaves the cache as it was before this forward. What such
        a layer takes, all others of its kind take, so that there is nothing to undo any more beyond them."""
        attention = self.config._attn_implementation
        if attention != NAME and isinstance(keys, torch.Tensor) and not torch.compiler.is_compiling():
            keys.made_for = attention  # type: ignore[attr-defined]
        if self._undo is not None:
            take_back = partial(self._take_back, self._undo)
            if isinstance(self.layers[index], WindowLayer) and attention == NAME:
                keys.undo = take_back
            for states in (keys, values):
                undoes(states, take_back)
            if index >= self._guarded:
                self._undo = None  # the keys hold it, and let go of it with themselves
        return keys, values

    def _take_back(self, undo: Undo | None) -> None:
        """The forward that has begun is refused: as if it had not come."""
        if undo is None or undo.number != self._progress.forwards:
            return
        undo()
        vars(self).update(undo.facts)
        self._progress.take_back(undone=True)
        self._last_updated = self._undo = None

    def _enter(self, index: int, what: str) -> None:
        """A forward comes to a layer; where it is the first one, the forward before must have reached them all.

        Raises:
            ValueError: it has not; nothing has changed.
        """
        self._follow_copy()
        progress = self._progress
        if progress.starts_at(index, what):
            self._raise_if_uneven()
            progress.begin(self._longest())
            self._undo = Undo(progress.forwards, self._facts(), self._offloader)
        if progress.recurrent or index == progress.first:
            if self._undo is not None and index in progress.recurrent and index < self._guarded:
                if all(other != index for other, _ in progress.reached):
                    self._undo.marks.append((self.layers[index], _states(self.layers[index])))
            progress.reached.add((index, what))

    def _facts(self) -> dict[str, Any]:
        """What a forward changes beside the layers."""
        names = ("_last_positions", "_made", "_rotated")
        return {**{name: getattr(self, name) for name in names}, "_with_grad": dict(self._with_grad)}

    def _raise_if_uneven(self) -> None:
        """Refuse to go on with layers that differ, and say what would make them equal."""
        wrong = self._progress.uneven(self.layers)
        if wrong is None:
            return
        lengths = self._progress.seen(self.layers).values()
        seen = [n for n in lengths if n is not None]
        back = max(seen) - min(seen)
        if 0 < back < max(seen) and None not in lengths and self.can_rollback(back):
            raise ValueError(f"{wrong}: call cache.rollback({back}) to go back to {min(seen)} tokens, then feed again")
        raise ValueError(f"{wrong}: {RESET}")

    def _longest(self) -> int:
        """Tokens seen by the layer that has seen most."""
        return max(n or 0 for n in self._progress.seen(self.layers).values())

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """As stock; a recurrent layer is reached."""
        self._enter(layer_idx, "conv")
        return super().get_conv_state(layer_idx, *args, **kwargs)

    def get_recurrent_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """As stock; a recurrent layer is reached."""
        self._enter(layer_idx, "recurrent")
        return super().get_recurrent_state(layer_idx, *args, **kwargs)

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As stock, but another batch size is refused."""
        self._check_batch(layer_idx, conv_states.shape[0])
        self._enter(layer_idx, f"new conv {args[:1]} {kwargs.get('state_idx')}")
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """As stock, but another batch size is refused."""
        self._check_batch(layer_idx, recurrent_states.shape[0])
        self._enter(layer_idx, f"new recurrent {args[:1]} {kwargs.get('state_idx')}")
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def _check_batch(self, index: int, rows: int) -> None:
        held = _rows(self.layers[index])
        if held not in (None, rows):
            self._progress.take_back()
            raise ValueError(
                f"layer {index} holds a batch of {held}, got {rows}: reset() the cache, or use "
                "batch_repeat_interleave / batch_select_indices first"
            )

    def _check_positions(self, positions: torch.Tensor | None, new: int) -> tuple[list[int], int]:
        """The last positions, and how many tokens back these begin where every row has seen them before, else 0: so
        ``generate`` feeds a prompt twice, but so come also contexts that a caller lays out side by side."""
        if positions is None or positions.dim() != 2 or positions.shape[1] != new or not new:
            return self._last_positions, 0
        if new == 1 and positions.is_cuda:  # a look would wait for the device in every decode step
            return [last + 1 for last in self._last_positions], 0
        lows = highs = positions[:, -1].tolist()
        if new > 1:  # position 0 is also that of pads, and so is a repeated one
            same, pads = positions[:, 1:] == positions[:, :-1], positions == 0
            pads[:, 1:] |= same
            pads[:, :-1] |= same
            lows = positions.masked_fill(pads, torch.iinfo(positions.dtype).max).amin(1).tolist()
            highs = positions.amax(1).tolist()
        lasts = self._last_positions
        lasts = lasts if len(lasts) == len(highs) else [min(lasts)] * len(highs)
        old = (high == 0 or low <= last for low, high, last in zip(lows, highs, lasts, strict=True))
        again = max(lasts) > 0 and (any(highs) or new == 1) and all(old)
        back = max(1, *(last - high + 1 for high, last in zip(highs, lasts, strict=True))) if again else 0
        return list(map(max, highs, lasts)), back

    def _raise_if_suspect(self) -> None:
        """Refuse what the last forward brought, where it was not looked at on the spot (see ``KVLayer``)."""
        waiting = [layer for layer in self.layers if isinstance(layer, KVLayer) and layer.peaks is not None]
        if waiting:
            peaks = torch.stack([layer.peaks.to(waiting[0].device) for layer in waiting]).cpu()  # type: ignore[union-attr]
            for layer, pair in zip(waiting, peaks, strict=True):
                layer.raise_if_suspect(pair)
                layer.peaks = None

    def _check_encoder_decoder(self, layer_idx: int) -> None:
        """Cross-attention comes with the same layer number right after self-attention: it must not land here.

        With one layer that is so in every forward, too; but each forward asks for the mask's size first.
        """
        if layer_idx == self._last_updated:
            raise ValueError(
                "an encoder-decoder model needs a cache for cross-attention too: pass "
                "EncoderDecoderCache(cache, DynamicCache(config=model.config))"
            )
        self._last_updated = layer_idx

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(keys that the next ``update`` of ``query_length`` tokens returns, position of the first of them).

        transformers makes one mask for all full-attention layers. Encoded layers can translate it to their slots, plain
        ones (``skip_layers``) cannot: where there are both, the answer is that of a plain one.
        """
        self._last_updated = None
        self._follow_copy()
        if self._progress.reached:  # a mask is made before anything is updated, and must not be blamed
            self._raise_if_uneven()
        if not query_length and self.get_seq_length() and compat.inside_generate():
            raise ValueError(
                f"generate has no token left to feed: it takes the {self.get_seq_length()} tokens that the cache holds "
                "for the beginning of the prompt, which is shorter: pass the old text and the new one together, or go "
                "back with rewind() or rollback() first"
            )
        if layer_idx < len(self.layers) and isinstance(self.layers[layer_idx], KVLayer):
            ours = (i for i, layer in enumerate(self.layers) if isinstance(layer, KVLayer) and layer.storage.lossless)
            layer_idx = next(ours, layer_idx)
        return super().get_mask_sizes(query_length, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, per row."""
        seen = super().get_seq_length(layer_idx)
        if self._drop_at is not None and seen <= self._drop_at:
            compat.warn_if_dropped(self.spec, self._drop_at)
        return seen

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]]:
        """Per layer: decoded keys, decoded values, and the window of a sliding layer."""
        for layer in self.layers:
            yield (
                getattr(layer, "keys", None),
                getattr(layer, "values", None),
                getattr(layer, "_sliding_window_tensor", None),
            )

    @property
    def is_croppable(self) -> bool:
        """Whether ``crop`` is exact at any time, as assisted generation requires."""
        return all(layer.is_croppable for layer in self.layers)

    def rollback(self, tokens: int) -> None:
        """Take back the last ``tokens`` tokens, exactly.

        After a forward that died midway layers differ: ``tokens`` counts from the longest of them, so that as many as
        that forward was to bring lead back to before it. Where that is exact for every layer, it makes them equal;
        where all that was seen is taken back, it always is.

        Raises:
            ValueError: negative, more than were seen, or what would have to come back is gone: evicted tokens, the
                plain form of encoded ones (low bits), a recurrent state. The message says what is exact.
        """
        seen = self._longest()
        if not 0 <= tokens <= seen:
            raise ValueError(f"rollback({tokens}): the cache has seen {seen} tokens")
        if not tokens:  # stock windows do not take crop(0)
            return self._raise_if_uneven()
        self.crop(-tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens, in all layers or (when one must refuse) in none.

        Raises:
            ValueError: a positive number, or as ``rollback``.
        """
        tokens_to_remove = int(tokens_to_remove)  # some versions of assisted generation hand over a tensor
        self.check_crop(tokens_to_remove)
        target = max(self._longest() + tokens_to_remove, 0)
        if tokens_to_remove and not target and self._progress.uneven(self.layers):
            return self.reset()
        layer: Any
        for index, layer in enumerate(self.layers):
            removed = layer.get_seq_length() - target if index in self._progress.attention else -tokens_to_remove
            if isinstance(layer, WindowLayer) and removed and not target:
                layer.reset()  # a full window cannot be cropped, but it can be left
            elif removed or getattr(layer, "record_past", False):  # stock layers do not take crop(0)
                layer.crop(-removed)
        if tokens_to_remove:
            self._progress.begin(target)
        self._with_grad = {index: first for index, first in self._with_grad.items() if first < target}
        self._last_positions = [max(last + tokens_to_remove, 0) for last in self._last_positions]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only the rows ``indices`` (integers or a bool mask; a tensor, list or tuple)."""
        self._raise_if_uneven()
        rows = as_rows(indices)
        for index, layer in enumerate(self.layers):
            if hasattr(layer, "batch_select_indices"):
                layer.batch_select_indices(rows)
            else:
                self._move_rows(index, lambda t: t[rows.to(t.device)])
        self._last_positions = [min(self._last_positions)]  # rows moved; every row is at least as far

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times, next to each other."""
        self._raise_if_uneven()
        for index, layer in enumerate(self.layers):
            if hasattr(layer, "batch_repeat_interleave"):
                layer.batch_repeat_interleave(repeats)
            else:
                self._move_rows(index, lambda t: t.repeat_interleave(repeats, 0))
        self._last_positions = [min(self._last_positions)]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row ``i`` becomes what row ``beam_idx[i]`` was (integers; a tensor, list or tuple)."""
        self._raise_if_uneven()
        super().reorder_cache(as_rows(beam_idx))  # type: ignore[arg-type]
        self._last_positions = [min(self._last_positions)]

    def _move_rows(self, index: int, fn: Any) -> None:
        """Rows of a recurrent layer, which stock can only reorder."""
        layer: Any = self.layers[index]
        held = _rows(layer)
        if held is not None:
            layer.reorder_cache(fn(torch.arange(held)))

    def activate_past_recording(self) -> None:
        """From now on nothing leaves a layer before a ``crop`` lets it: native windows grow, and tokens that would
        evict others are refused.

        Raises:
            ValueError: tokens are evicted already.
        """
        for layer in self.layers:
            if isinstance(layer, KVLayer) and layer.longest and layer.kept_at(layer.longest) < layer.longest:
                raise ValueError(
                    f"activate_past_recording(): layer {layer.index} has evicted tokens ({self.retention.spec!r}), and "
                    "could not be cropped: fork() the cache before the tokens that may be taken back, or use retention "
                    "'all'"
                )
        super().activate_past_recording()

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise what ``crop`` would raise, and change nothing."""
        refuse_positive(tokens_to_remove)
        lengths, longest = self._progress.seen(self.layers), self._longest()
        target = max(longest + tokens_to_remove, 0)
        wrong = self._progress.uneven(self.layers)
        if wrong and tokens_to_remove and not target:
            return  # everything goes
        if wrong and (None in lengths.values() or self._progress.torn(self.layers)):
            raise ValueError(f"crop({tokens_to_remove}): {wrong}: {RESET}")
        least = min(n for n in lengths.values() if n is not None) if lengths else longest
        if target > least:
            raise ValueError(
                f"crop({tokens_to_remove}): {wrong}: take back at least the {longest - least} tokens that some lack"
            )
        layer: Any
        for index, layer in enumerate(self.layers):
            removed = layer.get_seq_length() - target if index in self._progress.attention else -tokens_to_remove
            if isinstance(layer, (KVLayer, WindowLayer)):
                self._check_layer(layer, -removed, wrong)
            elif removed and isinstance(layer, compat.LinearAttentionCacheLayerMixin):
                if any(layer.is_recurrent_states_initialized.values()) or not layer.record_past:
                    why = f"{wrong}, and " if wrong else ""
                    raise ValueError(
                        f"crop({tokens_to_remove}): {why}layer {index} keeps a recurrent state, which cannot go back; "
                        + (RESET if wrong else "fork() the cache before the tokens that may be taken back")
                    )

    def _check_layer(self, layer: Any, tokens_to_remove: int, wrong: str | None) -> None:
        try:
            layer.check_crop(tokens_to_remove)
        except ValueError as error:
            if wrong is None:
                raise
            why = str(error).split(": ", 1)[1].split(";")[0].split(", and ")[0]
            raise ValueError(f"crop({tokens_to_remove}): {wrong}, and {why}: {RESET}") from None

    def can_rollback(self, tokens: int) -> bool:
        """Whether ``rollback(tokens)`` would be exact now."""
        try:
            self.check_crop(-tokens)
        except ValueError:
            return False
        return 0 <= tokens <= self._longest()

    def exact_rollback(self) -> int:
        """How many tokens can be taken back exactly: any number up to this one."""
        self._raise_if_uneven()
        exact = self.get_seq_length()
        for layer in self.layers:
            if isinstance(layer, KVLayer):
                exact = min(exact, layer.exact)
            elif isinstance(layer, compat.LinearAttentionCacheLayerMixin):
                exact = 0
            elif isinstance(layer, WindowLayer) and layer.get_seq_length() >= layer.sliding_window:
                exact = 0
        return exact

    def reset(self) -> None:
        """Forget everything: equal to a new cache."""
        super().reset()
        for index, layer in enumerate(self.layers):
            if isinstance(layer, compat.LinearAttentionCacheLayerMixin):
                self._renew(index)
        if self._offloader is not None:
            self._offloader.reset()
        self._start()

    def _renew(self, index: int) -> None:
        """Make a recurrent layer what it was when it was made: stock keeps its tensors, and their batch size."""
        new = compat.stock_layers(self.config)[index]
        vars(self.layers[index]).clear()
        vars(self.layers[index]).update(vars(new))

    def close(self) -> None:
        """Forget everything and remove what is on disk. Using the cache again begins anew."""
        self.reset()
        if self._offloader is not None:
            self._offloader.close()

    def fork(self) -> KVCache:
        """A cache that continues from here on its own. Both share the stored tokens, which never change; ``nbytes`` of
        each counts all that it reaches. An offloaded cache is copied: its files and lanes are its own.

        Raises:
            ValueError: a forward died midway and left layers that differ.
        """
        self._raise_if_uneven()
        self._follow_copy()
        if self._offloader is not None:
            return copy.deepcopy(self)
        new = copy.copy(self)
        new.layers = [
            layer.fork() if isinstance(layer, (KVLayer, WindowLayer)) else copy.deepcopy(layer) for layer in self.layers
        ]
        new._progress, new._with_grad = self._progress.fork(), dict(self._with_grad)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        """A copy follows the model's own config, which says which attention runs; copied together with its model, in
        any order, the config of that copy."""
        self._follow_copy()
        own = {id(config): config for config in (self._source, self.config)}
        copied = {key: memo.pop(key) for key in own if key in memo}  # of a model that was copied before
        memo.update(own)
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        for name, value in self.__getstate__().items():
            new.__dict__[name] = copy.deepcopy(value, memo)
        for key in own:
            del memo[key]
        memo.update(copied)
        # A model that is copied later finds these configs; without one they are forgotten.
        twins = [copy.deepcopy(config, memo) for config in (self._source, self.config)]
        new._twin = tuple(weakref.ref(twin) for twin in twins)
        return new

    def _follow_copy(self) -> None:
        """The configs of the model that was copied together with this cache, if there was one."""
        if self._twin is None:
            return
        (source, config), self._twin = (twin() for twin in self._twin), None
        if source is not None:
            self._source = source
            self._made = None if self._made is None else identity.mark(source)
        if config is not None:
            self.config = config
            for layer in self.layers:
                if isinstance(layer, KVLayer):
                    layer.config = config

    def __getstate__(self) -> dict[str, Any]:
        self._follow_copy()
        return {**self.__dict__, "_undo": None}

    @classmethod
    def from_states(
        cls,
        config: Any,
        states: Sequence[tuple[torch.Tensor, torch.Tensor]],
        spec: str = "full",
        *,
        tokens_seen: int | None = None,
    ) -> KVCache:
        """A cache filled with given keys and values, one ``([B, H, n, Dk], [B, H, n, Dv])`` per layer.

        Args:
            states: for a layer with a native window at least the tokens that it would hold; ``(None, None)`` for one
                without a cache.
            tokens_seen: how many tokens the states stand for, where they were chosen or compressed elsewhere: the next
                token has this position. Without it, as many as the longest layer has.

        Raises:
            ValueError: states for another number of layers, of other lengths in layers that hold all tokens, or too few
                for a window; recurrent layers; a policy that needs more than keys; ``tokens_seen`` less than there are
                states, or with a retention that needs to know which tokens they are.
        """
        cache = cls.from_spec(config, spec)
        if len(states) != len(cache):
            raise ValueError(f"{len(states)} pairs of states for a model of {len(cache)} layers")
        held = cache._check_states(states, tokens_seen)
        seen = held if tokens_seen is None else tokens_seen
        for index, (keys, values) in enumerate(states):
            layer: Any = cache.layers[index]
            if isinstance(layer, (KVLayer, WindowLayer)):
                cache.update(keys, values, index)  # and no attention will come
                if isinstance(layer, EvictionLayer) and layer.pending is not None:
                    layer.settle(None, None, None)
                elif isinstance(layer, KVLayer):
                    layer.catch_up()
                if layer.get_seq_length() != seen:
                    layer.pretend(seen)
        return cache

    def _check_states(self, states: Sequence[tuple[Any, Any]], tokens_seen: int | None) -> int:
        """How many tokens there are in the layers that hold most."""
        lengths: dict[int, int] = {}
        for index, (layer, (keys, values)) in enumerate(zip(self.layers, states, strict=True)):
            if isinstance(layer, compat.LinearAttentionCacheLayerMixin):
                raise ValueError(
                    f"from_states: layer {index} keeps a recurrent state, which keys and values cannot give"
                )
            if not isinstance(layer, (KVLayer, WindowLayer)):
                continue
            if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor):
                raise ValueError(f"from_states: layer {index} needs keys and values, got {type(keys).__name__}")
            lengths[index] = keys.shape[2]
            policy = self.retention.policy if isinstance(layer, KVLayer) else None
            if policy is not None and policy.needs != "keys":
                raise ValueError(
                    f"from_states: policy {self.retention.spec!r} needs attention {policy.needs}, which states do not "
                    "bring: use 'knorm', 'keydiff' or 'random', or feed the tokens to the model"
                )
        full = {n for i, n in lengths.items() if isinstance(self.layers[i], KVLayer)}
        if len(full) > 1:
            raise ValueError(
                f"from_states: layers that hold all tokens have states of {sorted(full)} tokens: pass as many"
            )
        held = max(full or lengths.values())
        if tokens_seen is None:
            return held
        if isinstance(tokens_seen, bool) or not isinstance(tokens_seen, int) or tokens_seen < held:
            raise ValueError(f"from_states: tokens_seen={tokens_seen!r} is not an integer >= the {held} given tokens")
        if full and tokens_seen > held and (self.retention.policy or self.retention.reposition):
            raise ValueError(
                f"from_states: {self.retention.spec!r} needs the position of every token, and {held} states of "
                f"{tokens_seen} tokens do not have one: use retention 'all' or 'sink'"
            )
        return held

    def save(self, path: str | os.PathLike[str], token_ids: Any = None, *, model: Any = None) -> None:
        """Write the cache to one safetensors file, at once or not at all, readable by the user alone.

        Args:
            path: the file; one that exists is replaced.
            token_ids: the tokens that were fed, ``[n]`` or ``[B, n]``, to be kept with it.
            model: the model that made the states; without it, the one whose config this is is looked for.

        Raises:
            ValueError: ``path`` is a symbolic link, ``token_ids`` are not as many as were seen, a layer holds what such
                a file cannot, the model's weights changed meanwhile, or several models share the config.
            OSError: the folder cannot be written to, or the disk is full; nothing is left behind.
        """
        self._raise_if_uneven()
        self._raise_if_suspect()
        snapshot.save(self, path, token_ids, self._whose(model))

    @staticmethod
    def load(path: str | os.PathLike[str], config: Any, *, spec: str | None = None, device: Any = None) -> KVCache:
        """The cache that ``save`` wrote, which continues with the same bits; a copy, whatever becomes of the file.

        Args:
            config: the model that made the cache, one with the same weights, or ``model.config`` of either.
            spec: refuse a file of another storage or retention than this one's; its placement is the new cache's.
            device: where everything goes; without it, to the devices that it was saved from.

        Raises:
            FileNotFoundError: no such file.
            ValueError: a damaged or foreign file, another model or other weights, another spec, or devices that are not
                here. Nothing of the file is used before all of it was checked.
        """
        read = snapshot.read(path)
        snapshot.check(read, config)
        try:
            cache = KVCache.from_spec(identity.config_of(config), read.metadata["spec"] if spec is None else spec)
        except ValueError as error:
            raise ValueError(f"{path}: {error}" if spec is None else str(error)) from None
        snapshot.check_spec(read, cache.spec)
        snapshot.restore(cache, read, device)
        return cache

    def _whose(self, model: Any = None) -> str:
        """The identity of the weights that made the states (see ``identity``)."""
        self._follow_copy()
        source = self._source if model is None else model
        whose = identity.of(source)
        identity.check_unchanged(self, source)
        if model is not None and not identity.same_config(whose, identity.of_config(self.config)):
            raise ValueError(f"model={type(model).__name__}: this cache was made for another config")
        return whose

    # -- accounting --------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Every byte this cache holds: the storages of all tensors reachable from it, each counted once."""
        for layer in self.layers:
            if isinstance(layer, KVLayer):
                layer.catch_up()
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(self.layers)}
        return sum(storages.values())

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes by tier and part; the sum over everything is ``nbytes``.

        Parts: ``payload`` (codes, or plain values where nothing is encoded), ``scales``, ``residual`` (full-precision
        tokens beside encoded ones), ``indices`` (of kept tokens, and tables of rotations), ``scores`` (of importance
        eviction), ``window`` (native sliding layers and recurrent states), ``spare`` (allocated rows not yet used),
        ``staging`` (copies of offloaded layers).
        """
        parts = dict.fromkeys(("payload", "scales", "residual", "indices", "scores", "window", "spare"), 0)
        tiers = {"device": parts}
        if self._offloader is not None:
            names = ("device", "cpu", "disk")[: 2 if self._offloader.placement.tier == "cpu" else 3]
            tiers = {tier: {**parts, "staging": 0} for tier in names}
            tiers["cpu"]["staging"] = self._offloader.staging()
        for layer in self.layers:
            if not isinstance(layer, KVLayer):
                tiers["device"]["window"] += sum(t.untyped_storage().nbytes() for t in tensors_of(layer))
                continue
            for tier, sizes in layer.bytes_by_tier().items():
                for name, size in sizes.items():
                    tiers[tier][name] += size
        return tiers

    def stats(self) -> CacheStats:
        """Tokens seen, kept, evicted and quantized (per row), and bytes moved."""
        ours = [layer for layer in self.layers if isinstance(layer, KVLayer)]
        moved = self._offloader
        moves = (0, 0, 0) if moved is None else (moved.bytes_out, moved.bytes_in, moved.waits)
        if not ours:
            return CacheStats(self.get_seq_length(), self.get_seq_length(), 0, 0)
        quantized = max(layer.quantized for layer in ours)
        seen, kept = ours[0].get_seq_length(), ours[0].kept
        return CacheStats(seen, kept, seen - kept, quantized, *moves)


class QuantizedCache(KVCache):
    """``KVCache`` with a quantized storage: ``QuantizedCache(model.config, "int8")``.

    Raises:
        ValueError: ``storage`` stores in full precision (use ``KVCache``), or as ``KVCache``.
    """

    def __init__(self, config: Any, storage: str = "int8", **options: Any) -> None:
        if specs.storage(storage).lossless:
            raise ValueError(f"QuantizedCache: storage {storage!r} does not quantize; use KVCache(config) for that")
        super().__init__(config, storage, **_known(options, "retention", "placement", "skip_layers"))


class EvictionCache(KVCache):
    """``KVCache`` that keeps what a policy finds important: ``EvictionCache(model.config, "snapkv", budget=1024)``.

    Args:
        policy: ``random``, ``knorm``, ``keydiff``, ``tova``, ``h2o``, ``snapkv`` or ``expected`` (see ``policies.py``).
        budget: tokens per KV head (int), or the share of the tokens seen that stays (float in (0, 1)).
        sinks, recent: first and last tokens of each row that always stay.
        **options: ``pyramid``, ``adaptive``, the policy's own options, and the other axes.

    Raises:
        ValueError: as ``Importance`` and ``KVCache``; at the first update, a policy that needs what the model's
            attention does not hand over.
    """

    def __init__(
        self,
        config: Any,
        policy: str = "snapkv",
        budget: int | float = 1024,
        *,
        sinks: int = 4,
        recent: int = 32,
        **options: Any,
    ) -> None:
        axes = {name: options.pop(name) for name in ("storage", "placement", "skip_layers") if name in options}
        super().__init__(config, retention=Importance(policy, budget, sinks, recent, **options), **axes)


class SinkWindowCache(KVCache):
    """``KVCache`` that keeps the first ``sinks`` and the last ``window`` tokens.

    Args:
        reposition: the sinks seem to lie right before the window (StreamingLLM), for streams beyond the trained
            length. Rotary positions and "kvcache" attention only.

    Raises:
        ValueError: as ``SinkWindow`` and ``KVCache``.
    """

    def __init__(
        self, config: Any, sinks: int = 4, window: int = 1020, *, reposition: bool = False, **options: Any
    ) -> None:
        retention = SinkWindow(sinks, window, reposition)
        super().__init__(config, retention=retention, **_known(options, "storage", "placement", "skip_layers"))


class OffloadedCache(KVCache):
    """``KVCache`` whose sealed tokens live in host memory, or on disk when a directory is given.

    Args:
        device: ``"cpu"``.
        directory: where the files go, made if it does not exist; no symlink, and not writable by everyone.
        keep_layers: layers that stay on the device; negative numbers count from the end, "ends" is first and last.
        keep_recent: so many of the last tokens of each layer stay on the device, too.
        max_pinned: most bytes of pinned host memory (CUDA); what is beyond it is slower. ``None``: any number.

    Raises:
        ValueError: another device, a directory that is refused, or as ``KVCache``.
        OSError: the directory cannot be written to.
    """

    def __init__(
        self,
        config: Any,
        device: str | torch.device = "cpu",
        directory: str | os.PathLike[str] | None = None,
        keep_layers: int | str | Sequence[int] = (),
        keep_recent: int = 0,
        *,
        max_pinned: int | None = None,
        _stage: bool = False,
        **options: Any,
    ) -> None:
        if str(device) != "cpu":
            raise ValueError(f"OffloadedCache: device={str(device)!r}; known is 'cpu', and directory= for the disk")
        layers = specs.layer_numbers("keep_layers", keep_layers)
        placement = Offload(directory, layers, keep_recent, max_pinned, _stage)
        super().__init__(config, placement=placement, **_known(options, "storage", "retention", "skip_layers"))


def _refuse_backward(gradient: torch.Tensor) -> None:
    """A hook on what attention read, where stored tokens came with gradients that the store does not keep."""
    raise ValueError(
        "the cache holds tokens that came with gradients, which end in it: feed those under torch.no_grad(), or use "
        "transformers' DynamicCache for training through several forwards"
    )


def _rows(layer: Any) -> int | None:
    """The batch of a recurrent layer; ``None`` before its first forward."""
    held = [t for states in (layer.conv_states, layer.recurrent_states) for t in states.values() if t is not None]
    return held[0].shape[0] if held else None


def _states(layer: Any) -> dict[str, Any]:
    """All that a recurrent layer is, in copies: it changes in place."""
    copied = lambda v: v.clone() if isinstance(v, torch.Tensor) else v  # noqa: E731
    return {k: {i: copied(t) for i, t in v.items()} if isinstance(v, dict) else v for k, v in vars(layer).items()}


def _known(options: dict[str, Any], *names: str) -> dict[str, Any]:
    for name in options:
        if name not in names:
            raise ValueError(f"unknown option {name!r}: known are {', '.join(names)}")
    return options


def tensors_of(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Every tensor reachable from a layer, but not through the model's config."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item, seen)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item, seen)
    elif hasattr(value, "__dict__") and not hasattr(value, "get_text_config") and id(value) not in seen:
        seen.add(id(value))
        yield from tensors_of(vars(value), seen)
