/* The collectives: rounds of 'put into your own slot, meet, take from everybody's slot'.
 *
 * [Note: slots]
 * Every rank has PL_SLOTS staging slots. What is put for phase p goes into slot p % 4, before the
 * rank arrives at p. Peers read it after p is complete and before they arrive at p + 3. The slot
 * is written again for phase p + 4, which its owner does only after p + 3 is complete, that is,
 * after all peers have arrived at p + 3 and so have finished reading. This holds across
 * collectives as well, because phases count on through the life of the group: a collective needs
 * no barrier at its end. */
#include "engine.h"

/* Up to this many bytes over all ranks, every rank reduces everything by itself: one meeting
 * instead of two. */
#define TINY_BYTES ((uint64_t)1 << 18)
/* How much is reduced between two looks at the verdict. */
#define STRIDE_BYTES ((uint64_t)1 << 18)

/* --- slices ---------------------------------------------------------------------------------- */

/* The first element of part `index` of `parts`, cut at cache lines. */
uint64_t pl_cut(uint64_t count, uint32_t parts, uint32_t index, size_t itemsize) {
    if (index >= parts)
        return count;
    uint64_t per_line = PL_LINE / itemsize;
    uint64_t lines = count / per_line;
    uint64_t share = lines / parts, rest = lines % parts;
    return (share * index + smaller(rest, index)) * per_line;
}

/* Reduce elements [begin, end) of every rank's `from` into all `to`, in rank order. */
int pl_reduce_range(pl_core *core, uint8_t *const *from, uint8_t *const *to, uint32_t to_count,
                    uint64_t begin, uint64_t end, const pl_request *request) {
    size_t itemsize = pl_itemsize(request->dtype);
    uint64_t stride = STRIDE_BYTES / itemsize;
    const void *sources[core->world];
    void *targets[to_count];
    for (uint64_t at = begin; at < end; at += stride) {
        /* Before, not after: a rank that was stopped until its peers gave up writes no more. */
        int state = pl_state(core);
        if (state != PL_OK)
            return state;
        for (uint32_t rank = 0; rank < core->world; rank++)
            sources[rank] = from[rank] + at * itemsize;
        for (uint32_t target = 0; target < to_count; target++)
            targets[target] = to[target] + at * itemsize;
        pl_reduce(targets, to_count, sources, core->world, smaller(stride, end - at),
                  request->dtype, request->op, core->world);
        pl_at(core, PL_POINT_REDUCING);
    }
    return PL_OK;
}

/* --- put and take ---------------------------------------------------------------------------- */

/* Where every rank's slot holds a piece for each rank. */
static uint64_t split_piece(pl_core *core) {
    return core->slot_bytes / core->world / PL_LINE * PL_LINE;
}

static void put_nothing(pl_core *core, pl_operation *operation, uint64_t round, uint8_t *slot) {
    (void)core, (void)operation, (void)round, (void)slot;
}

static int take_nothing(pl_core *core, pl_operation *operation, uint64_t round, uint32_t phase) {
    (void)core, (void)operation, (void)round, (void)phase;
    return PL_OK;
}

static void put_own(pl_core *core, pl_operation *operation, uint64_t round, uint8_t *slot) {
    window at = window_of(total_bytes(operation), core->slot_bytes, round);
    copy(slot, operation->inputs[0] + at.begin, at.bytes);
}

static void put_if_root(pl_core *core, pl_operation *operation, uint64_t round, uint8_t *slot) {
    if (core->rank == operation->request.root)
        put_own(core, operation, round, slot);
}

static int take_from_root(pl_core *core, pl_operation *operation, uint64_t round, uint32_t phase) {
    window at = window_of(total_bytes(operation), core->slot_bytes, round);
    if (core->rank != operation->request.root)
        copy(operation->outputs[0] + at.begin, slot_of(core, operation->request.root, phase),
             at.bytes);
    return PL_OK;
}

static int take_all(pl_core *core, pl_operation *operation, uint64_t round, uint32_t phase) {
    window at = window_of(total_bytes(operation), core->slot_bytes, round);
    for (uint32_t rank = 0; rank < core->world; rank++) {
        const uint8_t *from = rank == core->rank ? operation->inputs[0] + at.begin
                                                 : slot_of(core, rank, phase);
        copy(operation->outputs[rank] + at.begin, from, at.bytes);
        pl_at(core, PL_POINT_TAKING);
    }
    return PL_OK;
}

static int take_all_if_root(pl_core *core, pl_operation *operation, uint64_t round,
                            uint32_t phase) {
    return core->rank == operation->request.root ? take_all(core, operation, round, phase) : PL_OK;
}

static void put_parts(pl_core *core, pl_operation *operation, uint64_t round, uint8_t *slot) {
    uint64_t piece = split_piece(core);
    window at = window_of(total_bytes(operation), piece, round);
    for (uint32_t rank = 0; rank < core->world; rank++)
        copy(slot + rank * piece, operation->inputs[rank] + at.begin, at.bytes);
}

static void put_parts_if_root(pl_core *core, pl_operation *operation, uint64_t round,
                              uint8_t *slot) {
    if (core->rank == operation->request.root)
        put_parts(core, operation, round, slot);
}

static int take_part_from_root(pl_core *core, pl_operation *operation, uint64_t round,
                               uint32_t phase) {
    uint64_t piece = split_piece(core);
    window at = window_of(total_bytes(operation), piece, round);
    copy(operation->outputs[0] + at.begin,
         slot_of(core, operation->request.root, phase) + core->rank * piece, at.bytes);
    return PL_OK;
}

static int take_reduced_part(pl_core *core, pl_operation *operation, uint64_t round,
                             uint32_t phase) {
    uint64_t piece = split_piece(core);
    window at = window_of(total_bytes(operation), piece, round);
    uint8_t *from[core->world];
    for (uint32_t rank = 0; rank < core->world; rank++)
        from[rank] = slot_of(core, rank, phase) + core->rank * piece;
    uint8_t *to = operation->outputs[0] + at.begin;
    uint64_t count = at.bytes / pl_itemsize(operation->request.dtype);
    return pl_reduce_range(core, from, &to, 1, 0, count, &operation->request);
}

/* Take all of a small tensor, reduced. */
static int take_reduced(pl_core *core, pl_operation *operation, uint64_t round, uint32_t phase) {
    (void)round;
    if (operation->request.kind == PL_REDUCE && core->rank != operation->request.root)
        return PL_OK;
    uint8_t *from[core->world];
    for (uint32_t rank = 0; rank < core->world; rank++)
        from[rank] = slot_of(core, rank, phase);
    return pl_reduce_range(core, from, operation->outputs, 1, 0, operation->request.count,
                           &operation->request);
}

/* The rounds of a collective, of which the first has been put and met for. While peers may still
 * be reading this round, the next is put into another slot and announced. */
int pl_run_rounds(pl_core *core, pl_operation *operation, uint64_t rounds, put_function *put,
                  take_function *take, uint64_t deadline_ns) {
    for (uint64_t round = 0; round < rounds; round++) {
        uint32_t phase = core->phase;
        bool goes_on = round + 1 < rounds;
        if (goes_on) {
            put(core, operation, round + 1, slot_of(core, core->rank, phase + 1));
            pl_at(core, PL_POINT_DATA_PUT);
            pl_arrive(core);
        }
        int status = take(core, operation, round, phase);
        if (status == PL_OK)
            status = goes_on ? pl_await(core, deadline_ns) : PL_OK;
        if (status != PL_OK)
            return status;
    }
    return PL_OK;
}

/* --- one operation ---------------------------------------------------------------------------- */

static bool is_reduction(uint32_t kind) { return kind == PL_ALL_REDUCE || kind == PL_REDUCE; }

static bool is_tiny(pl_core *core, const pl_operation *operation) {
    uint64_t bytes = total_bytes(operation);
    return bytes <= TINY_BYTES / core->world && bytes <= core->slot_bytes;
}

/* What a rank puts before it knows what its peers have brought. */
static put_function *opening(pl_core *core, const pl_operation *operation) {
    switch (operation->request.kind) {
    case PL_ALL_REDUCE:
    case PL_REDUCE:
        if (is_tiny(core, operation))
            return put_own;
        return operation->request.offset == PL_NOT_IN_ARENA ? pl_put_slices : put_nothing;
    case PL_BROADCAST:
        return put_if_root;
    case PL_ALL_GATHER:
    case PL_GATHER:
        return put_own;
    case PL_REDUCE_SCATTER:
        return put_parts;
    case PL_SCATTER:
        return put_parts_if_root;
    case PL_ALL_TO_ALL:
        return pl_put_splits;
    default:
        return put_nothing;
    }
}

static int run_checked(pl_core *core, pl_operation *operation, uint32_t in_arena,
                       uint64_t deadline_ns) {
    uint64_t whole = rounds_for(total_bytes(operation), core->slot_bytes);
    uint64_t split = rounds_for(total_bytes(operation), split_piece(core));
    switch (operation->request.kind) {
    case PL_ALL_REDUCE:
    case PL_REDUCE:
        if (is_tiny(core, operation))
            return pl_run_rounds(core, operation, 1, put_nothing, take_reduced, deadline_ns);
        return pl_reduce_large(core, operation, in_arena, deadline_ns);
    case PL_BROADCAST:
        return pl_run_rounds(core, operation, whole, put_if_root, take_from_root, deadline_ns);
    case PL_ALL_GATHER:
        return pl_run_rounds(core, operation, whole, put_own, take_all, deadline_ns);
    case PL_GATHER:
        return pl_run_rounds(core, operation, whole, put_own, take_all_if_root, deadline_ns);
    case PL_REDUCE_SCATTER:
        return pl_run_rounds(core, operation, split, put_parts, take_reduced_part, deadline_ns);
    case PL_SCATTER:
        return pl_run_rounds(core, operation, split, put_parts_if_root, take_part_from_root,
                             deadline_ns);
    case PL_ALL_TO_ALL:
        return pl_run_all_to_all(core, operation, deadline_ns);
    case PL_REDUCE_TO_LEADERS:
    case PL_COPY_FROM_LEADERS:
        return pl_run_with_leaders(core, operation, deadline_ns);
    default:
        return pl_run_rounds(core, operation, 1, put_nothing, take_nothing, deadline_ns);
    }
}

/* Carry out one operation from its ticket to its end. Called by one thread at a time. */
int pl_execute(pl_core *core, pl_operation *operation) {
    pl_request *request = &operation->request;
    request->seq = core->seq + 1; /* also for the words about one that is refused */
    int status = pl_state(core);
    if (status != PL_OK)
        return status;
    pl_at(core, PL_POINT_BEGIN);
    uint64_t began_ns = operation->began_ns = pl_now_ns();
    uint64_t deadline_ns = began_ns > UINT64_MAX - operation->timeout_ns
                               ? UINT64_MAX
                               : began_ns + operation->timeout_ns;
    core->seq = request->seq;
    if (is_reduction(request->kind) && is_tiny(core, operation))
        request->offset = PL_NOT_IN_ARENA;
    pl_write_ticket(core, request);
    pl_set_life(core, PL_LIFE_WORKING);
    pl_at(core, PL_POINT_TICKET_WRITTEN);
    opening(core, operation)(core, operation, 0, slot_of(core, core->rank, core->phase + 1));
    pl_at(core, PL_POINT_DATA_PUT);
    status = advance(core, deadline_ns);
    uint32_t in_arena = 0;
    if (status == PL_OK)
        status = pl_check_tickets(core, operation, &in_arena);
    if (status == PL_OK)
        status = run_checked(core, operation, in_arena, deadline_ns);
    pl_at(core, PL_POINT_END);
    atomic_store_explicit(&pl_my_row(core)->finished, request->seq, memory_order_relaxed);
    pl_set_life(core, PL_LIFE_IDLE);
    return status;
}
