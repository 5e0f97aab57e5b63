/* A plan's layout, and sorting of ids, between `sort.c` and `plan.c`. */
#ifndef PACELINE_PS_PLAN_H
#define PACELINE_PS_PLAN_H

#include <stdint.h>

/* As `Layout.packed` of ps/client/row_plan.py; followed by rows[tables], homes[tables]. */
typedef struct {
    int64_t tables, servers, sharding;
    int64_t numbers[];
} Layout;

typedef struct {
    uint64_t id;
    uint64_t at; /* where it stood */
} Entry;

/* Sort entries by id, equal ones in the order of `at`. `other` has as much space; the result is one
 * of the two. `largest` is the largest id. */
Entry *pl_sorted(Entry *entries, Entry *other, int64_t count, uint64_t largest);

#endif
