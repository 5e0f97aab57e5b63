/* The mean of the squares of a row, added up in the order of torch's kernel; for update.c. */
#ifndef PACELINE_PS_MEAN_OF_SQUARES_H
#define PACELINE_PS_MEAN_OF_SQUARES_H

#include <stddef.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define MOST_LANES 16
#define LEVELS 4
#define GROUPS 4

/* Four groups of lanes at each of several levels: a level that has added up its share of lines is
 * added to the next one, so that no sum is much larger than what is added to it. */
struct sums {
    float level[LEVELS][GROUPS * MOST_LANES];
};

INLINE void add_squares(float *sums, const float *grad, size_t count) {
    for (size_t i = 0; i < count; i++) {
        float square = grad[i] * grad[i];
        sums[i] += square;
    }
}

INLINE unsigned ceil_log2(size_t value) {
    unsigned found = 0;
    while (((size_t)1 << found) < value) {
        found++;
    }
    return found;
}

INLINE void carry(struct sums *s, size_t lines, unsigned power, size_t width) {
    size_t mask = ((size_t)1 << power) - 1;
    for (unsigned level = 1; level < LEVELS; level++) {
        for (size_t i = 0; i < width; i++) {
            s->level[level][i] += s->level[level - 1][i];
            s->level[level - 1][i] = 0;
        }
        if ((lines & (mask << (level * power))) != 0) {
            return;
        }
    }
}

/* Add up lines of `width` squares, column by column, into level 0. */
INLINE void add_lines(struct sums *s, const float *grad, size_t lines, size_t width) {
    unsigned power = ceil_log2(lines) / LEVELS;
    power = power < 4 ? 4 : power;
    for (size_t line = 0; line < lines; line++) {
        add_squares(s->level[0], grad + line * width, width);
        if (((line + 1) & (((size_t)1 << power) - 1)) == 0) {
            carry(s, line + 1, power, width);
        }
    }
    for (unsigned level = 1; level < LEVELS; level++) {
        for (size_t i = 0; i < width; i++) {
            s->level[0][i] += s->level[level][i];
        }
    }
}

INLINE float mean_of_squares(const float *grad, size_t dim, size_t lanes) {
    lanes = dim < lanes ? 1 : lanes;
    struct sums s;
    memset(&s, 0, sizeof s);
    size_t width = GROUPS * lanes, lines = dim / width, whole = dim - dim % lanes;
    float *sums = s.level[0], sum = 0;
    add_lines(&s, grad, lines, width);
    for (size_t at = lines * width; at < whole; at += lanes) {
        add_squares(sums, grad + at, lanes);
    }
    for (size_t i = lanes; i < width; i += lanes) {
        for (size_t lane = 0; lane < lanes; lane++) {
            sums[lane] += sums[i + lane];
        }
    }
    for (size_t at = whole; at < dim; at++) {
        float square = grad[at] * grad[at];
        sum += square;
    }
    for (size_t lane = 0; lane < lanes; lane++) {
        sum += sums[lane];
    }
    return sum / (float)dim;
}

#endif
