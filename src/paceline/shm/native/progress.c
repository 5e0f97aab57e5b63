/* The queue of operations, and who works it off: a thread of its own, or a caller that would only
 * wait for it. Never needs Python's interpreter lock.
 *
 * Operations are executed one at a time and in the order in which they were handed in: that order
 * is what ranks have in common. A caller that finds the queue empty executes its operation itself
 * (pl_run), which saves two changes of threads. */
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
    pthread_cond_broadcast(&core->changed);
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
        core->interrupted = interrupted;
        pthread_mutex_unlock(&core->lock);
        status = pl_execute(core, operation);
        pthread_mutex_lock(&core->lock);
        core->interrupted = NULL;
        finish(core, operation, status);
    }
    pthread_mutex_unlock(&core->lock);
    return status;
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

/* Leave the group: what is under way here ends with PL_SHUT, what is queued never begins. */
void pl_close(pl_core *core) {
    pthread_mutex_lock(&core->lock);
    bool was_closing = atomic_exchange(&core->closing, true);
    pthread_cond_broadcast(&core->changed);
    pthread_mutex_unlock(&core->lock);
    if (was_closing)
        return;
    pl_wake_all(core);
    if (core->has_thread)
        pthread_join(core->thread, NULL);
    pthread_mutex_lock(&core->lock);
    while (core->busy) /* a caller executes: it sees `closing` when it next looks */
        pthread_cond_wait(&core->changed, &core->lock);
    for (pl_operation *operation = core->head, *next; operation != NULL; operation = next) {
        next = operation->next;
        finish(core, operation, PL_SHUT);
        pl_operation_release(operation);
    }
    core->head = core->tail = NULL;
    pthread_mutex_unlock(&core->lock);
    pl_set_life(core, PL_LIFE_CLOSED);
    pl_wake_all(core);
}
