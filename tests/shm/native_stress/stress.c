/* The native core under a sanitizer: ranks as threads of one process, without Python.
 *
 *   stress WORLD COLLECTIVES SEED
 *
 * All ranks draw the same collectives from the same seed: every kind, some dtypes and operations,
 * sizes from nothing to several slots, tensors in the arena or not or mixed, mismatches, executed
 * by the caller or by the progress thread, with delays at random points. Every element that comes
 * back is compared. Threads share nothing but what ranks of different processes share, so a race
 * that the sanitizer sees here is one that processes would have. Phases start a little before the
 * 32-bit counters wrap. At the end one rank aborts while the others wait. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

enum {
    MAX_WORLD = 8,
    SLOT_BYTES = 4096,
    MAX_BYTES = 5 * SLOT_BYTES + 200,
    HEAP_BYTES = 8 * SLOT_BYTES,
    STAGE_BYTES = PL_SLOTS * SLOT_BYTES,
    POISON = 0xa5,
};

static uint32_t world, collectives;
static uint64_t seed;
static pl_control *control;
static pl_core *cores[MAX_WORLD];
static uint8_t *arenas[MAX_WORLD];
static _Atomic uint32_t mismatches, in_place, delays;

#define REQUIRE(condition, ...)                                        \
    do {                                                               \
        if (!(condition)) {                                            \
            fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);            \
            fprintf(stderr, __VA_ARGS__);                              \
            fputc('\n', stderr);                                       \
            abort();                                                   \
        }                                                              \
    } while (0)

/* --- what is to be done ------------------------------------------------------------------------- */

typedef struct {
    uint64_t seq;
    uint32_t kind, dtype, op, root, count;
    uint32_t arena_mask; /* which ranks bring a tensor of their arena */
    uint32_t odd_rank;   /* brings another size; world: nobody */
} plan;

static uint64_t draw(uint64_t *state) {
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static bool has_leaders(uint32_t kind) {
    return kind == PL_REDUCE_TO_LEADERS || kind == PL_COPY_FROM_LEADERS;
}

static plan draw_plan(uint64_t seq) {
    static const uint32_t dtypes[] = {PL_U8, PL_I32, PL_I64, PL_F16, PL_BF16, PL_F32, PL_F64};
    uint64_t state = seed + seq * 977;
    plan next = {.seq = seq, .odd_rank = world};
    next.kind = (uint32_t)(draw(&state) % PL_KINDS);
    next.dtype = dtypes[draw(&state) % 7];
    next.op = draw(&state) % 3 == 0 ? PL_MAX : PL_SUM;
    next.root = (uint32_t)(draw(&state) % world) + (has_leaders(next.kind) ? 1 : 0);
    uint64_t limit = draw(&state) % 2 ? 300 : MAX_BYTES;
    next.count = (uint32_t)(draw(&state) % (limit + 1) / pl_itemsize(next.dtype));
    next.arena_mask = (uint32_t)draw(&state);
    if (draw(&state) % 2 || has_leaders(next.kind))
        next.arena_mask = UINT32_MAX;
    if (draw(&state) % 16 == 0 && next.kind != PL_BARRIER)
        next.odd_rank = (uint32_t)(draw(&state) % world);
    if (has_leaders(next.kind))
        next.op = PL_SUM;
    return next;
}

/* --- values --------------------------------------------------------------------------------------- */

/* Small integers: every dtype holds them and their sums exactly. */
static double value_of(const plan *p, uint32_t rank, uint32_t part, uint64_t i) {
    return (double)((rank * 3 + part * 5 + p->seq + i) % 7);
}

static void store(uint8_t *base, uint32_t dtype, uint64_t i, double value) {
    switch (dtype) {
    case PL_U8: base[i] = (uint8_t)value; break;
    case PL_I32: ((int32_t *)base)[i] = (int32_t)value; break;
    case PL_I64: ((int64_t *)base)[i] = (int64_t)value; break;
    case PL_F16: ((_Float16 *)base)[i] = (_Float16)value; break;
    case PL_F32: ((float *)base)[i] = (float)value; break;
    case PL_F64: ((double *)base)[i] = value; break;
    case PL_BF16: {
        float narrow = (float)value;
        uint32_t bits;
        memcpy(&bits, &narrow, 4);
        ((uint16_t *)base)[i] = (uint16_t)(bits >> 16);
    }
    }
}

static double load(const uint8_t *base, uint32_t dtype, uint64_t i) {
    switch (dtype) {
    case PL_U8: return base[i];
    case PL_I32: return ((const int32_t *)base)[i];
    case PL_I64: return (double)((const int64_t *)base)[i];
    case PL_F16: return (double)((const _Float16 *)base)[i];
    case PL_F32: return ((const float *)base)[i];
    case PL_F64: return ((const double *)base)[i];
    default: {
        uint32_t bits = (uint32_t)((const uint16_t *)base)[i] << 16;
        float wide;
        memcpy(&wide, &bits, 4);
        return wide;
    }
    }
}

static double reduced(const plan *p, uint32_t part, uint64_t i) {
    double result = value_of(p, 0, part, i);
    for (uint32_t rank = 1; rank < world; rank++) {
        double next = value_of(p, rank, part, i);
        result = p->op == PL_SUM ? result + next : (next > result ? next : result);
    }
    return result;
}

/* --- one rank ------------------------------------------------------------------------------------- */

typedef struct {
    uint32_t rank;
    uint8_t *in[MAX_WORLD], *out[MAX_WORLD];
    uint64_t random;
} body;

/* all_to_all: how many bytes go from one rank to another. */
static uint64_t split(const plan *p, uint32_t from, uint32_t to) {
    uint64_t bytes = (p->count / world + from * 37 + to * 11) % (MAX_BYTES / world);
    return p->count == 0 ? 0 : bytes;
}

static void fill(const body *me, const plan *p) {
    for (uint32_t part = 0; part < world; part++) {
        for (uint64_t i = 0; i < p->count; i++)
            store(me->in[part], p->dtype, i, value_of(p, me->rank, part, i));
        memset(me->out[part], POISON, MAX_BYTES);
    }
    if (p->kind == PL_ALL_TO_ALL)
        for (uint32_t to = 0; to < world; to++)
            for (uint64_t i = 0; i < split(p, me->rank, to); i++)
                me->in[to][i] = (uint8_t)value_of(p, me->rank, to, i);
}

static uint8_t *heap_of(uint32_t rank, const plan *p) {
    return arenas[rank] + STAGE_BYTES + (p->seq + rank) % 3 * PL_LINE * 4;
}

static bool in_arena(const body *me, const plan *p) {
    return (has_leaders(p->kind) || p->kind == PL_ALL_REDUCE) && p->arena_mask >> me->rank & 1;
}

static pl_operation *make(const body *me, const plan *p) {
    pl_operation *operation = pl_operation_create(world, world, 3 * world);
    REQUIRE(operation != NULL, "no memory");
    for (uint32_t rank = 0; rank < world; rank++) {
        operation->inputs[rank] = me->in[rank];
        operation->outputs[rank] = me->out[rank];
        operation->splits[rank] = split(p, me->rank, rank);
        operation->splits[world + rank] = split(p, rank, me->rank);
    }
    operation->request = (pl_request){.kind = p->kind, .dtype = p->dtype, .op = p->op,
                                      .root = p->root, .count = p->count,
                                      .offset = PL_NOT_IN_ARENA};
    if (p->kind == PL_ALL_TO_ALL)
        operation->request.count = 0;
    if (in_arena(me, p)) {
        uint8_t *tensor = heap_of(me->rank, p);
        memcpy(tensor, me->in[0], p->count * pl_itemsize(p->dtype));
        operation->inputs[0] = operation->outputs[0] = tensor;
        operation->request.offset = (uint64_t)(tensor - arenas[me->rank]);
    }
    if (p->odd_rank == me->rank && p->kind == PL_ALL_TO_ALL)
        operation->splits[(me->rank + 1) % world] += 1;
    else if (p->odd_rank == me->rank)
        operation->request.count += p->count == 0 ? 1 : -1;
    operation->timeout_ns = UINT64_C(60000000000);
    return operation;
}

static int carry_out(body *me, pl_operation *operation) {
    pl_core *core = cores[me->rank];
    int status = PL_PENDING;
    if (draw(&me->random) % 2)
        status = pl_run(core, operation, NULL);
    if (status == PL_PENDING) {
        status = pl_submit(core, operation);
        while (status == PL_PENDING)
            status = pl_wait(core, operation, pl_now_ns() + 1000000000u);
    }
    return status;
}

/* --- what must have come back ------------------------------------------------------------------- */

static void expect(const body *me, const plan *p, const uint8_t *found, uint64_t i, double wanted,
                   uint32_t dtype) {
    double value = load(found, dtype, i);
    REQUIRE(value == wanted, "rank %u, collective %llu of kind %u: element %llu of %u is %g, not %g",
            me->rank, (unsigned long long)p->seq, p->kind, (unsigned long long)i, p->count, value,
            wanted);
}

static void check_reduced(const body *me, const plan *p, const uint8_t *found, uint32_t part) {
    for (uint64_t i = 0; i < p->count; i++)
        expect(me, p, found, i, reduced(p, part, i), p->dtype);
}

static void check_moved(const body *me, const plan *p, const uint8_t *found, uint32_t from,
                        uint32_t part) {
    for (uint64_t i = 0; i < p->count; i++)
        expect(me, p, found, i, value_of(p, from, part, i), p->dtype);
}

static void check_leaders(const body *me, const plan *p, const uint8_t *found) {
    size_t itemsize = pl_itemsize(p->dtype);
    for (uint32_t leader = 0; leader < p->root; leader++) {
        uint64_t end = pl_cut(p->count, p->root, leader + 1, itemsize);
        for (uint64_t i = pl_cut(p->count, p->root, leader, itemsize); i < end; i++) {
            double wanted = value_of(p, leader, 0, i);
            if (p->kind == PL_REDUCE_TO_LEADERS)
                wanted = leader == me->rank ? reduced(p, 0, i) : value_of(p, me->rank, 0, i);
            expect(me, p, found, i, wanted, p->dtype);
        }
    }
}

static void check_exchanged(const body *me, const plan *p) {
    for (uint32_t from = 0; from < world; from++)
        for (uint64_t i = 0; i < split(p, from, me->rank); i++)
            expect(me, p, me->out[from], i, value_of(p, from, me->rank, i), PL_U8);
}

static void check(const body *me, const plan *p, const pl_operation *operation) {
    const uint8_t *result = operation->outputs[0];
    switch (p->kind) {
    case PL_ALL_REDUCE: check_reduced(me, p, result, 0); break;
    case PL_REDUCE:
        if (me->rank == p->root)
            check_reduced(me, p, result, 0);
        break;
    case PL_BROADCAST:
        if (me->rank != p->root)
            check_moved(me, p, result, p->root, 0);
        break;
    case PL_GATHER:
        if (me->rank != p->root)
            break; /* fall through */
    case PL_ALL_GATHER:
        for (uint32_t rank = 0; rank < world; rank++)
            check_moved(me, p, me->out[rank], rank, 0);
        break;
    case PL_REDUCE_SCATTER: check_reduced(me, p, result, me->rank); break;
    case PL_SCATTER: check_moved(me, p, result, p->root, me->rank); break;
    case PL_ALL_TO_ALL: check_exchanged(me, p); break;
    case PL_REDUCE_TO_LEADERS:
    case PL_COPY_FROM_LEADERS: check_leaders(me, p, result); break;
    }
}

static void maybe_delay(body *me) {
    if (draw(&me->random) % 8)
        return;
    uint32_t point = 1 + (uint32_t)(draw(&me->random) % (PL_POINTS - 1));
    pl_arm_fault(cores[me->rank], point, 1, PL_FAULT_DELAY, draw(&me->random) % 50000);
}

static void one(body *me, uint64_t seq) {
    plan p = draw_plan(seq);
    fill(me, &p);
    maybe_delay(me);
    pl_operation *operation = make(me, &p);
    int status = carry_out(me, operation);
    if (p.odd_rank < world && world > 1) {
        REQUIRE(status == PL_MISMATCH, "collective %llu of kind %u: status %d instead of mismatch",
                (unsigned long long)seq, p.kind, status);
        atomic_fetch_add(&mismatches, 1);
    } else {
        REQUIRE(status == PL_OK, "collective %llu of kind %u: status %d",
                (unsigned long long)seq, p.kind, status);
        check(me, &p, operation);
        atomic_fetch_add(&in_place, in_arena(me, &p));
    }
    pl_operation_release(operation);
}

static void end(body *me) {
    /* The others wait for rank 0, which aborts. */
    plan p = {.seq = collectives, .kind = PL_BARRIER, .odd_rank = world};
    if (me->rank == 0) {
        pl_declare(cores[0], PL_END_ABORTED, 0);
    } else {
        pl_operation *operation = make(me, &p);
        int status = carry_out(me, operation);
        REQUIRE(status == PL_BROKEN, "status %d after the abort", status);
        pl_operation_release(operation);
    }
    atomic_fetch_add(&delays, cores[me->rank]->faults_fired);
    pl_close(cores[me->rank]);
}

static void *live(void *argument) {
    body me = {.rank = (uint32_t)(uintptr_t)argument};
    me.random = seed ^ (me.rank + 1) * 0x12345u;
    for (uint32_t part = 0; part < world; part++) {
        me.in[part] = malloc(MAX_BYTES);
        me.out[part] = malloc(MAX_BYTES);
    }
    for (uint64_t seq = 0; seq < collectives; seq++)
        one(&me, seq);
    end(&me);
    for (uint32_t part = 0; part < world; part++)
        free(me.in[part]), free(me.out[part]);
    return NULL;
}

/* --- the group -------------------------------------------------------------------------------------- */

static void start_before_the_counters_wrap(uint32_t phase) {
    atomic_store(&control->barrier.arrived, phase * world);
    for (uint32_t rank = 0; rank < world; rank++) {
        cores[rank]->phase = phase;
        atomic_store(&control->row[rank].phase, phase);
    }
}

static void make_group(void) {
    uint64_t bytes = (pl_control_bytes(world) + PL_LINE - 1) / PL_LINE * PL_LINE;
    control = aligned_alloc(PL_LINE, bytes);
    memset(control, 0, bytes);
    pl_format(control, world, SLOT_BYTES);
    for (uint32_t rank = 0; rank < world; rank++)
        arenas[rank] = aligned_alloc(4096, STAGE_BYTES + HEAP_BYTES);
    for (uint32_t rank = 0; rank < world; rank++) {
        uint8_t **arena = calloc(world, sizeof *arena);
        uint64_t *arena_bytes = calloc(world, sizeof *arena_bytes);
        int *pidfd = calloc(world, sizeof *pidfd);
        for (uint32_t peer = 0; peer < world; peer++) {
            arena[peer] = arenas[peer];
            arena_bytes[peer] = STAGE_BYTES + HEAP_BYTES;
            pidfd[peer] = -1;
        }
        cores[rank] = pl_core_create(control, rank, world, arena, arena_bytes, 0, pidfd);
        cores[rank]->yields = 4;
        cores[rank]->spin_ns = rank % 2 ? 2000 : 0;
    }
    start_before_the_counters_wrap((uint32_t)-1000);
}

int main(int argc, char **argv) {
    REQUIRE(argc == 4, "usage: stress WORLD COLLECTIVES SEED");
    world = (uint32_t)atoi(argv[1]);
    collectives = (uint32_t)atoi(argv[2]);
    seed = (uint64_t)atoll(argv[3]);
    REQUIRE(world >= 1 && world <= MAX_WORLD, "between 1 and %d ranks", MAX_WORLD);
    make_group();
    pthread_t threads[MAX_WORLD];
    for (uintptr_t rank = 0; rank < world; rank++)
        pthread_create(&threads[rank], NULL, live, (void *)rank);
    for (uint32_t rank = 0; rank < world; rank++)
        pthread_join(threads[rank], NULL);
    for (uint32_t rank = 0; rank < world; rank++) {
        pl_core_destroy(cores[rank]);
        free(arenas[rank]);
    }
    free(control);
    printf("collectives=%u mismatches=%u in_place=%u delays=%u\n", collectives, mismatches,
           in_place, delays);
    return 0;
}
