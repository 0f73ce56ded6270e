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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import compat, identity, snapshot
from . import spec as specs
from .eviction import EvictionLayer
from .layers import MASKABLE, KVLayer, WindowLayer, position_ids
from .masked import FED_TWICE, watched
from .placement import Offload, Offloader
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
        self._offloader = Offloader(self.placement) if isinstance(self.placement, Offload) else None
        super().__init__(layers=self._make_layers())
        attends = [isinstance(layer, (KVLayer, WindowLayer)) for layer in self.layers]
        self._first = attends.index(True)
        self._start()

    def _start(self) -> None:
        """What a forward has to be checked against, before there was one."""
        self._last_updated: int | None = None
        self._last_positions = [0]  # of each row, or the smallest of all
        self._rotated = Rotated()
        self._made: int | None = None  # ``identity.mark`` of the model when the first token came

    def _refuse_position_bias(self) -> None:
        """Scores that are biased by a key's column need columns to be tokens, which they are not with these."""
        bias = compat.position_bias(self.config)
        if bias and (self.retention.evicts or self.storage.has_tail):
            raise ValueError(
                f"{self.spec!r} is not supported for {type(self.config).__name__}, which biases scores by key position "
                f"({bias}): use retention 'all' with storage 'full', 'int8' or 'fp8'"
            )

    def _make_layers(self) -> list[Any]:
        stock = compat.stock_layers(self.config)
        skip, keep = self._numbers("skip_layers", self.storage.skip_layers, len(stock)), set(range(len(stock)))
        if isinstance(self.placement, Offload):
            keep = self._numbers("keep_layers", self.placement.keep_layers, len(stock))
        self._refuse_far_eviction()
        layers = [self._make_layer(layer, i, len(stock), i in skip, i in keep) for i, layer in enumerate(stock)]
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

    def _numbers(self, name: str, layers: tuple[int, ...] | str, count: int) -> set[int]:
        if layers == "ends":
            return {0, count - 1}
        outside = [index for index in layers if not -count <= int(index) < count]
        if outside:
            raise ValueError(f"{name}={outside}: the model has {count} layers")
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
        if self.config.is_encoder_decoder:
            self._check_encoder_decoder(layer_idx)
        if layer_idx >= len(self.layers):
            raise ValueError(f"layer {layer_idx} does not exist: the cache was made for {len(self.layers)} layers")
        layer: Any = self.layers[layer_idx]
        if layer_idx != self._first:
            return self._update_layer(layer, key_states, value_states, *args, **kwargs)
        positions, seen, new = position_ids(args, kwargs), layer.get_seq_length(), key_states.shape[2]
        self._raise_if_suspect()
        last_positions = self._check_positions(positions, new)
        if self._offloader is not None:
            self._offloader.begin(new)
        keys, values = self._update_layer(layer, key_states, value_states, *args, **kwargs)
        self._last_positions = last_positions  # now that these tokens are accepted
        self._made = self._made if seen else identity.mark(self._source)
        reached = seen + new if positions is None else max(last_positions) + 1
        self._rotated = self._rotated.fed(seen, new, self._regimes.of(reached))
        if isinstance(layer, WindowLayer) and seen and new > 1 and positions is None:
            # Without position ids only the mask shows a prompt that is fed twice (KVLayer does the same).
            if self.config._attn_implementation in MASKABLE:
                keys = watched(keys, seen, new)
        return keys, values

    def _update_layer(self, layer: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        try:
            return layer.update(*args, **kwargs)
        except OSError:  # a full disk
            if self._offloader is not None and self._offloader.forwards <= 1:
                self.reset()  # there was nothing before this forward
            raise

    def _check_positions(self, positions: torch.Tensor | None, new: int) -> list[int]:
        """A prompt that is fed twice comes with positions that were seen before, in every row; else the last ones."""
        if positions is None or positions.dim() != 2 or positions.shape[1] != new or not new:
            return self._last_positions
        if new == 1 and positions.is_cuda:  # a look would wait for the device in every decode step
            return [last + 1 for last in self._last_positions]
        lows = highs = positions[:, -1].tolist()
        if new > 1:  # position 0 is also that of pads, and so is a repeated one
            again, pads = positions[:, 1:] == positions[:, :-1], positions == 0
            pads[:, 1:] |= again
            pads[:, :-1] |= again
            lows = positions.masked_fill(pads, torch.iinfo(positions.dtype).max).amin(1).tolist()
            highs = positions.amax(1).tolist()
        lasts = self._last_positions
        lasts = lasts if len(lasts) == len(highs) else [min(lasts)] * len(highs)
        old = (high == 0 or low <= last for low, high, last in zip(lows, highs, lasts, strict=True))
        if max(lasts) > 0 and (any(highs) or new == 1) and all(old):
            raise ValueError(FED_TWICE)
        return list(map(max, highs, lasts))

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

        Raises:
            ValueError: negative, more than were seen, or what would have to come back is gone: evicted tokens, the
                plain form of encoded ones (low bits), a recurrent state. The message says what is exact.
        """
        seen = self.get_seq_length()
        if not 0 <= tokens <= seen:
            raise ValueError(f"rollback({tokens}): the cache has seen {seen} tokens")
        if tokens:  # stock windows do not take crop(0)
            self.crop(-tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens, in all layers or (when one must refuse) in none.

        Raises:
            ValueError: a positive number, or as ``rollback``.
        """
        tokens_to_remove = int(tokens_to_remove)  # some versions of assisted generation hand over a tensor
        self.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)
        self._last_positions = [max(last + tokens_to_remove, 0) for last in self._last_positions]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only the rows ``indices`` (integers or a bool mask)."""
        super().batch_select_indices(indices)
        self._last_positions = [min(self._last_positions)]  # rows moved; every row is at least as far

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row ``i`` becomes what row ``beam_idx[i]`` was."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._last_positions = [min(self._last_positions)]

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise what ``crop`` would raise, and change nothing."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, (KVLayer, WindowLayer)):
                layer.check_crop(tokens_to_remove)
            elif tokens_to_remove and isinstance(layer, compat.LinearAttentionCacheLayerMixin):
                if any(layer.is_recurrent_states_initialized.values()) or not layer.record_past:
                    raise ValueError(
                        f"crop({tokens_to_remove}): layer {index} keeps a recurrent state, which cannot go back; "
                        "fork() the cache before the tokens that may be taken back"
                    )

    def can_rollback(self, tokens: int) -> bool:
        """Whether ``rollback(tokens)`` would be exact now."""
        try:
            self.check_crop(-tokens)
        except ValueError:
            return False
        return 0 <= tokens <= self.get_seq_length()

    def exact_rollback(self) -> int:
        """How many tokens can be taken back exactly: any number up to this one."""
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
        if self._offloader is not None:
            self._offloader.reset()
        self._start()

    def close(self) -> None:
        """Forget everything and remove what is on disk. Using the cache again begins anew."""
        self.reset()
        if self._offloader is not None:
            self._offloader.close()

    def fork(self) -> KVCache:
        """A cache that continues from here on its own. Both share the stored tokens, which never change; ``nbytes`` of
        each counts all that it reaches. An offloaded cache is copied: its files and lanes are its own."""
        if self._offloader is not None:
            return copy.deepcopy(self)
        new = copy.copy(self)
        new.layers = [
            layer.fork() if isinstance(layer, (KVLayer, WindowLayer)) else copy.deepcopy(layer) for layer in self.layers
        ]
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        memo[id(self.config)] = self.config  # the model's own config says which attention runs
        memo[id(self._source)] = self._source
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        for name, value in self.__dict__.items():
            new.__dict__[name] = copy.deepcopy(value, memo)
        return new

    @classmethod
    def from_states(
        cls, config: Any, states: Sequence[tuple[torch.Tensor, torch.Tensor]], spec: str = "full"
    ) -> KVCache:
        """A cache filled with given keys and values, one ``([B, H, n, Dk], [B, H, n, Dv])`` per layer."""
        cache = cls.from_spec(config, spec)
        if len(states) != len(cache):
            raise ValueError(f"{len(states)} pairs of states for a model of {len(cache)} layers")
        for index, (keys, values) in enumerate(states):
            cache.update(keys, values, index)
        return cache

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
