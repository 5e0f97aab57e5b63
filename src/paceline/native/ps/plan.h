/* Sorting of ids, between `sort.c` and `plan.c`. */
#ifndef PACELINE_PS_PLAN_H
#define PACELINE_PS_PLAN_H

#include <stdint.h>

typedef struct {
    uint64_t id;
    uint64_t at; /* where it stood */
} Entry;

/* Sort entries by id, equal ones in the order of `at`. `other` has as much space; the result is one
 * of the two. `largest` is the largest id. */
Entry *pl_sorted(Entry *entries, Entry *other, int64_t count, uint64_t largest);

#endif
