/* The native core of the shared-memory group, without Python and without torch.
 *
 *   sync.c       arriving, waiting (spin, futex, deadline, watch over peers), verdicts
 *   kernels.c    element-wise reductions
 *   streaming.c  large copies past the caches
 *   engine.h     the collectives, as rounds between barriers: which files they are in
 *   progress.c   the queue of operations and the thread that works it off
 *   faults.c     named points at which tests kill, stop or delay a rank
 *
 * group.h lists the files that include Python.h; no other does, and the sanitizers run all others
 * without it (tests/shm/native_stress). */
#ifndef PACELINE_CORE_H
#define PACELINE_CORE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "layout.h"

enum pl_status {
    PL_OK = 0,
    PL_PENDING,      /* not done yet */
    PL_MISMATCH,     /* ranks brought different tickets; the group goes on */
    PL_BROKEN,       /* the verdict says why */
    PL_SHUT,         /* this rank closed the group */
    PL_INTERRUPTED,  /* the caller's check said stop (Ctrl-C) */
};

enum pl_kind {
    PL_BARRIER = 0,
    PL_ALL_REDUCE,
    PL_REDUCE,
    PL_BROADCAST,
    PL_ALL_GATHER,
    PL_REDUCE_SCATTER,
    PL_ALL_TO_ALL,
    PL_GATHER,
    PL_SCATTER,
    PL_REDUCE_TO_LEADERS, /* in place: rank i < leaders gets the sum of slice i, in its own copy */
    PL_COPY_FROM_LEADERS, /* in place: every rank copies the slices of the leaders */
    PL_KINDS,
};

enum pl_dtype {
    PL_U8 = 0, PL_I8, PL_I16, PL_I32, PL_I64, PL_F16, PL_BF16, PL_F32, PL_F64,
    PL_BOOL,
    PL_C64, PL_C128, /* are moved; to be reduced they come as twice as many real numbers */
    PL_DTYPES,
};

enum pl_op { PL_SUM = 0, PL_AVG, PL_PRODUCT, PL_MIN, PL_MAX, PL_BAND, PL_BOR, PL_BXOR, PL_OPS };

size_t pl_itemsize(uint32_t dtype);
bool pl_can_reduce(uint32_t dtype, uint32_t op);

/* streaming.c: a scaled copy from so many bytes on goes past the caches; below, that gains nothing. */
#define PL_STREAM_BYTES (1 << 17)
void pl_scale_f32(float *target, const float *source, size_t count, float factor);
void pl_stream(void *target, const void *source, size_t bytes);

/* Reduce `count` elements of `sources` in their order into targets[0], then copy to the others.
 * A target may be the very same memory as a source, never a shifted one. AVG divides by
 * `divisor`. float16 and bfloat16 are added up in float32 and rounded once. */
void pl_reduce(void *const *targets, size_t target_count, const void *const *sources,
               size_t source_count, size_t count, uint32_t dtype, uint32_t op, double divisor);

/* One operation, as a caller hands it in. Memory behind the pointers must live until it is done.
 *
 *                   inputs                     outputs                     count: elements of
 *   barrier         -                          -                           -
 *   all_reduce      1                          1 (may be the input)        the tensor
 *   reduce          1                          1, used on the root         the tensor
 *   broadcast       1, used on the root        1, used elsewhere           the tensor
 *   all_gather      1                          world                       one input
 *   reduce_scatter  world                      1                           the output
 *   all_to_all      world                      world                       - (see splits)
 *   gather          1                          world, on the root          one input
 *   scatter         world, on the root         1                           the output
 *   *_leaders       -                          1, in the arena             the tensor
 */
typedef struct {
    uint64_t seq, count, offset;
    uint32_t kind, dtype, op, root; /* root: of *_leaders, how many there are */
} pl_request;

typedef struct pl_operation {
    pl_request request;
    const uint8_t **inputs;
    uint8_t **outputs;
    uint64_t *splits; /* all_to_all: bytes to each rank, then bytes from each rank */
    uint64_t timeout_ns;

    _Atomic int status; /* pl_status */
    uint64_t began_ns, ended_ns;
    /* With PL_MISMATCH: two ranks that differ and what each brought; for all_to_all, the bytes
     * that the first sends and the second expects. */
    uint32_t differing[2];
    pl_request brought[2];
    uint64_t expected_bytes[2];

    _Atomic int references;
    struct pl_operation *next;
} pl_operation;

typedef struct pl_core pl_core;

enum pl_point {
    PL_POINT_NONE = 0,
    PL_POINT_BEGIN,           /* before anything is written */
    PL_POINT_TICKET_WRITTEN,
    PL_POINT_DATA_PUT,        /* own data is in the slot, not yet announced */
    PL_POINT_COUNTED,         /* between the barrier's count and waking the sleepers */
    PL_POINT_ARRIVED,
    PL_POINT_ASLEEP,          /* counted as a sleeper, about to sleep */
    PL_POINT_RELEASED,        /* the wait is over, nothing read yet */
    PL_POINT_REDUCING,        /* in the middle of a slice */
    PL_POINT_TAKING,          /* in the middle of reading results */
    PL_POINT_END,             /* all read, not yet noted as finished */
    PL_POINTS,
};

enum pl_fault { PL_FAULT_NONE = 0, PL_FAULT_KILL, PL_FAULT_STOP, PL_FAULT_DELAY };

struct pl_core {
    /* Constant after pl_core_create. */
    pl_control *control;
    uint32_t rank, world;
    uint8_t **arena;         /* base of each rank's arena, as mapped here */
    uint64_t *arena_bytes;
    uint64_t stage_offset;   /* of the staging slots in every arena */
    uint64_t slot_bytes;
    int *pidfd;              /* of each peer; -1 for this rank */
    uint64_t spin_ns;        /* how long to spin before sleeping */
    _Atomic uint32_t *doorbell; /* this rank's, rung by a wait that takes long; may be NULL */
    uint32_t yields;         /* how often to yield the processor before sleeping */
    int owner_pid;

    /* Of whoever executes (the thread, or a caller that runs its operation itself). */
    uint32_t phase;
    uint64_t seq;
    bool (*interrupted)(void *); /* asked now and then while a caller executes; may be NULL */
    void *interrupted_argument;

    /* The queue: under `lock`. */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pl_operation *head, *tail;
    bool busy;               /* somebody executes */
    _Atomic uint64_t executor; /* the thread that does; 0 for none */
    bool has_thread, is_joined, has_left;
    pthread_t thread;
    _Atomic bool closing;

    uint64_t caller; /* the thread that handed in the latest operation; Python's lock guards it */

    /* Tests only. */
    _Atomic uint32_t fault_point;
    uint32_t fault_countdown, fault_action;
    uint64_t fault_delay_ns;
    _Atomic uint32_t faults_fired;
};

/* sync.c */
uint64_t pl_now_ns(void);
void pl_format(pl_control *control, uint32_t world, uint64_t slot_bytes);
void pl_arrive(pl_core *core);
int pl_await(pl_core *core, uint64_t deadline_ns);
int pl_state(pl_core *core); /* PL_OK, PL_BROKEN or PL_SHUT */
bool pl_declare(pl_core *core, enum pl_end end, uint32_t about);
void pl_wake_all(pl_core *core);
void pl_set_life(pl_core *core, uint32_t life);
uint32_t pl_alive(pl_core *core, uint32_t rank);
void pl_ring_doorbell(_Atomic uint32_t *doorbell);
uint32_t pl_await_doorbell(_Atomic uint32_t *doorbell, uint32_t seen, uint64_t duration_ns);

/* engine.c, tickets.c */
pl_request pl_read_ticket(pl_core *core, uint32_t rank, uint64_t seq);
uint64_t pl_cut(uint64_t count, uint32_t parts, uint32_t index, size_t itemsize);
int pl_execute(pl_core *core, pl_operation *operation);

/* progress.c */
pl_core *pl_core_create(pl_control *control, uint32_t rank, uint32_t world, uint8_t **arena,
                        uint64_t *arena_bytes, uint64_t stage_offset, int *pidfd);
void pl_core_destroy(pl_core *core);
pl_operation *pl_operation_create(size_t inputs, size_t outputs, size_t splits);
void pl_operation_release(pl_operation *operation);
int pl_submit(pl_core *core, pl_operation *operation);
int pl_run(pl_core *core, pl_operation *operation, bool (*interrupted)(void *));
int pl_wait(pl_core *core, pl_operation *operation, uint64_t until_ns);
void pl_close(pl_core *core);
bool pl_is_executor(pl_core *core);

/* faults.c */
void pl_arm_fault(pl_core *core, uint32_t point, uint32_t nth, uint32_t action, uint64_t delay_ns);
void pl_fault_here(pl_core *core);

static inline void pl_at(pl_core *core, uint32_t point) {
    if (__builtin_expect(
            atomic_load_explicit(&core->fault_point, memory_order_relaxed) == point, 0))
        pl_fault_here(core);
}

static inline pl_row *pl_my_row(pl_core *core) { return &core->control->row[core->rank]; }

#endif
