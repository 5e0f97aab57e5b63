/* A plan's layout, and sorting of ids, between `sort.c` and `plan.c`. */
#ifndef PACELINE_PS_PLAN_H
#define PACELINE_PS_PLAN_H

#include <stdint.h>

/* As `Layout.packed` of ps/client/row_plan.py; followed by rows[tables], table_servers[tables]. */
typedef struct {
    int64_t tables, servers, sharding;
    int64_t numbers[];
} Layout;

/* One table's ids and offsets in memory, as ps/client/batch.py packs them. */
struct pl_batch {
    int64_t ids, count, offsets, bags;
};

/* Where the arrays of a plan begin in its memory, in int64; the memory begins with this. As
 * ps/client/message_plan.py reads it. `ranks` and `gather` are filled in for shared bags. */
struct pl_plan_head {
    int64_t places, bag_of, offsets, ranks, gather, ids, starts, end;
};

typedef struct {
    uint64_t id;
    uint64_t at; /* where it stood */
} Entry;

/* Sort entries by id, equal ones in the order of `at`. `other` has as much space; the result is one
 * of the two. `largest` is the largest id. */
Entry *pl_sorted(Entry *entries, Entry *other, int64_t count, uint64_t largest);

#endif
