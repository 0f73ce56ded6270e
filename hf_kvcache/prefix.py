"""What can be reused? Caches by the tokens that made them.

    store = PrefixStore(2 << 30)
    output = generate_with_prefix(model, store, input_ids=ids, max_new_tokens=50)

``match`` looks for the stored cache that shares the longest prefix with a prompt. A prompt is cut into blocks, and each
block's name is a hash of its tokens and of the block before it, so equal names mean equal prefixes, up to collisions:

    h_0 = H(weights, spec, namespace, extra)        h_i = H(h_{i-1}, tokens of block i)

The deepest name that is known gives the candidates. A hash decides nothing, though: of every candidate the key and the
tokens are compared, one by one, and what they share is what counts. So nobody is served another's state, not even when
hashes collide.

What is handed out is a fork (see ``store``), rolled back to the shared prefix, and only where a rollback is exact:

    full, 8 bits, retention "all"    any length
    low bits                         lengths whose plain tail is still there
    sinks and window, recurrent      the full stored length, once something was dropped
    RoPE that depends on the length  tokens rotated as those of a prompt of the new one's length are (see ``regime``)

Two tiers: memory, in which the least recently used caches make room, and a folder, to which they go when there is one.
Storages that several caches share count once.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import stat
import threading
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import compat, identity, snapshot
from .caches import KVCache, tensors_of
from .layers import KVLayer
from .regime import Regimes, Rotated

BLOCK = 16  # tokens per link of the chain
CHUNK = 2048  # tokens per forward of a prefill
STALE = 3600.0  # seconds after which a temporary file has no writer any more
SUFFIX = ".safetensors"


@dataclass(frozen=True)
class StoreStats:
    """Counters of a store since it was made, and what it holds now.

    ``tokens_asked`` and ``tokens_reused`` are those of all ``match`` calls together. ``errors`` counts files that could
    not be written or read; each of them also warned.
    """

    hits: int
    misses: int
    tokens_asked: int
    tokens_reused: int
    puts: int
    evictions: int
    disk_hits: int
    errors: int
    entries: int
    disk_entries: int
    memory_bytes: int
    disk_bytes: int


class Key(NamedTuple):
    """What has to be equal before tokens are compared at all."""

    model: str  # whose states (see ``identity``)
    spec: str
    namespace: str
    extra: str


class Entry:
    """One stored cache: in memory, in a file, or both."""

    def __init__(self, key: Key, tokens: torch.Tensor, exact_from: int, rotated: Rotated) -> None:
        self.key, self.tokens = key, tokens  # [n] int64
        self.exact_from = exact_from  # a rollback to this length and to any longer one is exact
        self.rotated = rotated
        self.cache: KVCache | None = None
        self.path: Path | None = None
        self.file_bytes = 0
        self.chain = chain(key, tokens)

    @property
    def file_name(self) -> str:
        rest = self.tokens[len(self.tokens) // BLOCK * BLOCK :]
        return _digest(self.chain[-1], b"end" + repr(tuple(self.rotated)).encode() + _bytes(rest)).hex() + SUFFIX


class PrefixStore:
    """Caches of prompts, to be continued from; safe to use from several threads, its folder from several processes.

    Args:
        max_bytes: bytes of cache held in memory after any call. What does not fit goes to ``directory``, or is dropped.
        directory: a folder of the user's own, for what does not fit; made if missing. Other processes may use it too.
        config: the model, or ``model.config``, that ``match`` takes if it is given none.
        spec: spec that ``match`` and ``generate_with_prefix`` take if they are given none.
        disk_bytes: most bytes in ``directory``; ``None``: no limit.

    Raises:
        ValueError: ``max_bytes`` or ``disk_bytes`` is not positive, the latter has no folder, or the folder is a link,
            someone else's, or open to others.
    """

    def __init__(
        self,
        max_bytes: int,
        directory: str | os.PathLike[str] | None = None,
        *,
        config: Any = None,
        spec: str | None = None,
        disk_bytes: int | None = None,
    ) -> None:
        for name, value in (("max_bytes", max_bytes), ("disk_bytes", 1 if disk_bytes is None else disk_bytes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"PrefixStore: {name}={value!r} is not a number of bytes")
        if disk_bytes is not None and directory is None:
            raise ValueError(
                f"PrefixStore: disk_bytes={disk_bytes} limits a folder, and there is none: pass directory="
            )
        self.max_bytes, self.disk_bytes = max_bytes, disk_bytes
        self.config, self.spec = config, spec
        self.directory = None if directory is None else private_directory(Path(directory))
        self._lock = threading.RLock()
        self._memory: OrderedDict[Entry, None] = OrderedDict()  # least recently used first
        self._index: dict[bytes, set[Entry]] = {}
        self._sources: dict[int, Any] = {}  # configs of the models that used this store, by id
        self._storages: Counter[int] = Counter()  # how many caches in memory reach a storage
        self._held = 0  # bytes of these storages
        self._files: dict[str, Entry] = {}
        self._passed: set[tuple[str, int]] = set()  # files that are none of ours, by name and time
        self._scanned = 0
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._memory)

    def __bool__(self) -> bool:
        return True  # also while it is empty

    def __repr__(self) -> str:
        return f"PrefixStore({len(self)} caches, {self._held} of {self.max_bytes} bytes)"

    # -- storing -----------------------------------------------------------------------------------------------------

    def put(self, token_ids: Any, cache: KVCache, namespace: str = "", extra: str = "", *, model: Any = None) -> bool:
        """Keep a fork of ``cache``, to be found by the tokens that it has seen.

        Args:
            token_ids: these tokens, a list, ``[n]`` or ``[1, n]``. One more is allowed and ignored: ``generate``
                returns its last token without feeding it.
            cache: of batch 1. It stays the caller's; what happens to it later does not reach the store.
            namespace: whose it is. It is only ever found under the same one.
            extra: whatever else the states depend on, such as the ``content_hash`` of images.
            model: the model that made it; without it, the one whose config the cache was made with is looked for.

        Returns:
            Whether it was kept: not if it is larger than ``max_bytes`` and there is no folder.

        Raises:
            ValueError: no cache of ours, another batch than 1, tokens that are not those that it has seen, weights that
                changed since it was fed, or a config that several models share.
        """
        check_cache(cache)
        return self._keep(token_ids, cache, cache._whose(model), namespace, extra)

    def _keep(self, token_ids: Any, cache: KVCache, whose: str, namespace: str, extra: str) -> bool:
        ids, seen = row(token_ids), check_cache(cache)
        if len(ids) not in (seen, seen + 1) or not seen:
            raise ValueError(f"put: {len(ids)} token ids for a cache that has seen {seen} tokens")
        cache._raise_if_suspect()
        key = Key(whose, cache.spec, *texts(namespace, extra))
        entry = Entry(key, ids[:seen].clone(), seen - cache.exact_rollback(), cache._rotated)
        entry.cache = cache.fork()
        with self._lock:
            self._counts["puts"] += 1
            self._sources[id(cache._source)] = cache._source
            for old in self._covered(entry):
                self._forget(old)
            self._enter(entry)
            victims = self._make_room() if entry in self._memory else [entry]
        self._demote(victims)
        return entry.cache is not None or entry.path is not None

    def flush(self) -> None:
        """Write every cache in memory to the folder too, for instance before the process ends."""
        if self.directory is None:
            raise ValueError("flush: this store has no directory")
        with self._lock:
            entries = list(self._memory)
        for entry in entries:
            self._write(entry)

    def clear(self) -> None:
        """Forget everything, files included."""
        with self._lock:
            for entry in {entry for entries in self._index.values() for entry in entries}:
                self._forget(entry)

    # -- finding -----------------------------------------------------------------------------------------------------

    def match(
        self,
        token_ids: Any,
        config: Any = None,
        *,
        spec: str | None = None,
        namespace: str = "",
        extra: str = "",
        leave: int = 1,
    ) -> tuple[KVCache | None, int]:
        """The cache that is stored for the longest prefix of a prompt.

        Args:
            token_ids: the whole prompt, a list, ``[n]`` or ``[1, n]``. Where rotary positions depend on the length, its
                length decides what is served.
            config: the model, or ``model.config``; needed where the store has seen several, or none yet. It is the
                weights as they are now that count.
            spec: as ``config``.
            namespace, extra: as they were given to ``put``.
            leave: tokens at the end of the prompt that are not taken from the store. ``generate`` needs one to feed.

        Returns:
            (a cache that holds the first ``matched`` tokens and is the caller's own, ``matched``), or (``None``, 0).

        Raises:
            ValueError: ``config`` or ``spec`` is needed, or the model itself, because several share this config.
        """
        self._scan()
        key, source = self._resolve(config, spec, namespace, extra)
        return self._match(row(token_ids), key, source, leave)

    def _match(self, ids: torch.Tensor, key: Key | None, source: Any, leave: int) -> tuple[KVCache | None, int]:
        cache, matched = None, 0
        if key is not None:
            cache, matched = self._serve(key, source, ids, max(len(ids) - leave, 0))
        with self._lock:
            self._counts.update(tokens_asked=len(ids), tokens_reused=matched)
            self._counts["misses" if cache is None else "hits"] += 1
        return cache, matched

    def _resolve(self, source: Any, spec: str | None, namespace: str, extra: str) -> tuple[Key | None, Any]:
        """The key that a prompt is looked up by, and the model or config; no key where there is nothing to be found."""
        source, spec = self.config if source is None else source, spec or self.spec
        texts(namespace, extra)
        with self._lock:
            pairs = {entry.key[:2] for entry in (*self._memory, *self._files.values())}
            sources = list(self._sources.values()) if source is None else [source]
        whose = {identity.of(one): one for one in sources}  # weights may have changed since something was put
        if source is not None:
            self._remember(source)
        spec = canonical(sources[0] if sources else None, pairs, spec)
        fitting = {pair for pair in pairs if (not whose or pair[0] in whose) and spec in (None, pair[1])}
        if not fitting:
            return None, source
        if len(fitting) > 1:
            raise ValueError(
                f"match: the store holds caches of {len({m for m, _ in fitting})} models and of the specs "
                f"{', '.join(sorted({s for _, s in fitting}))}: pass config= and spec="
            )
        pair = fitting.pop()
        if not whose:
            raise ValueError("match: another process has written these caches: pass config=model.config to load them")
        return Key(*pair, namespace, extra), whose[pair[0]]

    def _remember(self, source: Any) -> None:
        config = identity.config_of(source)
        self._sources[id(config)] = config

    def _serve(self, key: Key, source: Any, ids: torch.Tensor, most: int) -> tuple[KVCache | None, int]:
        """A fork of the best entry; one whose file turns out to be gone or damaged is forgotten, then the next best."""
        while True:
            with self._lock:
                entry, length = self._best(key, source, ids, most)
                if entry is None:
                    return None, 0
                if entry.cache is not None:
                    cache = entry.cache.fork()
                    if entry in self._memory:
                        self._memory.move_to_end(entry)
                    break
            loaded = self._load(entry, source)
            if loaded is not None:
                cache = loaded
                break
        rebind(cache, source)
        cache.rollback(len(entry.tokens) - length)
        return cache, length

    def _best(self, key: Key, source: Any, ids: torch.Tensor, most: int) -> tuple[Entry | None, int]:
        """The entry with the longest usable prefix, from the deepest known block to the shallowest."""
        best, length, links = None, 0, chain(key, ids)
        looked: set[Entry] = set()
        regime = Regimes(compat.decoder_config(identity.config_of(source))).of(len(ids))
        for depth in reversed(range(len(links))):
            if min(most, (depth + 1) * BLOCK) <= length:
                break  # what is only found further up shares less than this
            for entry in self._index.get(links[depth], set()) - looked:
                looked.add(entry)
                if entry.key != key or not fits(entry.cache, source):
                    continue
                usable = min(shared(entry.tokens, ids), most, entry.rotated.usable(regime))
                if usable >= max(entry.exact_from, 1) and usable > length:
                    best, length = entry, usable
        return best, length

    # -- the memory tier ---------------------------------------------------------------------------------------------

    def _covered(self, entry: Entry) -> list[Entry]:
        """Entries that the new one can stand for: its own prefixes, as far as it can be rolled back to them."""
        candidates = {old for link in entry.chain for old in self._index.get(link, ()) if old.chain[-1] == link}
        return [
            old
            for old in candidates
            if old.key == entry.key
            and len(old.tokens) >= min(entry.exact_from, len(entry.tokens))
            and shared(old.tokens, entry.tokens) == len(old.tokens)
            and entry.rotated.usable(old.rotated.regime) >= old.rotated.length
        ]

    def _enter(self, entry: Entry) -> None:
        """Into the index, and into memory if it holds a cache that is not too large for it."""
        for link in entry.chain:
            self._index.setdefault(link, set()).add(entry)
        if entry.cache is None or entry in self._memory or entry.cache.nbytes > self.max_bytes:
            return
        self._memory[entry] = None
        for pointer, size in storages(entry.cache):
            self._held += 0 if self._storages[pointer] else size
            self._storages[pointer] += 1

    def _leave_memory(self, entry: Entry) -> None:
        if entry not in self._memory or entry.cache is None:
            return
        del self._memory[entry]
        for pointer, size in storages(entry.cache):
            self._storages[pointer] -= 1
            if not self._storages[pointer]:
                del self._storages[pointer]
                self._held -= size

    def _make_room(self) -> list[Entry]:
        """Take the least recently used ones out of memory; they stay in the index until they are demoted."""
        victims = []
        while self._held > self.max_bytes and self._memory:
            victims.append(next(iter(self._memory)))
            self._leave_memory(victims[-1])
        return victims

    def _demote(self, victims: list[Entry]) -> None:
        """To the folder, or out; outside the lock, because it may take long."""
        for entry in victims:
            self._counts["evictions"] += 1
            kept = self.directory is not None and self._write(entry)
            with self._lock:
                entry.cache = None
                if not kept:
                    self._forget(entry)

    def _forget(self, entry: Entry, unlink: bool = True) -> None:
        self._leave_memory(entry)
        entry.cache = None
        for link in entry.chain:
            entries = self._index.get(link, set())
            entries.discard(entry)
            if not entries:
                self._index.pop(link, None)
        if entry.path is not None:
            self._files.pop(entry.path.name, None)
            if unlink:
                entry.path.unlink(missing_ok=True)
            entry.path = None

    # -- the disk tier -----------------------------------------------------------------------------------------------

    def _write(self, entry: Entry) -> bool:
        """Whether the entry lies in the folder now; a warning if it does not."""
        cache, path = entry.cache, self._path(entry)
        if entry.path is not None or cache is None:
            return entry.path is not None
        try:
            key = entry.key
            facts = {"namespace": key.namespace, "extra": key.extra, "exact_from": str(entry.exact_from)}
            snapshot.save(cache, path, entry.tokens, key.model, **facts)
            size = path.stat().st_size
        except (OSError, ValueError) as error:
            self._warn(f"a cache of {len(entry.tokens)} tokens was not written to {path}: {error}")
            return False
        with self._lock:
            other = self._files.get(path.name)
            if other is not None and other is not entry:  # the same tokens once more, or a hash collision
                self._forget(other, unlink=False)
            entry.path, entry.file_bytes = path, size
            self._files[path.name] = entry
            self._trim_files()
        return entry.path is not None

    def _path(self, entry: Entry) -> Path:
        assert self.directory is not None
        return self.directory / entry.file_name

    def _trim_files(self) -> None:
        """The files that were not used for longest go first."""
        if self.disk_bytes is None:
            return
        files = sorted(
            (_used(entry.path), name, entry) for name, entry in self._files.items() if entry.path is not None
        )
        total = sum(entry.file_bytes for _, _, entry in files)
        for _, name, entry in files:
            if total <= self.disk_bytes:
                break
            total -= entry.file_bytes
            if entry in self._memory:
                self._files.pop(name)
                assert entry.path is not None
                entry.path.unlink(missing_ok=True)
                entry.path = None
            else:
                self._forget(entry)

    def _scan(self) -> None:
        """Take up files that other processes have written, and let go of those that they have removed."""
        if self.directory is None:
            return
        with self._lock:
            changed = self.directory.stat().st_mtime_ns
            if changed == self._scanned and time.time_ns() - changed > 10**9:
                return
            self._scanned = changed
            there = {name for name in os.listdir(self.directory) if name.endswith(SUFFIX)}
            for name in self._files.keys() - there:
                entry = self._files.pop(name)
                entry.path = None
                if entry.cache is None:
                    self._forget(entry)
            for name in there - self._files.keys():
                with contextlib.suppress(FileNotFoundError):
                    self._take_up(self.directory / name, os.lstat(self.directory / name))

    def _take_up(self, path: Path, about: os.stat_result) -> None:
        if (path.name, about.st_mtime_ns) in self._passed:
            return
        try:
            found = snapshot.read(path, only=("token_ids",))
            facts, tokens = found.metadata, found.token_ids
            key = Key(facts["model"], facts["spec"], facts["namespace"], facts["extra"])
            if tokens is None or "exact_from" not in facts:
                raise KeyError("token_ids")
            exact_from = snapshot.fact(found, "exact_from", int, lambda length: 0 <= length <= tokens.shape[-1])
            entry = Entry(key, row(tokens).clone(), exact_from, snapshot.rotated(found))
        except KeyError:  # a snapshot that no store has written
            self._passed.add((path.name, about.st_mtime_ns))
            return
        except FileNotFoundError:  # another process has removed it
            return
        except (ValueError, OSError) as error:
            self._passed.add((path.name, about.st_mtime_ns))
            self._warn(f"a file is passed over: {error}")
            return
        entry.path, entry.file_bytes = path, about.st_size
        self._files[path.name] = entry
        self._enter(entry)

    def _load(self, entry: Entry, source: Any) -> KVCache | None:
        """The cache in an entry's file, also back in memory; ``None``, and the entry forgotten, if it is not there."""
        path = entry.path
        if path is None:  # another thread found it damaged
            return None
        try:
            cache = self._read(path, entry, source)
            os.utime(path)  # what was used last is removed last
        except (ValueError, OSError) as error:
            with self._lock:
                self._forget(entry, unlink=False)
                with contextlib.suppress(FileNotFoundError):
                    self._passed.add((path.name, os.lstat(path).st_mtime_ns))
            if not isinstance(error, FileNotFoundError):  # removed by another process
                self._warn(f"a file is passed over: {error}")
            return None
        with self._lock:
            self._counts["disk_hits"] += 1
            if entry.path is not None and entry.cache is None:
                entry.cache = cache.fork()
                self._enter(entry)
                if entry not in self._memory:  # too large
                    entry.cache = None
            victims = self._make_room()
        self._demote(victims)
        return cache

    def _read(self, path: Path, entry: Entry, source: Any) -> KVCache:
        found = snapshot.read(path)
        snapshot.check_spec(found, entry.key.spec)
        facts, tokens = found.metadata, found.token_ids
        same = (facts["model"], facts.get("namespace"), facts.get("extra")) == (entry.key.model, *entry.key[2:])
        same = same and tokens is not None and snapshot.rotated(found) == entry.rotated
        if not same or not torch.equal(row(tokens), entry.tokens):
            raise ValueError(f"{path} holds another cache than it did")
        cache = KVCache.from_spec(identity.config_of(source), entry.key.spec)
        snapshot.restore(cache, found, device_of(source))
        return cache

    def _warn(self, message: str) -> None:
        with self._lock:
            self._counts["errors"] += 1
        warnings.warn(f"PrefixStore: {message}", RuntimeWarning, stacklevel=4)

    # -- accounting --------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of cache in memory; a storage that several caches share counts once."""
        return self._held

    def stats(self) -> StoreStats:
        """Counters since the store was made, and what it holds now."""
        names = ("hits", "misses", "tokens_asked", "tokens_reused", "puts", "evictions", "disk_hits", "errors")
        with self._lock:
            sizes = [entry.file_bytes for entry in self._files.values()]
            return StoreStats(
                **{name: self._counts[name] for name in names},
                entries=len(self._memory),
                disk_entries=len(sizes),
                memory_bytes=self._held,
                disk_bytes=sum(sizes),
            )


# -- helpers a caller may want -----------------------------------------------------------------------------------------


def generate_with_prefix(
    model: Any, store: PrefixStore, *, spec: str | None = None, namespace: str = "", extra: str = "", **inputs: Any
) -> Any:
    """``model.generate(**inputs)`` that takes from the store what it can and leaves there what it made.

    The prompt's cache is put before the first token is generated, and the whole conversation's after the last one.

    Args:
        spec: the cache to use; without it the store's own, or the only one in use there, or ``"full"``.
        namespace, extra: as for ``PrefixStore.put``.
        **inputs: what ``generate`` takes: ``input_ids`` of one row, ``max_new_tokens``, ``num_beams``, ...

    Returns:
        What ``generate`` returns.

    Raises:
        ValueError: several rows, padding, an encoder-decoder model, or model inputs beside ``input_ids``.
    """
    ids, rows = _checked_inputs(model, inputs)
    whose, regimes = identity.of(model), Regimes(compat.decoder_config(model.config))
    spec = spec or store.spec or store_spec(store, whose)
    fresh = KVCache.from_spec(model.config, spec)
    store._scan()
    store._remember(model)
    cache, matched = store._match(row(ids), Key(whose, fresh.spec, *texts(namespace, extra)), model, leave=1)
    if cache is None:
        cache = fresh
    name = compat.cache_argument(model.forward)
    ends = prefill_ends(regimes, matched, ids.shape[1])
    for start, end in zip([matched, *ends], ends, strict=False):
        _feed(model, ids[:, start:end], {name: cache})
    if ends:
        store._keep(ids[:, : ends[-1]], cache, whose, namespace, extra)
    if rows > 1:
        cache.batch_repeat_interleave(rows)
    output = model.generate(**inputs, **{name: cache})
    if rows == 1 and cache.get_seq_length():  # a model may have refused it (see ``compat.drops_caches_at``)
        sequence = output if isinstance(output, torch.Tensor) else output.sequences
        store._keep(sequence[:, : cache.get_seq_length()], cache, whose, namespace, extra)
    return output


def prefill_ends(regimes: Regimes, start: int, length: int) -> list[int]:
    """Where the forwards end that feed all but the last token of a prompt: each long enough to be rotated as the whole
    prompt would be; none, if only the whole prompt is."""
    last = length - 1
    if last <= start or not regimes.agree(last, length):
        return []
    return [*(end for end in range(start + CHUNK, last, CHUNK) if regimes.agree(end, length)), last]


def rewind(cache: KVCache, cached_ids: Any, new_ids: Any) -> int:
    """Make a chat's cache fit a prompt that is not just longer: chat templates rewrite earlier turns.

    Rolls ``cache`` back to the tokens that both share, at most to one token before the end of ``new_ids`` (``generate``
    needs one to feed). Where that rollback is not exact, or where a prompt of this length is rotated in another way
    (see ``regime``), the cache is reset, and the whole prompt has to be fed again.

    Args:
        cached_ids: the tokens that ``cache`` has seen, a list, ``[n]`` or ``[1, n]`` (one more is ignored).
        new_ids: the next prompt.

    Returns:
        The tokens that stay, 0 after a reset.

    Raises:
        ValueError: ``cached_ids`` are not those that the cache has seen, or a batch.
    """
    cached, new, seen = row(cached_ids), row(new_ids), check_cache(cache)
    if len(cached) not in (seen, seen + 1):
        raise ValueError(f"rewind: {len(cached)} cached ids for a cache that has seen {seen} tokens")
    keep = min(shared(cached[:seen], new), max(len(new) - 1, 0), cache._rotated.usable(cache._regimes.of(len(new))))
    if cache.can_rollback(seen - keep):
        cache.rollback(seen - keep)
    else:
        cache.reset()
    return cache.get_seq_length()


def content_hash(*tensors: torch.Tensor) -> str:
    """A hash of what is in these tensors (pixel values, audio features), for ``extra``."""
    digest = hashlib.sha256()
    for t in tensors:
        digest.update(f"{t.dtype} {tuple(t.shape)};".encode())
        digest.update(_bytes(t))
    return digest.hexdigest()


# -- parts -------------------------------------------------------------------------------------------------------------


def chain(key: Key, tokens: torch.Tensor) -> list[bytes]:
    """The names of a prefix's blocks: of none, of the first, of the first two, ..."""
    data, step = _bytes(tokens), BLOCK * 8
    links = [_digest(b"", repr(tuple(key)).encode())]
    for start in range(0, len(data) // step * step, step):
        links.append(_digest(links[-1], data[start : start + step]))
    return links


def _digest(before: bytes, data: Any) -> bytes:
    return hashlib.sha256(before + bytes(data)).digest()


def _bytes(t: torch.Tensor) -> memoryview:
    return t.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


def shared(first: torch.Tensor, second: torch.Tensor) -> int:
    """How many tokens two rows have in common at their start."""
    n = min(len(first), len(second))
    if not n or int(first[0]) != int(second[0]):
        return 0
    differ = (first[:n] != second[:n]).nonzero()
    return int(differ[0]) if len(differ) else n


def row(token_ids: Any) -> torch.Tensor:
    """One row of token ids, [n] int64 on the CPU."""
    ids = torch.as_tensor(token_ids).detach().to("cpu", torch.int64)
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1:
        raise ValueError(f"token ids of shape {tuple(ids.shape)}: give one row, [n] or [1, n]")
    return ids.contiguous()


def check_cache(cache: Any) -> int:
    """Tokens that a cache of one row has seen."""
    if not isinstance(cache, KVCache):
        raise ValueError(f"a {type(cache).__name__} cannot be reused: make the cache with hf_kvcache")
    if cache.batch_size not in (-1, 1):
        raise ValueError(f"a cache of batch {cache.batch_size} cannot be reused: batch_select_indices() one row of it")
    return cache.get_seq_length()


def rebind(cache: KVCache, source: Any) -> None:
    """Let a cache ask this model which attention runs, not the one that made it; their weights are the same."""
    cache._source = identity.config_of(source)
    cache.config = compat.decoder_config(cache._source)
    cache._made = identity.mark(cache._source)
    for layer in cache.layers:
        if isinstance(layer, KVLayer):
            layer.config = cache.config


def canonical(source: Any, pairs: set[tuple[str, str]], spec: str | None) -> str | None:
    """A spec as caches name themselves."""
    if spec is None or source is None or spec in {pair[1] for pair in pairs}:
        return spec
    return KVCache.from_spec(identity.config_of(source), spec).spec


def texts(namespace: str, extra: str) -> tuple[str, str]:
    for name, value in (("namespace", namespace), ("extra", extra)):
        if not isinstance(value, str):
            raise ValueError(f"{name}={value!r} is not a string")
    return namespace, extra


def store_spec(store: PrefixStore, model: str) -> str:
    """The spec that a store holds this model's caches in, "full" if there is none yet."""
    with store._lock:
        found = {entry.key.spec for entries in store._index.values() for entry in entries if entry.key.model == model}
    if len(found) > 1:
        raise ValueError(f"the store holds caches of the specs {', '.join(sorted(found))}: pass spec=")
    return found.pop() if found else "full"


def storages(cache: KVCache) -> Iterator[tuple[int, int]]:
    """(address, bytes) of every storage that a cache reaches, each once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(cache.layers)}
    return iter(found.items())


def private_directory(path: Path) -> Path:
    """A folder that is the user's alone to write to; made if missing. Leftovers of killed writers are removed."""
    if path.is_symlink():
        raise ValueError(f"directory {path} is a symbolic link: give the folder itself")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = path.stat()
    if hasattr(os, "geteuid") and about.st_uid != os.geteuid():
        raise ValueError(f"directory {path} belongs to another user: give a folder of your own")
    if stat.S_IMODE(about.st_mode) & 0o022:
        raise ValueError(f"directory {path} can be written to by others: chmod 700 it, or give another one")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"directory {path} cannot be written to")
    for item in path.glob(f".*{SUFFIX}.*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - item.lstat().st_mtime > STALE:
                item.unlink()
    return path


def _used(path: Path | None) -> int:
    try:
        return path.stat().st_mtime_ns if path is not None else 0
    except FileNotFoundError:
        return 0


def _checked_inputs(model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """The prompt [1, n] and the number of rows that ``generate`` will make of it."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[0] != 1 or not ids.shape[1]:
        raise ValueError("generate_with_prefix takes input_ids of one row, [1, n]: call it once per row")
    if mask is not None and not bool(mask.all()):
        raise ValueError("generate_with_prefix: attention_mask hides tokens: leave the padding out")
    if model.config.is_encoder_decoder:
        raise ValueError(f"generate_with_prefix does not take encoder-decoder models ({type(model).__name__})")
    others = [k for k, v in inputs.items() if isinstance(v, torch.Tensor) and k not in ("input_ids", "attention_mask")]
    others += [name for name in ("cache", "past_key_values") if inputs.get(name) is not None]
    if others:
        raise ValueError(
            f"generate_with_prefix does not take {', '.join(others)}: use store.match and store.put, with what the "
            "states depend on as extra=content_hash(...)"
        )
    settings = inputs.get("generation_config") or model.generation_config
    counts = (inputs.get(name) or getattr(settings, name, None) for name in ("num_beams", "num_return_sequences"))
    return ids, max(1, *(count or 1 for count in counts))


def device_of(source: Any) -> Any:
    """Where a model computes, ``None`` for a config, and for a model that is spread over several devices."""
    spread = not isinstance(source, torch.nn.Module) or getattr(source, "hf_device_map", None)
    return None if spread else source.device


def fits(cache: KVCache | None, source: Any) -> bool:
    """Whether a cache lies where the model computes; the dtype is part of the key."""
    device = device_of(source)
    first = next((layer for layer in cache.layers if isinstance(layer, KVLayer)), None) if cache is not None else None
    return device is None or first is None or first.device == device


@torch.no_grad()
def _feed(model: Any, ids: torch.Tensor, cache: dict[str, Any]) -> None:
    few = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    model(ids, **cache, **few, use_cache=True)
