/* The collectives: rounds of 'put into your own slot, meet, take from everybody's slot'.
 *
 * [Note: slots]
 * Every rank has PL_SLOTS staging slots. What is put for phase p goes into slot p % 4, before the
 * rank arrives at p. Peers read it after p is complete and before they arrive at p + 3. The slot
 * is written again for phase p + 4, which its owner does only after p + 3 is complete, that is,
 * after all peers have arrived at p + 3 and so have finished reading. This holds across
 * collectives as well, because phases count on through the life of the group: a collective needs
 * no barrier at its end.
 *
 * [Note: in place]
 * A tensor that lies in the arenas of all ranks is not staged. Phase p is complete: all have
 * filled their copies, and none touches its own any more. Each rank reduces its slice from all
 * copies and writes it into all copies. Phase p + 1 is complete: all slices are written, and the
 * copies belong to their owners again. A rank that dies in between never arrives at p + 1, so
 * nobody ever takes a half-written copy for a result. A rank that gives up waiting for p + 1 has
 * arrived there: its owner may change the copy while a late peer still reads it, and then p + 1 is
 * complete. So whoever leaves looks at the verdict, which was there before the owner's change. */
#include <string.h>

#include "core.h"

/* Up to this many bytes over all ranks, every rank reduces everything by itself: one meeting
 * instead of two. */
#define TINY_BYTES ((uint64_t)1 << 18)
/* How much is reduced or copied between two looks at the verdict. */
#define STRIDE_BYTES ((uint64_t)1 << 18)
/* Results of this size and more do not stay in a cache: they are written past it. */
#define STREAMED_BYTES ((uint64_t)8 << 20)

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
static int reduce_range(pl_core *core, uint8_t *const *from, uint8_t *const *to, uint32_t to_count,
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

/* --- meeting --------------------------------------------------------------------------------- */

static void write_ticket(pl_core *core, const pl_request *request) {
    pl_ticket *ticket = &pl_my_row(core)->ticket[request->seq % 2];
    atomic_store_explicit(&ticket->seq, request->seq, memory_order_relaxed);
    atomic_store_explicit(&ticket->count, request->count, memory_order_relaxed);
    atomic_store_explicit(&ticket->offset, request->offset, memory_order_relaxed);
    atomic_store_explicit(&ticket->kind, request->kind, memory_order_relaxed);
    atomic_store_explicit(&ticket->dtype, request->dtype, memory_order_relaxed);
    atomic_store_explicit(&ticket->op, request->op, memory_order_relaxed);
    atomic_store_explicit(&ticket->root, request->root, memory_order_relaxed);
}

static pl_request read_ticket(pl_core *core, uint32_t rank, uint64_t seq) {
    pl_ticket *ticket = &core->control->row[rank].ticket[seq % 2];
    return (pl_request){
        .seq = atomic_load_explicit(&ticket->seq, memory_order_relaxed),
        .count = atomic_load_explicit(&ticket->count, memory_order_relaxed),
        .offset = atomic_load_explicit(&ticket->offset, memory_order_relaxed),
        .kind = atomic_load_explicit(&ticket->kind, memory_order_relaxed),
        .dtype = atomic_load_explicit(&ticket->dtype, memory_order_relaxed),
        .op = atomic_load_explicit(&ticket->op, memory_order_relaxed),
        .root = atomic_load_explicit(&ticket->root, memory_order_relaxed),
    };
}

static bool agree(const pl_request *a, const pl_request *b) {
    return a->seq == b->seq && a->kind == b->kind && a->count == b->count &&
           a->dtype == b->dtype && a->op == b->op && a->root == b->root;
}

/* Compare what all ranks brought with what rank 0 brought: the same answer on every rank. Offsets
 * are only counted here; who uses one checks it (find_copies). */
static int check_tickets(pl_core *core, pl_operation *operation, uint32_t *in_arena) {
    uint64_t seq = operation->request.seq;
    pl_request first = read_ticket(core, 0, seq);
    *in_arena = 0;
    for (uint32_t rank = 0; rank < core->world; rank++) {
        pl_request other = read_ticket(core, rank, seq);
        if (!agree(&first, &other)) {
            operation->differing[1] = rank;
            operation->brought[0] = first;
            operation->brought[1] = other;
            return PL_MISMATCH;
        }
        *in_arena += other.offset != PL_NOT_IN_ARENA;
    }
    return PL_OK;
}

/* --- put and take ---------------------------------------------------------------------------- */

typedef void put_function(pl_core *, pl_operation *, uint64_t round, uint8_t *slot);
typedef int take_function(pl_core *, pl_operation *, uint64_t round, uint32_t phase);

static void copy(void *to, const void *from, uint64_t bytes) {
    if (bytes != 0 && to != from)
        memcpy(to, from, bytes);
}

static uint64_t total_bytes(const pl_operation *operation) {
    return operation->request.count * pl_itemsize(operation->request.dtype);
}

/* Rounds in which each rank puts up to `piece` bytes of one part. */
typedef struct {
    uint64_t begin, bytes;
} window;

static window window_of(uint64_t total, uint64_t piece, uint64_t round) {
    uint64_t begin = smaller(total, round * piece);
    return (window){begin, smaller(piece, total - begin)};
}

static uint64_t rounds_for(uint64_t total, uint64_t piece) {
    return total == 0 ? 1 : (total + piece - 1) / piece;
}

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
    return reduce_range(core, from, &to, 1, 0, count, &operation->request);
}

/* Take all of a small tensor, reduced. */
static int take_reduced(pl_core *core, pl_operation *operation, uint64_t round, uint32_t phase) {
    (void)round;
    if (operation->request.kind == PL_REDUCE && core->rank != operation->request.root)
        return PL_OK;
    uint8_t *from[core->world];
    for (uint32_t rank = 0; rank < core->world; rank++)
        from[rank] = slot_of(core, rank, phase);
    return reduce_range(core, from, operation->outputs, 1, 0, operation->request.count,
                        &operation->request);
}

/* The rounds of a collective, of which the first has been put and met for. While peers may still
 * be reading this round, the next is put into another slot and announced. */
static int run_rounds(pl_core *core, pl_operation *operation, uint64_t rounds, put_function *put,
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

/* --- all_reduce of memory that is not shared -------------------------------------------------- */

/* Everything but the own slice goes into the slot: nobody else reads that one. */
static void put_slices(pl_core *core, pl_operation *operation, uint64_t round, uint8_t *slot) {
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
    return reduce_range(core, from, to, wants_result(core, operation) ? 2 : 1,
                        pl_cut(count, core->world, core->rank, itemsize),
                        pl_cut(count, core->world, core->rank + 1, itemsize), &operation->request);
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
                put_slices(core, operation, round + 1, slot_of(core, core->rank, phase + 1));
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
        uint64_t offset = read_ticket(core, rank, operation->request.seq).offset;
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
    int status = reduce_range(core, copies, copies, core->world, begin, end, request);
    return status == PL_OK ? leave(core, deadline_ns) : status;
}

static int reduce_lanes(pl_core *core, pl_operation *operation, uint8_t **copies,
                        uint64_t deadline_ns) {
    const pl_request *request = &operation->request;
    size_t itemsize = pl_itemsize(request->dtype);
    uint64_t begin = pl_cut(request->count, request->root, core->rank, itemsize);
    uint64_t end = pl_cut(request->count, request->root, core->rank + 1, itemsize);
    int status = reduce_range(core, copies, &copies[core->rank], 1, begin, end, request);
    return status == PL_OK ? leave(core, deadline_ns) : status;
}

static int share_lanes(pl_core *core, pl_operation *operation, uint8_t **copies,
                       uint64_t deadline_ns) {
    const pl_request *request = &operation->request;
    size_t itemsize = pl_itemsize(request->dtype);
    for (uint32_t lane = 0; lane < request->root; lane++) {
        uint64_t begin = pl_cut(request->count, request->root, lane, itemsize) * itemsize;
        uint64_t end = pl_cut(request->count, request->root, lane + 1, itemsize) * itemsize;
        copy(copies[core->rank] + begin, copies[lane] + begin, end - begin);
        pl_at(core, PL_POINT_TAKING);
    }
    return leave(core, deadline_ns);
}

/* --- all_to_all ------------------------------------------------------------------------------- */

/* The first round carries every rank's table of sizes, so that all check all of them. */
static void put_splits(pl_core *core, pl_operation *operation, uint64_t round, uint8_t *slot) {
    (void)round;
    memcpy(slot, operation->splits, 2 * core->world * sizeof(uint64_t));
}

/* A word of a peer's table: read once, whatever the compiler thinks. */
static uint64_t table_word(pl_core *core, uint32_t rank, uint32_t phase, uint32_t at) {
    const _Atomic uint64_t *table = (const _Atomic uint64_t *)(const void *)slot_of(core, rank, phase);
    return atomic_load_explicit(table + at, memory_order_relaxed);
}

/* What `from` sends to `to`, and what that expects; what is this rank's own comes from itself. */
static bool is_agreed(pl_core *core, pl_operation *operation, uint32_t phase, uint32_t from,
                      uint32_t to, uint64_t *sent) {
    uint64_t expected = to == core->rank ? operation->splits[core->world + from]
                                         : table_word(core, to, phase, core->world + from);
    *sent = from == core->rank ? operation->splits[to] : table_word(core, from, phase, to);
    if (*sent == expected)
        return true;
    operation->differing[0] = from;
    operation->differing[1] = to;
    operation->expected_bytes[0] = *sent;
    operation->expected_bytes[1] = expected;
    return false;
}

/* See that all sizes agree; find out how long the longest stream is, and where this rank's bytes
 * begin in each rank's stream. */
static int check_splits(pl_core *core, pl_operation *operation, uint32_t phase, uint64_t *longest) {
    *longest = 0;
    for (uint32_t from = 0; from < core->world; from++) {
        uint64_t total = 0, sent;
        for (uint32_t to = 0; to < core->world; to++) {
            if (!is_agreed(core, operation, phase, from, to, &sent))
                return PL_MISMATCH;
            if (to == core->rank)
                operation->splits[2 * core->world + from] = total;
            total += sent;
        }
        if (total > *longest)
            *longest = total;
    }
    return PL_OK;
}

/* Call `move` for the pieces that a window of one rank's outgoing bytes has for each rank. */
static void put_outgoing(pl_core *core, pl_operation *operation, uint64_t round, uint8_t *slot) {
    uint64_t low = round * core->slot_bytes, high = low + core->slot_bytes, at = 0;
    for (uint32_t to = 0; to < core->world; to++) {
        uint64_t end = at + operation->splits[to];
        uint64_t begin = at > low ? at : low, stop = smaller(end, high);
        if (begin < stop)
            copy(slot + (begin - low), operation->inputs[to] + (begin - at), stop - begin);
        at = end;
    }
}

/* check_splits has noted where this rank's bytes begin in each rank's stream. */
static int take_incoming(pl_core *core, pl_operation *operation, uint64_t round, uint32_t phase) {
    uint64_t low = round * core->slot_bytes, high = low + core->slot_bytes;
    const uint64_t *sizes = operation->splits + core->world;
    const uint64_t *starts = operation->splits + 2 * core->world;
    for (uint32_t from = 0; from < core->world; from++) {
        uint64_t at = starts[from], end = at + sizes[from];
        uint64_t begin = at > low ? at : low, stop = smaller(end, high);
        if (begin < stop)
            copy(operation->outputs[from] + (begin - at), slot_of(core, from, phase) + (begin - low),
                 stop - begin);
        pl_at(core, PL_POINT_TAKING);
    }
    return PL_OK;
}

static int exchange(pl_core *core, pl_operation *operation, uint64_t deadline_ns) {
    uint32_t phase = core->phase;
    uint64_t longest;
    int status = check_splits(core, operation, phase, &longest);
    if (status != PL_OK)
        return status;
    if (longest == 0)
        return PL_OK;
    put_outgoing(core, operation, 0, slot_of(core, core->rank, phase + 1));
    pl_at(core, PL_POINT_DATA_PUT);
    status = advance(core, deadline_ns);
    if (status != PL_OK)
        return status;
    return run_rounds(core, operation, rounds_for(longest, core->slot_bytes), put_outgoing,
                      take_incoming, deadline_ns);
}

/* --- one operation ----------------------------------------------------------------------------- */

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
        return operation->request.offset == PL_NOT_IN_ARENA ? put_slices : put_nothing;
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
        return put_splits;
    default:
        return put_nothing;
    }
}

static int reduce_large(pl_core *core, pl_operation *operation, uint32_t in_arena,
                        uint64_t deadline_ns) {
    uint8_t *copies[core->world];
    if (in_arena == core->world && operation->request.kind == PL_ALL_REDUCE &&
        find_copies(core, operation, copies))
        return reduce_in_place(core, operation, copies, deadline_ns);
    if (in_arena != 0) {
        /* Some have not put anything yet: all put once more, into the next slot. */
        put_slices(core, operation, 0, slot_of(core, core->rank, core->phase + 1));
        int status = advance(core, deadline_ns);
        if (status != PL_OK)
            return status;
    }
    return reduce_staged(core, operation, deadline_ns);
}

static int run_lanes(pl_core *core, pl_operation *operation, uint64_t deadline_ns) {
    uint8_t *copies[core->world];
    if (!find_copies(core, operation, copies))
        return PL_MISMATCH;
    if (operation->request.kind == PL_REDUCE_LANES)
        return reduce_lanes(core, operation, copies, deadline_ns);
    return share_lanes(core, operation, copies, deadline_ns);
}

static int run_checked(pl_core *core, pl_operation *operation, uint32_t in_arena,
                       uint64_t deadline_ns) {
    uint64_t whole = rounds_for(total_bytes(operation), core->slot_bytes);
    uint64_t split = rounds_for(total_bytes(operation), split_piece(core));
    switch (operation->request.kind) {
    case PL_ALL_REDUCE:
    case PL_REDUCE:
        if (is_tiny(core, operation))
            return run_rounds(core, operation, 1, put_nothing, take_reduced, deadline_ns);
        return reduce_large(core, operation, in_arena, deadline_ns);
    case PL_BROADCAST:
        return run_rounds(core, operation, whole, put_if_root, take_from_root, deadline_ns);
    case PL_ALL_GATHER:
        return run_rounds(core, operation, whole, put_own, take_all, deadline_ns);
    case PL_GATHER:
        return run_rounds(core, operation, whole, put_own, take_all_if_root, deadline_ns);
    case PL_REDUCE_SCATTER:
        return run_rounds(core, operation, split, put_parts, take_reduced_part, deadline_ns);
    case PL_SCATTER:
        return run_rounds(core, operation, split, put_parts_if_root, take_part_from_root,
                          deadline_ns);
    case PL_ALL_TO_ALL:
        return exchange(core, operation, deadline_ns);
    case PL_REDUCE_LANES:
    case PL_SHARE_LANES:
        return run_lanes(core, operation, deadline_ns);
    default:
        return run_rounds(core, operation, 1, put_nothing, take_nothing, deadline_ns);
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
    write_ticket(core, request);
    pl_set_life(core, PL_LIFE_WORKING);
    pl_at(core, PL_POINT_TICKET_WRITTEN);
    opening(core, operation)(core, operation, 0, slot_of(core, core->rank, core->phase + 1));
    pl_at(core, PL_POINT_DATA_PUT);
    status = advance(core, deadline_ns);
    uint32_t in_arena = 0;
    if (status == PL_OK)
        status = check_tickets(core, operation, &in_arena);
    if (status == PL_OK)
        status = run_checked(core, operation, in_arena, deadline_ns);
    pl_at(core, PL_POINT_END);
    atomic_store_explicit(&pl_my_row(core)->finished, request->seq, memory_order_relaxed);
    pl_set_life(core, PL_LIFE_IDLE);
    return status;
}
