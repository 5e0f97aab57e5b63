/* The type `Core`: this rank's end of a group. It checks nothing that shm/collectives/group.py has
 * checked: addresses are taken as they come. */
#define PY_SSIZE_T_CLEAN
#include "group.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static PyObject *forked_error;

bool pl_is_usable(CoreObject *self) {
    if (self->core == NULL) {
        PyErr_SetString(PyExc_ValueError, "this core was never set up");
        return false;
    }
    if (self->core->owner_pid != (int)getpid()) {
        PyErr_SetString(forked_error, "used in a child process of its owner");
        return false;
    }
    return true;
}

/* A handler that waits inside of the wait that it interrupts would wait for ever. */
bool pl_refuse_in_handler(CoreObject *self) {
    if (!pl_is_executor(self->core))
        return false;
    PyErr_SetString(PyExc_RuntimeError,
                    "a signal handler waits for a collective inside of a blocking one of the same "
                    "group, which goes on when the handler returns; set a flag in the handler and "
                    "look at it between collectives");
    return true;
}

/* Read [(address, bytes), ...] and [pidfd, ...] into arrays that the core then owns. */
static bool read_arenas(PyObject *list, uint8_t **arena, uint64_t *bytes, uint32_t world) {
    for (uint32_t rank = 0; rank < world; rank++) {
        unsigned long long address, size;
        PyObject *pair = PyList_GetItem(list, rank);
        if (pair == NULL || !PyArg_ParseTuple(pair, "KK", &address, &size))
            return false;
        arena[rank] = (uint8_t *)(uintptr_t)address;
        bytes[rank] = size;
    }
    return true;
}

static bool read_pidfds(PyObject *list, int *pidfd, uint32_t world) {
    for (uint32_t rank = 0; rank < world; rank++) {
        PyObject *item = PyList_GetItem(list, rank);
        pidfd[rank] = item == NULL ? -1 : (int)PyLong_AsLong(item);
        if (PyErr_Occurred())
            return false;
    }
    return true;
}

/* `header` is a copy: the segment may change while we look. */
static bool check_header(const pl_header *header, unsigned world) {
    if (header->magic == PL_MAGIC && header->version == PL_LAYOUT_VERSION &&
        header->world == world)
        return true;
    PyErr_Format(PyExc_ValueError,
                 "the control segment has layout version %u for %u ranks; this build has "
                 "version %u for %u",
                 header->version, header->world, (unsigned)PL_LAYOUT_VERSION, world);
    return false;
}

/* Whether every arena has room for slots of this size, and a slot for what is put there: a line for
 * each rank, the table of an all_to_all. */
static bool check_slots(const pl_header *header, const uint64_t *arena_bytes, unsigned world,
                        uint64_t stage_offset, uint64_t expected) {
    uint64_t slot = header->slot_bytes;
    bool is_right = slot >= 4096 && slot % PL_LINE == 0 && slot / PL_LINE >= world &&
                    slot / (2 * sizeof(uint64_t)) >= world && (expected == 0 || slot == expected);
    for (unsigned rank = 0; rank < world && is_right; rank++)
        is_right = stage_offset <= arena_bytes[rank] &&
                   slot <= (arena_bytes[rank] - stage_offset) / PL_SLOTS;
    if (!is_right)
        PyErr_Format(PyExc_ValueError,
                     "the control segment has slots of %llu bytes, which do not fit the arenas",
                     (unsigned long long)slot);
    return is_right;
}

static int core_init(CoreObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"control", "rank",   "world",      "arenas", "pidfds", "stage_offset",
                            "spin_ns", "yields", "slot_bytes", "doorbell", NULL};
    unsigned long long control, stage_offset, spin_ns;
    unsigned long long slot_bytes = 0, doorbell = 0; /* 0: any that fits; none */
    unsigned rank, world, yields;
    PyObject *arenas, *pidfds;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KIIOOKKI|KK", names, &control, &rank, &world,
                                     &arenas, &pidfds, &stage_offset, &spin_ns, &yields,
                                     &slot_bytes, &doorbell))
        return -1;
    pl_control *shared = (pl_control *)(uintptr_t)control;
    pl_header header;
    if (self->core != NULL || world == 0 || world > PL_MAX_WORLD || rank >= world) {
        PyErr_SetString(PyExc_ValueError, "a core is set up once, for a rank of its world");
        return -1;
    }
    memcpy(&header, &shared->header, sizeof header);
    if (!check_header(&header, world))
        return -1;
    uint8_t **arena = calloc(world, sizeof *arena);
    uint64_t *bytes = calloc(world, sizeof *bytes);
    int *pidfd = calloc(world, sizeof *pidfd);
    if (arena != NULL && bytes != NULL && pidfd != NULL && read_arenas(arenas, arena, bytes, world) &&
        read_pidfds(pidfds, pidfd, world) &&
        check_slots(&header, bytes, world, stage_offset, slot_bytes))
        self->core = pl_core_create(shared, rank, world, arena, bytes, stage_offset, pidfd);
    if (self->core == NULL) {
        free(arena), free(bytes), free(pidfd);
        if (!PyErr_Occurred())
            PyErr_NoMemory();
        return -1;
    }
    self->core->slot_bytes = header.slot_bytes; /* that was checked */
    self->core->doorbell = (_Atomic uint32_t *)(uintptr_t)doorbell;
    self->core->caller = (uint64_t)pthread_self();
    self->core->spin_ns = spin_ns;
    self->core->yields = yields;
    return 0;
}

static void core_dealloc(CoreObject *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    pl_core *core = self->core;
    /* In a forked child there is no thread to join, and locks may be held by nobody. */
    if (core != NULL && core->owner_pid == (int)getpid()) {
        Py_BEGIN_ALLOW_THREADS;
        pl_close(core);
        Py_END_ALLOW_THREADS;
        pl_core_destroy(core);
    }
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *core_start(CoreObject *self, PyObject *const *args, Py_ssize_t count) {
    if (!pl_is_usable(self))
        return NULL;
    pl_operation *operation = pl_read_operation(self->core, args, count);
    if (operation == NULL)
        return NULL;
    self->core->caller = (uint64_t)pthread_self();
    int status = pl_submit(self->core, operation);
    if (status < 0) {
        pl_operation_release(operation);
        PyErr_SetString(PyExc_RuntimeError, "the system refuses another thread");
        return NULL;
    }
    if (status != PL_PENDING)
        atomic_store(&operation->status, status);
    return pl_wrap_operation(self, operation);
}

/* Called by the thread that executes, which does not hold the interpreter lock. */
static bool is_interrupted(void *unused) {
    (void)unused;
    PyGILState_STATE state = PyGILState_Ensure();
    bool interrupted = PyErr_CheckSignals() != 0;
    PyGILState_Release(state);
    return interrupted;
}

static PyObject *core_run(CoreObject *self, PyObject *const *args, Py_ssize_t count) {
    if (!pl_is_usable(self) || pl_refuse_in_handler(self))
        return NULL;
    pl_operation *operation = pl_read_operation(self->core, args, count);
    if (operation == NULL)
        return NULL;
    self->core->caller = (uint64_t)pthread_self();
    int status;
    Py_BEGIN_ALLOW_THREADS;
    status = pl_run(self->core, operation, is_interrupted);
    if (status == PL_PENDING)
        status = pl_submit(self->core, operation);
    Py_END_ALLOW_THREADS;
    if (PyErr_Occurred()) { /* Ctrl-C, out of is_interrupted */
        pl_operation_release(operation);
        return NULL;
    }
    if (status < 0) {
        pl_operation_release(operation);
        PyErr_SetString(PyExc_RuntimeError, "the system refuses another thread");
        return NULL;
    }
    if (status == PL_SHUT)
        atomic_store(&operation->status, status);
    return pl_wrap_operation(self, operation);
}

static PyObject *core_close(CoreObject *self, PyObject *unused) {
    (void)unused;
    if (self->core == NULL || self->core->owner_pid != (int)getpid())
        Py_RETURN_NONE;
    Py_BEGIN_ALLOW_THREADS;
    pl_close(self->core);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *core_abort(CoreObject *self, PyObject *unused) {
    (void)unused;
    if (!pl_is_usable(self))
        return NULL;
    return PyBool_FromLong(pl_declare(self->core, PL_END_ABORTED, self->core->rank));
}

/* declare(END_*, about) -> whether it was the first to say how the group ends. */
static PyObject *core_declare(CoreObject *self, PyObject *args) {
    unsigned end, about;
    if (!PyArg_ParseTuple(args, "II", &end, &about) || !pl_is_usable(self))
        return NULL;
    if (end == PL_END_NONE || end > PL_END_DAMAGED || about >= self->core->world) {
        PyErr_SetString(PyExc_ValueError, "no such end, or no such rank");
        return NULL;
    }
    return PyBool_FromLong(pl_declare(self->core, end, about));
}

/* caller() -> the thread, as threading.get_ident() names it, that handed in the latest operation. */
static PyObject *core_caller(CoreObject *self, PyObject *unused) {
    (void)unused;
    if (!pl_is_usable(self))
        return NULL;
    return PyLong_FromUnsignedLongLong(self->core->caller);
}

static PyObject *core_verdict(CoreObject *self, PyObject *unused) {
    (void)unused;
    return pl_is_usable(self) ? pl_verdict_record(self->core) : NULL;
}

static PyObject *core_row(CoreObject *self, PyObject *argument) {
    unsigned long rank = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred() || !pl_is_usable(self))
        return NULL;
    if (rank >= self->core->world) {
        PyErr_SetString(PyExc_IndexError, "no such rank");
        return NULL;
    }
    return pl_row_record(self->core, (uint32_t)rank);
}

static PyObject *core_arm_fault(CoreObject *self, PyObject *args) {
    unsigned point, nth, action;
    unsigned long long delay_ns;
    if (!PyArg_ParseTuple(args, "IIIK", &point, &nth, &action, &delay_ns) || !pl_is_usable(self))
        return NULL;
    pl_arm_fault(self->core, point, nth, action, delay_ns);
    Py_RETURN_NONE;
}

static PyObject *core_faults_fired(CoreObject *self, PyObject *unused) {
    (void)unused;
    if (!pl_is_usable(self))
        return NULL;
    return PyLong_FromUnsignedLong(atomic_load(&self->core->faults_fired));
}

static PyMethodDef core_methods[] = {
    {"start", (PyCFunction)(void (*)(void))core_start, METH_FASTCALL,
     "start(kind, dtype, op, root, count, offset, inputs, outputs, splits, timeout_s)\n\n"
     "Queue an operation for the progress thread and return it."},
    {"run", (PyCFunction)(void (*)(void))core_run, METH_FASTCALL,
     "Like start, but executed by the caller if nothing is queued before it."},
    {"abort", (PyCFunction)core_abort, METH_NOARGS, "End the group, for every rank."},
    {"declare", (PyCFunction)core_declare, METH_VARARGS,
     "declare(END_*, about) -> bool: end the group, for every rank, unless somebody has."},
    {"caller", (PyCFunction)core_caller, METH_NOARGS, "The thread of the latest operation."},
    {"close", (PyCFunction)core_close, METH_NOARGS, "Leave the group and end the thread."},
    {"verdict", (PyCFunction)core_verdict, METH_NOARGS, "A Verdict: why the group is over."},
    {"row", (PyCFunction)core_row, METH_O,
     "row(rank) -> a Row: what a rank says about itself."},
    {"arm_fault", (PyCFunction)core_arm_fault, METH_VARARGS,
     "arm_fault(POINT_*, nth, FAULT_*, delay_ns): for tests"},
    {"faults_fired", (PyCFunction)core_faults_fired, METH_NOARGS, "for tests"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot core_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, core_init},
    {Py_tp_dealloc, core_dealloc},
    {Py_tp_methods, core_methods},
    {Py_tp_doc, "This rank's end of a group of ranks that share memory."},
    {0, NULL},
};

static PyType_Spec core_spec = {
    .name = "paceline.native._native.Core",
    .basicsize = sizeof(CoreObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = core_slots,
};

int pl_add_core(PyObject *module) {
    forked_error =
        PyErr_NewException("paceline.native._native.ForkedError", PyExc_RuntimeError, NULL);
    if (forked_error == NULL)
        return -1;
    Py_INCREF(forked_error);
    if (PyModule_AddObject(module, "ForkedError", forked_error) != 0)
        return -1;
    PyObject *type = PyType_FromSpec(&core_spec);
    return type == NULL ? -1 : PyModule_AddObject(module, "Core", type);
}
