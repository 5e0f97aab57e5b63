/* Element-wise reductions, in the order of the sources: the same bits however the work is cut.
 *
 * Plain loops that the compiler vectorises; where it can, it emits one version for each
 * generation of processors and the loader picks (function multiversioning). Blocks are small
 * enough that what is added up stays in the first-level cache. */
#include <string.h>

#include "core.h"

/* The thread sanitizer is not up yet when the loader asks which version it wants. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define VERSIONS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VERSIONS
#endif

/* An output may be one of the inputs, element for element; the compiler need not fear more. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

#define BLOCK 4096 /* elements */

/* --- two operands ------------------------------------------------------------------------------ */

typedef void combine_function(void *out, const void *a, const void *b, size_t count);

#define COMBINE(NAME, TYPE, EXPRESSION)                                                      \
    VERSIONS static void NAME(void *out_, const void *a_, const void *b_, size_t count) {    \
        TYPE *out = out_;                                                                    \
        const TYPE *left = a_, *right = b_;                                                  \
        INDEPENDENT for (size_t i = 0; i < count; i++) {                                     \
            TYPE a = left[i], b = right[i];                                                  \
            out[i] = (TYPE)(EXPRESSION);                                                     \
        }                                                                                    \
    }

/* NaN wins: whoever asks for the smallest or largest value wants to hear of it. */
#define ARITHMETIC(SUFFIX, TYPE)                                  \
    COMBINE(sum_##SUFFIX, TYPE, a + b)                            \
    COMBINE(product_##SUFFIX, TYPE, a *b)                         \
    COMBINE(min_##SUFFIX, TYPE, (a != a || a < b) ? a : b)        \
    COMBINE(max_##SUFFIX, TYPE, (a != a || a > b) ? a : b)

#define BITWISE(SUFFIX, TYPE)                  \
    COMBINE(band_##SUFFIX, TYPE, a &b)         \
    COMBINE(bor_##SUFFIX, TYPE, a | b)         \
    COMBINE(bxor_##SUFFIX, TYPE, a ^ b)

ARITHMETIC(u8, uint8_t)
ARITHMETIC(i8, int8_t)
ARITHMETIC(i16, int16_t)
ARITHMETIC(i32, int32_t)
ARITHMETIC(i64, int64_t)
ARITHMETIC(f32, float)
ARITHMETIC(f64, double)
/* Bits have no sign: one version for each width does. */
BITWISE(u8, uint8_t)
BITWISE(i16, int16_t)
BITWISE(i32, int32_t)
BITWISE(i64, int64_t)

#define INTEGER(SUFFIX, BITS)                                                           \
    {sum_##SUFFIX,  NULL,       product_##SUFFIX, min_##SUFFIX, max_##SUFFIX,           \
     band_##BITS,   bor_##BITS, bxor_##BITS}
#define FLOATING(SUFFIX) \
    {sum_##SUFFIX, sum_##SUFFIX, product_##SUFFIX, min_##SUFFIX, max_##SUFFIX, NULL, NULL, NULL}

/* Half precision is combined in float32. */
static combine_function *const combine[PL_DTYPES][PL_OPS] = {
    [PL_U8] = INTEGER(u8, u8),    [PL_I8] = INTEGER(i8, u8),    [PL_I16] = INTEGER(i16, i16),
    [PL_I32] = INTEGER(i32, i32), [PL_I64] = INTEGER(i64, i64), [PL_F16] = FLOATING(f32),
    [PL_BF16] = FLOATING(f32),    [PL_F32] = FLOATING(f32),     [PL_F64] = FLOATING(f64),
    /* sum and max are 'any', product and min are 'all' */
    [PL_BOOL] = {bor_u8, NULL, band_u8, band_u8, bor_u8, band_u8, bor_u8, bxor_u8},
};

static const uint8_t itemsizes[PL_DTYPES] = {
    [PL_U8] = 1,  [PL_I8] = 1,   [PL_I16] = 2, [PL_I32] = 4, [PL_I64] = 8,  [PL_F16] = 2,
    [PL_BF16] = 2, [PL_F32] = 4, [PL_F64] = 8, [PL_BOOL] = 1, [PL_C64] = 8, [PL_C128] = 16,
};

size_t pl_itemsize(uint32_t dtype) { return dtype < PL_DTYPES ? itemsizes[dtype] : 1; }

bool pl_can_reduce(uint32_t dtype, uint32_t op) {
    return dtype < PL_DTYPES && op < PL_OPS && combine[dtype][op] != NULL;
}

/* --- sums of more than two ------------------------------------------------------------------- */

/* From left to right, as two at a time would; but each source is read while the others are. */
#define SUMS(SUFFIX, TYPE)                                                                        \
    VERSIONS static void sum3_##SUFFIX(void *out_, const void *a_, const void *b_, const void *c_, \
                                       size_t count) {                                            \
        TYPE *out = out_;                                                                         \
        const TYPE *a = a_, *b = b_, *c = c_;                                                     \
        INDEPENDENT for (size_t i = 0; i < count; i++) out[i] = (a[i] + b[i]) + c[i];             \
    }                                                                                             \
    VERSIONS static void sum4_##SUFFIX(void *out_, const void *a_, const void *b_, const void *c_, \
                                       const void *d_, size_t count) {                            \
        TYPE *out = out_;                                                                         \
        const TYPE *a = a_, *b = b_, *c = c_, *d = d_;                                            \
        INDEPENDENT for (size_t i = 0; i < count; i++) out[i] = ((a[i] + b[i]) + c[i]) + d[i];    \
    }

SUMS(f32, float)
SUMS(f64, double)

/* Add two or three more sources to `sum`; return how many, 0 if there is no kernel for that. */
static size_t sum_several(void *out, const void *sum, const void *const *more, size_t left,
                          size_t offset, size_t count, uint32_t dtype, uint32_t op) {
    bool is_sum = op == PL_SUM || op == PL_AVG;
    if (!is_sum || (dtype != PL_F32 && dtype != PL_F64) || left < 2)
        return 0;
    const uint8_t *b = (const uint8_t *)more[0] + offset, *c = (const uint8_t *)more[1] + offset;
    if (left == 2) {
        (dtype == PL_F32 ? sum3_f32 : sum3_f64)(out, sum, b, c, count);
        return 2;
    }
    const uint8_t *d = (const uint8_t *)more[2] + offset;
    (dtype == PL_F32 ? sum4_f32 : sum4_f64)(out, sum, b, c, d, count);
    return 3;
}

/* The same, written to every source: what an all-reduce in place does. One pass, because writing to
 * the first and copying from there takes a quarter longer, though it stays in the cache. */
VERSIONS static void share2_f32(float *a, float *b, size_t count) {
    INDEPENDENT for (size_t i = 0; i < count; i++) a[i] = b[i] = a[i] + b[i];
}

VERSIONS static void share3_f32(float *a, float *b, float *c, size_t count) {
    INDEPENDENT for (size_t i = 0; i < count; i++) a[i] = b[i] = c[i] = (a[i] + b[i]) + c[i];
}

VERSIONS static void share4_f32(float *a, float *b, float *c, float *d, size_t count) {
    INDEPENDENT for (size_t i = 0; i < count; i++)
        a[i] = b[i] = c[i] = d[i] = ((a[i] + b[i]) + c[i]) + d[i];
}

/* Replace each of some copies by their sum; false if there is no kernel for so many. */
static bool share_sum_f32(void *const *copies, size_t copy_count, size_t count) {
    float *const *copy = (float *const *)copies;
    if (copy_count == 2)
        share2_f32(copy[0], copy[1], count);
    else if (copy_count == 3)
        share3_f32(copy[0], copy[1], copy[2], count);
    else if (copy_count == 4)
        share4_f32(copy[0], copy[1], copy[2], copy[3], count);
    else
        return false;
    return true;
}

static bool is_in_place(void *const *targets, size_t target_count, const void *const *sources,
                        size_t source_count) {
    return target_count == source_count &&
           memcmp(targets, sources, source_count * sizeof(void *)) == 0;
}

/* --- half precision ------------------------------------------------------------------------------ */

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

VERSIONS static void widen_bf16(float *out, const uint16_t *in, size_t count) {
    INDEPENDENT for (size_t i = 0; i < count; i++) out[i] = float_of((uint32_t)in[i] << 16);
}

/* To nearest, ties to even; a NaN stays one. */
VERSIONS static void narrow_bf16(uint16_t *out, const float *in, size_t count) {
    INDEPENDENT for (size_t i = 0; i < count; i++) {
        uint32_t bits = bits_of(in[i]);
        uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
        out[i] = (uint16_t)(in[i] != in[i] ? (bits >> 16 | 0x40u) : rounded);
    }
}

/* A half's exponent and fraction, moved to where float32 keeps them, are too small by 2^112,
 * subnormals included. */
VERSIONS static void widen_f16(float *out, const uint16_t *in, size_t count) {
    INDEPENDENT for (size_t i = 0; i < count; i++) {
        uint32_t magnitude = in[i] & 0x7fffu;
        uint32_t sign = (uint32_t)(in[i] & 0x8000u) << 16;
        uint32_t finite = bits_of(float_of(magnitude << 13) * 0x1p112f);
        uint32_t special = 0x7f800000u | magnitude << 13;
        out[i] = float_of(sign | (magnitude >= 0x7c00u ? special : finite));
    }
}

VERSIONS static void narrow_f16(uint16_t *out, const float *in, size_t count) {
    INDEPENDENT for (size_t i = 0; i < count; i++) {
        uint32_t bits = bits_of(in[i]);
        uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
        /* Round at bit 13, ties to even, and take 112 off the exponent. */
        uint32_t normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
        /* 0.5 has the weight of a half's last bit at its own last bit: adding it rounds. */
        uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
        uint32_t value = magnitude < 0x38800000u ? subnormal : normal;
        value = magnitude >= 0x477ff000u ? 0x7c00u : value; /* 65520 and more */
        value = magnitude > 0x7f800000u ? 0x7e00u : value;
        out[i] = (uint16_t)(sign | value);
    }
}

static void widen(float *out, const void *in, size_t count, uint32_t dtype) {
    dtype == PL_F16 ? widen_f16(out, in, count) : widen_bf16(out, in, count);
}

/* --- many operands ------------------------------------------------------------------------------- */

VERSIONS static void divide_f32(float *values, size_t count, float divisor) {
    for (size_t i = 0; i < count; i++)
        values[i] /= divisor;
}

VERSIONS static void divide_f64(double *values, size_t count, double divisor) {
    for (size_t i = 0; i < count; i++)
        values[i] /= divisor;
}

static inline const uint8_t *at(const void *base, size_t element, size_t itemsize) {
    return (const uint8_t *)base + element * itemsize;
}

static void reduce_half(uint16_t *out, const void *const *sources, size_t source_count,
                        size_t begin, size_t count, uint32_t dtype, uint32_t op, float divisor) {
    float sum[BLOCK], next[BLOCK];
    combine_function *function = combine[dtype][op];
    widen(sum, at(sources[0], begin, 2), count, dtype);
    for (size_t source = 1; source < source_count; source++) {
        widen(next, at(sources[source], begin, 2), count, dtype);
        function(sum, sum, next, count);
    }
    if (op == PL_AVG)
        divide_f32(sum, count, divisor);
    dtype == PL_F16 ? narrow_f16(out, sum, count) : narrow_bf16(out, sum, count);
}

/* All but the last combination go to scratch memory: `out` may be one of the sources. */
static void reduce_full(void *out, const void *const *sources, size_t source_count, size_t begin,
                        size_t count, uint32_t dtype, uint32_t op, double divisor) {
    _Alignas(PL_LINE) uint8_t scratch[BLOCK * 8];
    size_t itemsize = pl_itemsize(dtype);
    const void *sum = at(sources[0], begin, itemsize);
    if (source_count == 1 && sum != out)
        memcpy(out, sum, count * itemsize);
    for (size_t source = 1, taken; source < source_count; source += taken) {
        size_t left = source_count - source;
        void *target = left <= 3 ? out : scratch;
        taken = sum_several(target, sum, sources + source, left, begin * itemsize, count, dtype, op);
        if (taken == 0) {
            target = left == 1 ? out : scratch;
            combine[dtype][op](target, sum, at(sources[source], begin, itemsize), count);
            taken = 1;
        }
        sum = target;
    }
    if (op == PL_AVG)
        dtype == PL_F32 ? divide_f32(out, count, (float)divisor)
                        : divide_f64(out, count, divisor);
}

void pl_reduce(void *const *targets, size_t target_count, const void *const *sources,
               size_t source_count, size_t count, uint32_t dtype, uint32_t op, double divisor) {
    if (dtype == PL_F32 && op == PL_SUM &&
        is_in_place(targets, target_count, sources, source_count) &&
        share_sum_f32(targets, target_count, count))
        return;
    size_t itemsize = pl_itemsize(dtype);
    bool is_half = dtype == PL_F16 || dtype == PL_BF16;
    for (size_t begin = 0; begin < count; begin += BLOCK) {
        size_t length = count - begin < BLOCK ? count - begin : BLOCK;
        uint8_t *out = (uint8_t *)targets[0] + begin * itemsize;
        if (is_half)
            reduce_half((uint16_t *)out, sources, source_count, begin, length, dtype, op,
                        (float)divisor);
        else
            reduce_full(out, sources, source_count, begin, length, dtype, op, divisor);
        for (size_t target = 1; target < target_count; target++)
            memcpy((uint8_t *)targets[target] + begin * itemsize, out, length * itemsize);
    }
}
