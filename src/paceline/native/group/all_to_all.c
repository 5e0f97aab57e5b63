/* all_to_all: every rank's outgoing bytes as one stream, of which each rank takes its part. */
#include "engine.h"

/* The first round carries every rank's table of sizes, so that all check all of them. */
void pl_put_splits(pl_core *core, pl_operation *operation, uint64_t round, uint8_t *slot) {
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

/* Copy one window of this rank's outgoing bytes, piece by piece, into its slot. */
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

int pl_run_all_to_all(pl_core *core, pl_operation *operation, uint64_t deadline_ns) {
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
    return pl_run_rounds(core, operation, rounds_for(longest, core->slot_bytes), put_outgoing,
                         take_incoming, deadline_ns);
}
