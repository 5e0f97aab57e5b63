/* Arriving at a phase, waiting for it, and finding out that it will never be complete.
 *
 * [Note: the barrier]
 * Phases are numbered from 1. A rank arrives at phase p by adding 1 to `arrived`; p is complete
 * when `arrived` has reached world * p (modulo 2^32). No rank arrives at p + 1 before p is
 * complete, so the count cannot run ahead, nothing is ever reset, and a rank that dies has either
 * been counted or not: there is no state in between. The add releases what the rank has written
 * before; a wait that sees the full count acquires what all have written (every add continues the
 * release sequence of those before it).
 *
 * Only the rank that completes a phase wakes the others, and only if somebody may sleep. Sleeper
 * and waker must not miss each other: the sleeper announces itself and then looks at the count,
 * the waker counts and then looks for sleepers, all four sequentially consistent, so at least one
 * sees the other; and the kernel compares the count again before it puts the sleeper to bed. */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "core.h"

/* How long after its deadline a waiter believes that the last rank is just being counted. */
#define COUNTING_NS UINT64_C(1000000000)
/* How often a sleeper wakes to look at the deadline, the verdict and its peers. */
#define WATCH_NS UINT64_C(40000000)

uint64_t pl_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* How long a wait takes before it rings the doorbell: a thread of this process asks for the reason. */
#define DOORBELL_AFTER_NS UINT64_C(500000000)

static void futex_wait(_Atomic uint32_t *word, uint32_t value, uint64_t duration_ns) {
    struct timespec limit = {(time_t)(duration_ns / 1000000000u),
                             (long)(duration_ns % 1000000000u)};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, NULL, 0);
}

void pl_wake_all(pl_core *core) {
    syscall(SYS_futex, &core->control->barrier.arrived, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* A doorbell is counted up by anybody and waited for by one thread of its rank. The count is what
 * tells; a ring that comes while nobody waits is seen by the next wait, by the kernel's comparison. */
void pl_ring_doorbell(_Atomic uint32_t *doorbell) {
    atomic_fetch_add(doorbell, 1);
    syscall(SYS_futex, doorbell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Wait until the doorbell's count is not `seen`, or the time is over; UINT64_MAX: for ever. */
uint32_t pl_await_doorbell(_Atomic uint32_t *doorbell, uint32_t seen, uint64_t duration_ns) {
    uint64_t began_ns = pl_now_ns(), spent_ns = 0;
    while (atomic_load(doorbell) == seen && spent_ns < duration_ns) {
        uint64_t left_ns = duration_ns - spent_ns;
        futex_wait(doorbell, seen, left_ns < UINT64_C(3600000000000) ? left_ns : UINT64_C(3600000000000));
        spent_ns = pl_now_ns() - began_ns;
    }
    return atomic_load(doorbell);
}

void pl_format(pl_control *control, uint32_t world, uint64_t slot_bytes) {
    /* A new memfd reads as zeros, which is the right start for everything else. */
    control->header.magic = PL_MAGIC;
    control->header.version = PL_LAYOUT_VERSION;
    control->header.world = world;
    control->header.slot_bytes = slot_bytes;
}

void pl_set_life(pl_core *core, uint32_t life) {
    pl_row *row = pl_my_row(core);
    atomic_store_explicit(&row->since_ns, pl_now_ns(), memory_order_relaxed);
    atomic_store_explicit(&row->life, life, memory_order_release);
}

void pl_arrive(pl_core *core) {
    pl_barrier *barrier = &core->control->barrier;
    uint32_t target = ++core->phase * core->world;
    uint32_t arrived = atomic_fetch_add(&barrier->arrived, 1) + 1;
    pl_at(core, PL_POINT_COUNTED);
    if (arrived == target && atomic_load(&barrier->sleepers) != 0)
        pl_wake_all(core);
    /* The row is for people; the count is what decides. Noted after it is counted, so that a
     * phase that is not complete always has a rank whose row says that it is missing. */
    atomic_store_explicit(&pl_my_row(core)->phase, core->phase, memory_order_release);
    pl_at(core, PL_POINT_ARRIVED);
}

static inline bool is_complete(pl_core *core) {
    uint32_t arrived =
        atomic_load_explicit(&core->control->barrier.arrived, memory_order_acquire);
    return (int32_t)(arrived - core->phase * core->world) >= 0;
}

int pl_state(pl_core *core) {
    if (atomic_load_explicit(&core->control->verdict, memory_order_acquire) != 0)
        return PL_BROKEN;
    if (atomic_load_explicit(&core->closing, memory_order_acquire))
        return PL_SHUT;
    return PL_OK;
}

bool pl_declare(pl_core *core, enum pl_end end, uint32_t about) {
    uint64_t none = 0;
    bool first = atomic_compare_exchange_strong(&core->control->verdict, &none,
                                                pl_pack_verdict(end, core->rank, about));
    pl_wake_all(core);
    return first;
}

/* A pidfd is readable once its process has ended, reaped or not. */
uint32_t pl_alive(pl_core *core, uint32_t rank) {
    if (core->pidfd[rank] < 0)
        return 1;
    struct pollfd query = {core->pidfd[rank], POLLIN, 0};
    /* POLLNVAL, for one, says nothing about the process. */
    return poll(&query, 1, 0) <= 0 || (query.revents & POLLIN) == 0;
}

static bool is_missing(pl_core *core, uint32_t rank) {
    uint32_t phase =
        atomic_load_explicit(&core->control->row[rank].phase, memory_order_acquire);
    return (int32_t)(phase - core->phase) < 0;
}

static bool is_gone(pl_core *core, uint32_t rank) {
    return atomic_load_explicit(&core->control->row[rank].life, memory_order_acquire) ==
               PL_LIFE_CLOSED ||
           !pl_alive(core, rank);
}

/* [Note: who is lost]
 * Return a rank that is gone, or world; best one that has not arrived. The phase is lost if it is
 * still not complete after this look: a rank that ends in good order does so after its last phase
 * was complete and arrives at no later one, and a rank that died in between breaks the group even
 * if it was counted. So nobody waits for a slow third rank to learn of a dead second one. */
static uint32_t find_lost(pl_core *core) {
    uint32_t lost = core->world;
    for (uint32_t rank = 0; rank < core->world; rank++) {
        if (!is_gone(core, rank))
            continue;
        if (is_missing(core, rank))
            return rank;
        lost = rank;
    }
    return lost;
}

/* Return the first rank that has not arrived; world if all have, and then the phase is complete. */
static uint32_t first_missing(pl_core *core) {
    for (uint32_t rank = 0; rank < core->world; rank++)
        if (is_missing(core, rank))
            return rank;
    return core->world;
}

/* Spin and yield for a moment; say whether the phase became complete. */
static bool wait_awake(pl_core *core) {
    for (uint32_t turn = 0; turn < core->yields; turn++) {
        if (is_complete(core))
            return true;
        sched_yield();
    }
    if (core->spin_ns == 0)
        return is_complete(core);
    uint64_t until_ns = pl_now_ns() + core->spin_ns;
    do {
        for (int turn = 0; turn < 64; turn++) {
            if (is_complete(core))
                return true;
            relax();
        }
    } while (pl_now_ns() < until_ns);
    return false;
}

static void sleep_once(pl_core *core, uint64_t duration_ns) {
    pl_barrier *barrier = &core->control->barrier;
    atomic_fetch_add(&barrier->sleepers, 1);
    pl_at(core, PL_POINT_ASLEEP);
    uint32_t arrived = atomic_load(&barrier->arrived);
    if ((int32_t)(arrived - core->phase * core->world) < 0 && pl_state(core) == PL_OK)
        futex_wait(&barrier->arrived, arrived, duration_ns);
    atomic_fetch_sub(&barrier->sleepers, 1);
}

/* Wait until all ranks have arrived at this rank's phase. */
int pl_await(pl_core *core, uint64_t deadline_ns) {
    if (is_complete(core) || wait_awake(core))
        return PL_OK;
    uint64_t watch_ns = pl_now_ns() + WATCH_NS, doorbell_ns = watch_ns + DOORBELL_AFTER_NS;
    for (;;) {
        uint64_t now_ns = pl_now_ns();
        if (is_complete(core))
            return PL_OK;
        int state = pl_state(core);
        if (state != PL_OK)
            return state;
        if (now_ns >= watch_ns) {
            watch_ns = now_ns + WATCH_NS;
            if (now_ns >= doorbell_ns && core->doorbell != NULL) {
                doorbell_ns = UINT64_MAX; /* once: whoever hears it goes on looking by itself */
                pl_ring_doorbell(core->doorbell);
            }
            uint32_t lost = find_lost(core);
            /* It may have completed the phase before it went: [Note: who is lost]. */
            if (lost < core->world && !is_complete(core)) {
                pl_declare(core, PL_END_LOST, lost);
                return PL_BROKEN;
            }
            if (core->interrupted != NULL && core->interrupted(core->interrupted_argument)) {
                if (pl_state(core) == PL_OK) /* else a handler has closed the group: it has left */
                    pl_declare(core, PL_END_ABORTED, core->rank);
                return PL_INTERRUPTED;
            }
            if (core->interrupted != NULL && core->owner_pid != (int)getpid())
                return PL_SHUT; /* a signal's handler has forked: this is the child */
        }
        if (now_ns >= deadline_ns) {
            uint32_t missing = first_missing(core);
            if (missing == core->world && now_ns - deadline_ns < COUNTING_NS) {
                sched_yield();
                continue; /* the last has come just now */
            }
            if (missing == core->world) /* all are counted, and the count is wrong */
                pl_declare(core, PL_END_DAMAGED, core->rank);
            else
                pl_declare(core, PL_END_TIMEOUT, missing);
            return is_complete(core) ? PL_OK : PL_BROKEN;
        }
        uint64_t until_ns = deadline_ns < watch_ns ? deadline_ns : watch_ns;
        sleep_once(core, until_ns > now_ns ? until_ns - now_ns : 1);
    }
}
