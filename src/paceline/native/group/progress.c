/* The queue of operations, and who works it off: a thread of its own, or a caller that would only
 * wait for it. Never needs Python's interpreter lock.
 *
 * Operations are executed one at a time and in the order in which they were handed in: that order
 * is what ranks have in common. A caller that finds the queue empty executes its operation itself
 * (pl_run), which saves two changes of threads.
 *
 * [Note: closing]
 * Whoever closes waits until nobody executes: afterwards the memory may go. Who executes sees
 * `closing` when it next looks, 40 ms later at the most, so that wait ends; and the thread ends
 * whoever executes. With one exception: a caller that executes runs signal handlers in the middle
 * of its wait (`interrupted`), and a handler that closes would wait for the very wait that it
 * interrupts. pl_close knows that by the thread: it marks the group as closing and returns, the
 * execution ends with PL_SHUT when the handler returns, and pl_run does the rest. Until then
 * nothing looks at the pidfds again, which the handler may close: a wait looks at `closing` first.
 * All of it happens under `lock`, which nobody holds while it executes, waits for a peer or runs a
 * handler. So no order of closings, on any threads, can wait for itself. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core.h"

pl_operation *pl_operation_create(size_t inputs, size_t outputs, size_t splits) {
    /* The arrays stand behind the operation itself. */
    size_t words = inputs + outputs + splits;
    pl_operation *operation = calloc(1, sizeof(pl_operation) + words * 8);
    if (operation == NULL)
        return NULL;
    uint64_t *array = (uint64_t *)(operation + 1);
    operation->splits = array;
    operation->inputs = (const uint8_t **)(array + splits);
    operation->outputs = (uint8_t **)(array + splits + inputs);
    atomic_init(&operation->status, PL_PENDING);
    atomic_init(&operation->references, 1);
    return operation;
}

void pl_operation_release(pl_operation *operation) {
    if (atomic_fetch_sub(&operation->references, 1) == 1)
        free(operation);
}

pl_core *pl_core_create(pl_control *control, uint32_t rank, uint32_t world, uint8_t **arena,
                        uint64_t *arena_bytes, uint64_t stage_offset, int *pidfd) {
    pl_core *core = calloc(1, sizeof(pl_core));
    if (core == NULL)
        return NULL;
    core->control = control;
    core->rank = rank;
    core->world = world;
    core->arena = arena;
    core->arena_bytes = arena_bytes;
    core->stage_offset = stage_offset;
    core->slot_bytes = control->header.slot_bytes;
    core->pidfd = pidfd;
    core->owner_pid = (int)getpid();
    pthread_mutex_init(&core->lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&core->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    pl_set_life(core, PL_LIFE_IDLE);
    return core;
}

/* Nobody may use the core any more, and pl_close has been called. */
void pl_core_destroy(pl_core *core) {
    pthread_cond_destroy(&core->changed);
    pthread_mutex_destroy(&core->lock);
    free(core->arena);
    free(core->arena_bytes);
    free(core->pidfd);
    free(core);
}

/* Under the lock: the operation is over, and whoever waits for it may go on. */
static void finish(pl_core *core, pl_operation *operation, int status) {
    operation->ended_ns = pl_now_ns();
    atomic_store_explicit(&operation->status, status, memory_order_release);
    core->busy = false;
    atomic_store_explicit(&core->executor, 0, memory_order_relaxed);
    pthread_cond_broadcast(&core->changed);
}

/* Under the lock, when nobody executes and nobody will: refuse what is queued, and tell the peers.
 * A second time does nothing. */
static void leave(pl_core *core) {
    for (pl_operation *operation = core->head, *next; operation != NULL; operation = next) {
        next = operation->next;
        finish(core, operation, PL_SHUT);
        pl_operation_release(operation);
    }
    core->head = core->tail = NULL;
    if (core->has_left)
        return;
    core->has_left = true;
    pl_set_life(core, PL_LIFE_CLOSED);
    pl_wake_all(core);
}

static void *work(void *argument) {
    pl_core *core = argument;
    pthread_mutex_lock(&core->lock);
    for (;;) {
        while ((core->head == NULL || core->busy) && !atomic_load(&core->closing))
            pthread_cond_wait(&core->changed, &core->lock);
        pl_operation *operation = core->head;
        if (operation == NULL || core->busy)
            break; /* closing; what is left is refused by pl_close */
        core->head = operation->next;
        if (core->head == NULL)
            core->tail = NULL;
        core->busy = true;
        atomic_store_explicit(&core->executor, (uint64_t)pthread_self(), memory_order_relaxed);
        core->interrupted = NULL;
        pthread_mutex_unlock(&core->lock);
        int status = pl_execute(core, operation);
        pthread_mutex_lock(&core->lock);
        finish(core, operation, status);
        pl_operation_release(operation);
    }
    pthread_mutex_unlock(&core->lock);
    return NULL;
}

/* Under the lock. Signals are for the interpreter's threads, not for this one. */
static bool ensure_thread(pl_core *core) {
    if (core->has_thread)
        return true;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    core->has_thread = pthread_create(&core->thread, NULL, work, core) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (core->has_thread)
        pthread_setname_np(core->thread, "paceline-shm");
    return core->has_thread;
}

/* Hand in an operation; the queue holds a reference until it is done. */
int pl_submit(pl_core *core, pl_operation *operation) {
    pthread_mutex_lock(&core->lock);
    int status = PL_PENDING;
    if (atomic_load(&core->closing))
        status = PL_SHUT;
    else if (!ensure_thread(core))
        status = -EAGAIN;
    else {
        atomic_fetch_add(&operation->references, 1);
        operation->next = NULL;
        if (core->tail != NULL)
            core->tail->next = operation;
        else
            core->head = operation;
        core->tail = operation;
        pthread_cond_broadcast(&core->changed);
    }
    pthread_mutex_unlock(&core->lock);
    return status;
}

/* Execute an operation in the calling thread if nothing is before it; else PL_PENDING. */
int pl_run(pl_core *core, pl_operation *operation, bool (*interrupted)(void *)) {
    pthread_mutex_lock(&core->lock);
    int status = PL_PENDING;
    if (atomic_load(&core->closing))
        status = PL_SHUT;
    else if (core->head == NULL && !core->busy) {
        core->busy = true;
        atomic_store_explicit(&core->executor, (uint64_t)pthread_self(), memory_order_relaxed);
        core->interrupted = interrupted;
        pthread_mutex_unlock(&core->lock);
        status = pl_execute(core, operation);
        if (status == PL_SHUT && core->owner_pid != (int)getpid())
            return PL_SHUT; /* a forked child; the lock may be held by nobody */
        pthread_mutex_lock(&core->lock);
        core->interrupted = NULL;
        finish(core, operation, status);
        if (atomic_load(&core->closing))
            leave(core);
    }
    pthread_mutex_unlock(&core->lock);
    return status;
}

/* Whether the calling thread executes an operation: it is in a signal handler then. No lock: a
 * thread sees its own mark, and nobody else's looks like it. */
bool pl_is_executor(pl_core *core) {
    return atomic_load_explicit(&core->executor, memory_order_relaxed) == (uint64_t)pthread_self();
}

/* Wait for an operation until a moment of CLOCK_MONOTONIC; PL_PENDING if it is not done then. */
int pl_wait(pl_core *core, pl_operation *operation, uint64_t until_ns) {
    struct timespec until = {(time_t)(until_ns / 1000000000u), (long)(until_ns % 1000000000u)};
    int status = atomic_load_explicit(&operation->status, memory_order_acquire);
    if (status != PL_PENDING)
        return status;
    pthread_mutex_lock(&core->lock);
    for (;;) {
        status = atomic_load_explicit(&operation->status, memory_order_acquire);
        if (status != PL_PENDING)
            break;
        if (pthread_cond_timedwait(&core->changed, &core->lock, &until) == ETIMEDOUT) {
            status = atomic_load_explicit(&operation->status, memory_order_acquire);
            break;
        }
    }
    pthread_mutex_unlock(&core->lock);
    return status;
}

/* Under the lock: end the thread. It needs `closing` only, whoever executes; one caller joins it,
 * others wait for that. */
static void end_thread(pl_core *core) {
    if (core->has_thread && !core->is_joined) {
        core->is_joined = true;
        pthread_mutex_unlock(&core->lock);
        pthread_join(core->thread, NULL);
        pthread_mutex_lock(&core->lock);
        core->has_thread = false;
        pthread_cond_broadcast(&core->changed);
    }
    while (core->has_thread)
        pthread_cond_wait(&core->changed, &core->lock);
}

/* Leave the group: what is under way here ends with PL_SHUT, what is queued never begins. From any
 * thread, any number of times: [Note: closing]. */
void pl_close(pl_core *core) {
    pthread_mutex_lock(&core->lock);
    if (!core->has_left) { /* else the shared memory may be gone */
        atomic_store(&core->closing, true);
        pthread_cond_broadcast(&core->changed);
        pl_wake_all(core);
        end_thread(core);
    }
    if (!core->has_left && !pl_is_executor(core)) {
        while (core->busy)
            pthread_cond_wait(&core->changed, &core->lock);
        leave(core);
    }
    pthread_mutex_unlock(&core->lock);
}
