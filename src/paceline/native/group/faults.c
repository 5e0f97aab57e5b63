/* Named points at which a test kills, stops or delays this process.
 *
 * Always compiled in, so that what is tested is what is shipped: an unarmed point costs one
 * relaxed load and a branch. */
#define _GNU_SOURCE
#include <signal.h>
#include <time.h>

#include "core.h"

void pl_arm_fault(pl_core *core, uint32_t point, uint32_t nth, uint32_t action,
                  uint64_t delay_ns) {
    core->fault_countdown = nth;
    core->fault_action = action;
    core->fault_delay_ns = delay_ns;
    atomic_store_explicit(&core->fault_point, point, memory_order_release);
}

void pl_fault_here(pl_core *core) {
    atomic_thread_fence(memory_order_acquire);
    if (core->fault_countdown > 1) {
        core->fault_countdown--;
        return;
    }
    atomic_fetch_add(&core->faults_fired, 1);
    if (core->fault_action == PL_FAULT_DELAY) {
        /* Stays set: a delay is there to reorder things many times over. */
        struct timespec pause = {(time_t)(core->fault_delay_ns / 1000000000u),
                                 (long)(core->fault_delay_ns % 1000000000u)};
        nanosleep(&pause, NULL);
        return;
    }
    atomic_store(&core->fault_point, PL_POINT_NONE);
    /* To this thread: one that is sent to the process may stop it a little later. */
    raise(core->fault_action == PL_FAULT_KILL ? SIGKILL : SIGSTOP);
}
