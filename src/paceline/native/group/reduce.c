/* Reductions of large tensors: round by round through the slots, or in place in the arenas.
 *
 * [Note: in place]
 * A tensor that lies in the arenas of all ranks is not staged. Phase p is complete: all have
 * filled their copies, and none touches its own any more. Each rank reduces its slice from all
 * copies and writes it into all copies. Phase p + 1 is complete: all slices are written, and the
 * copies belong to their owners again. A rank that dies in between never arrives at p + 1, so
 * nobody ever takes a half-written copy for a result. A rank that gives up waiting for p + 1 has
 * arrived there: its owner may change the copy while a late peer still reads it, and then p + 1 is
 * complete. So whoever leaves looks at the verdict, which was there before the owner's change. */
#include "engine.h"

/* Results of this size and more do not stay in a cache: they are written past it. */
#define STREAMED_BYTES ((uint64_t)8 << 20)

/* --- through the slots ------------------------------------------------------------------------ */

/* Everything but the own slice goes into the slot: nobody else reads that one. */
void pl_put_slices(pl_core *core, pl_operation *operation, uint64_t round, uint8_t *slot) {
    size_t itemsize = pl_itemsize(operation->request.dtype);
    window at = window_of(total_bytes(operation), core->slot_bytes, round);
    uint64_t count = at.bytes / itemsize;
    uint64_t begin = pl_cut(count, core->world, core->rank, itemsize) * itemsize;
    uint64_t end = pl_cut(count, core->world, core->rank + 1, itemsize) * itemsize;
    const uint8_t *input = operation->inputs[0] + at.begin;
    copy(slot, input, begin);
    copy(slot + end, input + end, at.bytes - end);
}

static bool wants_result(pl_core *core, const pl_operation *operation) {
    return operation->request.kind != PL_REDUCE || core->rank == operation->request.root;
}

/* Reduce this rank's slice of a round, into its slot for the peers and into its own output. */
static int reduce_slice(pl_core *core, pl_operation *operation, uint64_t round, uint32_t phase) {
    size_t itemsize = pl_itemsize(operation->request.dtype);
    window at = window_of(total_bytes(operation), core->slot_bytes, round);
    uint64_t count = at.bytes / itemsize;
    uint8_t *from[core->world];
    for (uint32_t rank = 0; rank < core->world; rank++)
        from[rank] = slot_of(core, rank, phase);
    uint8_t *to[2] = {from[core->rank], operation->outputs[0] + at.begin};
    /* Never written to: a source. */
    from[core->rank] = (uint8_t *)(uintptr_t)(operation->inputs[0] + at.begin);
    return pl_reduce_range(core, from, to, wants_result(core, operation) ? 2 : 1,
                           pl_cut(count, core->world, core->rank, itemsize),
                           pl_cut(count, core->world, core->rank + 1, itemsize),
                           &operation->request);
}

static void take_slices(pl_core *core, pl_operation *operation, uint64_t round, uint32_t phase) {
    if (!wants_result(core, operation))
        return;
    size_t itemsize = pl_itemsize(operation->request.dtype);
    window at = window_of(total_bytes(operation), core->slot_bytes, round);
    uint64_t count = at.bytes / itemsize;
    bool is_past_caches = total_bytes(operation) >= STREAMED_BYTES;
    for (uint32_t turn = 1; turn < core->world; turn++) {
        /* Each begins with its neighbour, so that not all read the same memory at once. */
        uint32_t rank = (core->rank + turn) % core->world;
        uint64_t begin = pl_cut(count, core->world, rank, itemsize) * itemsize;
        uint64_t end = pl_cut(count, core->world, rank + 1, itemsize) * itemsize;
        uint8_t *to = operation->outputs[0] + at.begin + begin;
        const uint8_t *from = slot_of(core, rank, phase) + begin;
        is_past_caches ? pl_stream(to, from, end - begin) : copy(to, from, end - begin);
        pl_at(core, PL_POINT_TAKING);
    }
}

/* Round by round: reduce this one, put the next, announce both, take the results of the last. */
static int reduce_staged(pl_core *core, pl_operation *operation, uint64_t deadline_ns) {
    uint64_t rounds = rounds_for(total_bytes(operation), core->slot_bytes);
    for (uint64_t round = 0; round <= rounds; round++) {
        uint32_t phase = core->phase;
        if (round < rounds) {
            int status = reduce_slice(core, operation, round, phase);
            if (status != PL_OK)
                return status;
            if (round + 1 < rounds)
                pl_put_slices(core, operation, round + 1, slot_of(core, core->rank, phase + 1));
            pl_at(core, PL_POINT_DATA_PUT);
            pl_arrive(core);
        }
        if (round > 0)
            take_slices(core, operation, round - 1, phase - 1);
        if (round < rounds) {
            int status = pl_await(core, deadline_ns);
            if (status != PL_OK)
                return status;
        }
    }
    return PL_OK;
}

/* --- in place --------------------------------------------------------------------------------- */

/* Find every rank's copy; false if one does not lie in its arena. Offsets come from peers, and are
 * read once: no rank puts a tensor where its elements would not be aligned. */
static bool find_copies(pl_core *core, const pl_operation *operation, uint8_t **copies) {
    uint64_t bytes = total_bytes(operation);
    for (uint32_t rank = 0; rank < core->world; rank++) {
        uint64_t offset = pl_read_ticket(core, rank, operation->request.seq).offset;
        if (offset > core->arena_bytes[rank] || bytes > core->arena_bytes[rank] - offset ||
            offset % pl_itemsize(operation->request.dtype) != 0)
            return false;
        copies[rank] = core->arena[rank] + offset;
    }
    return true;
}

/* The end of a reduction in place: see [Note: in place]. The count orders what was read before the
 * look at the verdict. */
static int leave(pl_core *core, uint64_t deadline_ns) {
    int status = advance(core, deadline_ns);
    return status == PL_OK ? pl_state(core) : status;
}

static int reduce_in_place(pl_core *core, pl_operation *operation, uint8_t **copies,
                           uint64_t deadline_ns) {
    const pl_request *request = &operation->request;
    size_t itemsize = pl_itemsize(request->dtype);
    uint64_t begin = pl_cut(request->count, core->world, core->rank, itemsize);
    uint64_t end = pl_cut(request->count, core->world, core->rank + 1, itemsize);
    int status = pl_reduce_range(core, copies, copies, core->world, begin, end, request);
    return status == PL_OK ? leave(core, deadline_ns) : status;
}

static int reduce_to_leaders(pl_core *core, pl_operation *operation, uint8_t **copies,
                        uint64_t deadline_ns) {
    const pl_request *request = &operation->request;
    size_t itemsize = pl_itemsize(request->dtype);
    uint64_t begin = pl_cut(request->count, request->root, core->rank, itemsize);
    uint64_t end = pl_cut(request->count, request->root, core->rank + 1, itemsize);
    int status = pl_reduce_range(core, copies, &copies[core->rank], 1, begin, end, request);
    return status == PL_OK ? leave(core, deadline_ns) : status;
}

static int copy_from_leaders(pl_core *core, pl_operation *operation, uint8_t **copies,
                       uint64_t deadline_ns) {
    const pl_request *request = &operation->request;
    size_t itemsize = pl_itemsize(request->dtype);
    for (uint32_t leader = 0; leader < request->root; leader++) {
        uint64_t begin = pl_cut(request->count, request->root, leader, itemsize) * itemsize;
        uint64_t end = pl_cut(request->count, request->root, leader + 1, itemsize) * itemsize;
        copy(copies[core->rank] + begin, copies[leader] + begin, end - begin);
        pl_at(core, PL_POINT_TAKING);
    }
    return leave(core, deadline_ns);
}

int pl_reduce_large(pl_core *core, pl_operation *operation, uint32_t in_arena,
                    uint64_t deadline_ns) {
    uint8_t *copies[core->world];
    if (in_arena == core->world && operation->request.kind == PL_ALL_REDUCE &&
        find_copies(core, operation, copies))
        return reduce_in_place(core, operation, copies, deadline_ns);
    if (in_arena != 0) {
        /* Some have not put anything yet: all put once more, into the next slot. */
        pl_put_slices(core, operation, 0, slot_of(core, core->rank, core->phase + 1));
        int status = advance(core, deadline_ns);
        if (status != PL_OK)
            return status;
    }
    return reduce_staged(core, operation, deadline_ns);
}

int pl_run_with_leaders(pl_core *core, pl_operation *operation, uint64_t deadline_ns) {
    uint8_t *copies[core->world];
    if (!find_copies(core, operation, copies))
        return PL_MISMATCH;
    if (operation->request.kind == PL_REDUCE_TO_LEADERS)
        return reduce_to_leaders(core, operation, copies, deadline_ns);
    return copy_from_leaders(core, operation, copies, deadline_ns);
}
