"""How does attention read the stored form on a GPU? One kernel over the codes, one that joins the splits.

A decode step is bound by memory: every stored byte is read once and little is computed with it. Per layer

    bytes per step = B * H * n * (Dk + Dv) * 2          ``full`` in 16 bits
                   = B * H * n * (Dk + 4 + Dv + 4)      8-bit codecs: codes, a float32 scale beside each row
                   = B * H * n * (Dk + Dv) * 5 / 8      int4 in groups of 32; int2: 3 / 8

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

*Words and planes.* Four bytes are read as one 32-bit word; ``plane j`` is the tile of every fourth channel. A dot
product does not care about the order of its terms, so scores are the sum of four products of a plane of the query
with a plane of the codes, and outputs are four tiles that interleave when stored. Nothing is ever shuffled between
threads byte by byte, which 8-bit operands would otherwise need for the values (their tokens are the summed axis).

*Lines.* A byte of int4 holds two tokens of one channel, a byte of int2 four (see ``lowbit``): a word has 8 or 16
planes, and is read once for all of them. So programs walk over *lines*, each of which stands for ``TOKENS`` tokens,
as many as the denser side has in a byte. With L = group / TOKENS lines to a group, token i of line n is token

    n // L * group + i * L + n % L

A side with fewer codes to a byte reads several rows for a line; that of ``full`` and of 8 bits alone is a token.

*Steps and zeros* (``lowbit``). Keys per channel multiply the query, once per group of tokens, and zeros add one term:

    q . k_t = (q * step) . code_t + (q * step) . zero

A block of lines that spans several groups makes the product with the query of each, and every line takes its own.
Scales per token and channel group cut a row into tiles, one per channel group, that are scaled like rows of 8 bits.

*Rotated values.* Parts that store values rotated and parts that store them plain meet in one output. The second kernel
keeps one sum for either kind, and only the sum of the rotated ones, [rows, Dv], is turned back: one product for the
step. Rotating the plain parts instead would take that product for all of their tokens, or for all of their splits.

*Numbers.* All codes are exact in float16, which tensor cores multiply into float32 sums. To stay in range
in float16 whatever the model's type, a query is divided by a power of two and probabilities by their block's
largest scale; both factors are put back in float32, and zeros are summed in float32. Plain 16-bit states are
multiplied in their own type. float32 queries are multiplied in float32.

*Mass.* Where importance eviction asks what attention each key got, the first kernel also leaves its scores, the second
the log-sum-exp of every row, and a third adds up  mean over G of sum over Q of exp(s_j - lse).

``append_quantized`` is the writing side: read a row once, write codes and scale into their slots.

Under ``TRITON_INTERPRET=1`` everything runs on the CPU, in float32: the interpreter's bfloat16 is not right.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from math import lcm
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .codecs import ALWAYS, NEVER, Codec, PerToken, Plain, Scaled, fit, turn, turn_in
from .lowbit import GroupedCodec
from .part import Part

FORMATS = ("full", "int8", "fp8_e4m3", "fp8_e5m2", "int4", "int2")  # codecs that the kernels know, by name
FLOATS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
MAX_QUERIES = 16
MAX_ROWS = 128  # more rows are a prefill, which is bound by arithmetic: not what these kernels are for
MAX_WIDTH = 256
MAX_GROUPS = 16  # channel groups: the kernel is unrolled over them
MASS_BLOCK = 1 << 12  # scores that the third kernel reads at a time
MERGE_SPLITS = 32  # splits that the second kernel reads at a time
FEW_ROWS = 32  # what every GPU since Ampere has room for, in float32 too: 99 KB of shared memory at most
ROOM_FOR_MANY = 170_000  # bytes of shared memory that one program of MAX_ROWS rows may need
BLOCK_BYTES = 1 << 13  # keys and values of one block, per warp: 12 warps with three blocks in flight fill an SM
WARPS_PER_SM = 12
MIN_BLOCKS = 2  # see ``split_sizes``
LOG2E = tl.constexpr(1.4426950408889634)  # exponents are of base 2, which is what the hardware has


# -- kernels -------------------------------------------------------------------------------------------------


@triton.jit
def _row(line, PART: tl.constexpr, PARTS: tl.constexpr, LINES: tl.constexpr):
    """Row PART of the PARTS rows that belong to each line, where LINES lines make a group; see *Lines* above."""
    return line // LINES * (LINES * PARTS) + PART * LINES + line % LINES


@triton.jit
def _load_words(
    base,
    line,
    exists,
    STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    LINES: tl.constexpr,
    GROUPS: tl.constexpr,
    SPAN: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Tiles [BLOCK_N, BLOCK] of stored words, for each row of a line and each channel group; zeros where none are."""
    tiles = ()
    for part in tl.static_range(PARTS):
        row = _row(line, part, PARTS, LINES)
        for group in tl.static_range(GROUPS):
            column = tl.arange(0, BLOCK)
            inside = exists[:, None]
            if SPAN < BLOCK or GROUPS * SPAN > WORDS:
                inside = inside & ((column < SPAN) & (group * SPAN + column < WORDS))[None, :]
            at = base + row[:, None] * STRIDE + (group * SPAN + column)[None, :]
            tiles = tiles + (tl.load(at, mask=inside, other=0),)  # type: ignore[assignment]
    return tiles


@triton.jit
def _load_scales(base, at, exists, FORMAT: tl.constexpr):
    """float32 factors that belong to ``_plane``; zeros where nothing is stored."""
    scales = tl.load(base + at, mask=exists, other=0.0).to(tl.float32)
    if FORMAT == "fp8_e4m3":
        scales = scales * 256.0
    elif FORMAT == "int4" or FORMAT == "int2":
        scales = scales * 16777216.0
    return scales


@triton.jit
def _load_zeros(base, at, exists, FORMAT: tl.constexpr):
    """float32 zeros of low bits, in the unit of ``_plane``: stored in steps for 4 bits, in eighths of a step for 2."""
    zeros = tl.load(base + at, mask=exists, other=0).to(tl.float32)
    if FORMAT == "int2":
        zeros = zeros * 0.125
    return zeros * 5.9604644775390625e-08


@triton.jit
def _plane(words, PLANE: tl.constexpr, CODE: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """[BLOCK_N, BLOCK] numbers in byte PLANE of each word, as DTYPE; of low bits, code CODE of that byte.

    fp8_e4m3 comes times 2**-8, low bits times 2**-24: as the mantissa of a float16 below its normal range, no
    conversion is needed.
    """
    if FORMAT == "full":
        out = words.to(DTYPE)
    elif FORMAT == "int4":
        out = ((words >> (8 * PLANE + 4 * CODE)) & 15).to(tl.int16).to(tl.float16, bitcast=True).to(DTYPE)
    elif FORMAT == "int2":
        out = ((words >> (8 * PLANE + 2 * CODE)) & 3).to(tl.int16).to(tl.float16, bitcast=True).to(DTYPE)
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
def _power_of_two(x):
    """The largest power of two that is at most x (x >= 0, float32); the smallest normal one where there is none."""
    exponent = x.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.maximum(exponent, 0x00800000).to(tl.float32, bitcast=True)


@triton.jit
def _load_query(
    at,
    inside,
    PLANES: tl.constexpr,
    GROUPS: tl.constexpr,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Tiles [ROWS, BLOCK] of the query by channel group and plane, divided by ``unit``, a power of two for each row;
    ``unit`` [ROWS]; and the sum [ROWS] over each channel group."""
    column = tl.arange(0, BLOCK)
    planes = ()
    peak = tl.zeros([at.shape[0]], tl.float32)
    for group in tl.static_range(GROUPS):
        for j in tl.static_range(PLANES):
            channel = (group * SPAN + column) * PLANES + j
            mask = inside[:, None] & ((column < SPAN) & (channel < WIDTH))[None, :]
            q = tl.load(at[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
            planes = planes + (q,)  # type: ignore[assignment]
            peak = tl.maximum(peak, tl.max(tl.abs(q), 1))
    unit = _power_of_two(peak)
    out = ()
    sums = ()
    for group in tl.static_range(GROUPS):
        total = tl.zeros([at.shape[0]], tl.float32)
        for j in tl.static_range(PLANES):
            q = (planes[group * PLANES + j] / unit[:, None]).to(DTYPE)
            out = out + (q,)  # type: ignore[assignment]
            total += tl.sum(q.to(tl.float32), 1)
        sums = sums + (total,)  # type: ignore[assignment]
    return out, unit, sums


@triton.jit
def _fold_query(
    q,
    scales,
    zeros,
    group,
    groups,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The query times the steps of one group of tokens, divided by ``unit``; the unit; and the zeros' term [ROWS]."""
    steps, offsets = (), ()
    peak = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(PLANES):
        channel = tl.arange(0, BLOCK) * PLANES + j
        at = group * WIDTH + channel
        inside = (channel < WIDTH) & (at < groups * WIDTH)
        step = _load_scales(scales, at, inside, FORMAT)
        steps = steps + (step,)  # type: ignore[assignment]
        offsets = offsets + (_load_zeros(zeros, at, inside, FORMAT),)  # type: ignore[assignment]
        peak = tl.maximum(peak, step)
    unit = _power_of_two(tl.max(peak, 0))
    folded = ()
    shift = tl.zeros([q[0].shape[0], BLOCK], tl.float32)
    for j in tl.static_range(PLANES):
        stepped = q[j].to(tl.float32) * (steps[j] / unit)[None, :]
        folded = folded + (stepped.to(DTYPE),)  # type: ignore[assignment]
        shift += stepped * offsets[j][None, :]
    return folded, unit, tl.sum(shift, 1)


@triton.jit
def _dots(
    q,
    words,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    PLANES: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """[ROWS, BLOCK_N]: tiles of the query (those of GROUP) times the codes of one tile of words."""
    out = tl.zeros([q[0].shape[0], words.shape[0]], tl.float32)
    for j in tl.static_range(PLANES):
        codes = _plane(words, j, CODE, FORMAT, DTYPE)
        out = tl.dot(q[GROUP * PLANES + j], tl.trans(codes), out, input_precision="ieee")
    return out


@triton.jit
def _visible(base, row_offsets, rows_inside, tokens, exists, stride, MASK: tl.constexpr):
    """bool, [1, BLOCK_N] or [ROWS, BLOCK_N]: tokens that exist and that the mask shows."""
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


@triton.jit
def _weigh(
    p,
    scales,
    zeros,
    line,
    exists,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TOKENS: tl.constexpr,
    LINES: tl.constexpr,
    LOW: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Probabilities times the scales of a channel group, divided by ``unit``; the unit; and the zeros' term [ROWS]."""
    factors = ()
    peak = tl.zeros([line.shape[0]], tl.float32)
    for i in tl.static_range(TOKENS):
        factor = _load_scales(scales, _row(line, i, TOKENS, LINES) * GROUPS + GROUP, exists, FORMAT)
        factors = factors + (factor,)  # type: ignore[assignment]
        peak = tl.maximum(peak, factor)
    unit = tl.max(peak, 0) * 6.103515625e-05  # 2**-14: weights up to 16384 use float16's range
    weights = ()
    shift = tl.zeros([p[0].shape[0], line.shape[0]], tl.float32)
    for i in tl.static_range(TOKENS):
        weights = weights + ((p[i] * (factors[i] / unit)[None, :]).to(DTYPE),)  # type: ignore[assignment]
        if LOW:
            zeros_of = _load_zeros(zeros, _row(line, i, TOKENS, LINES) * GROUPS + GROUP, exists, FORMAT)
            shift += p[i] * (factors[i] * zeros_of)[None, :]
    return weights, unit, tl.sum(shift, 1)


# Numbers that grow with the sequence or the slab are not specialized on: they would compile again and again.
@triton.jit(do_not_specialize=["lines", "chunk", "first_split", "splits", "tokens", "ksb", "ksh", "vsb", "vsh"])
def _partial_kernel(
    query,
    keys,
    key_scales,
    key_zeros,
    values,
    value_scales,
    value_zeros,
    starts,
    sizes,
    mask,
    acc_out,
    stats_out,
    scores_out,
    scaling,
    softcap,
    rows,
    queries,
    lines,
    chunk,
    first_split,
    splits,
    tokens,
    qb,
    qh,
    qq,
    kb,
    kh,
    ksb,
    ksh,
    vb,
    vh,
    vsb,
    vsh,
    mb,
    mh,
    mq,
    mn,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
    WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr,
    PLANES_K: tl.constexpr,
    PLANES_V: tl.constexpr,
    GROUPS_K: tl.constexpr,
    GROUPS_V: tl.constexpr,
    SPAN_K: tl.constexpr,
    SPAN_V: tl.constexpr,
    CODES_K: tl.constexpr,
    CODES_V: tl.constexpr,
    TOKENS: tl.constexpr,
    LINES: tl.constexpr,
    NEAR: tl.constexpr,
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
    RAGGED: tl.constexpr,
    SCORES: tl.constexpr,
):
    """Attention of one KV head's rows over one split: unnormalized output, running maximum and sum.

    RAGGED: a head's tokens begin at row ``starts`` [B, H] of flat tensors, and are ``sizes`` [B, H] of the ``lines``.

    SCORES: they are kept, of exponents of base 2, in ``scores_out`` [B, H, rows, tokens], from the part's first on.

    NEAR: groups of tokens that a block of lines may touch, where keys have a step per channel; 0 where they have not.
    """
    split, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    PARTS_K: tl.constexpr = TOKENS // CODES_K  # rows of keys for one line
    PARTS_V: tl.constexpr = TOKENS // CODES_V
    row = tl.arange(0, ROWS)
    rows_inside = row < rows
    query_head = head * (rows // queries) + row // queries
    query_at = query + batch * qb + query_head * qh + (row % queries) * qq
    q, unit_q, q_sums = _load_query(query_at, rows_inside, PLANES_K, GROUPS_K, SPAN_K, WIDTH_K, BLOCK_K, DTYPE_K)

    start = split.to(tl.int64) * chunk  # 64 bits: a slab may have more than 2**31 values
    stop, own_row = tl.minimum(lines - split * chunk, chunk), start
    if RAGGED:
        cell = batch * tl.num_programs(1) + head
        stop = tl.minimum(tl.load(sizes + cell).to(tl.int32) - split * chunk, chunk)
        own_row = start + tl.load(starts + cell)
    keys += batch * kb + head * kh + own_row * (PARTS_K * STRIDE_K)
    values += batch * vb + head * vh + own_row * (PARTS_V * STRIDE_V)
    if NEAR:
        key_at = batch * ksb + head * ksh + own_row // LINES * WIDTH_K
    else:
        key_at = batch * ksb + head * ksh + own_row * (TOKENS * GROUPS_K)
    key_scales += key_at
    key_zeros += key_at
    value_at = batch * vsb + head * vsh + own_row * (TOKENS * GROUPS_V)
    value_scales += value_at
    value_zeros += value_at
    mask += batch * mb + start * TOKENS * mn
    mask_rows = query_head * mh + (row % queries) * mq
    scores_at = scores_out + ((batch * tl.num_programs(1) + head) * rows + row) * tokens + start * TOKENS

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc, shifts = (), ()
    for _ in tl.static_range(GROUPS_V):
        shifts = shifts + (tl.zeros([ROWS], tl.float32),)  # type: ignore[assignment]
        for _ in tl.static_range(PLANES_V):
            acc = acc + (tl.zeros([ROWS, BLOCK_V], tl.float32),)  # type: ignore[assignment]
    for first in range(0, stop, BLOCK_N):
        line = first + tl.arange(0, BLOCK_N)
        exists = line < stop
        k = _load_words(keys, line, exists, STRIDE_K, PARTS_K, LINES, GROUPS_K, SPAN_K, WIDTH_K // PLANES_K, BLOCK_K)
        dots = ()
        for _ in tl.static_range(TOKENS):
            dots = dots + (tl.zeros([ROWS, BLOCK_N], tl.float32),)  # type: ignore[assignment]
        for near in tl.static_range(NEAR):
            folded, unit_k, term = _fold_query(
                q, key_scales, key_zeros, first // LINES + near, stop // LINES,
                PLANES_K, WIDTH_K, BLOCK_K, FORMAT_K, DTYPE_K,
            )  # fmt: skip
            own = (line // LINES == first // LINES + near)[None, :]
            before, dots = dots, ()
            for i in tl.static_range(TOKENS):
                dot = _dots(folded, k[i % PARTS_K], 0, i // PARTS_K, PLANES_K, FORMAT_K, DTYPE_K)
                dots = dots + (tl.where(own, (dot + term[:, None]) * unit_k, before[i]),)  # type: ignore[assignment]

        raw = ()
        top = tl.full([ROWS, BLOCK_N], float("-inf"), tl.float32)
        for i in tl.static_range(TOKENS):
            token = _row(line, i, TOKENS, LINES)
            scores = dots[i]  # type: ignore[var-annotated]
            if not NEAR:
                for group in tl.static_range(GROUPS_K):
                    words = k[i % PARTS_K * GROUPS_K + group]
                    dot = _dots(q, words, group, i // PARTS_K, PLANES_K, FORMAT_K, DTYPE_K)
                    if CODES_K > 1:
                        zeros = _load_zeros(key_zeros, token * GROUPS_K + group, exists, FORMAT_K)
                        dot += q_sums[group][:, None] * zeros[None, :]
                    if FORMAT_K != "full":
                        dot *= _load_scales(key_scales, token * GROUPS_K + group, exists, FORMAT_K)[None, :]
                    scores += dot
            scores = scores * (unit_q * scaling)[:, None]
            if SOFTCAP:
                scores = _capped(scores, softcap) * LOG2E
            visible = _visible(mask, mask_rows, rows_inside, token, exists, mn, MASK)
            scores = tl.where(visible, scores, float("-inf"))
            if SCORES:
                tl.store(scores_at[:, None] + token[None, :], scores, mask=rows_inside[:, None] & exists[None, :])
            raw = raw + (scores,)  # type: ignore[assignment]
            top = tl.maximum(top, scores)

        new_peak = tl.maximum(peak, tl.max(top, 1))
        floor = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # nothing seen yet: -inf - -inf is NaN
        fade = tl.exp2(peak - floor)
        peak = new_peak
        p = ()
        mass = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for i in tl.static_range(TOKENS):
            p = p + (tl.exp2(raw[i] - floor[:, None]),)  # type: ignore[assignment]
            mass += p[i]
        total = total * fade + tl.sum(mass, 1)

        v = _load_words(values, line, exists, STRIDE_V, PARTS_V, LINES, GROUPS_V, SPAN_V, WIDTH_V // PLANES_V, BLOCK_V)
        faded, moved = (), ()
        for group in tl.static_range(GROUPS_V):
            weights, unit_v, shift = p, 1.0, shifts[group] * fade
            if FORMAT_V != "full":
                weights, unit_v, term = _weigh(
                    p, value_scales, value_zeros, line, exists,
                    group, GROUPS_V, TOKENS, LINES, CODES_V > 1, FORMAT_V, DTYPE_V,
                )  # fmt: skip
                shift += term
            moved = moved + (shift,)  # type: ignore[assignment]
            for j in tl.static_range(PLANES_V):
                mixed = tl.zeros([ROWS, BLOCK_V], tl.float32)
                for i in tl.static_range(TOKENS):
                    codes = _plane(v[i % PARTS_V * GROUPS_V + group], j, i // PARTS_V, FORMAT_V, DTYPE_V)
                    mixed = tl.dot(weights[i].to(DTYPE_V), codes, mixed, input_precision="ieee")
                faded = faded + (acc[group * PLANES_V + j] * fade[:, None] + mixed * unit_v,)  # type: ignore[assignment]
        acc, shifts = faded, moved

    cell = ((batch * tl.num_programs(1) + head) * splits + first_split + split) * rows
    stats_at = stats_out + cell * 2 + row
    tl.store(stats_at, peak, mask=rows_inside)
    tl.store(stats_at + rows, total, mask=rows_inside)
    for group in tl.static_range(GROUPS_V):
        for j in tl.static_range(PLANES_V):
            column = tl.arange(0, BLOCK_V)
            channel = (group * SPAN_V + column) * PLANES_V + j
            acc_at = acc_out + (cell + row)[:, None] * WIDTH_V + channel[None, :]
            inside = rows_inside[:, None] & ((column < SPAN_V) & (channel < WIDTH_V))[None, :]
            tl.store(acc_at, acc[group * PLANES_V + j] + shifts[group][:, None], mask=inside)


@triton.jit(do_not_specialize=["splits", "turned"])
def _merge_kernel(
    acc_in,
    stats_in,
    s_aux,
    out,
    lse_out,
    queries,
    splits,
    turned,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    AUX: tl.constexpr,
    TURN: tl.constexpr,
    HALF: tl.constexpr,
    LSE: tl.constexpr,
):
    """Join all splits of one row; ``out`` is [B, Hq, Q, Dv], which is [B, H, rows, Dv].

    TURN: splits from ``turned`` on hold rotated values; ``out`` is [2, B, Hq, Q, Dv], and their sum the second half.
    """
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
    acc_turned = tl.zeros([BLOCK_D], tl.float32)
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
        if TURN:
            weights_turned = tl.where(split < turned, 0.0, weights)
            acc_turned = acc_turned * fade + tl.sum(partial * weights_turned[:, None], 0)
            weights = tl.where(split < turned, weights, 0.0)
        acc = acc * fade + tl.sum(partial * weights[:, None], 0)
        peak = new_peak
    nothing = total == 0.0  # a row that may attend to nothing gets zeros
    total = tl.where(nothing, 1.0, total)
    if LSE:
        lse = tl.where(nothing, float("inf"), peak + tl.log2(total))
        tl.store(lse_out + cell * rows + row + tl.arange(0, 1), lse)
    out_at = out + (cell * rows + row) * WIDTH + column
    mean = acc / total
    if HALF:  # rounded values may lie beyond what they were rounded from; infinity is somebody's own
        beyond = (tl.abs(mean) > 65504.0) & (tl.abs(mean) < float("inf"))
        mean = tl.where(beyond, tl.where(mean < 0, -65504.0, 65504.0), mean)
    tl.store(out_at, mean, mask=column < WIDTH)
    if TURN:
        half = tl.num_programs(2).to(tl.int64) * heads * rows * WIDTH
        tl.store(out_at + half, acc_turned / total, mask=column < WIDTH)


@triton.jit(do_not_specialize=["tokens"])
def _mass_kernel(scores, lse, mass, rows, tokens, groups, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """To ``mass`` [B, H, tokens]: what some keys of one head got from all rows, [B, H, rows, tokens]; of base 2."""
    cell = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    row, token = tl.arange(0, ROWS), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = token < tokens
    at = scores + (cell * rows + row)[:, None] * tokens + token[None, :]
    s = tl.load(at, mask=(row < rows)[:, None] & exists[None, :], other=float("-inf"))
    shift = tl.load(lse + cell * rows + row, mask=row < rows, other=0.0)
    total = tl.sum(tl.exp2(s - shift[:, None]), 0) / groups
    mass_at = mass + cell * tokens + token
    tl.store(mass_at, tl.load(mass_at, mask=exists, other=0.0) + total, mask=exists)


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
    unit,
    most,
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
    """Rows of x [B, H, n, D], counted through and divided by ``unit``, into rows ``slot + i`` of the slab.

    ``most``: the largest scale; NaN and infinity stay to be seen.
    """
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
    scale = tl.where(scale * unit < 1.1754943508222875e-38, tl.div_rn(1.0, unit), scale)
    scaled = tl.div_rn(values, tl.broadcast_to(scale[:, None], [BLOCK_R, BLOCK_D]))
    scale *= unit
    scale = tl.where((scale > most) & (scale < float("inf")), most, scale)
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

    It does not take a prefill (many queries), additive masks, heads wider than 256 or (where they are encoded) not a
    multiple of 4, codecs that are not in ``FORMATS``, low-bit values in more than ``MAX_GROUPS`` channel groups or in
    groups that are not a multiple of 4, tensors on several devices, and parts that hold fewer rows than the query.
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
        and {part.key_codec.group, part.value_codec.group} <= {1, part.group}
        and getattr(part.value_codec, "axis", "token") == "token"
        for part in parts
    )


def _readable(codec: Codec, state: Any, device: torch.device) -> bool:
    codes, width = state[0], state[0].shape[-1]
    if codec.name not in FORMATS or codes.device != device or width > MAX_WIDTH or codes.stride(-1) != 1:
        return False
    if isinstance(state, Plain):
        return codes.dtype in FLOATS
    if any(size % 4 for size in (width, codes.storage_offset(), *codes.stride()[:-1])):
        return False  # not whole words
    if isinstance(state, Scaled):
        return state.scale.stride(2) == 1 or codes.shape[2] == 1
    form = form_of(codec, width)
    whole_tiles = form.groups == 1 or (form.groups <= MAX_GROUPS and codec.group % 4 == 0)
    return whole_tiles and all(t[0, 0].is_contiguous() for t in state) and state.scale.stride() == state.zero.stride()


def attend_triton(
    query: torch.Tensor,
    parts: list[Part],
    scaling: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    mass: torch.Tensor | None = None,
) -> torch.Tensor:
    """``attend_torch`` in Triton, for decode. Same arguments, same result; ask ``supports`` first."""
    assert supports(query, parts, mask, softcap, s_aux), "attend_triton: ask supports() first"
    with _current(query.device):
        return _attend(query, parts, scaling, mask, softcap, s_aux, mass)


def _attend(
    query: torch.Tensor,
    parts: list[Part],
    scaling: float,
    mask: torch.Tensor | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
    mass: torch.Tensor | None,
) -> torch.Tensor:
    batch, query_heads, queries, _ = query.shape
    heads, width = parts[0].keys[0].shape[1], parts[0].values[0].shape[-1]
    if mask is not None and mask.shape[1] not in (1, query_heads):  # one for all query heads of a KV head
        mask = mask.repeat_interleave(query_heads // heads, 1)
    rows = query_heads // heads * queries
    masked = mask is not None and mask.shape[1:3] != (1, 1)
    tiles = [_tiles_of(part, rows, query.dtype, masked) for part in parts]
    sms = _sm_count(query.device)
    sizes = [
        split_sizes(part.tokens // tile.tokens, tile, batch * heads, sms)
        for part, tile in zip(parts, tiles, strict=True)
    ]
    splits = sum(count for count, _ in sizes)
    rotated = [width in getattr(part.value_codec, "rotated", NEVER) for part in parts]
    turned = sum(count for (count, _), rotates in zip(sizes, rotated, strict=True) if not rotates)
    acc = torch.empty((batch, heads, splits, rows, width), dtype=torch.float32, device=query.device)
    stats = torch.empty((batch, heads, splits, 2, rows), dtype=torch.float32, device=query.device)
    scores = stats if mass is None else _room_for_scores(mass, parts, rows)
    next_split, first_token = [0, turned], 0  # splits of plain values, then those of rotated ones
    for part, tile, (count, chunk), rotates in zip(parts, tiles, sizes, rotated, strict=True):
        own_mask = None if mask is None else mask[..., first_token : first_token + part.tokens]
        if count:
            own_splits = (next_split[rotates], count, chunk)
            own_scores = None if mass is None else scores[..., first_token:]
            _launch_part(query, part, scaling, own_mask, softcap, acc, stats, own_scores, tile, own_splits)
        next_split[rotates] += count
        first_token += part.tokens
    turns = turned < splits
    # The interpreter cuts off bits where a cast should round, and rotated sums are added to the others in float32.
    dtype = torch.float32 if INTERPRETED or turns else query.dtype
    out = torch.empty((2 if turns else 1, batch, query_heads, queries, width), dtype=dtype, device=query.device)
    if out.numel():
        assert s_aux is None or s_aux.shape == (query_heads,), s_aux.shape
        aux = stats if s_aux is None else s_aux
        lse = stats if mass is None else torch.empty_like(scores[..., 0])
        _merge_kernel[(rows, heads, batch)](
            acc, stats, aux, out, lse, queries, splits, turned, width, _block(width), MERGE_SPLITS, s_aux is not None,
            turns, query.dtype == torch.float16 and not turns, mass is not None,
        )  # fmt: skip
        if mass is not None and mass.numel():
            block = max(MASS_BLOCK // _block(rows), 16)
            grid = (-(-mass.shape[2] // block), heads, batch)
            _mass_kernel[grid](scores, lse, mass, rows, mass.shape[2], rows // queries, _block(rows), block)
    if turns:
        return fit(out[0] + turn(out[1], ALWAYS, back=True), query.dtype)
    return out[0].to(query.dtype)


def _room_for_scores(mass: torch.Tensor, parts: list[Part], rows: int) -> torch.Tensor:
    """[B, H, rows, n] float32; what no program writes, beyond the size of a head, gets nothing."""
    batch, heads, tokens = mass.shape
    assert mass.dtype == torch.float32 and mass.is_contiguous(), (mass.dtype, mass.stride())
    assert tokens == sum(part.tokens for part in parts) and heads == parts[0].keys[0].shape[1], mass.shape
    room = torch.empty((batch, heads, rows, tokens), dtype=torch.float32, device=mass.device)
    return room if all(part.starts is None for part in parts) else room.fill_(float("-inf"))


class Form(NamedTuple):
    """How one side of a part is laid out; see *Words and planes* above."""

    name: str
    per_channel: bool  # a step and a zero per channel and group of tokens; else per token and channel group
    planes: int  # channels in a word
    codes: int  # tokens in a byte
    words: int  # in a row
    groups: int  # channel groups in a row
    span: int  # words in a channel group


def form_of(codec: Codec, width: int) -> Form:
    """The ``Form`` of rows of ``width`` values."""
    if isinstance(codec, GroupedCodec):
        return _grouped_form(codec.name, codec.bits, codec.group, codec.axis == "channel", width)
    planes = 1 if codec.lossless else 4
    return Form(codec.name, False, planes, 1, width // planes, 1, width // planes)


@cache
def _grouped_form(name: str, bits: int, group: int, per_channel: bool, width: int) -> Form:
    groups = 1 if per_channel else -(-width // group)
    return Form(name, per_channel, 4, 8 // bits, width // 4, groups, width // 4 if groups == 1 else group // 4)


class Tiles(NamedTuple):
    """What one program of the first kernel works on at a time."""

    rows: int
    block_k: int  # words
    block_v: int  # words
    block_n: int  # lines
    warps: int
    tokens: int  # of a line
    lines: int  # of a group
    near: int  # groups that a block may touch, if that matters


@cache
def tile_sizes(keys: Form, values: Form, itemsize: int, rows: int, group: int = 1, masked: bool = False) -> Tiles:
    """Powers of two that cover the widths, and as many lines as make a block of about ``BLOCK_BYTES`` per warp.

    ``itemsize``: bytes of the largest number that is held. ``masked``: every row has a mask of its own, for whose
    addresses one warp has too few registers. Warps share the columns of a product; a plane of 16
    columns is too narrow to be shared, and many rows need more registers than four warps have; so do low bits of wide
    heads, which read few lines at a time where one side has several rows for each. Keys with steps per
    channel get a group of tokens to a block where it has 16 lines or more.
    """
    tokens = max(keys.codes, values.codes)
    lines = group // tokens if group > 1 else 1
    block_k = _block(keys.span)
    block_v = _block(values.span) if values.groups == 1 else max(8, triton.next_power_of_2(values.span))
    padded_rows = _block(rows)
    wide = tokens > 1 and max(block_k, block_v) >= 32
    warps = 8 if padded_rows > 32 or wide else 1 if min(block_k, block_v) <= 16 else 4
    words = tokens // keys.codes * keys.groups * block_k * keys.planes
    words += tokens // values.codes * values.groups * block_v * values.planes
    room = _floor_power(BLOCK_BYTES * min(warps, 4) // (words * itemsize))
    if masked and warps == 1:
        warps, room = 2, room // 2
    block_n = 16 if wide and keys.codes != values.codes else min(128, max(16, room))
    near = 0
    if keys.per_channel:
        block_n = min(block_n, max(16, _floor_power(lines)))
        aligned = lines % block_n == 0 or block_n % lines == 0
        near = max(block_n // lines, 1) if aligned else (block_n - 2) // lines + 2
    return Tiles(padded_rows, block_k, block_v, block_n, warps, tokens, lines, near)


def split_sizes(lines: int, tiles: Tiles, pairs: int, sms: int) -> tuple[int, int]:
    """(number of splits, lines in each) of ``lines`` per (batch row, KV head) pair.

    As many programs as are resident at once, ``WARPS_PER_SM`` on each of the multiprocessors, so that none has to
    wait for a second wave; but a split has at least ``MIN_BLOCKS`` blocks, since each leaves a partial result to
    write and to read again. Splits are whole blocks and whole groups, equal but for the last, and none is empty.
    """
    wanted = max(1, WARPS_PER_SM // tiles.warps * sms // max(pairs, 1))
    unit = lcm(tiles.block_n, tiles.lines)
    units = max(-(-lines // (wanted * unit)), -(-MIN_BLOCKS * tiles.block_n // unit))
    return -(-lines // (units * unit)), units * unit


def _tiles_of(part: Part, rows: int, query: torch.dtype, masked: bool) -> Tiles:
    keys, values = part.keys[0], part.values[0]
    itemsize = 4 if query == torch.float32 else max(keys.element_size(), values.element_size())
    forms = form_of(part.key_codec, keys.shape[-1]), form_of(part.value_codec, values.shape[-1])
    return tile_sizes(*forms, itemsize, rows, part.group, masked)


def _floor_power(n: int) -> int:
    """The largest power of two that is at most n; 1 for less."""
    return 1 << (max(n, 1).bit_length() - 1)


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


def _words(state: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes as the kernel reads them, their scales and zeros (without any: a stand-in)."""
    if isinstance(state, Plain):
        return state.values, state.values, state.values
    words = state.codes.view(torch.int32)
    return words, state.scale, getattr(state, "zero", state.scale)


def _dot_dtype(query: torch.dtype, state: Any) -> tl.dtype:
    """What products with this side are computed in; see *Numbers* above."""
    if INTERPRETED or query == torch.float32:
        return tl.float32
    return FLOATS[state.values.dtype] if isinstance(state, Plain) else tl.float16


def _launch_part(
    query: torch.Tensor,
    part: Part,
    scaling: float,
    mask: torch.Tensor | None,
    softcap: float | None,
    acc: torch.Tensor,
    stats: torch.Tensor,
    scores: torch.Tensor | None,
    tiles: Tiles,
    splits: tuple[int, int, int],
) -> None:
    """One launch over the tokens of one part, into the splits (first, count, tokens in each) of the buffers.

    ``scores``: where its scores are wanted, [B, H, rows, n] from its first token on.
    """
    _check_shapes(query, part, mask)
    first_split, count, chunk = splits
    keys, key_scales, key_zeros = _words(part.keys)
    values, value_scales, value_zeros = _words(part.values)
    batch, query_heads, queries, width = query.shape
    rows = query_heads // keys.shape[1] * queries
    mask_bytes, kind, mask_strides = _mask_arguments(query, mask)
    dtype = query.dtype
    if width in getattr(part.key_codec, "rotated", NEVER):
        query = turn(query.float(), part.key_codec.rotated)  # type: ignore[attr-defined]
    form_k, form_v = form_of(part.key_codec, width), form_of(part.value_codec, part.values[0].shape[-1])
    ragged = part.starts is not None
    starts, sizes = (part.starts, part.sizes) if ragged else (stats, stats)
    _partial_kernel[(count, keys.shape[1], batch)](
        query, keys, key_scales, key_zeros, values, value_scales, value_zeros, starts, sizes, mask_bytes, acc, stats,
        stats if scores is None else scores,
        float(scaling) if softcap else float(scaling) * LOG2E.value, float(softcap or 0.0),
        rows, queries, part.tokens // tiles.tokens, chunk, first_split, stats.shape[2],
        0 if scores is None else scores.stride(2),
        *query.stride()[:3], *keys.stride()[:2], *key_scales.stride()[:2],
        *values.stride()[:2], *value_scales.stride()[:2], *mask_strides,
        keys.stride(-2), values.stride(-2), width, part.values[0].shape[-1], form_k.planes, form_v.planes,
        form_k.groups, form_v.groups, form_k.span, form_v.span, form_k.codes, form_v.codes,
        tiles.tokens, tiles.lines, tiles.near, tiles.block_k, tiles.block_v, tiles.block_n, tiles.rows,
        form_k.name, form_v.name, _dot_dtype(dtype, part.keys), _dot_dtype(dtype, part.values), kind, bool(softcap),
        ragged, scores is not None, num_warps=tiles.warps, num_stages=3,
    )  # fmt: skip


def _check_shapes(query: torch.Tensor, part: Part, mask: torch.Tensor | None) -> None:
    batch, _, _, width = query.shape
    heads, tokens = part.keys[0].shape[1], part.tokens
    assert part.keys[0].shape[-1] == width, (part.keys[0].shape, width)
    for codec, state in ((part.key_codec, part.keys), (part.value_codec, part.values)):
        assert all(t.shape[:3] == (batch, heads, tokens // codec.group) for t in state), [t.shape for t in state]
        if not isinstance(state, Plain):
            assert state.codes.element_size() == 1, state.codes.dtype
        if isinstance(state, Scaled):
            assert state.scale.shape[3] == 1 and state.scale.dtype == torch.float32, state.scale.shape
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


def can_append(x: torch.Tensor) -> bool:
    """Whether ``append_quantized`` takes states of this dtype on this device."""
    return x.dtype in FLOATS and (x.is_cuda or INTERPRETED) and _most_rows(x.device, x.dtype) > 0


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
    assert isinstance(codec, PerToken), codec.name
    assert can_append(x) and x.device == codes.device == scale.device, (x.dtype, x.device, codes.device)
    assert codes.shape[:2] == (batch, heads) and codes.shape[3] == width, (codes.shape, x.shape)
    assert codes.element_size() == 1 and scale.dtype == torch.float32, (codes.dtype, scale.dtype)
    assert scale.shape == (*codes.shape[:3], 1), scale.shape
    assert 0 <= slot and slot + tokens <= codes.shape[2], (slot, tokens, codes.shape)
    assert codes.stride(3) == 1 and (scale.stride(2) == 1 or codes.shape[2] == 1), (codes.stride(), scale.stride())
    if not x.numel():
        return
    unit = 1.0
    if width in codec.rotated:
        x, unit = turn_in(x, codec.rotated)
    if x.stride(3) != 1:
        x = x.contiguous()
    count, block = batch * heads * tokens, _block(width)
    rows = max(1, 1024 // block)
    with _current(x.device):
        _append_kernel[(-(-count // rows),)](
            x, codes.view(torch.int8), scale, count, tokens, heads, slot,
            float(codec.limit), unit, codec.largest_scale(width),
            *x.stride()[:3], *codes.stride()[:3], *scale.stride()[:2], width, block, rows, codec.name,
            x.is_cuda,  # there, torch divides by a number by multiplying with its reciprocal
        )  # fmt: skip
