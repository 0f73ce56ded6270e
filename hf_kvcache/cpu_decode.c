/* How does attention read the stored form on a CPU? One pass over the codes, tile by tile, in registers and L1.

   Called through ctypes by cpu_decode.py, which also says what each number in Call and Part means. No torch headers, no
   Python: addresses and strides come in, the result goes out, and nothing outlives a call.

   One KV head of one batch row has M = G * Q query rows (G heads share it, Q new tokens). Its tokens are cut in splits;
   a task walks over one split in tiles of at most TILE tokens:

       k[t]    = the codes of token t as float32        in L1; float32 states are read where they lie
       s[m,t]  = q[m] . k[t] * scale[t]                 then softcap and mask
       p[m,t]  = exp(s[m,t] - peak[m])                  peak: the largest score so far; when it rises, what was
       sum[m] += p[m,t]                                 gathered so far is scaled down by exp(old - new)
       a[m]   += (p[m,t] * value_scale[t]) * v[t]

   and whoever finishes the last split of a head joins them all (log-sum-exp). So every stored byte is read once, and
   the result depends on the number of splits, but not on which thread did which.

   Rotated keys are met by a rotated query. Rotated values are gathered apart from plain ones and turned back once.

   Where importance eviction wants to know what each key got, scores are kept, and once peak and sum are those of all
   splits:  mass[t] += mean over heads of the sum over queries of exp(s[m,t] - peak[m]) / sum[m].

   The file is compiled once per instruction set (LEVEL), from the same lines: vectors are written with the vector
   extensions of GCC and clang, eight floats each. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifndef LEVEL
#define LEVEL base
#endif
#define PASTE2(a, b) a##_##b
#define PASTE(a, b) PASTE2(a, b)
#define EXPORT(name) __attribute__((visibility("default"))) PASTE(name, LEVEL)
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define TILE 64         /* most tokens in a tile; a tile of float32 should stay within half of L1 */
#define TILE_FLOATS 4096

typedef float v8 __attribute__((vector_size(32)));
typedef float v8_anywhere __attribute__((vector_size(32), aligned(4), may_alias));
typedef float v4 __attribute__((vector_size(16)));
typedef int32_t i8x32 __attribute__((vector_size(32)));
typedef int16_t i8x16 __attribute__((vector_size(16)));
typedef int8_t i8x8 __attribute__((vector_size(8)));
typedef uint8_t u8x8 __attribute__((vector_size(8)));

enum { FLOAT32, BFLOAT16, FLOAT16, INT8, E4M3, E5M2, PER_CHANNEL, PER_TOKEN };

/* Keys or values of a part: addresses, and strides in elements. The rows of a low-bit side are groups of tokens. */
typedef struct {
    int64_t format, codes, codes_batch, codes_head, codes_row;
    int64_t scale, scale_batch, scale_head, scale_row;
    int64_t zero, bits, group; /* low bits only; zero has the strides of scale */
    int64_t turned;
} Side;

typedef struct {
    int64_t tokens;
    int64_t starts, sizes; /* int64 [B, H], or 0: where each head's rows begin in flat tensors, and how many it has */
    Side keys, values;
} Part;

typedef struct {
    int64_t query, query_dtype, query_batch, query_head, query_token;
    int64_t out, out_dtype; /* [B, Q, Hq, Dv], contiguous */
    int64_t mask, mask_dtype, mask_batch, mask_head, mask_query, mask_token, mask_shared;
    int64_t s_aux;                 /* float32 [Hq], or 0 */
    int64_t mass;                  /* float32 [B, H, n], contiguous, added to; or 0 */
    int64_t key_turn, value_turn;  /* float32 [D, D]: what query rows are multiplied with; what undoes it for values */
    int64_t batch, heads, groups, queries, key_width, value_width;
    int64_t parts, splits, threads, parallel;
    double scaling, softcap; /* softcap 0: none */
} Call;

/* ---- eight numbers at a time ------------------------------------------------------------------------------------ */

INLINE v8 load8(const float *p) { return *(const v8_anywhere *)p; }
INLINE void store8(float *p, v8 x) { *(v8_anywhere *)p = x; }
INLINE v8 floats(i8x32 bits) { return (v8)bits; }
INLINE v8 choose(i8x32 mask, v8 yes, v8 no) { return (v8)((mask & (i8x32)yes) | (~mask & (i8x32)no)); }

/* Eight stored numbers as 32 (or 16) bits each. GCC 12 widens a vector one element at a time, hence the intrinsics. */
#ifdef __AVX2__
INLINE i8x32 wide_int8(const void *p) { return (i8x32)_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)); }
INLINE i8x32 wide_uint8(const void *p) { return (i8x32)_mm256_cvtepu8_epi32(_mm_loadl_epi64(p)); }
INLINE i8x32 wide_int16(const void *p) { return (i8x32)_mm256_cvtepi16_epi32(_mm_loadu_si128(p)); }
INLINE i8x16 half_int8(const void *p) { return (i8x16)_mm_cvtepi8_epi16(_mm_loadl_epi64(p)); }
INLINE v8 from_half(i8x16 half) { return (v8)_mm256_cvtph_ps((__m128i)half); }
#else
#define WIDEN(NAME, FROM, TO)                                                                                          \
    INLINE TO NAME(const void *p) {                                                                                    \
        FROM x;                                                                                                        \
        memcpy(&x, p, sizeof x);                                                                                       \
        return __builtin_convertvector(x, TO);                                                                         \
    }
WIDEN(wide_int8, i8x8, i8x32)
WIDEN(wide_uint8, u8x8, i8x32)
WIDEN(wide_int16, i8x16, i8x32)
WIDEN(half_int8, i8x8, i8x16)
INLINE v8 from_half(i8x16 half) {
    i8x32 h = __builtin_convertvector(half, i8x32), bits = (h & 0x7fff) << 13, exponent = bits & 0x0f800000;
    i8x32 special = exponent == 0x0f800000, small = exponent == 0; /* infinity and NaN; subnormal */
    bits += (112 << 23) + (special & (112 << 23)) + (small & (1 << 23));
    v8 out = floats(bits) - (v8)(small & (113 << 23)); /* 1.m * 2^-14 - 2^-14: no subnormal float32 is made */
    return (v8)((i8x32)out | ((h & 0x8000) << 16));
}
#endif

INLINE v8 from_float32(const float *p) { return load8(p); }
INLINE v8 from_bfloat16(const int16_t *p) { return floats(wide_int16(p) << 16); }
INLINE v8 from_int8(const int8_t *p) { return __builtin_convertvector(wide_int8(p), v8); }
INLINE v8 from_float16(const int16_t *p) {
    i8x16 x;
    memcpy(&x, p, sizeof x);
    return from_half(x);
}
/* Both 8-bit floats are a float16 with bits missing (see codecs.py); e4m3 comes out as the value times 2^-8. */
INLINE v8 from_e4m3(const int8_t *p) { return from_half((half_int8(p) << 7) & (int16_t)0xbf80); }
INLINE v8 from_e5m2(const int8_t *p) { return from_half(half_int8(p) << 8); }
INLINE v8 from_bits(const uint8_t *p, int shift, int top) {
    return __builtin_convertvector((wide_uint8(p) >> shift) & top, v8);
}

/* exp(x) for x <= 0, to two units in the last place; 0 below -87, NaN for NaN (polynomial: Cephes, expf). */
INLINE v8 exp8(v8 x) {
    const v8 magic = (v8){} + 12582912.0f;
    v8 rounded = x * 1.44269504f + magic, n = rounded - magic;
    v8 r = x - n * 0.693359375f - n * -2.12194440e-4f;
    v8 p = ((v8){} + 1.9875691500e-4f) * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    v8 out = floats((i8x32)p + (((i8x32)rounded - (i8x32)magic) << 23));
    out = choose(x < -87.0f, (v8){}, out);
    return choose(x != x, x, out);
}
INLINE float exp1(float x) { return exp8((v8){} + x)[0]; }

INLINE v4 low(v8 x) { return (v4){x[0], x[1], x[2], x[3]}; }
INLINE v4 high(v8 x) { return (v4){x[4], x[5], x[6], x[7]}; }
INLINE float sum8(v8 x) {
    v4 y = low(x) + high(x);
    return (y[0] + y[1]) + (y[2] + y[3]);
}
INLINE v4 sums(v8 a, v8 b, v8 c, v8 d) {
    v4 w = low(a) + high(a), x = low(b) + high(b), y = low(c) + high(c), z = low(d) + high(d);
    v4 wx = (v4){w[0], x[0], w[1], x[1]} + (v4){w[2], x[2], w[3], x[3]};
    v4 yz = (v4){y[0], z[0], y[1], z[1]} + (v4){y[2], z[2], y[3], z[3]};
    return (v4){wx[0], wx[1], yz[0], yz[1]} + (v4){wx[2], wx[3], yz[2], yz[3]};
}

INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t padded(int64_t width) { return (width + 7) & ~(int64_t)7; }

/* ---- tokens as float32, [n, padded(width)], zeros in the padding --------------------------------------------------- */

#define DECODE(NAME, TYPE)                                                                                             \
    static void rows_##NAME(const TYPE *row, int64_t stride, int64_t n, int64_t width, float *out) {                  \
        for (; n--; row += stride) {                                                                                   \
            int64_t d = 0;                                                                                             \
            for (; d + 8 <= width; d += 8, out += 8) store8(out, from_##NAME(row + d));                               \
            if (d < width) {                                                                                           \
                TYPE rest[8] = {0};                                                                                    \
                memcpy(rest, row + d, (size_t)(width - d) * sizeof(TYPE));                                             \
                store8(out, from_##NAME(rest));                                                                        \
                out += 8;                                                                                              \
            }                                                                                                          \
        }                                                                                                              \
    }
DECODE(float32, float)
DECODE(bfloat16, int16_t)
DECODE(float16, int16_t)
DECODE(int8, int8_t)
DECODE(e4m3, int8_t)
DECODE(e5m2, int8_t)

INLINE float one_bfloat16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

/* (code + zero) * step for whole vectors; the codes of the last few channels are copied out, never read past. */
INLINE void low_row(const uint8_t *row, int64_t from, int64_t to, int shift, int top, const float *zero,
                    const float *step, int one, float *out) {
    for (int64_t d = from; d < to; d += 8) {
        uint8_t rest[8] = {0};
        const uint8_t *codes = row + d;
        if (d + 8 > to) codes = memcpy(rest, codes, (size_t)(to - d));
        v8 z = one ? (v8){} + *zero : load8(zero + d), s = one ? (v8){} + *step : load8(step + d);
        store8(out + d, (from_bits(codes, shift, top) + z) * s);
    }
}

typedef struct {
    const Side *side;
    int64_t width;
    const uint8_t *codes;
    const uint16_t *scale;
    const int16_t *zero;
    float unit;  /* of zero, in steps */
    float *meta; /* [2, padded(width)] */
} Low;

/* One token t of its group: byte t % rows holds it, in bits (t / rows) * bits and up. */
static void low_token(const Low *low, int64_t group, int64_t t, float *out) {
    const Side *side = low->side;
    int64_t rows = side->group * side->bits / 8, width = low->width, wide = padded(width);
    const uint8_t *row = low->codes + group * side->codes_row + t % rows * width;
    int shift = (int)(t / rows * side->bits), top = (1 << side->bits) - 1;
    if (side->format == PER_CHANNEL) {
        low_row(row, 0, width, shift, top, low->meta + wide, low->meta, 0, out);
    } else {
        int64_t count = (width + side->group - 1) / side->group;
        const uint16_t *scale = low->scale + group * side->scale_row + t * count;
        const int16_t *zero = low->zero + group * side->scale_row + t * count;
        for (int64_t c = 0; c < count; c++) {
            int64_t from = c * side->group, to = at_most(from + side->group, width);
            float step = one_bfloat16(scale[c]), first = zero[c] * low->unit;
            if (from % 8 == 0 && (to % 8 == 0 || to == width))
                low_row(row, from, to, shift, top, &first, &step, 1, out);
            else
                for (int64_t d = from; d < to; d++) out[d] = ((float)(row[d] >> shift & top) + first) * step;
        }
    }
    for (int64_t d = width; d < wide; d++) out[d] = 0.0f;
}

static void rows_low(const Low *low, int64_t start, int64_t n, float *out) {
    const Side *side = low->side;
    int64_t wide = padded(low->width), loaded = -1;
    for (int64_t i = start; i < start + n; i++, out += wide) {
        int64_t group = i / side->group;
        if (side->format == PER_CHANNEL && group != loaded) {
            for (int64_t d = 0; d < wide; d++) {
                low->meta[d] = d < low->width ? one_bfloat16(low->scale[group * side->scale_row + d]) : 0.0f;
                low->meta[wide + d] = d < low->width ? low->zero[group * side->scale_row + d] * low->unit : 0.0f;
            }
            loaded = group;
        }
        low_token(low, group, i % side->group, out);
    }
}

/* Where a tile of float32 lies, and what each of its tokens still has to be multiplied with. */
typedef struct {
    const float *rows;
    int64_t stride;
    const float *scale; /* [n], or NULL */
} Tile;

static Tile decode(const Side *side, int64_t b, int64_t h, int64_t start, int64_t n, int64_t width, float *room,
                   float *scales, float *meta) {
    int64_t at = b * side->codes_batch + h * side->codes_head, from = at + start * side->codes_row;
    int64_t stride = side->codes_row, scale_at = b * side->scale_batch + h * side->scale_head;
    Tile tile = {room, padded(width), NULL};
    switch (side->format) {
    case FLOAT32:
        if (width % 8 == 0) return (Tile){(const float *)side->codes + from, stride, NULL};
        rows_float32((const float *)side->codes + from, stride, n, width, room);
        return tile;
    case BFLOAT16: rows_bfloat16((const int16_t *)side->codes + from, stride, n, width, room); return tile;
    case FLOAT16: rows_float16((const int16_t *)side->codes + from, stride, n, width, room); return tile;
    case INT8: rows_int8((const int8_t *)side->codes + from, stride, n, width, room); break;
    case E4M3: rows_e4m3((const int8_t *)side->codes + from, stride, n, width, room); break;
    case E5M2: rows_e5m2((const int8_t *)side->codes + from, stride, n, width, room); break;
    default:;
        Low low = {side, width, (const uint8_t *)side->codes + at, (const uint16_t *)side->scale + scale_at,
                   (const int16_t *)side->zero + scale_at, side->bits == 2 ? 0.125f : 1.0f, meta};
        rows_low(&low, start, n, room);
        return tile;
    }
    const float *scale = (const float *)side->scale + scale_at + start * side->scale_row;
    for (int64_t t = 0; t < n; t++) scales[t] = scale[t * side->scale_row] * (side->format == E4M3 ? 256.0f : 1.0f);
    tile.scale = scales;
    return tile;
}

/* ---- scores and outputs of a tile ----------------------------------------------------------------------------------- */

/* ROWS query rows times TOKENS tokens, each product in a register of eight partial sums. */
INLINE void dots(int ROWS, int TOKENS, const float *q, int64_t width, const float *k, int64_t stride, float *s) {
    v8 sum[4][4] = {};
    for (int64_t d = 0; d < width; d += 8) {
        v8 key[4];
        UNROLL for (int t = 0; t < TOKENS; t++) key[t] = load8(k + t * stride + d);
        UNROLL for (int m = 0; m < ROWS; m++) {
            v8 row = load8(q + m * width + d);
            UNROLL for (int t = 0; t < TOKENS; t++) sum[m][t] += row * key[t];
        }
    }
    UNROLL for (int m = 0; m < ROWS; m++) {
        if (TOKENS == 4) {
            v4 four = sums(sum[m][0], sum[m][1], sum[m][2], sum[m][3]);
            memcpy(s + m * TILE, &four, sizeof four);
        } else {
            UNROLL for (int t = 0; t < TOKENS; t++) s[m * TILE + t] = sum8(sum[m][t]);
        }
    }
}
INLINE void dots_rows(int ROWS, const float *q, int64_t width, const Tile *k, int64_t n, float *s) {
    int64_t t = 0;
    if (ROWS < 4)
        for (; t + 4 <= n; t += 4) dots(ROWS, 4, q, width, k->rows + t * k->stride, k->stride, s + t);
    for (; t + 2 <= n; t += 2) dots(ROWS, 2, q, width, k->rows + t * k->stride, k->stride, s + t);
    for (; t < n; t++) dots(ROWS, 1, q, width, k->rows + t * k->stride, k->stride, s + t);
}
INLINE int64_t rows_at_once(int64_t rows) { return rows == 4 || rows > 6 ? 4 : at_most(rows, 3); }

/* q [M, width], width a multiple of 8 -> s [M, TILE] */
static void tile_scores(const float *q, int64_t rows, int64_t width, const Tile *k, int64_t n, float *s) {
    while (rows > 0) {
        int64_t some = rows_at_once(rows);
        if (some == 4) dots_rows(4, q, width, k, n, s);
        if (some == 3) dots_rows(3, q, width, k, n, s);
        if (some == 2) dots_rows(2, q, width, k, n, s);
        if (some == 1) dots_rows(1, q, width, k, n, s);
        rows -= some, q += some * width, s += some * TILE;
    }
}

/* ROWS rows of the output, COLUMNS vectors wide, over all tokens of the tile. */
INLINE void mix(int ROWS, int COLUMNS, const float *p, const float *v, int64_t stride, int64_t n, float *a,
                int64_t width) {
    v8 sum[4][8];
    UNROLL for (int m = 0; m < ROWS; m++)
        UNROLL for (int c = 0; c < COLUMNS; c++) sum[m][c] = load8(a + m * width + c * 8);
    for (int64_t t = 0; t < n; t++) {
        UNROLL for (int c = 0; c < COLUMNS; c++) {
            v8 value = load8(v + t * stride + c * 8);
            UNROLL for (int m = 0; m < ROWS; m++) sum[m][c] += p[m * TILE + t] * value;
        }
    }
    UNROLL for (int m = 0; m < ROWS; m++)
        UNROLL for (int c = 0; c < COLUMNS; c++) store8(a + m * width + c * 8, sum[m][c]);
}
INLINE void mix_rows(int ROWS, int COLUMNS, const float *p, const Tile *v, int64_t n, float *a, int64_t width) {
    int64_t d = 0;
    for (; d + 8 * COLUMNS <= width; d += 8 * COLUMNS) mix(ROWS, COLUMNS, p, v->rows + d, v->stride, n, a + d, width);
    for (; d < width; d += 8) mix(ROWS, 1, p, v->rows + d, v->stride, n, a + d, width);
}
/* p [M, TILE], v -> a [M, width] */
static void tile_mix(const float *p, int64_t rows, const Tile *v, int64_t n, float *a, int64_t width) {
    while (rows > 0) {
        int64_t some = rows_at_once(rows);
        if (some == 4) mix_rows(4, 2, p, v, n, a, width);
        if (some == 3) mix_rows(3, 4, p, v, n, a, width);
        if (some == 2) mix_rows(2, 4, p, v, n, a, width);
        if (some == 1) mix_rows(1, 8, p, v, n, a, width);
        rows -= some, p += some * TILE, a += some * width;
    }
}

/* softcap * tanh(s / softcap), through an exponential that cannot overflow */
static void cap_scores(float *s, int64_t n, float softcap) {
    for (int64_t t = 0; t < n; t += 8) {
        v8 x = load8(s + t), sign = (v8)((i8x32)x & INT32_MIN), size = (v8)((i8x32)x & INT32_MAX);
        v8 shrunk = exp8(size * (-2.0f / softcap));
        v8 out = softcap * (1.0f - shrunk) / (1.0f + shrunk);
        store8(s + t, (v8)((i8x32)out | (i8x32)sign));
    }
}

static void mask_scores(const Call *call, int64_t b, int64_t head, int64_t query, int64_t token, int64_t n, float *s) {
    int64_t step = call->mask_token, row = head / call->mask_shared;
    int64_t at = b * call->mask_batch + row * call->mask_head + query * call->mask_query + token * step;
    if (call->mask_dtype == FLOAT32) {
        const float *bias = (const float *)call->mask + at;
        for (int64_t t = 0; t < n; t++) s[t] += bias[t * step];
    } else {
        const uint8_t *shown = (const uint8_t *)call->mask + at;
        for (int64_t t = 0; t < n; t++) s[t] = shown[t * step] ? s[t] : -INFINITY;
    }
}

/* ---- one split of one head ------------------------------------------------------------------------------------------- */

/* What a split leaves behind: peak and sum [M], outputs of plain and of rotated values [2, M, padded(Dv)]. */
typedef struct {
    float *peak, *sum, *out;
} Partial;

typedef struct {
    const Call *call;
    const Part *parts;
    int64_t rows, key_wide, value_wide, tokens, chunk, tile;
    float *query;    /* [B, H, 2, M, padded(Dk)]: plain and rotated, scaled */
    float *partials; /* [B, H, splits] Partial */
    int64_t partial_size;
    float *scores;   /* [B, H, M, n] where ``mass`` is wanted, else NULL */
    int64_t *left; /* [B, H]: splits to come */
    int64_t next, tasks;
    int failed;
} Work;

typedef struct {
    float *room, *scores, *scales, *meta;
} Scratch;

static Partial partial_of(const Work *work, int64_t cell, int64_t split) {
    float *at = work->partials + (cell * work->call->splits + split) * work->partial_size;
    return (Partial){at, at + work->rows, at + padded(2 * work->rows)};
}

/* Scores of one row -> exp(scores - peak); the new peak; earlier results scaled down. Whether anything is seen. */
static int softmax_row(float *s, int64_t n, const float *value_scale, float *peak, float *sum, float *out,
                       int64_t wide, int64_t other) {
    v8 largest = (v8){} - INFINITY;
    for (int64_t t = 0; t < n; t += 8) {
        v8 x = load8(s + t);
        largest = choose((x > largest) | (x != x), x, largest); /* NaN stays */
    }
    float top = *peak;
    for (int i = 0; i < 8; i++) top = largest[i] > top || largest[i] != largest[i] ? largest[i] : top;
    if (top == -INFINITY) {
        memset(s, 0, (size_t)n * sizeof *s);
        return 0;
    }
    if (top != *peak) {
        float fade = exp1(*peak - top);
        *sum *= fade;
        for (int64_t d = 0; d < wide; d++) out[d] *= fade, out[other + d] *= fade;
        *peak = top;
    }
    v8 total = {};
    for (int64_t t = 0; t < n; t += 8) {
        v8 p = exp8(load8(s + t) - top);
        total += p;
        store8(s + t, value_scale ? p * load8(value_scale + t) : p);
    }
    *sum += sum8(total);
    return 1;
}

static void attend_tile(const Work *work, const Part *part, int64_t b, int64_t h, int64_t start, int64_t n,
                        int64_t token, Partial *into, Scratch *scratch) {
    const Call *call = work->call;
    int64_t rows = work->rows, wide = work->value_wide, full = padded(n);
    const float *query =
        work->query + ((b * call->heads + h) * 2 + part->keys.turned) * rows * work->key_wide;
    int64_t row = start + (part->starts ? ((const int64_t *)part->starts)[b * call->heads + h] : 0);
    Tile keys = decode(&part->keys, b, h, row, n, call->key_width, scratch->room, scratch->scales, scratch->meta);
    tile_scores(query, rows, work->key_wide, &keys, n, scratch->scores);
    for (int64_t m = 0; m < rows; m++) {
        float *s = scratch->scores + m * TILE;
        if (keys.scale)
            for (int64_t t = 0; t < n; t++) s[t] *= keys.scale[t];
        for (int64_t t = n; t < full; t++) s[t] = -INFINITY;
        if (call->softcap != 0.0) cap_scores(s, n, (float)call->softcap);
        for (int64_t t = n; t < full; t++) s[t] = -INFINITY;
        if (call->mask)
            mask_scores(call, b, h * call->groups + m / call->queries, m % call->queries, token, n, s);
        if (work->scores)
            memcpy(work->scores + ((b * call->heads + h) * rows + m) * work->tokens + token, s, (size_t)n * sizeof *s);
    }
    Tile values =
        decode(&part->values, b, h, row, n, call->value_width, scratch->room, scratch->scales, scratch->meta);
    if (values.scale)
        for (int64_t t = n; t < full; t++) scratch->scales[t] = 0.0f;
    int seen = 0;
    for (int64_t m = 0; m < rows; m++)
        seen |= softmax_row(scratch->scores + m * TILE, full, values.scale, into->peak + m, into->sum + m,
                            into->out + m * wide, wide, rows * wide);
    if (seen) tile_mix(scratch->scores, rows, &values, n, into->out + part->values.turned * rows * wide, wide);
}

static void attend_split(const Work *work, int64_t cell, int64_t split, Scratch *scratch) {
    const Call *call = work->call;
    int64_t b = cell / call->heads, h = cell % call->heads;
    int64_t begin = split * work->chunk, end = at_most(begin + work->chunk, work->tokens), first = 0;
    Partial into = partial_of(work, cell, split);
    memset(into.peak, 0, (size_t)work->partial_size * sizeof(float));
    for (int64_t m = 0; m < work->rows; m++) into.peak[m] = -INFINITY;
    for (int64_t i = 0; i < call->parts; first += work->parts[i++].tokens) {
        const Part *part = work->parts + i;
        int64_t own = part->sizes ? ((const int64_t *)part->sizes)[cell] : part->tokens;
        int64_t stop = at_most(end - first, own);
        for (int64_t t = begin > first ? begin - first : 0; t < stop; t += work->tile)
            attend_tile(work, part, b, h, t, at_most(work->tile, stop - t), first + t, &into, scratch);
    }
}

/* ---- before and after the splits ------------------------------------------------------------------------------------- */

static void times_matrix(const float *restrict x, int64_t width, const float *restrict matrix, float *restrict out) {
    for (int64_t i = 0; i < width; i++)
        for (int64_t j = 0; j < width; j++) out[j] += x[i] * matrix[i * width + j];
}

static void read_query(const Call *call, int64_t at, float *out) {
    int64_t width = call->key_width;
    if (call->query_dtype == FLOAT32) rows_float32((const float *)call->query + at, 0, 1, width, out);
    if (call->query_dtype == BFLOAT16) rows_bfloat16((const int16_t *)call->query + at, 0, 1, width, out);
    if (call->query_dtype == FLOAT16) rows_float16((const int16_t *)call->query + at, 0, 1, width, out);
    for (int64_t d = 0; d < width; d++) out[d] *= (float)call->scaling;
}

static void prepare_query(const Work *work, int64_t cell) {
    const Call *call = work->call;
    int64_t b = cell / call->heads, h = cell % call->heads, wide = work->key_wide;
    float *plain = work->query + cell * 2 * work->rows * wide, *turned = plain + work->rows * wide;
    for (int64_t m = 0; m < work->rows; m++) {
        int64_t head = h * call->groups + m / call->queries, token = m % call->queries;
        read_query(call, b * call->query_batch + head * call->query_head + token * call->query_token, plain + m * wide);
        if (call->key_turn) {
            memset(turned + m * wide, 0, (size_t)wide * sizeof(float));
            times_matrix(plain + m * wide, call->key_width, (const float *)call->key_turn, turned + m * wide);
        }
    }
}

static void write_row(const Call *call, const float *row, float factor, int64_t at) {
    if (call->out_dtype == FLOAT32) {
        float *out = (float *)call->out + at;
        for (int64_t d = 0; d < call->value_width; d++) out[d] = row[d] * factor;
        return;
    }
    uint16_t *out = (uint16_t *)call->out + at; /* bfloat16: nearest, even on ties; NaN stays NaN */
    for (int64_t d = 0; d < call->value_width; d++) {
        float x = row[d] * factor;
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        out[d] = (uint16_t)(x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

/* Row m of all splits, and the learned logit that has no value. The splits' buffers are used up; the first keeps the
   peak and the sum of all. */
static void join_row(const Work *work, int64_t cell, int64_t m) {
    const Call *call = work->call;
    int64_t b = cell / call->heads, head = cell % call->heads * call->groups + m / call->queries;
    int64_t wide = work->value_wide, other = work->rows * wide;
    float peak = call->s_aux ? ((const float *)call->s_aux)[head] : -INFINITY, total = call->s_aux ? 1.0f : 0.0f;
    Partial first = partial_of(work, cell, 0);
    float *plain = first.out + m * wide, *turned = plain + other;
    for (int64_t i = 0; i < call->splits; i++) {
        Partial one = partial_of(work, cell, i);
        float *out = one.out + m * wide, mine = one.peak[m];
        float top = mine > peak || mine != mine ? mine : peak;
        float grow = top == -INFINITY ? 0.0f : exp1(mine - top), fade = top == -INFINITY ? 0.0f : exp1(peak - top);
        total = total * fade + one.sum[m] * grow;
        peak = top;
        for (int64_t d = 0; d < wide; d++) {
            plain[d] = (i ? plain[d] * fade : 0.0f) + out[d] * grow;
            turned[d] = (i ? turned[d] * fade : 0.0f) + out[other + d] * grow;
        }
    }
    if (call->value_turn) times_matrix(turned, call->value_width, (const float *)call->value_turn, plain);
    int64_t query_heads = call->heads * call->groups, token = m % call->queries;
    write_row(call, plain, total == 0.0f ? 0.0f : 1.0f / total,
              ((b * call->queries + token) * query_heads + head) * call->value_width);
    first.peak[m] = peak, first.sum[m] = total;
}

/* mass += exp(s - peak) * factor */
static void add_row(const float *s, int64_t n, float peak, float factor, float *mass) {
    int64_t t = 0;
    for (; t + 8 <= n; t += 8) store8(mass + t, load8(mass + t) + exp8(load8(s + t) - peak) * factor);
    for (; t < n; t++) mass[t] += exp1(s[t] - peak) * factor;
}

/* What each key of a head got from its joined rows; a row that sees nothing gives nothing. */
static void add_mass(const Work *work, int64_t cell) {
    const Call *call = work->call;
    Partial joined = partial_of(work, cell, 0);
    for (int64_t m = 0; m < work->rows; m++) {
        if (joined.sum[m] == 0.0f) continue;
        float factor = 1.0f / (joined.sum[m] * (float)call->groups);
        const float *s = work->scores + (cell * work->rows + m) * work->tokens;
        float *mass = (float *)call->mass + cell * work->tokens;
        for (int64_t i = 0; i < call->parts; i++) {
            const Part *part = work->parts + i;
            int64_t own = part->sizes ? ((const int64_t *)part->sizes)[cell] : part->tokens;
            add_row(s, own, joined.peak[m], factor, mass);
            s += part->tokens, mass += part->tokens;
        }
    }
}

static void *make_scratch(const Work *work, Scratch *scratch) {
    int64_t wide = work->key_wide > work->value_wide ? work->key_wide : work->value_wide;
    int64_t room = work->tile * wide, scores = work->rows * TILE;
    float *all = malloc((size_t)(room + scores + TILE + 2 * wide) * sizeof(float));
    if (all) *scratch = (Scratch){all, all + room, all + room + scores, all + room + scores + TILE};
    return all;
}

/* What each thread does: take the next split until there is none. */
static void run_tasks(void *shared) {
    Work *work = shared;
    const Call *call = work->call;
    Scratch scratch;
    void *memory = make_scratch(work, &scratch);
    if (!memory) {
        __atomic_store_n(&work->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (;;) {
        int64_t task = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
        if (task >= work->tasks) break;
        int64_t cell = task / call->splits;
        attend_split(work, cell, task % call->splits, &scratch);
        if (__atomic_sub_fetch(&work->left[cell], 1, __ATOMIC_ACQ_REL) == 0) {
            for (int64_t m = 0; m < work->rows; m++) join_row(work, cell, m);
            if (work->scores) add_mass(work, cell);
        }
    }
    free(memory);
}

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel of the pool torch uses */

/* 0, or -1 when there is no memory. The result is float32 or bfloat16, [B, Q, Hq, Dv]. */
int EXPORT(attend)(const Call *call, const Part *parts) {
    int64_t cells = call->batch * call->heads, rows = call->groups * call->queries;
    int64_t key_wide = padded(call->key_width), value_wide = padded(call->value_width), tokens = 0;
    int64_t wide = key_wide > value_wide ? key_wide : value_wide, tile = TILE;
    for (int64_t i = 0; i < call->parts; i++) tokens += parts[i].tokens;
    while (tile > 16 && tile * wide > TILE_FLOATS) tile /= 2;
    int64_t chunk = (tokens + call->splits - 1) / call->splits;
    Work work = {call, parts, rows, key_wide, value_wide, tokens, (chunk + tile - 1) / tile * tile, tile,
                 NULL, NULL, padded(2 * rows) + 2 * rows * value_wide, NULL, NULL, 0, cells * call->splits, 0};
    int64_t queries = cells * 2 * rows * key_wide, partials = cells * call->splits * work.partial_size;
    int64_t scores = call->mass ? cells * rows * tokens : 0;
    work.left = malloc((size_t)cells * sizeof(int64_t) + (size_t)(queries + partials + scores) * sizeof(float));
    if (!work.left) return -1;
    work.query = (float *)(work.left + cells);
    work.partials = work.query + queries;
    if (scores) work.scores = work.partials + partials;
    for (int64_t cell = 0; cell < cells; cell++) {
        work.left[cell] = call->splits;
        prepare_query(&work, cell);
    }
    if (call->threads > 1 && call->parallel)
        ((Parallel)call->parallel)(run_tasks, &work, (unsigned)call->threads, 0);
    else
        run_tasks(&work);
    free(work.left);
    return work.failed ? -1 : 0;
}

/* ---- the writing side: one token into its slot ------------------------------------------------------------------------ */

typedef struct {
    int64_t states, dtype, states_batch, states_head; /* one token: [B, H, 1, D] */
    int64_t format, codes, codes_batch, codes_head;   /* of the slot */
    int64_t scale, scale_batch, scale_head, width;
    double unit, most; /* what the states were divided by; the largest scale */
} Append;

static const float LIMITS[] = {[INT8] = 127.0f, [E4M3] = 448.0f, [E5M2] = 57344.0f};

/* Nearest 8-bit float, even on ties, of x within the format's range. Adding and taking away 1.5 * 2^23 steps rounds to
   whole steps; a step is the value of the last mantissa bit, and stops shrinking where subnormals begin. */
INLINE uint8_t float8(float x, int mantissa, int bias) {
    uint32_t bits, anchor_bits, rounded;
    float anchor, size = fabsf(x);
    memcpy(&bits, &x, sizeof bits);
    int32_t exponent = (int32_t)(bits >> 23 & 0xff);
    if (exponent < 128 - bias) exponent = 128 - bias;
    anchor_bits = (uint32_t)(exponent - mantissa + 23) << 23 | 0x400000;
    memcpy(&anchor, &anchor_bits, sizeof anchor);
    size = (size + anchor) - anchor;
    memcpy(&rounded, &size, sizeof rounded);
    uint32_t normal = (rounded >> (23 - mantissa)) - ((uint32_t)(127 - bias) << mantissa);
    uint32_t subnormal = (uint32_t)(fminf(size, 1.0f) * (float)(1 << (bias + mantissa - 1)));
    return (uint8_t)((rounded < (uint32_t)(128 - bias) << 23 ? subnormal : normal) | (bits >> 24 & 0x80));
}

INLINE void encode_row(int FORMAT, const float *x, const Append *side, uint8_t *codes, float *scale) {
    int64_t width = side->width;
    float peak = 0.0f, limit = LIMITS[FORMAT];
    for (int64_t d = 0; d < width; d++) peak = fabsf(x[d]) > peak ? fabsf(x[d]) : peak;
    float step = peak / limit * (float)side->unit, most = (float)side->most;
    step = step < 1.17549435e-38f ? 1.0f : step;
    *scale = step > most ? most : step;
    step /= (float)side->unit;
    for (int64_t d = 0; d < width; d++) {
        float y = x[d] / step;
        if (FORMAT == INT8) y = (y + 12582912.0f) - 12582912.0f; /* nearest, even on ties */
        y = y > limit ? limit : y < -limit ? -limit : y;
        codes[d] = FORMAT == INT8 ? (uint8_t)(int8_t)y : FORMAT == E4M3 ? float8(y, 3, 7) : float8(y, 2, 15);
    }
}

static void read_states(const Append *side, int64_t at, float *out) {
    if (side->dtype == FLOAT32) rows_float32((const float *)side->states + at, 0, 1, side->width, out);
    if (side->dtype == BFLOAT16) rows_bfloat16((const int16_t *)side->states + at, 0, 1, side->width, out);
    if (side->dtype == FLOAT16) rows_float16((const int16_t *)side->states + at, 0, 1, side->width, out);
}

static void append_row(const Append *side, int64_t b, int64_t h, float *row) {
    int64_t from = b * side->states_batch + h * side->states_head, to = b * side->codes_batch + h * side->codes_head;
    if (side->format <= FLOAT16) {
        int64_t size = side->format == FLOAT32 ? 4 : 2;
        memcpy((char *)side->codes + to * size, (const char *)side->states + from * size, (size_t)(side->width * size));
        return;
    }
    uint8_t *codes = (uint8_t *)side->codes + to;
    float *scale = (float *)side->scale + b * side->scale_batch + h * side->scale_head;
    read_states(side, from, row);
    if (side->format == INT8) encode_row(INT8, row, side, codes, scale);
    if (side->format == E4M3) encode_row(E4M3, row, side, codes, scale);
    if (side->format == E5M2) encode_row(E5M2, row, side, codes, scale);
}

/* Infinity minus itself is NaN, and NaN stays in a sum. */
static int is_finite(const Append *side, int64_t b, int64_t h, float *row) {
    float sum = 0.0f;
    read_states(side, b * side->states_batch + h * side->states_head, row);
    for (int64_t d = 0; d < side->width; d++) sum += row[d] - row[d];
    return sum == 0.0f;
}

/* Keys and values of one token. 0; -1: no memory; 1 + side: that side is not finite, where one is encoded. */
int EXPORT(append)(const Append *sides, int64_t batch, int64_t heads) {
    int64_t wide = padded(sides[0].width > sides[1].width ? sides[0].width : sides[1].width);
    int lossy = sides[0].format > FLOAT16 || sides[1].format > FLOAT16, bad = 0;
    float *row = malloc((size_t)wide * sizeof(float));
    if (!row) return -1;
    for (int64_t i = 0; lossy && !bad && i < 2 * batch * heads; i++)
        if (!is_finite(sides + i % 2, i / 2 / heads, i / 2 % heads, row)) bad = 1 + (int)(i % 2);
    for (int64_t i = 0; !bad && i < 2 * batch * heads; i++)
        append_row(sides + i % 2, i / 2 / heads, i / 2 % heads, row);
    free(row);
    return bad;
}

/* Whether this machine has what was compiled for a level: 0 base, 1 avx2. Asked of the base level. */
#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
int EXPORT(has)(int level) {
    unsigned a, b, c = 0, d;
    int f16c = __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
    return !level || (f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
}
#else
int EXPORT(has)(int level) { return !level; }
#endif

#ifdef SOURCE
const char EXPORT(source)[] = SOURCE; /* SHA-256 of this file: a binary of another version must not be called */
#endif
