"""How does a CPU read the stored form without forty operators per layer? One call into ``cpu_decode.c``.

torch casts codes to float32 in one operator, multiplies in the next, and so on: per layer and step of decode that is
dozens of operators, and each writes what the next one reads again. The C kernel reads every stored byte once and keeps
the rest in registers and L1:

    s_j = scaling * ks_j * (q . kc_j)     p_j = exp(s_j - m)     o = sum_j (p_j * vs_j) vc_j / sum_j p_j

with kc_j, vc_j the codes and ks_j, vs_j the scales of token j; q is rotated where the keys are, o is turned back where
the values are (``codecs``); steps and offsets of 4 and 2 bits are put in while a tile is in L1 (``lowbit``). All G * Q
query rows of a KV head are served by one pass (FlashAttention, Dao et al., arXiv:2205.14135); the sequence is split
over the threads of torch's own OpenMP pool, and partial results are joined by log-sum-exp (Flash-Decoding, Dao et al.,
2023). The order of additions depends on the number of threads, and on nothing else. ``mass``, what importance eviction
wants to know of each key, takes its own exponentials of scores that were kept; without it nothing is.

``append`` is the writing side: keys and values of one token, encoded into their slots, bit for bit as ``encode``.

The library is optional (``cpu_build``). ``status()`` says what is used; ``register(compiled=False)``, or
``HF_KVCACHE_COMPILED=0`` in the environment, turns it off, and torch does the work.
"""

from __future__ import annotations

import ctypes
import os
import struct
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .codecs import NEVER, Codec, PerToken, fit, rotation, turn_in
from .part import Part

FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
EIGHT_BITS = {"int8": 3, "fp8_e4m3": 4, "fp8_e5m2": 5}
WRITES = {"full", *EIGHT_BITS}  # codecs that ``append`` knows
GROUPED = {"channel": 6, "token": 7}
MAX_QUERIES = 16
MAX_WIDTH = 1024
ALONE = 1 << 21  # products below which one thread is faster than waking others
PIECE = 256  # fewest tokens in a split

SIDE = struct.Struct("13q")  # Side, Part, Call and Append of cpu_decode.c
TOKENS = struct.Struct("3q")
CALL = struct.Struct("28q2d")
APPEND = struct.Struct("12q2d12q2d")


class Library(NamedTuple):
    """The compiled kernel: its functions, the level of instructions they use, and the address of torch's pool."""

    attend: Any
    append: Any
    level: str
    parallel: int
    path: Path


wanted = os.environ.get("HF_KVCACHE_COMPILED", "1") != "0"


def use(compiled: bool) -> None:
    """Turn the kernel on or off; ``register(compiled=...)`` is the public name."""
    global wanted
    wanted = compiled


def status() -> str:
    """One line: which kernel works, or why none does."""
    from .cpu_build import find  # not above: ``python -m hf_kvcache.cpu_build`` would load it twice

    if not wanted:
        return "compiled kernel: turned off"
    found = find()
    if found is None:
        return "compiled kernel: not built (python -m hf_kvcache.cpu_build does); torch is used"
    library = load()
    if library is None:
        return f"compiled kernel: {found} was built from another version; build it again; torch is used"
    threads = "threads of torch" if library.parallel else "one thread"
    return f"compiled kernel: {library.path}, {library.level}, {threads}"


@cache
def load() -> Library | None:
    """The library, opened once, at the best level of this machine.

    ``None`` where it is not built, or was built from another source.
    """
    from .cpu_build import find

    path = find()
    found = {} if path is None else levels(path)
    return list(found.values())[-1] if found else None


def levels(path: Path) -> dict[str, Library]:
    """The levels in a library that this machine can run, simplest first; none where it is of another source."""
    from .cpu_build import LEVELS, source_hash

    library = ctypes.CDLL(str(path))
    if (ctypes.c_char * 65).in_dll(library, "source_base").value.decode() != source_hash():
        return {}
    found = {}
    for index, name in enumerate(LEVELS):
        if hasattr(library, f"attend_{name}") and library.has_base(index):
            attend, append = getattr(library, f"attend_{name}"), getattr(library, f"append_{name}")
            attend.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
            append.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64]
            found[name] = Library(attend, append, name, _pool(), path)
    return found


def _pool() -> int:
    """The address of ``GOMP_parallel`` in the OpenMP library that torch itself runs on, 0 if there is none.

    Looked up through torch's library: a second pool, whatever it is called, would compete with torch's threads.
    """
    name = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(name), mode=os.RTLD_NOLOAD | os.RTLD_NOW).GOMP_parallel
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


# -- reading -------------------------------------------------------------------------------------------------


def supports(
    query: torch.Tensor,
    parts: list[Part],
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> bool:
    """Whether ``attend_compiled`` takes these arguments.

    It does not take a prefill (more than 16 queries), gradients, heads wider than 1024, codecs that it does not know,
    rows that are not contiguous, and anything but plain tensors on the CPU.
    """
    return load() is not None and _describe(query, parts, mask, s_aux) is not None


def attend_compiled(
    query: torch.Tensor,
    parts: list[Part],
    scaling: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    mass: torch.Tensor | None = None,
) -> torch.Tensor:
    """``attend_torch`` in C, for decode. Same arguments, same result; ask ``supports`` first."""
    out = try_attend(query, parts, scaling, mask, softcap, s_aux, mass)
    assert out is not None, "attend_compiled: ask supports() first"
    return out


def try_attend(
    query: torch.Tensor,
    parts: list[Part],
    scaling: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    mass: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """``attend_compiled``, or ``None`` where it does not support the arguments."""
    library = load() if wanted and not torch.compiler.is_compiling() else None
    described = None if library is None else _describe(query, parts, mask, s_aux)
    if library is None or described is None:
        return None
    sides, turned, tokens, aux = described
    batch, query_heads, queries, width = query.shape
    heads, value_width = parts[0].keys[0].shape[1], parts[0].values[0].shape[-1]
    if mass is not None:
        assert mass.shape == (batch, heads, tokens) and mass.dtype is torch.float32, (mass.shape, mass.dtype)
        assert mass.device.type == "cpu" and mass.is_contiguous(), (mass.device, mass.stride())
    if mask is not None and mask.dtype not in (torch.bool, torch.float32):
        mask = mask.float()
    dtype = torch.bfloat16 if query.dtype is torch.bfloat16 else torch.float32
    out = torch.empty((batch, queries, query_heads, value_width), dtype=dtype)
    threads, splits = _share(batch * heads, tokens, (width + value_width) * (query_heads // heads * queries + 3))
    call = CALL.pack(
        query.data_ptr(), FLOATS[query.dtype], *query.stride()[:3],
        out.data_ptr(), FLOATS[dtype],
        *_mask_fields(mask, query_heads),
        0 if aux is None else aux.data_ptr(), 0 if mass is None else mass.data_ptr(),
        _turns(width)[0] if turned[0] else 0, _turns(value_width)[1] if turned[1] else 0,
        batch, heads, query_heads // heads, queries, width, value_width,
        len(parts), splits, threads, library.parallel,
        scaling, softcap or 0.0,
    )  # fmt: skip
    if library.attend(call, sides):
        raise MemoryError("attend_compiled: no memory for the partial results")
    out = out.transpose(1, 2)
    if dtype is query.dtype:
        return out
    return out.to(query.dtype) if all(part.value_codec.lossless for part in parts) else fit(out, query.dtype)


class Described(NamedTuple):
    """The parts as C reads them, whether any keys and any values are rotated, all tokens, and ``s_aux`` as float32."""

    parts: bytes
    turned: list[bool]
    tokens: int
    s_aux: torch.Tensor | None


def _describe(
    query: torch.Tensor, parts: list[Part], mask: torch.Tensor | None, s_aux: torch.Tensor | None
) -> Described | None:
    """``None``: not supported. Looks at no values."""
    batch, query_heads, queries, width = query.shape
    heads, value_width = parts[0].keys[0].shape[1], parts[0].values[0].shape[-1]
    if not 0 < queries <= MAX_QUERIES or query_heads % heads or not _plain(query) or query.dtype not in FLOATS:
        return None
    if query.requires_grad and torch.is_grad_enabled():
        return None
    pieces, turned, tokens = [], [False, False], 0
    for part in parts:
        n = part.tokens
        where = [0 if t is None else t.data_ptr() for t in (part.starts, part.sizes)]
        pieces.append(TOKENS.pack(n, *where))
        for side, (codec, state) in enumerate(((part.key_codec, part.keys), (part.value_codec, part.values))):
            fields = _side_fields(codec, state, (batch, heads, n, value_width if side else width))
            if fields is None:
                return None
            turned[side] |= bool(fields[-1])
            pieces.append(SIDE.pack(*fields))
        tokens += n
    if mask is not None and not _mask_fits(mask, (batch, query_heads, queries, tokens), heads):
        return None
    if s_aux is not None:
        if s_aux.device.type != "cpu" or s_aux.shape != (query_heads,):
            return None
        s_aux = s_aux.detach().float().contiguous()
    return Described(b"".join(pieces), turned, tokens, s_aux)


def _plain(t: torch.Tensor) -> bool:
    """A real tensor on the CPU with contiguous rows: neither traced nor faked."""
    return type(t) is torch.Tensor and t.device.type == "cpu" and (t.stride(-1) == 1 or t.shape[-1] == 1)


def _side_fields(codec: Codec, state: Any, shape: tuple[int, int, int, int]) -> tuple[int, ...] | None:
    """The fields of Side; ``None`` for what the kernel cannot read."""
    grouped, bits = GROUPED.get(getattr(codec, "axis", "")), getattr(codec, "bits", 0)
    if codec.name not in WRITES and (grouped is None or codec.name != f"int{bits}"):
        return None  # somebody else's codec: its state is its own business
    codes, width = state[0], shape[3]
    strides = codes.stride()
    if type(codes) is not torch.Tensor or codes.device.type != "cpu" or not 0 < width <= MAX_WIDTH:
        return None
    assert codes.shape[:2] == shape[:2] and codes.shape[-1] == width, (codes.shape, shape)
    if codec.name == "full":
        if codes.dtype not in FLOATS or strides[3] != 1 and width > 1:
            return None
        return FLOATS[codes.dtype], codes.data_ptr(), *strides[:3], 0, 0, 0, 0, 0, 0, 0, 0
    scale, turned = state[1], int(width in getattr(codec, "rotated", NEVER))
    if codec.name in EIGHT_BITS:
        if strides[3] != 1 and width > 1:
            return None
        assert codes.element_size() == 1 and scale.dtype is torch.float32 and scale.shape == (*codes.shape[:3], 1)
        form = EIGHT_BITS[codec.name]
        return form, codes.data_ptr(), *strides[:3], scale.data_ptr(), *scale.stride()[:3], 0, 0, 0, turned
    assert grouped is not None
    return _grouped_fields(grouped, bits, codec.group, state, turned)


def _grouped_fields(form: int, bits: int, group: int, state: Any, turned: int) -> tuple[int, ...] | None:
    codes, scale, zero = state
    assert codes.dtype is torch.uint8 and scale.dtype is torch.bfloat16 and zero.dtype is torch.int16
    assert codes.shape[3] == group * bits // 8 and scale.shape == zero.shape, (codes.shape, scale.shape, zero.shape)
    if not (_dense(codes, 3) and _dense(scale, 3) and _dense(zero, 3)):
        return None
    if any(a != b and size > 1 for a, b, size in zip(scale.stride(), zero.stride(), scale.shape, strict=True)):
        return None
    return (
        form, codes.data_ptr(), *codes.stride()[:3], scale.data_ptr(), *scale.stride()[:3],
        zero.data_ptr(), bits, group, turned,
    )  # fmt: skip


def _dense(t: torch.Tensor, axis: int) -> bool:
    """Whether axes ``axis`` and the one after it lie in one piece."""
    row, one = t.stride()[axis : axis + 2]
    return (one == 1 or t.shape[axis + 1] == 1) and (row == t.shape[axis + 1] or t.shape[axis] == 1)


def _mask_fits(mask: torch.Tensor, shape: tuple[int, int, int, int], heads: int) -> bool:
    sizes = mask.shape
    if len(sizes) != 4 or mask.device.type != "cpu" or not (mask.dtype is torch.bool or mask.dtype in FLOATS):
        return False
    if type(mask) is not torch.Tensor or (mask.requires_grad and torch.is_grad_enabled()):
        return False
    fits = [have == want or have == 1 for have, want in zip(sizes, shape, strict=True)]
    return fits[0] and (fits[1] or sizes[1] == heads) and fits[2] and fits[3]


def _mask_fields(mask: torch.Tensor | None, query_heads: int) -> tuple[int, ...]:
    """Address, kind, strides with 0 along broadcast axes, and how many query heads share a row of it."""
    if mask is None:
        return 0, 0, 0, 0, 0, 0, 1
    strides = (0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
    return mask.data_ptr(), 0 if mask.dtype is torch.float32 else 1, *strides, query_heads // mask.shape[1]


def _share(pairs: int, tokens: int, products: int) -> tuple[int, int]:
    """(threads, splits of the sequence) for so many (batch row, KV head) pairs, with ``products`` per token."""
    threads = torch.get_num_threads()
    if threads == 1 or pairs * tokens * products < ALONE:
        return 1, 1
    return threads, max(min(-(-4 * threads // pairs), tokens // PIECE), 1)


@cache
def _turn_matrices(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode(False):
        matrix = rotation(width, "cpu").contiguous()
        return matrix, matrix.T.contiguous()


@cache
def _turns(width: int) -> tuple[int, int]:
    """Addresses of the rotation [width, width] and of its transpose, which live as long as the process."""
    matrix, back = _turn_matrices(width)
    return matrix.data_ptr(), back.data_ptr()


# -- writing -------------------------------------------------------------------------------------------------


def appends(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether ``append`` takes such states: plain tensors on the CPU, of a float dtype, without gradients."""
    if not wanted or torch.compiler.is_compiling() or load() is None:
        return False
    if type(keys) is not torch.Tensor or type(values) is not torch.Tensor:
        return False
    if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
        return False
    return keys.device.type == values.device.type == "cpu" and keys.dtype in FLOATS and values.dtype in FLOATS


def append(
    keys: torch.Tensor,
    values: torch.Tensor,
    codecs: tuple[Codec, Codec],
    states: tuple[Any, Any],
    slots: tuple[int, int],
) -> str | None:
    """Encode one token into its slots: the bits of ``codec.encode``, or with ``full`` a copy.

    Args:
        keys, values: [B, H, 1, D], a float dtype.
        codecs: of keys and of values: ``full``, ``int8`` or an 8-bit float.
        states: the slabs' whole tensors; written to, unless a value is not finite and would be encoded.
        slots: the rows to write.

    Returns:
        ``None``, or "keys" or "values": which of them is not finite.
    """
    library = load()
    assert library is not None, "append: the kernel is not built"
    fresh = [_turned(x, codec) for x, codec in zip((keys, values), codecs, strict=True)]
    sides = zip(fresh, codecs, states, slots, strict=True)
    fields = [field for (x, unit), *side in sides for field in _append_fields(x, unit, *side)]
    bad = library.append(APPEND.pack(*fields), keys.shape[0], keys.shape[1])
    if bad < 0:
        raise MemoryError("append: no memory for one row")
    return (None, "keys", "values")[bad]


def _turned(x: torch.Tensor, codec: Codec) -> tuple[torch.Tensor, float]:
    """Rotated by torch, as in ``encode``: another order of additions would give other bits."""
    rotated, unit = getattr(codec, "rotated", NEVER), 1.0
    if x.shape[-1] in rotated:
        x, unit = turn_in(x, rotated)
    return x if x.stride(-1) == 1 else x.contiguous(), unit


def _append_fields(x: torch.Tensor, unit: float, codec: Codec, state: Any, slot: int) -> tuple[float, ...]:
    """The fields of Append, with the addresses of the slot."""
    batch, heads, tokens, width = x.shape
    codes = state[0]
    b, h, row, one = codes.stride()
    assert x.device.type == codes.device.type == "cpu" and x.dtype in FLOATS
    assert tokens == 1 and codes.shape[:2] == (batch, heads) and codes.shape[3] == width, (codes.shape, x.shape)
    assert 0 <= slot < codes.shape[2] and (one == 1 or width == 1), (slot, codes.shape, codes.stride())
    start = (x.data_ptr(), FLOATS[x.dtype], *x.stride()[:2])
    if codec.name == "full":
        assert codes.dtype is x.dtype, (codes.dtype, x.dtype)
        return *start, FLOATS[x.dtype], codes.data_ptr() + slot * row * x.element_size(), b, h, 0, 0, 0, width, 1.0, 0.0
    assert isinstance(codec, PerToken), codec.name
    scale = state[1]
    assert codes.element_size() == 1 and scale.dtype is torch.float32 and scale.shape == (*codes.shape[:3], 1)
    sb, sh, scale_row, _ = scale.stride()
    at, scale_at = codes.data_ptr() + slot * row, scale.data_ptr() + 4 * slot * scale_row
    most = codec.largest_scale(width)
    return *start, EIGHT_BITS[codec.name], at, b, h, scale_at, sb, sh, width, unit, most
