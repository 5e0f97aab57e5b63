/* Copies of something large that nobody reads soon: past the caches.
 *
 * An ordinary store reads its cache line first and throws out others. A streaming store does
 * neither; copying a gradient of 16 MB into its bucket takes two thirds of the time. */
#include <string.h>

#include "core.h"

#if defined(__SSE2__)
#include <emmintrin.h>

#define LINE_FLOATS (PL_LINE / sizeof(float))
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAS_WIDE /* to be compiled for processors that may have AVX, and to ask whether they do */
#endif

static inline void stream_bytes(uint8_t *target, const uint8_t *source) {
    for (size_t i = 0; i < PL_LINE; i += sizeof(__m128i))
        _mm_stream_si128((__m128i *)(target + i), _mm_loadu_si128((const __m128i *)(source + i)));
}
#endif

#if defined(HAS_WIDE)
/* Half as many stores for a line: three quarters of the time if the source is in a cache. */
__attribute__((target("avx"))) static void stream_lines_avx(float *target, const float *source,
                                                            size_t lines, float factor) {
    __m256 factors = _mm256_set1_ps(factor);
    for (size_t i = 0; i < lines * LINE_FLOATS; i += 8)
        _mm256_stream_ps(target + i, _mm256_mul_ps(_mm256_loadu_ps(source + i), factors));
}
#endif

#if defined(__SSE2__)
static void stream_lines(float *target, const float *source, size_t lines, float factor) {
#if defined(HAS_WIDE)
    if (__builtin_cpu_supports("avx")) {
        stream_lines_avx(target, source, lines, factor);
        return;
    }
#endif
    __m128 factors = _mm_set1_ps(factor);
    for (size_t i = 0; i < lines * LINE_FLOATS; i += 4)
        _mm_stream_ps(target + i, _mm_mul_ps(_mm_loadu_ps(source + i), factors));
}
#endif

void pl_scale_f32(float *target, const float *source, size_t count, float factor) {
    size_t i = 0;
#if defined(__SSE2__)
    /* Whole lines of the target; what is before the first and after the last goes the usual way. */
    for (; i < count && (uintptr_t)(target + i) % PL_LINE; i++)
        target[i] = source[i] * factor;
    size_t lines = (count - i) / LINE_FLOATS;
    stream_lines(target + i, source + i, lines, factor);
    i += lines * LINE_FLOATS;
    _mm_sfence(); /* streaming stores are not ordered by the release that follows */
#endif
    for (; i < count; i++)
        target[i] = source[i] * factor;
}

void pl_stream(void *target_, const void *source_, size_t bytes) {
#if defined(__SSE2__)
    uint8_t *target = target_;
    const uint8_t *source = source_;
    size_t i = (size_t)(-(uintptr_t)target % PL_LINE); /* up to the first whole line */
    if (i + PL_LINE <= bytes) {
        memcpy(target, source, i);
        for (; i + PL_LINE <= bytes; i += PL_LINE)
            stream_bytes(target + i, source + i);
        memcpy(target + i, source + i, bytes - i);
        _mm_sfence();
        return;
    }
#endif
    if (bytes)
        memcpy(target_, source_, bytes);
}
