"""How does attention read the stored form on a GPU? One kernel over the codes, one that joins the splits.

A decode step is bound by memory: every stored byte is read once and little is computed with it. Per layer

    bytes per step = B * H * n * (Dk + 4 + Dv + 4)      8-bit codecs: codes, a float32 scale beside each row
                   = B * H * n * (Dk + Dv) * 2          ``full`` in 16 bits

have to move, and the kernel is good when it takes little longer than a copy of as many bytes. Four things get
it there (FlashAttention-2, Dao, arXiv:2307.08691; Flash-Decoding, Dao et al., 2023,
pytorch.org/blog/flash-decoding):

*Rows.* All queries of the G heads that share a KV head, times the Q new tokens (speculative decoding), are the
rows of one tile: a code is read once for all of them. Row ``g * Q + i`` is query ``i`` of head ``h * G + g``.

*Splits.* One program per (split, KV head, batch row) walks over its own tokens in blocks of BLOCK_N:

    s_j = scaling * ks_j * (q . kc_j)     ks_j, vs_j: scales; kc_j, vc_j: codes; then softcap and mask
    m'  = max(m, max_j s_j)               p_j = exp(s_j - m')
    l   = l * exp(m - m') + sum_j p_j     a   = a * exp(m - m') + sum_j (p_j * vs_j) vc_j

and leaves a, m and l in float32: ``acc`` [B, H, splits, rows, Dv] and ``stats`` [B, H, splits, 2, rows].

*Parts.* Every part (sinks, sealed, ...) is one launch that fills splits of its own in the same buffers. The
second kernel cannot tell parts from splits, and joins all of them exactly:

    M = max_i m_i     o = sum_i exp(m_i - M) a_i / (sum_i exp(m_i - M) l_i + exp(s_aux - M))

*Words and planes.* Four codes are read as one 32-bit word; ``plane j`` is the tile of every fourth code. A dot
product does not care about the order of its terms, so scores are the sum of four products of a plane of the query
with a plane of the codes, and outputs are four tiles that interleave when stored. Nothing is ever shuffled between
threads byte by byte, which 8-bit operands would otherwise need for the values (their tokens are the summed axis).
A format with more codes to a word (int4: 8 planes, int2: 16) adds its line to ``_plane`` and ``_words``; one with
scales per channel multiplies the query by them.

*Numbers.* All 8-bit codes are exact in float16, which tensor cores multiply into float32 sums. To stay in range
in float16 whatever the model's type, a query is divided by a power of two and probabilities by their block's
largest scale; both factors are put back in float32. Plain 16-bit states are multiplied in their own type. float32
queries are multiplied in float32.

``append_quantized`` is the writing side: read a row once, write codes and scale into their slots.

Under ``TRITON_INTERPRET=1`` everything runs on the CPU, in float32: the interpreter's bfloat16 is not right.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .attention import Part
from .codecs import NEVER, Codec, Scaled, turn

FORMATS = ("full", "int8", "fp8_e4m3", "fp8_e5m2")  # codecs that the kernels know, by name
FLOATS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
MAX_QUERIES = 16
MAX_ROWS = 128  # more rows are a prefill, which is bound by arithmetic: not what these kernels are for
MAX_WIDTH = 256
MERGE_SPLITS = 32  # splits that the second kernel reads at a time
FEW_ROWS = 32  # what every GPU since Ampere has room for, in float32 too: 99 KB of shared memory at most
ROOM_FOR_MANY = 170_000  # bytes of shared memory that one program of MAX_ROWS rows may need
BLOCK_BYTES = 1 << 13  # keys and values of one block, per warp: 12 warps with three blocks in flight fill an SM
WARPS_PER_SM = 12
MIN_BLOCKS = 2  # see ``split_sizes``
LOG2E = tl.constexpr(1.4426950408889634)  # exponents are of base 2, which is what the hardware has


# -- kernels -------------------------------------------------------------------------------------------------


@triton.jit
def _load_words(base, tokens, stop, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK_N, BLOCK] words of stored rows, zeros where nothing is stored."""
    columns = tl.arange(0, BLOCK)
    inside = (tokens < stop)[:, None]
    if WIDTH < BLOCK:
        inside = inside & (columns < WIDTH)[None, :]
    return tl.load(base + tokens[:, None] * stride + columns[None, :], mask=inside, other=0)


@triton.jit
def _load_scales(base, tokens, stop, FORMAT: tl.constexpr):
    """[BLOCK_N] float32 factors that belong to ``_plane``; zeros where nothing is stored."""
    scales = tl.load(base + tokens, mask=tokens < stop, other=0.0)
    if FORMAT == "fp8_e4m3":
        scales = scales * 256.0
    return scales


@triton.jit
def _plane(words, PLANE: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """[BLOCK_N, BLOCK] numbers in code PLANE of each word, as DTYPE; fp8_e4m3 times 2**-8."""
    if FORMAT == "full":
        out = words.to(DTYPE)
    else:
        top = words << (24 - 8 * PLANE)  # the code in the highest byte
        if FORMAT == "int8":
            out = (top >> 24).to(DTYPE)
        else:
            # Both 8-bit floats are a float16 with bits missing (see codecs.Float8): move bits, on any GPU.
            if FORMAT == "fp8_e4m3":
                top = (top >> 1) & -1082130432  # 0xBF800000: the second bit is a copy of the sign
            else:
                top = top & -16777216  # 0xFF000000
            out = (top >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(DTYPE)
    return out


@triton.jit
def _load_query(at, inside, PLANES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Planes of the query, each [ROWS, BLOCK], divided by ``unit`` [ROWS], a power of two; and ``unit``."""
    column = tl.arange(0, BLOCK) * PLANES
    planes = ()
    peak = tl.zeros([at.shape[0]], tl.float32)
    for j in tl.static_range(PLANES):
        mask = inside[:, None] & (column + j < WIDTH)[None, :]
        q = tl.load(at[:, None] + (column + j)[None, :], mask=mask, other=0.0).to(tl.float32)
        planes = planes + (q,)  # type: ignore[assignment]
        peak = tl.maximum(peak, tl.max(tl.abs(q), 1))
    exponent = peak.to(tl.int32, bitcast=True) & 0x7F800000
    unit = tl.maximum(exponent, 0x00800000).to(tl.float32, bitcast=True)
    out = ()
    for j in tl.static_range(PLANES):
        out = out + ((planes[j] / unit[:, None]).to(DTYPE),)  # type: ignore[assignment]
    return out, unit


@triton.jit
def _visible(base, row_offsets, rows_inside, tokens, stop, stride, MASK: tl.constexpr):
    """bool, [1, BLOCK_N] or [ROWS, BLOCK_N]: tokens that exist and that the mask shows."""
    exists = tokens < stop
    if MASK == "keys":
        out = (exists & (tl.load(base + tokens * stride, mask=exists, other=0) != 0))[None, :]
    elif MASK == "rows":
        at = base + row_offsets[:, None] + (tokens * stride)[None, :]
        out = tl.load(at, mask=rows_inside[:, None] & exists[None, :], other=0) != 0
    else:
        out = exists[None, :]
    return out


@triton.jit
def _capped(scores, softcap):
    """``softcap * tanh(scores / softcap)``, through an exponential that cannot overflow."""
    shrunk = tl.exp(-2.0 * tl.abs(scores) / softcap)
    magnitude = softcap * (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(scores < 0, -magnitude, magnitude)


# Numbers that grow with the sequence or the slab are not specialized on: they would compile again and again.
@triton.jit(do_not_specialize=["tokens", "chunk", "first_split", "splits", "ksb", "ksh", "vsb", "vsh"])
def _partial_kernel(
    query,
    keys,
    key_scales,
    values,
    value_scales,
    mask,
    acc_out,
    stats_out,
    scaling,
    softcap,
    rows,
    queries,
    tokens,
    chunk,
    first_split,
    splits,
    qb,
    qh,
    qq,
    kb,
    kh,
    kn,
    ksb,
    ksh,
    vb,
    vh,
    vn,
    vsb,
    vsh,
    mb,
    mh,
    mq,
    mn,
    WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr,
    PLANES_K: tl.constexpr,
    PLANES_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT_K: tl.constexpr,
    FORMAT_V: tl.constexpr,
    DTYPE_K: tl.constexpr,
    DTYPE_V: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Attention of one KV head's rows over one split: unnormalized output, running maximum and sum."""
    split, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tl.arange(0, ROWS)
    rows_inside = row < rows
    query_head = head * (rows // queries) + row // queries
    query_at = query + batch * qb + query_head * qh + (row % queries) * qq
    q, unit_q = _load_query(query_at, rows_inside, PLANES_K, WIDTH_K, BLOCK_K, DTYPE_K)

    start = split.to(tl.int64) * chunk  # 64 bits: a slab may have more than 2**31 values
    stop = tl.minimum(tokens - split * chunk, chunk)
    keys += batch * kb + head * kh + start * kn
    values += batch * vb + head * vh + start * vn
    key_scales += batch * ksb + head * ksh + start
    value_scales += batch * vsb + head * vsh + start
    mask += batch * mb + start * mn
    mask_rows = query_head * mh + (row % queries) * mq

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = ()
    for _ in tl.static_range(PLANES_V):
        acc = acc + (tl.zeros([ROWS, BLOCK_V], tl.float32),)  # type: ignore[assignment]
    for first in range(0, stop, BLOCK_N):
        at = first + tl.arange(0, BLOCK_N)
        k = _load_words(keys, at, stop, kn, WIDTH_K // PLANES_K, BLOCK_K)
        scores = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for j in tl.static_range(PLANES_K):
            codes = _plane(k, j, FORMAT_K, DTYPE_K)
            scores = tl.dot(q[j], tl.trans(codes), scores, input_precision="ieee")
        scores = scores * (unit_q * scaling)[:, None]
        if FORMAT_K != "full":
            scores = scores * _load_scales(key_scales, at, stop, FORMAT_K)[None, :]
        if SOFTCAP:
            scores = _capped(scores, softcap) * LOG2E
        visible = _visible(mask, mask_rows, rows_inside, at, stop, mn, MASK)
        scores = tl.where(visible, scores, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, 1))
        floor = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # nothing seen yet: -inf - -inf is NaN
        p = tl.exp2(scores - floor[:, None])
        fade = tl.exp2(peak - floor)
        total = total * fade + tl.sum(p, 1)
        peak = new_peak

        v = _load_words(values, at, stop, vn, WIDTH_V // PLANES_V, BLOCK_V)
        weights, unit_v = p, 1.0
        if FORMAT_V != "full":
            scales = _load_scales(value_scales, at, stop, FORMAT_V)
            unit_v = tl.max(scales, 0) * 6.103515625e-05  # 2**-14: weights up to 16384 use float16's range
            weights = p * (scales / unit_v)[None, :]
        weights = weights.to(DTYPE_V)
        faded = ()
        for j in tl.static_range(PLANES_V):
            mixed = tl.dot(weights, _plane(v, j, FORMAT_V, DTYPE_V), input_precision="ieee")
            faded = faded + (acc[j] * fade[:, None] + mixed * unit_v,)  # type: ignore[assignment]
        acc = faded

    cell = ((batch * tl.num_programs(1) + head) * splits + first_split + split) * rows
    stats_at = stats_out + cell * 2 + row
    tl.store(stats_at, peak, mask=rows_inside)
    tl.store(stats_at + rows, total, mask=rows_inside)
    for j in tl.static_range(PLANES_V):
        column = tl.arange(0, BLOCK_V) * PLANES_V + j
        acc_at = acc_out + (cell + row)[:, None] * WIDTH_V + column[None, :]
        tl.store(acc_at, acc[j], mask=rows_inside[:, None] & (column < WIDTH_V)[None, :])


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    acc_in,
    stats_in,
    s_aux,
    out,
    queries,
    splits,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    AUX: tl.constexpr,
):
    """Join all splits of one row; ``out`` is [B, Hq, Q, Dv], which is [B, H, rows, Dv]."""
    row, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, heads = tl.num_programs(0), tl.num_programs(1)
    cell = batch.to(tl.int64) * heads + head
    column = tl.arange(0, BLOCK_D)
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    if AUX:  # a logit without a value, once per row
        logit = tl.load(s_aux + head * (rows // queries) + row // queries).to(tl.float32)
        peak = tl.zeros([1], tl.float32) + logit * LOG2E
        total += 1.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        inside = split < splits
        at = (cell * splits + split) * rows
        peaks = tl.load(stats_in + at * 2 + row, mask=inside, other=float("-inf"))
        totals = tl.load(stats_in + at * 2 + rows + row, mask=inside, other=0.0)
        inside = inside[:, None] & (column < WIDTH)[None, :]
        partial = tl.load(acc_in + (at + row)[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        floor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(peaks - floor)
        fade = tl.exp2(peak - floor)
        total = total * fade + tl.sum(totals * weights, 0)
        acc = acc * fade + tl.sum(partial * weights[:, None], 0)
        peak = new_peak
    total = tl.where(total == 0.0, 1.0, total)  # a row that may attend to nothing gets zeros
    tl.store(out + (cell * rows + row) * WIDTH + column, acc / total, mask=column < WIDTH)


@triton.jit
def _float8_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Bits of the nearest 8-bit float (even on ties), int32, for float32 within the format's range.

    Adding 1.5 * 2**23 steps and taking them away again rounds to whole steps; a step is the value of the last
    mantissa bit, and stops shrinking where the format's subnormals begin.
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 0xFF, 128 - BIAS)
    anchor = (((exponent - MANTISSA + 23) << 23) | 0x400000).to(tl.float32, bitcast=True)
    magnitude = (tl.abs(x) + anchor) - anchor
    rounded = magnitude.to(tl.int32, bitcast=True)
    normal = (rounded >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
    subnormal = (tl.minimum(magnitude, 1.0) * (1 << (BIAS + MANTISSA - 1))).to(tl.int32)
    return tl.where(rounded < ((128 - BIAS) << 23), subnormal, normal) | ((bits >> 24) & 0x80)


@triton.jit(do_not_specialize=["count", "tokens", "slot", "xb", "xh", "sb", "sh"])
def _append_kernel(
    x,
    codes,
    scales,
    count,
    tokens,
    heads,
    slot,
    limit,
    xb,
    xh,
    xn,
    cb,
    ch,
    cn,
    sb,
    sh,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    FORMAT: tl.constexpr,
    RECIPROCAL: tl.constexpr,
):
    """Rows of x [B, H, n, D], counted through, into rows ``slot + i`` of the slab."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_D)
    token, head, batch = row % tokens, row // tokens % heads, row // tokens // heads
    exists = row < count
    inside = exists[:, None] & (column < WIDTH)[None, :]
    x_at = x + (batch * xb + head * xh + token * xn)[:, None] + column[None, :]
    values = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(values), 1)
    if RECIPROCAL:
        scale = peak * tl.div_rn(1.0, limit)
    else:
        scale = tl.div_rn(peak, limit)
    scale = tl.where(scale < 1.1754943508222875e-38, 1.0, scale)
    scaled = tl.div_rn(values, tl.broadcast_to(scale[:, None], [BLOCK_R, BLOCK_D]))
    scaled = tl.minimum(tl.maximum(scaled, -limit), limit)
    if FORMAT == "int8":
        bits = ((scaled + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2**23: nearest, even on ties
    elif FORMAT == "fp8_e4m3":
        bits = _float8_bits(scaled, 3, 7)
    else:
        bits = _float8_bits(scaled, 2, 15)
    code_at = codes + (batch * cb + head * ch + (slot + token) * cn)[:, None] + column[None, :]
    tl.store(code_at, bits.to(tl.int8), mask=inside)
    tl.store(scales + batch * sb + head * sh + slot + token, scale, mask=exists)


INTERPRETED = not isinstance(_partial_kernel, triton.JITFunction)


# -- launchers -----------------------------------------------------------------------------------------------


def supports(
    query: torch.Tensor,
    parts: list[Part],
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> bool:
    """Whether ``attend_triton`` takes these arguments; looks at no values, so the device is not waited for.

    It does not take a prefill (many queries), additive masks, heads wider than 256 or (in 8 bits) not a multiple
    of 4, codecs that are not in ``FORMATS``, rotated values (rotated keys it does), tensors on several devices, and
    parts that hold fewer rows than the query.
    """
    _, query_heads, queries, width = query.shape
    heads = parts[0].keys[0].shape[1]
    if not (query.is_cuda or INTERPRETED) or query.dtype not in FLOATS or query.stride(3) != 1:
        return False
    rows = query_heads // heads * queries
    if not 0 < queries <= MAX_QUERIES or query_heads % heads or rows > _most_rows(query.device, query.dtype):
        return False
    if mask is not None and (mask.dtype != torch.bool or mask.dim() != 4 or mask.device != query.device):
        return False
    if s_aux is not None and (s_aux.device != query.device or s_aux.stride(0) != 1):
        return False
    return width <= MAX_WIDTH and all(
        part.keys[0].shape[0] == query.shape[0]
        and _readable(part.key_codec, part.keys, query.device)
        and _readable(part.value_codec, part.values, query.device)
        and part.values[0].shape[3] < getattr(part.value_codec, "rotate_from", NEVER)
        for part in parts
    )


def _readable(codec: Codec, state: Any, device: torch.device) -> bool:
    codes = state[0]
    if codec.name not in FORMATS or codes.device != device or codes.shape[3] > MAX_WIDTH or codes.stride(3) != 1:
        return False
    if not isinstance(state, Scaled):
        return codes.dtype in FLOATS
    whole_words = not any(size % 4 for size in (codes.shape[3], codes.storage_offset(), *codes.stride()[:3]))
    return whole_words and (state.scale.stride(2) == 1 or codes.shape[2] == 1)


def attend_triton(
    query: torch.Tensor,
    parts: list[Part],
    scaling: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """``attend_reference`` in Triton, for decode. Same arguments, same result; ask ``supports`` first."""
    assert supports(query, parts, mask, softcap, s_aux), "attend_triton: ask supports() first"
    with _current(query.device):
        return _attend(query, parts, scaling, mask, softcap, s_aux)


def _attend(
    query: torch.Tensor,
    parts: list[Part],
    scaling: float,
    mask: torch.Tensor | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    batch, query_heads, queries, _ = query.shape
    heads, width = parts[0].keys[0].shape[1], parts[0].values[0].shape[3]
    rows = query_heads // heads * queries
    tiles = [_tiles_of(part, rows, query.dtype) for part in parts]
    sms = _sm_count(query.device)
    sizes = [split_sizes(part.tokens, tile, batch * heads, sms) for part, tile in zip(parts, tiles, strict=True)]
    splits = sum(count for count, _ in sizes)
    acc = torch.empty((batch, heads, splits, rows, width), dtype=torch.float32, device=query.device)
    stats = torch.empty((batch, heads, splits, 2, rows), dtype=torch.float32, device=query.device)
    first_split = first_token = 0
    for part, tile, (count, chunk) in zip(parts, tiles, sizes, strict=True):
        own_mask = None if mask is None else mask[..., first_token : first_token + part.tokens]
        if count:
            _launch_part(query, part, scaling, own_mask, softcap, acc, stats, tile, (first_split, count, chunk))
        first_split += count
        first_token += part.tokens
    # The interpreter cuts off bits where a cast should round.
    dtype = torch.float32 if INTERPRETED else query.dtype
    out = torch.empty((batch, query_heads, queries, width), dtype=dtype, device=query.device)
    if out.numel():
        assert s_aux is None or s_aux.shape == (query_heads,), s_aux.shape
        aux = stats if s_aux is None else s_aux
        _merge_kernel[(rows, heads, batch)](
            acc, stats, aux, out, queries, splits, width, _block(width), MERGE_SPLITS, s_aux is not None
        )
    return out.to(query.dtype)


class Tiles(NamedTuple):
    """What one program of the first kernel works on at a time."""

    rows: int
    block_k: int  # words
    block_v: int  # words
    block_n: int  # tokens
    warps: int


@cache
def tile_sizes(width_k: int, width_v: int, planes_k: int, planes_v: int, itemsize: int, rows: int) -> Tiles:
    """Powers of two that cover the widths, and as many tokens as make a block of about ``BLOCK_BYTES`` per warp.

    ``itemsize``: bytes of the largest number that is held. Warps share the columns of a product; a plane of 16
    columns is too narrow to be shared, and many rows need more registers than four warps have.
    """
    block_k, block_v = _block(width_k // planes_k), _block(width_v // planes_v)
    padded_rows = _block(rows)
    warps = 8 if padded_rows > 32 else 1 if min(block_k, block_v) <= 16 else 4
    room = BLOCK_BYTES * min(warps, 4) // ((block_k * planes_k + block_v * planes_v) * itemsize)
    return Tiles(padded_rows, block_k, block_v, min(128, max(16, 1 << (max(room, 1).bit_length() - 1))), warps)


def split_sizes(tokens: int, tiles: Tiles, pairs: int, sms: int) -> tuple[int, int]:
    """(number of splits, tokens in each) of ``tokens`` per (batch row, KV head) pair.

    As many programs as are resident at once, ``WARPS_PER_SM`` on each of the multiprocessors, so that none has to
    wait for a second wave; but a split has at least ``MIN_BLOCKS`` blocks, since each leaves a partial result to
    write and to read again. Splits are whole blocks, equal but for the last, and none is empty.
    """
    wanted = max(1, WARPS_PER_SM // tiles.warps * sms // max(pairs, 1))
    blocks = max(-(-tokens // (wanted * tiles.block_n)), MIN_BLOCKS)
    return -(-tokens // (blocks * tiles.block_n)), blocks * tiles.block_n


def _tiles_of(part: Part, rows: int, query: torch.dtype) -> Tiles:
    keys, values = part.keys[0], part.values[0]
    itemsize = 4 if query == torch.float32 else max(keys.element_size(), values.element_size())
    planes = (4 if isinstance(state, Scaled) else 1 for state in (part.keys, part.values))
    return tile_sizes(keys.shape[3], values.shape[3], *planes, itemsize, rows)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device, which is another one where a model is spread over several."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def _most_rows(device: torch.device, dtype: torch.dtype) -> int:
    """Rows that one program can hold; none before Ampere, which has no bfloat16 and no asynchronous copies."""
    few = dtype == torch.float32
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if properties.major < 8:
            return 0
        few = few or getattr(properties, "shared_memory_per_block_optin", 0) < ROOM_FOR_MANY
    return FEW_ROWS if few else MAX_ROWS


@cache
def _sm_count(device: torch.device) -> int:
    """Multiprocessors; the interpreter counts as two, to have several splits where it matters little."""
    return 2 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


def _block(width: int) -> int:
    """The tile that holds ``width`` values: a power of two, and 16 at least as ``tl.dot`` demands."""
    return max(16, triton.next_power_of_2(width))


def _words(state: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Codes as the kernel reads them, their scales (without any: a stand-in), and codes per word."""
    if not isinstance(state, Scaled):
        return state[0], state[0], 1
    return state.codes.view(torch.int32), state.scale, 4


def _dot_dtype(query: torch.dtype, state: Any) -> tl.dtype:
    """What products with this side are computed in; see *Numbers* above."""
    if INTERPRETED or query == torch.float32:
        return tl.float32
    return tl.float16 if isinstance(state, Scaled) else FLOATS[state[0].dtype]


def _launch_part(
    query: torch.Tensor,
    part: Part,
    scaling: float,
    mask: torch.Tensor | None,
    softcap: float | None,
    acc: torch.Tensor,
    stats: torch.Tensor,
    tiles: Tiles,
    splits: tuple[int, int, int],
) -> None:
    """One launch over the tokens of one part, into the splits (first, count, tokens in each) of the buffers."""
    _check_shapes(query, part, mask)
    first_split, count, chunk = splits
    keys, key_scales, key_planes = _words(part.keys)
    values, value_scales, value_planes = _words(part.values)
    batch, query_heads, queries, width = query.shape
    rows = query_heads // keys.shape[1] * queries
    mask_bytes, kind, mask_strides = _mask_arguments(query, mask)
    dtype = query.dtype
    if width >= getattr(part.key_codec, "rotate_from", NEVER):
        query = turn(query.float(), part.key_codec.rotate_from)  # type: ignore[attr-defined]
    _partial_kernel[(count, keys.shape[1], batch)](
        query, keys, key_scales, values, value_scales, mask_bytes, acc, stats,
        float(scaling) if softcap else float(scaling) * LOG2E.value, float(softcap or 0.0),
        rows, queries, part.tokens, chunk, first_split, stats.shape[2],
        *query.stride()[:3], *keys.stride()[:3], *key_scales.stride()[:2],
        *values.stride()[:3], *value_scales.stride()[:2], *mask_strides,
        width, part.values[0].shape[3], key_planes, value_planes,
        tiles.block_k, tiles.block_v, tiles.block_n, tiles.rows, part.key_codec.name, part.value_codec.name,
        _dot_dtype(dtype, part.keys), _dot_dtype(dtype, part.values), kind, bool(softcap),
        num_warps=tiles.warps, num_stages=3,
    )  # fmt: skip


def _check_shapes(query: torch.Tensor, part: Part, mask: torch.Tensor | None) -> None:
    batch, _, _, width = query.shape
    heads, tokens = part.keys[0].shape[1], part.tokens
    assert part.keys[0].shape == (batch, heads, tokens, width), part.keys[0].shape
    assert part.values[0].shape[:3] == (batch, heads, tokens), part.values[0].shape
    for state in (part.keys, part.values):
        if isinstance(state, Scaled):
            assert state.scale.shape == (batch, heads, tokens, 1), state.scale.shape
            assert state.scale.dtype == torch.float32 and state.codes.element_size() == 1
    if mask is not None:
        assert mask.shape[3] == tokens, (mask.shape, tokens)
        pairs = zip(mask.shape[:3], query.shape[:3], strict=True)
        assert all(have in (1, want) for have, want in pairs), (mask.shape, query.shape)


def _mask_arguments(
    query: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, str, tuple[int, int, int, int]]:
    """(bytes, what they differ by apart from the batch, strides with 0 along broadcast axes)."""
    if mask is None:
        return query, "none", (0, 0, 0, 0)
    batch, head, row = (0 if mask.shape[axis] == 1 else mask.stride(axis) for axis in range(3))
    return mask.view(torch.uint8), "rows" if head or row else "keys", (batch, head, row, mask.stride(3))


def append_quantized(x: torch.Tensor, state: Scaled, slot: int, codec: Codec) -> None:
    """Encode ``x`` [B, H, n, D] straight into rows ``slot : slot + n`` of a slab: the bits of ``codec.encode``.

    Args:
        x: any float dtype.
        state: the slab's whole tensors, codes [B, H, capacity, D] and scale [B, H, capacity, 1]; written to.
        slot: the first row to write; ``slot + n`` must not exceed the capacity.
        codec: ``int8`` or one of the 8-bit floats.
    """
    codes, scale = state.codes, state.scale
    batch, heads, tokens, width = x.shape
    assert codec.name in FORMATS[1:], codec.name
    assert x.dtype in FLOATS and x.device == codes.device == scale.device and (x.is_cuda or INTERPRETED)
    assert codes.shape[:2] == (batch, heads) and codes.shape[3] == width, (codes.shape, x.shape)
    assert codes.element_size() == 1 and scale.dtype == torch.float32, (codes.dtype, scale.dtype)
    assert scale.shape == (*codes.shape[:3], 1), scale.shape
    assert 0 <= slot and slot + tokens <= codes.shape[2], (slot, tokens, codes.shape)
    assert codes.stride(3) == 1 and (scale.stride(2) == 1 or codes.shape[2] == 1), (codes.stride(), scale.stride())
    if not x.numel():
        return
    if width >= codec.rotate_from:  # type: ignore[attr-defined]
        x = turn(x.float(), codec.rotate_from)  # type: ignore[attr-defined]
    if x.stride(3) != 1:
        x = x.contiguous()
    count, block = batch * heads * tokens, _block(width)
    rows = max(1, 1024 // block)
    with _current(x.device):
        _append_kernel[(-(-count // rows),)](
            x, codes.view(torch.int8), scale, count, tokens, heads, slot, float(codec.limit),  # type: ignore[attr-defined]
            *x.stride()[:3], *codes.stride()[:3], *scale.stride()[:2], width, block, rows, codec.name,
            x.is_cuda,  # there, torch divides by a number by multiplying with its reciprocal
        )  # fmt: skip
