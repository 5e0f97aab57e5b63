/* A scaled copy of something large that nobody reads soon: past the caches.
 *
 * An ordinary store reads its cache line first and throws out others. A streaming store does
 * neither; copying a gradient of 16 MB into its bucket takes two thirds of the time. */
#include "core.h"

#if defined(__SSE2__)
#include <emmintrin.h>

#define LINE_FLOATS 16

static inline void stream_line(float *target, const float *source, __m128 factor) {
    for (size_t i = 0; i < LINE_FLOATS; i += 4)
        _mm_stream_ps(target + i, _mm_mul_ps(_mm_loadu_ps(source + i), factor));
}
#endif

void pl_scale_f32(float *target, const float *source, size_t count, float factor) {
    size_t i = 0;
#if defined(__SSE2__)
    /* Whole lines of the target; what is before the first and after the last goes the usual way. */
    for (; i < count && (uintptr_t)(target + i) % PL_LINE; i++)
        target[i] = source[i] * factor;
    __m128 factors = _mm_set1_ps(factor);
    for (; i + LINE_FLOATS <= count; i += LINE_FLOATS)
        stream_line(target + i, source + i, factors);
    _mm_sfence(); /* streaming stores are not ordered by the release that follows */
#endif
    for (; i < count; i++)
        target[i] = source[i] * factor;
}
