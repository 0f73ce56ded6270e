"""A cache in a file: the same bits come back, and nothing else ever does."""

from __future__ import annotations

import copy
import errno
import gc
import json
import os
import stat
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import build, feed, greedy, llama, llama_config, prompt, states
from test_caches import gemma3_config, mistral_config, qwen3_next_config, reachable_bytes

from hf_kvcache import KVCache, SinkWindowCache, snapshot

SPECS = [
    "full",
    "int8",
    "fp8",
    "fp8_e5m2",
    "int4(residual=8,group=8)",
    "int2(residual=0,group=8)",
    "k4v2(residual=8,group=8)",
    "k8v4(residual=4,group=8,sinks=2)",
    "sink(2,12)",
    "int8+sink(2,12)",
    "int4(residual=8,group=8)+sink(2,12)",
]
every_spec = pytest.mark.parametrize("spec", SPECS)


def filled(spec, n=40, batch=2, dtype=torch.float32):
    cache = KVCache.from_spec(llama_config(), spec)
    for layer in range(2):
        cache.update(*states(n, batch, dtype=dtype), layer)
    return cache


def saved(path, spec="int8", **options):
    cache = filled(spec, **options)
    cache.save(path)
    return cache


# -- round trips -------------------------------------------------------------------------------------------------------


@every_spec
@pytest.mark.parametrize("attention", ["sdpa", "kvcache"])
def test_b46_a_loaded_cache_continues_with_the_same_bits(spec, attention, tmp_path):
    """Before anything is sealed and after; in the middle of a ring; once more after the next save."""
    model, new = llama(attention), prompt(9, 2, seed=2)
    for n in (1, 40):
        cache = KVCache.from_spec(model.config, spec)
        feed(model, prompt(n, 2), cache)
        cache.save(tmp_path / "cache")
        loaded = KVCache.load(tmp_path / "cache", model.config)
        assert loaded.spec == cache.spec and loaded.stats() == cache.stats()
        for mine, theirs in zip(cache, loaded, strict=True):
            assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
        expected = feed(model, new, cache, 3)
        assert torch.equal(feed(model, new, loaded, 3), expected)
        loaded.save(tmp_path / "cache")  # over the file that is mapped
        again = KVCache.load(tmp_path / "cache", model.config)
        assert torch.equal(feed(model, new, again, 2), feed(model, new, loaded, 2))


@pytest.mark.parametrize("spec", ["full", "int8", "int4(residual=8,group=8)", "int8+sink(2,12)"])
def test_b46_in_the_middle_of_a_generation(spec, tmp_path):
    model, ids = llama("kvcache"), prompt(30)
    cache = KVCache.from_spec(model.config, spec)
    half = greedy(model, ids, cache, 10)
    cache.save(tmp_path / "cache", half[:, :-1])
    rest = greedy(model, half, cache, 10)
    loaded = KVCache.load(tmp_path / "cache", model.config)
    assert torch.equal(greedy(model, half, loaded, 10), rest)
    assert torch.equal(snapshot.read(tmp_path / "cache").token_ids, half[:, :-1])


@pytest.mark.parametrize("config", [gemma3_config, mistral_config, qwen3_next_config])
@pytest.mark.parametrize("n", [3, 20])
def test_native_windows_and_recurrent_states(config, n, tmp_path):
    model, ids, new = build(config()), prompt(n), prompt(9, seed=2)
    cache = KVCache(model.config) if config is mistral_config else KVCache(model.config, "int8")
    feed(model, ids, cache)
    cache.save(tmp_path / "cache")
    loaded = KVCache.load(tmp_path / "cache", model.config)
    expected = feed(model, new, cache, 1)
    assert torch.equal(feed(model, new, loaded, 1), expected)


@given(
    st.sampled_from(SPECS), st.integers(0, 45), st.integers(1, 3), st.integers(1, 12),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)  # fmt: skip
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shape_and_length(tmp_path, spec, n, batch, width, dtype):
    cache = KVCache.from_spec(llama_config(), spec)
    if n:
        for layer in range(2):
            cache.update(
                torch.randn(batch, 3, n, width + 3, dtype=dtype), torch.randn(batch, 3, n, width, dtype=dtype), layer
            )
    cache.save(tmp_path / "cache")
    loaded = KVCache.load(tmp_path / "cache", llama_config())
    assert loaded.stats() == cache.stats() and loaded.get_mask_sizes(3) == cache.get_mask_sizes(3)
    for mine, theirs in zip(cache.layers, loaded.layers, strict=True):
        assert (mine.keys is None) == (theirs.keys is None)
        if mine.keys is not None:
            assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)


@every_spec
def test_what_is_done_to_a_loaded_cache_stays_out_of_the_file(spec, tmp_path):
    saved(tmp_path / "cache", spec)
    before = (tmp_path / "cache").read_bytes()
    loaded, twin = (KVCache.load(tmp_path / "cache", llama_config()) for _ in range(2))
    old = [layer.keys.clone() for layer in twin.layers]
    for layer in range(2):
        loaded.update(*states(25), layer)
    loaded.reorder_cache(torch.tensor([1, 1]))
    loaded.fork().batch_repeat_interleave(2)
    assert (tmp_path / "cache").read_bytes() == before
    assert all(torch.equal(a, layer.keys) for a, layer in zip(old, twin.layers, strict=True))
    KVCache.load(tmp_path / "cache", llama_config())


def test_forks_and_repeated_batches_are_saved_whole(tmp_path):
    cache = filled("int8", 300, 1)
    cache.batch_repeat_interleave(3)
    for layer in range(2):
        cache.update(*states(4, 3), layer)
    cache.fork().save(tmp_path / "cache")
    loaded = KVCache.load(tmp_path / "cache", llama_config())
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(cache.layers, loaded.layers, strict=True))
    assert loaded.batch_size == 3


def test_the_bytes_are_those_of_the_file_and_count(tmp_path):
    cache = saved(tmp_path / "cache", "int8", n=2000)
    assert (tmp_path / "cache").stat().st_size < cache.nbytes + 4096  # codes, not decoded values
    loaded = KVCache.load(tmp_path / "cache", llama_config())
    total = sum(size for parts in loaded.memory().values() for size in parts.values())
    assert loaded.nbytes == total == reachable_bytes(loaded) == cache.nbytes
    twin = copy.deepcopy(loaded)
    del loaded
    gc.collect()
    assert torch.equal(twin.layers[0].keys, cache.layers[0].keys)


def test_anyone_can_read_the_file(tmp_path):
    """It is a safetensors file, and it holds no pickle."""
    from safetensors import safe_open

    cache = filled("int8")
    cache.save(tmp_path / "cache", torch.arange(80).view(2, 40))
    with safe_open(tmp_path / "cache", "pt") as file:
        about = file.metadata()
        assert about["format"] == "hf_kvcache snapshot" and about["spec"] == "int8" and about["tokens_seen"] == "40"
        assert torch.equal(file.get_tensor("token_ids"), torch.arange(80).view(2, 40))
        codes = file.get_tensor("layers.1.sealed.keys.codes")
        assert torch.equal(codes, cache.layers[1].sealed.keys.view().codes)
    assert snapshot.read(tmp_path / "cache").tensors["token_ids"].data_ptr() % 8 == 0


def test_b110_spec_and_device_can_be_asked_for(tmp_path):
    SinkWindowCache(llama_config(), 2, 12, storage="int8").save(tmp_path / "empty")
    loaded = SinkWindowCache.load(tmp_path / "empty", llama_config(), spec="sink(2,12)+int8", device="cpu")
    assert type(loaded) is KVCache and loaded.spec == "int8+sink(2,12)" and loaded.get_seq_length() == 0
    saved(tmp_path / "cache")
    meta = KVCache.load(tmp_path / "cache", llama_config(), device="meta")
    assert meta.layers[0].device.type == "meta" and meta.layers[0].sealed.keys.view().codes.is_meta


# -- faults ------------------------------------------------------------------------------------------------------------


def test_another_model_is_refused(tmp_path):
    saved(tmp_path / "cache")
    for other in (llama_config(rope_theta=5.0), llama_config(3), llama_config(vocab_size=98)):
        with pytest.raises(ValueError, match="another model than LlamaConfig"):
            KVCache.load(tmp_path / "cache", other)
    named = llama_config()
    named._name_or_path = "elsewhere"
    with pytest.raises(ValueError, match="another model than LlamaConfig .elsewhere."):
        KVCache.load(tmp_path / "cache", named)
    KVCache.load(tmp_path / "cache", llama_config(use_cache=False, attn_implementation="eager"))  # the same states


def test_another_spec_is_refused(tmp_path):
    saved(tmp_path / "cache")
    with pytest.raises(ValueError, match="of spec 'int8', not 'int4'"):
        KVCache.load(tmp_path / "cache", llama_config(), spec="int4")


def test_token_ids_have_to_be_as_many(tmp_path):
    with pytest.raises(ValueError, match=r"token_ids of shape \(39,\).*40 tokens"):
        filled("int8").save(tmp_path / "cache", list(range(39)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("keep", [0, 3, 8, 100, 0.5, -1])
def test_a_truncated_file_is_refused(keep, tmp_path):
    saved(tmp_path / "cache")
    whole = (tmp_path / "cache").read_bytes()
    (tmp_path / "cache").write_bytes(whole[: int(len(whole) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(ValueError, match="cut off|empty|damaged"):
        KVCache.load(tmp_path / "cache", llama_config())
    (tmp_path / "cache").write_bytes(whole + b"x")
    with pytest.raises(ValueError, match="1 bytes more"):
        KVCache.load(tmp_path / "cache", llama_config())


def test_any_flipped_bit_is_noticed(tmp_path):
    saved(tmp_path / "cache", n=3, batch=1)
    whole = (tmp_path / "cache").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for at in [*range(0, header, 7), *range(header, len(whole), 11), len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        (tmp_path / "cache").write_bytes(damaged)
        if whole[at : at + 1] == b" " and at < header:
            continue  # padding
        with pytest.raises(ValueError, match="cache"):
            KVCache.load(tmp_path / "cache", llama_config())


def test_foreign_files_are_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(3)}, tmp_path / "plain")
    torch.save({"a": 1}, tmp_path / "pickle")
    (tmp_path / "text").write_text("hello" * 100)
    for name in ("plain", "pickle", "text"):
        with pytest.raises(ValueError, match=f"{name} is not a snapshot"):
            KVCache.load(tmp_path / name, llama_config())
    with pytest.raises(FileNotFoundError):
        KVCache.load(tmp_path / "missing", llama_config())
    with pytest.raises(ValueError, match="not a file"):
        KVCache.load(tmp_path, llama_config()) if os.name != "posix" else snapshot._open(tmp_path)


def test_a_later_version_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "VERSION", "0")
    saved(tmp_path / "cache")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="of version 0, this library reads version 4"):
        KVCache.load(tmp_path / "cache", llama_config())


def test_tensors_that_do_not_fit_are_refused(tmp_path):
    """Right checksums, wrong content: whatever does not fit the spec is named before it is used."""
    saved(tmp_path / "cache")
    good = snapshot.read(tmp_path / "cache")
    name = "layers.1.sealed.values.scale"
    for changed, words in (
        ({**good.tensors, name: good.tensors[name][:, :, :-1]}, "sealed.values.scale is .* should be"),
        ({**good.tensors, name: good.tensors[name].double()}, "float64"),
        ({k: v for k, v in good.tensors.items() if k != name}, "sealed.values.scale"),
    ):
        snapshot.write(tmp_path / "wrong", changed, good.metadata)
        with pytest.raises(ValueError, match=words):
            KVCache.load(tmp_path / "wrong", llama_config())
    snapshot.write(tmp_path / "wrong", good.tensors, {**good.metadata, "layers": json.dumps([{"kind": "X"}] * 2)})
    with pytest.raises(ValueError, match="a X was saved, the model has a KVLayer"):
        KVCache.load(tmp_path / "wrong", llama_config())


WRONG = ["", "x", "-1", "1e9", "null", "[]", "{}", "[1]", '"x"', "true", "NaN", None, 3, [1], {"a": 1}]


@pytest.mark.parametrize("spec", ["int8", "int4(residual=8,group=8)+sink(2,12)", "knorm(budget=16,sinks=2,recent=4)"])
def test_metadata_that_is_missing_or_wrong_is_refused(spec, tmp_path):
    """Every key left out, and every value by every wrong one, under checksums that are right."""
    model = llama()
    filled(spec, n=20, batch=1).save(tmp_path / "cache", model=model)
    good = snapshot.read(tmp_path / "cache")
    keys = set(good.metadata) - {"checksums"}  # which are made anew
    assert keys == {"format", "version", *snapshot.FACTS}
    for key in sorted(keys):
        for value in ("missing", *WRONG):
            metadata = {**good.metadata, key: value}
            if value == "missing":
                del metadata[key]
            snapshot.write(tmp_path / "wrong", good.tensors, metadata)
            with pytest.raises(ValueError, match=r"^[^\n]*wrong[^\n]*$"):
                KVCache.load(tmp_path / "wrong", model)
    snapshot.write(tmp_path / "wrong", good.tensors, {**good.metadata, "note": "more is allowed"})
    assert KVCache.load(tmp_path / "wrong", model).get_seq_length() == 20


def altered(value):
    """Every part of a JSON value left out, or replaced."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        for wrong in ("x", None, -1, 1.5, [], {}):
            if wrong != item:
                copied = copy.deepcopy(value)
                copied[key] = wrong
                yield copied
        rest = copy.deepcopy(value)
        del rest[key]
        yield rest
        for inner in altered(item):
            copied = copy.deepcopy(value)
            copied[key] = inner
            yield copied


@pytest.mark.parametrize("spec", ["int8", "int4(residual=8,group=8)", "sink(2,12)"])
def test_layers_that_are_not_as_they_were_written_are_refused(spec, tmp_path):
    model = llama()  # named, which costs less than to look for it each time
    filled(spec, n=20).save(tmp_path / "cache", model=model)
    good = snapshot.read(tmp_path / "cache")
    layers, tried = json.loads(good.metadata["layers"]), 0
    for wrong in altered(layers[:1]):
        metadata = {**good.metadata, "layers": json.dumps(wrong + layers[1:])}
        snapshot.write(tmp_path / "wrong", good.tensors, metadata)
        with pytest.raises(ValueError, match=r"^[^\n]*wrong[^\n]*$"):
            KVCache.load(tmp_path / "wrong", model)
        tried += 1
    assert tried > 90


@pytest.mark.parametrize("config", [gemma3_config, qwen3_next_config])
def test_stock_layers_that_are_not_as_they_were_written_are_refused(config, tmp_path):
    """Fields of another type: also where these are the attributes of a layer of transformers."""
    model = build(config())
    cache = KVCache(model.config)
    feed(model, prompt(20), cache)
    cache.save(tmp_path / "cache")
    good = snapshot.read(tmp_path / "cache")
    for key in json.loads(good.metadata["layers"])[0]["fields"]:
        for wrong in ("x", 1.5, {"list": ["x"]}, {"dict": [["x", 1]]}, {"dtype": "nn"}, {"tensor": "none"}):
            layers = json.loads(good.metadata["layers"])
            if layers[0]["fields"][key] == {"list": []} and "list" in wrong:
                continue
            layers[0]["fields"][key] = wrong
            snapshot.write(tmp_path / "wrong", good.tensors, {**good.metadata, "layers": json.dumps(layers)})
            with pytest.raises(ValueError, match=r"^[^\n]*wrong: layer 0[^\n]*$"):
                KVCache.load(tmp_path / "wrong", model)


PLACE = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
NO_PLACES = [
    {}, None, 3, {"dtype": "F32"}, PLACE | {"dtype": "F9"}, PLACE | {"shape": 3}, PLACE | {"shape": [3.0]},
    PLACE | {"shape": [-3]}, PLACE | {"shape": [4]}, PLACE | {"data_offsets": [0]}, PLACE | {"data_offsets": ["0", 12]},
]  # fmt: skip


@pytest.mark.parametrize("entry", NO_PLACES)
def test_places_that_are_none_are_refused(entry, tmp_path):
    """In the header of a file with right checksums."""
    basics = {"format": snapshot.FORMAT, "version": snapshot.VERSION}
    snapshot.write(tmp_path / "cache", {"a": torch.zeros(3)}, dict.fromkeys(snapshot.FACTS, "") | basics)
    assert snapshot.read(tmp_path / "cache").tensors["a"].shape == (3,)
    whole = (tmp_path / "cache").read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    assert header["a"] == PLACE
    header["a"] = entry
    metadata = header.pop("__metadata__")
    del metadata["checksum"]
    text = json.dumps({"__metadata__": {**metadata, "checksum": snapshot._checksum(metadata, header)}, **header})
    (tmp_path / "cache").write_bytes(len(text).to_bytes(8, "little") + text.encode() + whole[8 + size :])
    with pytest.raises(ValueError, match=r"^[^\n]*cache is (damaged|not a snapshot|cut off)[^\n]*$"):
        snapshot.read(tmp_path / "cache")


# -- a file that changes under us --------------------------------------------------------------------------------------

CHANGED = """
import os, sys
sys.path.insert(0, {tests!r})
import torch
from hf_kvcache import KVCache
from models import llama_config
loaded = KVCache.load({path!r}, llama_config())
before = [layer.keys.clone() for layer in loaded.layers]
with open({path!r}, "r+b") as file:
    size = os.fstat(file.fileno()).st_size
    if {how!r} == "overwritten":
        file.seek(0)
        file.write(b"x" * size)
    else:
        file.truncate(0)
assert all(torch.equal(a, layer.keys) for a, layer in zip(before, loaded.layers))
assert all(torch.equal(a, layer.keys) for a, layer in zip(before, loaded.fork().layers))
print("same")
"""


@pytest.mark.parametrize("how", ["overwritten", "truncated"])
def test_a_loaded_cache_does_not_follow_its_file(how, tmp_path):
    """In a process of its own, which a mapped file that is cut off would kill."""
    saved(tmp_path / "cache", "full", n=3000)
    code = CHANGED.format(tests=os.path.dirname(__file__), path=str(tmp_path / "cache"), how=how)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=120, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "same"), done.stderr


def test_a_file_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    saved(tmp_path / "cache", n=2000)
    places = snapshot._check_places

    def cut(path, *args):
        places(path, *args)
        os.truncate(path, 5000)

    monkeypatch.setattr(snapshot, "_check_places", cut)
    with pytest.raises(ValueError, match="cut off or damaged at .* became shorter while it was read"):
        KVCache.load(tmp_path / "cache", llama_config())


def test_only_what_is_wanted_is_read(tmp_path):
    """The tokens of a large file, and nothing of its damaged rest."""
    cache = filled("full", n=40, batch=1)
    cache.save(tmp_path / "cache", torch.arange(40))
    data = bytearray((tmp_path / "cache").read_bytes())
    data[-1] ^= 1
    (tmp_path / "cache").write_bytes(data)
    found = snapshot.read(tmp_path / "cache", only=("token_ids",))
    assert list(found.tensors) == ["token_ids"] and torch.equal(found.token_ids, torch.arange(40))
    with pytest.raises(ValueError, match="is damaged"):
        snapshot.read(tmp_path / "cache")


def test_a_folder_that_cannot_be_flushed(tmp_path, monkeypatch):
    """On other systems; the file is whole and in its place, so nothing has failed."""
    opened = os.open

    def no_folders(path, *args):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args)

    monkeypatch.setattr(os, "open", no_folders)
    saved(tmp_path / "first")
    monkeypatch.undo()
    flushed = os.fsync

    def only_files(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        flushed(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    saved(tmp_path / "second")
    for name in ("first", "second"):
        assert KVCache.load(tmp_path / name, llama_config()).get_seq_length() == 40


def test_symbolic_links_are_refused(tmp_path):
    cache = saved(tmp_path / "cache")
    before = (tmp_path / "cache").read_bytes()
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    with pytest.raises(ValueError, match="link is a symbolic link"):
        cache.save(tmp_path / "link")
    with pytest.raises(ValueError, match="link is a symbolic link"):
        KVCache.load(tmp_path / "link", llama_config())
    assert (tmp_path / "link").is_symlink() and (tmp_path / "cache").read_bytes() == before


def test_the_file_is_private(tmp_path):
    old = os.umask(0)
    try:
        saved(tmp_path / "cache")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o600


class FullDisk:
    """A file that takes ``room`` bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *args):
        return self.file.__exit__(*args)


@pytest.mark.parametrize("room", [0, 3000, 8000])
def test_a_full_disk_leaves_the_old_file(room, tmp_path, monkeypatch):
    cache = saved(tmp_path / "cache")
    before, fdopen = (tmp_path / "cache").read_bytes(), os.fdopen
    assert len(before) > 8000
    monkeypatch.setattr(os, "fdopen", lambda *args: FullDisk(fdopen(*args), room))
    with pytest.raises(OSError, match="No space left"):
        cache.save(tmp_path / "cache")
    with pytest.raises(OSError, match="No space left"):
        cache.save(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert (tmp_path / "cache").read_bytes() == before


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    with pytest.raises(OSError, match="missing"):
        filled("int8").save(tmp_path / "missing" / "cache")

    def denied(path, *args):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(PermissionError, match="cache"):
        filled("int8").save(tmp_path / "cache")
    assert not list(tmp_path.iterdir())


KILLED = """
import os, sys
sys.path.insert(0, {tests!r})
import torch
from hf_kvcache import KVCache
from models import llama_config, states
cache = KVCache.from_spec(llama_config(), "int8")
for layer in range(2):
    cache.update(*states(7), layer)
os.replace = lambda *args: os.kill(os.getpid(), 9)
cache.save({path!r})
"""


def test_killed_between_write_and_rename(tmp_path):
    saved(tmp_path / "cache")
    before = (tmp_path / "cache").read_bytes()
    code = KILLED.format(tests=os.path.dirname(__file__), path=str(tmp_path / "cache"))
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120)
    assert done.returncode == -9
    left = [path.name for path in tmp_path.iterdir() if path.name != "cache"]
    assert (tmp_path / "cache").read_bytes() == before and len(left) == 1 and left[0].endswith(".tmp")
    assert KVCache.load(tmp_path / "cache", llama_config()).get_seq_length() == 40


FORGED = [
    "knorm(budget=16,sinks=2,recent=4)",
    "knorm(budget=60,sinks=2,recent=4)",
    "keydiff(budget=16,sinks=2,recent=4)",
    "expected(budget=16,sinks=2,recent=4)",
    "int8+random(budget=8,sinks=1,recent=3,adaptive)",
    "int4(group=4,residual=4)+knorm(budget=16,sinks=2,recent=3)",
    "sink(2,6)",
    "int4(group=4,residual=4)+sink(2,12)",
]


def leaves(value, path=()):
    """Every number in what was packed, and where it is."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for key, item in enumerate(value):
            yield from leaves(item, (*path, key))
    elif type(value) is int:
        yield path


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("spec", FORGED)
def test_forged_fields_of_evicted_layers_are_refused(spec, padded, tmp_path):
    """Every number one more and one less, every tensor cut, longer, or of another dtype, under right checksums."""
    model, ids, mask = llama("kvcache"), prompt(21, 2), torch.ones(2, 21, dtype=torch.long)
    mask[0, : 3 * padded] = 0
    cache = KVCache.from_spec(model.config, spec)
    for a, b in ((0, 20), (20, 21)):
        feed(model, ids[:, a:b], cache, attention_mask=mask[:, :b])
    cache.save(tmp_path / "cache", model=model)
    good, count = snapshot.read(tmp_path / "cache"), 0
    new = dict(attention_mask=torch.cat([mask, mask[:, -1:]], 1))
    right = feed(model, ids[:, :1], cache, **new)

    def refused(tensors, metadata, what):
        """Or no other cache."""
        nonlocal count
        snapshot.write(tmp_path / "wrong", tensors, metadata)
        try:
            loaded = KVCache.load(tmp_path / "wrong", model)
        except ValueError as error:
            assert "\n" not in str(error)
            count += 1
        else:
            assert torch.equal(feed(model, ids[:, :1], loaded, **new), right), what

    layers = json.loads(good.metadata["layers"])
    for path in leaves(layers[1]):
        for step in (-1, 1):
            changed = copy.deepcopy(layers)
            *way, last = path
            at = changed[1]
            for key in way:
                at = at[key]
            at[last] += step
            if not ("tail" in str(layers[1]) and "used" in str(at)):  # of two containers it cannot be known
                refused(good.tensors, {**good.metadata, "layers": json.dumps(changed)}, (path, step))
    for name, t in good.tensors.items():
        if not name.startswith("layers.1."):
            continue
        others = [t.narrow(axis, 0, t.shape[axis] - 1) for axis in range(t.dim()) if t.shape[axis] > 0]
        others += [torch.cat([t, t], axis) for axis in range(t.dim()) if t.shape[axis] > 0]
        others += [t.double() if t.dtype == torch.float32 else t.float()]
        if "position" in name:
            others += [t + 100, t.clone().fill_(3), t - 100]
        for other in others:
            refused(
                {**good.tensors, name: other.contiguous()}, good.metadata, (name, t.shape, other.shape, other.dtype)
            )
    assert count > 20
