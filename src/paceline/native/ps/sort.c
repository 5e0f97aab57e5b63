/* Sorting the ids of a batch: by insertion for few, by digits for many. Called by `plan.c`. */
#include <string.h>

#include "plan.h"

enum { FEW = 48, MANY = 4096 }; /* ids: insertion sort up to, large digits from */

static void sort_few(Entry *entries, int64_t count) {
    for (int64_t at = 1; at < count; at++) {
        Entry moved = entries[at];
        int64_t hole = at;
        for (; hole > 0 && entries[hole - 1].id > moved.id; hole--) {
            entries[hole] = entries[hole - 1];
        }
        entries[hole] = moved;
    }
}

static void sort_by_digit(const Entry *from, Entry *to, int64_t count, int shift, int bits) {
    int64_t starts[1 << 11];
    uint64_t mask = (UINT64_C(1) << bits) - 1;
    memset(starts, 0, sizeof(int64_t) << bits);
    for (int64_t at = 0; at < count; at++) {
        starts[(from[at].id >> shift) & mask]++;
    }
    int64_t before = 0;
    for (uint64_t digit = 0; digit <= mask; digit++) {
        int64_t here = starts[digit];
        starts[digit] = before;
        before += here;
    }
    for (int64_t at = 0; at < count; at++) {
        to[starts[(from[at].id >> shift) & mask]++] = from[at];
    }
}

/* Radix sort, least digit first, of as many digits as the largest id has. */
Entry *pl_sorted(Entry *entries, Entry *other, int64_t count, uint64_t largest) {
    if (count <= FEW) {
        sort_few(entries, count);
        return entries;
    }
    int bits = count >= MANY ? 11 : 8;
    for (int shift = 0; shift < 64 && largest >> shift; shift += bits) {
        sort_by_digit(entries, other, count, shift, bits);
        Entry *swapped = entries;
        entries = other;
        other = swapped;
    }
    return entries;
}
