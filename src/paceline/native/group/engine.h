/* What the files of the engine have in common: rounds, slots and windows. Nobody else includes it.
 *
 *   engine.c      one operation from its ticket to its end; the collectives that only move pieces
 *   tickets.c     what each rank brought, written and compared
 *   reduce.c      reductions of large tensors: through slots, in place, by leaders
 *   all_to_all.c  pieces of different sizes */
#ifndef PACELINE_ENGINE_H
#define PACELINE_ENGINE_H

#include <string.h>

#include "core.h"

static inline uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

static inline uint8_t *slot_of(pl_core *core, uint32_t rank, uint32_t phase) {
    return core->arena[rank] + core->stage_offset + (phase % PL_SLOTS) * core->slot_bytes;
}

static inline int advance(pl_core *core, uint64_t deadline_ns) {
    pl_arrive(core);
    int status = pl_await(core, deadline_ns);
    pl_at(core, PL_POINT_RELEASED);
    return status;
}

typedef void put_function(pl_core *, pl_operation *, uint64_t round, uint8_t *slot);
typedef int take_function(pl_core *, pl_operation *, uint64_t round, uint32_t phase);

static inline void copy(void *to, const void *from, uint64_t bytes) {
    if (bytes != 0 && to != from)
        memcpy(to, from, bytes);
}

static inline uint64_t total_bytes(const pl_operation *operation) {
    return operation->request.count * pl_itemsize(operation->request.dtype);
}

/* Rounds in which each rank puts up to `piece` bytes of one part. */
typedef struct {
    uint64_t begin, bytes;
} window;

static inline window window_of(uint64_t total, uint64_t piece, uint64_t round) {
    uint64_t begin = smaller(total, round * piece);
    return (window){begin, smaller(piece, total - begin)};
}

static inline uint64_t rounds_for(uint64_t total, uint64_t piece) {
    return total == 0 ? 1 : (total + piece - 1) / piece;
}

/* engine.c */
int pl_reduce_range(pl_core *core, uint8_t *const *from, uint8_t *const *to, uint32_t to_count,
                    uint64_t begin, uint64_t end, const pl_request *request);
int pl_run_rounds(pl_core *core, pl_operation *operation, uint64_t rounds, put_function *put,
                  take_function *take, uint64_t deadline_ns);

/* tickets.c, and pl_read_ticket */
void pl_write_ticket(pl_core *core, const pl_request *request);
/* Compare what all ranks brought; count those whose tensor lies in their arena. */
int pl_check_tickets(pl_core *core, pl_operation *operation, uint32_t *in_arena);

/* reduce.c: the first round has been met for. */
put_function pl_put_slices;
int pl_reduce_large(pl_core *core, pl_operation *operation, uint32_t in_arena,
                    uint64_t deadline_ns);
int pl_run_with_leaders(pl_core *core, pl_operation *operation, uint64_t deadline_ns);

/* all_to_all.c: likewise. */
put_function pl_put_splits;
int pl_run_all_to_all(pl_core *core, pl_operation *operation, uint64_t deadline_ns);

#endif
