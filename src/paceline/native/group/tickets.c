/* What each rank brings to a collective: written before it arrives, compared once all have. */
#include "engine.h"

void pl_write_ticket(pl_core *core, const pl_request *request) {
    pl_ticket *ticket = &pl_my_row(core)->ticket[request->seq % 2];
    atomic_store_explicit(&ticket->seq, request->seq, memory_order_relaxed);
    atomic_store_explicit(&ticket->count, request->count, memory_order_relaxed);
    atomic_store_explicit(&ticket->offset, request->offset, memory_order_relaxed);
    atomic_store_explicit(&ticket->kind, request->kind, memory_order_relaxed);
    atomic_store_explicit(&ticket->dtype, request->dtype, memory_order_relaxed);
    atomic_store_explicit(&ticket->op, request->op, memory_order_relaxed);
    atomic_store_explicit(&ticket->root, request->root, memory_order_relaxed);
}

pl_request pl_read_ticket(pl_core *core, uint32_t rank, uint64_t seq) {
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
int pl_check_tickets(pl_core *core, pl_operation *operation, uint32_t *in_arena) {
    uint64_t seq = operation->request.seq;
    pl_request first = pl_read_ticket(core, 0, seq);
    *in_arena = 0;
    for (uint32_t rank = 0; rank < core->world; rank++) {
        pl_request other = pl_read_ticket(core, rank, seq);
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
