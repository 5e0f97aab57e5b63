/* What Python sees of the native core: `Core`, `Operation`, and the constants of the layout.
 *
 * With mapping.c the only file of this folder that knows Python. It checks nothing that shm/collectives/group.py has checked: addresses are
 * taken as they come. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core.h"
#include "group.h"
#include "module.h"

/* How long a wait goes on before it looks for Ctrl-C. */
#define SIGNAL_CHECK_NS UINT64_C(50000000)

typedef struct {
    PyObject_HEAD pl_core *core;
} CoreObject;

typedef struct {
    PyObject_HEAD CoreObject *owner;
    pl_operation *operation;
} OperationObject;

static PyTypeObject *operation_type;
static PyObject *forked_error;

static bool is_usable(CoreObject *self) {
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

/* --- Operation --------------------------------------------------------------------------------- */

static void operation_dealloc(OperationObject *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    pl_operation_release(self->operation);
    Py_DECREF(self->owner);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *operation_status(OperationObject *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromLong(atomic_load_explicit(&self->operation->status, memory_order_acquire));
}

/* A handler that waits inside of the wait that it interrupts would wait for ever. */
static bool refuse_in_handler(CoreObject *self) {
    if (!pl_is_executor(self->core))
        return false;
    PyErr_SetString(PyExc_RuntimeError,
                    "a signal handler waits for a collective inside of a blocking one of the same "
                    "group, which goes on when the handler returns; set a flag in the handler and "
                    "look at it between collectives");
    return true;
}

/* wait(timeout_s) -> status. A negative time-out waits for ever (the operation has its own). */
static PyObject *operation_wait(OperationObject *self, PyObject *argument) {
    double timeout_s = PyFloat_AsDouble(argument);
    if (timeout_s == -1.0 && PyErr_Occurred())
        return NULL;
    if (!is_usable(self->owner))
        return NULL;
    uint64_t now_ns = pl_now_ns();
    uint64_t until_ns = timeout_s < 0 ? UINT64_MAX : now_ns + (uint64_t)(timeout_s * 1e9);
    int status = atomic_load(&self->operation->status);
    if (status == PL_PENDING && refuse_in_handler(self->owner))
        return NULL;
    do {
        uint64_t slice_ns = pl_now_ns() + SIGNAL_CHECK_NS;
        Py_BEGIN_ALLOW_THREADS;
        status = pl_wait(self->owner->core, self->operation,
                         slice_ns < until_ns ? slice_ns : until_ns);
        Py_END_ALLOW_THREADS;
        /* A signal's handler may have forked, and this be the child, in which nobody works. */
        if (status == PL_PENDING && (PyErr_CheckSignals() != 0 || !is_usable(self->owner)))
            return NULL;
    } while (status == PL_PENDING && pl_now_ns() < until_ns);
    return PyLong_FromLong(status);
}

static PyObject *operation_times(OperationObject *self, PyObject *unused) {
    (void)unused;
    return Py_BuildValue("(KK)", (unsigned long long)self->operation->began_ns,
                         (unsigned long long)self->operation->ended_ns);
}

static PyObject *request_tuple(const pl_request *request) {
    return Py_BuildValue("(IIIIKK)", request->kind, request->dtype, request->op, request->root,
                         (unsigned long long)request->count, (unsigned long long)request->seq);
}

/* request() -> (kind, dtype, op, root, count, seq) */
static PyObject *operation_request(OperationObject *self, PyObject *unused) {
    (void)unused;
    return request_tuple(&self->operation->request);
}

/* mismatch() -> (rank, rank, request, request, bytes sent, bytes expected) */
static PyObject *operation_mismatch(OperationObject *self, PyObject *unused) {
    (void)unused;
    pl_operation *operation = self->operation;
    return Py_BuildValue("(IINNKK)", operation->differing[0], operation->differing[1],
                         request_tuple(&operation->brought[0]),
                         request_tuple(&operation->brought[1]),
                         (unsigned long long)operation->expected_bytes[0],
                         (unsigned long long)operation->expected_bytes[1]);
}

static PyMethodDef operation_methods[] = {
    {"status", (PyCFunction)operation_status, METH_NOARGS, "A STATUS_*, without waiting."},
    {"wait", (PyCFunction)operation_wait, METH_O, "wait(timeout_s) -> STATUS_*"},
    {"times", (PyCFunction)operation_times, METH_NOARGS, "(began_ns, ended_ns), CLOCK_MONOTONIC"},
    {"request", (PyCFunction)operation_request, METH_NOARGS,
     "(kind, dtype, op, root, count, seq)"},
    {"mismatch", (PyCFunction)operation_mismatch, METH_NOARGS, "what two ranks brought"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot operation_slots[] = {
    {Py_tp_dealloc, operation_dealloc},
    {Py_tp_methods, operation_methods},
    {Py_tp_doc, "One collective, handed in to a Core."},
    {0, NULL},
};

static PyType_Spec operation_spec = {
    .name = "paceline.native._native.Operation",
    .basicsize = sizeof(OperationObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = operation_slots,
};

/* --- arguments ----------------------------------------------------------------------------------- */

/* Read a tuple of unsigned integers into an array; false with an exception set. */
static bool read_words(PyObject *tuple, uint64_t *words, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        words[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(tuple, i));
        if (words[i] == UINT64_MAX && PyErr_Occurred())
            return false;
    }
    return true;
}

enum { ARGUMENTS = 10 };

/* What would make the core read beyond its tables. */
static bool is_possible(const pl_core *core, const uint64_t *words) {
    uint64_t kind = words[0], dtype = words[1], op = words[2], root = words[3];
    bool has_lanes = kind == PL_REDUCE_LANES || kind == PL_SHARE_LANES;
    bool reduces = kind == PL_ALL_REDUCE || kind == PL_REDUCE || kind == PL_REDUCE_SCATTER ||
                   kind == PL_REDUCE_LANES;
    if (kind < PL_KINDS && dtype < PL_DTYPES && root < core->world + has_lanes &&
        (!reduces || pl_can_reduce((uint32_t)dtype, (uint32_t)op)))
        return true;
    PyErr_SetString(PyExc_ValueError, "no such collective, dtype, reduce operation or root");
    return false;
}

/* (kind, dtype, op, root, count, offset, inputs, outputs, splits, timeout_s) */
static pl_operation *read_operation(pl_core *core, PyObject *const *args, Py_ssize_t count) {
    if (count != ARGUMENTS || !PyTuple_Check(args[6]) || !PyTuple_Check(args[7]) ||
        !PyTuple_Check(args[8])) {
        PyErr_SetString(PyExc_TypeError, "an operation takes 6 integers, 3 tuples and a time-out");
        return NULL;
    }
    Py_ssize_t inputs = PyTuple_Size(args[6]), outputs = PyTuple_Size(args[7]);
    Py_ssize_t splits = PyTuple_Size(args[8]);
    if (splits != 0 && splits != 2 * (Py_ssize_t)core->world) {
        PyErr_SetString(PyExc_ValueError, "splits are two for each rank");
        return NULL;
    }
    /* all_to_all notes where each rank's bytes begin behind its splits. */
    pl_operation *operation =
        pl_operation_create((size_t)inputs, (size_t)outputs, (size_t)(splits + splits / 2));
    if (operation == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    uint64_t words[6];
    for (int i = 0; i < 6; i++) {
        words[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (words[i] == UINT64_MAX && PyErr_Occurred())
            goto failed;
    }
    if (!is_possible(core, words))
        goto failed;
    operation->request = (pl_request){.kind = (uint32_t)words[0],
                                      .dtype = (uint32_t)words[1],
                                      .op = (uint32_t)words[2],
                                      .root = (uint32_t)words[3],
                                      .count = words[4],
                                      .offset = words[5]};
    double timeout_s = PyFloat_AsDouble(args[9]);
    if (timeout_s == -1.0 && PyErr_Occurred())
        goto failed;
    operation->timeout_ns =
        timeout_s < 0 || timeout_s > 1e9 ? (uint64_t)1e18 : (uint64_t)(timeout_s * 1e9);
    if (read_words(args[6], (uint64_t *)operation->inputs, inputs) &&
        read_words(args[7], (uint64_t *)operation->outputs, outputs) &&
        read_words(args[8], operation->splits, splits))
        return operation;
failed:
    pl_operation_release(operation);
    return NULL;
}

static PyObject *wrap(CoreObject *self, pl_operation *operation) {
    OperationObject *object = PyObject_New(OperationObject, operation_type);
    if (object == NULL) {
        pl_operation_release(operation);
        return NULL;
    }
    Py_INCREF((PyObject *)self);
    object->owner = self;
    object->operation = operation;
    return (PyObject *)object;
}

/* --- Core ---------------------------------------------------------------------------------------- */

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
                            "spin_ns", "yields", "slot_bytes", "bell", NULL};
    unsigned long long control, stage_offset, spin_ns, slot_bytes = 0, bell = 0; /* 0: any that fits; none */
    unsigned rank, world, yields;
    PyObject *arenas, *pidfds;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KIIOOKKI|KK", names, &control, &rank, &world,
                                     &arenas, &pidfds, &stage_offset, &spin_ns, &yields,
                                     &slot_bytes, &bell))
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
    self->core->bell = (_Atomic uint32_t *)(uintptr_t)bell;
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
    if (!is_usable(self))
        return NULL;
    pl_operation *operation = read_operation(self->core, args, count);
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
    return wrap(self, operation);
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
    if (!is_usable(self) || refuse_in_handler(self))
        return NULL;
    pl_operation *operation = read_operation(self->core, args, count);
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
    return wrap(self, operation);
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
    if (!is_usable(self))
        return NULL;
    return PyBool_FromLong(pl_declare(self->core, PL_END_ABORTED, self->core->rank));
}

/* declare(END_*, about) -> whether it was the first to say how the group ends. */
static PyObject *core_declare(CoreObject *self, PyObject *args) {
    unsigned end, about;
    if (!PyArg_ParseTuple(args, "II", &end, &about) || !is_usable(self))
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
    if (!is_usable(self))
        return NULL;
    return PyLong_FromUnsignedLongLong(self->core->caller);
}

/* verdict() -> (end, by, about) */
static PyObject *core_verdict(CoreObject *self, PyObject *unused) {
    (void)unused;
    if (!is_usable(self))
        return NULL;
    uint64_t word = atomic_load(&self->core->control->verdict);
    pl_verdict verdict = pl_unpack_verdict(word, self->core->world);
    return Py_BuildValue("(III)", verdict.end, verdict.by, verdict.about);
}

/* row(rank) -> (life, phase, since_ns, finished, is_alive, request). What a rank that works is in
 * may change while we read: a request is then a mixture, which is good enough to tell people. */
static PyObject *core_row(CoreObject *self, PyObject *argument) {
    unsigned long rank = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred() || !is_usable(self))
        return NULL;
    if (rank >= self->core->world) {
        PyErr_SetString(PyExc_IndexError, "no such rank");
        return NULL;
    }
    pl_row *row = &self->core->control->row[rank];
    uint64_t finished = atomic_load(&row->finished);
    uint32_t life = atomic_load(&row->life);
    pl_ticket *ticket = &row->ticket[(finished + (life == PL_LIFE_WORKING)) % 2];
    pl_request request = {
        .seq = atomic_load(&ticket->seq),     .count = atomic_load(&ticket->count),
        .kind = atomic_load(&ticket->kind),   .dtype = atomic_load(&ticket->dtype),
        .op = atomic_load(&ticket->op),       .root = atomic_load(&ticket->root),
    };
    return Py_BuildValue("(IIKKIN)", life, (unsigned)atomic_load(&row->phase),
                         (unsigned long long)atomic_load(&row->since_ns),
                         (unsigned long long)finished,
                         (unsigned)pl_alive(self->core, (uint32_t)rank), request_tuple(&request));
}

static PyObject *core_arm_fault(CoreObject *self, PyObject *args) {
    unsigned point, nth, action;
    unsigned long long delay_ns;
    if (!PyArg_ParseTuple(args, "IIIK", &point, &nth, &action, &delay_ns) || !is_usable(self))
        return NULL;
    pl_arm_fault(self->core, point, nth, action, delay_ns);
    Py_RETURN_NONE;
}

static PyObject *core_faults_fired(CoreObject *self, PyObject *unused) {
    (void)unused;
    if (!is_usable(self))
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
    {"verdict", (PyCFunction)core_verdict, METH_NOARGS, "(END_*, by, about)"},
    {"row", (PyCFunction)core_row, METH_O,
     "row(rank) -> (LIFE_*, phase, since_ns, finished, is_alive, request)"},
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

/* --- the module ---------------------------------------------------------------------------------- */

static PyObject *native_format(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long control, slot_bytes;
    unsigned world;
    if (!PyArg_ParseTuple(args, "KIK", &control, &world, &slot_bytes))
        return NULL;
    pl_format((pl_control *)(uintptr_t)control, world, slot_bytes);
    Py_RETURN_NONE;
}

static PyObject *native_control_bytes(PyObject *module, PyObject *argument) {
    (void)module;
    unsigned long world = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred())
        return NULL;
    return PyLong_FromUnsignedLongLong(pl_control_bytes((uint32_t)world));
}

static PyObject *native_can_reduce(PyObject *module, PyObject *args) {
    (void)module;
    unsigned dtype, op;
    if (!PyArg_ParseTuple(args, "II", &dtype, &op))
        return NULL;
    return PyBool_FromLong(pl_can_reduce(dtype, op));
}

static PyObject *native_cut(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long count, itemsize;
    unsigned parts, index;
    if (!PyArg_ParseTuple(args, "KIIK", &count, &parts, &index, &itemsize))
        return NULL;
    return PyLong_FromUnsignedLongLong(pl_cut(count, parts, index, itemsize));
}

static PyObject *native_scale_f32(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 4)
        return PyErr_Format(PyExc_TypeError, "scale_f32 takes 4 arguments");
    float *target = (float *)(uintptr_t)PyLong_AsUnsignedLongLong(args[0]);
    const float *source = (const float *)(uintptr_t)PyLong_AsUnsignedLongLong(args[1]);
    size_t elements = PyLong_AsSize_t(args[2]);
    double factor = PyFloat_AsDouble(args[3]);
    if (PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    pl_scale_f32(target, source, elements, (float)factor);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *native_ring(PyObject *module, PyObject *address) {
    (void)module;
    _Atomic uint32_t *bell = (_Atomic uint32_t *)(uintptr_t)PyLong_AsUnsignedLongLong(address);
    if (PyErr_Occurred())
        return NULL;
    pl_ring(bell);
    Py_RETURN_NONE;
}

static PyObject *native_await_bell(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long address;
    unsigned seen, count;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "KId", &address, &seen, &timeout_s))
        return NULL;
    uint64_t duration_ns = timeout_s < 0 ? UINT64_MAX : (uint64_t)(timeout_s * 1e9);
    Py_BEGIN_ALLOW_THREADS;
    count = pl_await_bell((_Atomic uint32_t *)(uintptr_t)address, seen, duration_ns);
    Py_END_ALLOW_THREADS;
    return PyLong_FromUnsignedLong(count);
}

static PyMethodDef module_methods[] = {
    {"ring", native_ring, METH_O, "ring(address): count up a bell, and wake who waits for it"},
    {"await_bell", native_await_bell, METH_VARARGS,
     "await_bell(address, seen, timeout_s) -> its count, once that is not `seen`"},
    {"format", native_format, METH_VARARGS,
     "format(address, world, slot_bytes): make zeroed memory a control segment"},
    {"control_bytes", native_control_bytes, METH_O, "control_bytes(world) -> int"},
    {"cut", native_cut, METH_VARARGS,
     "cut(count, parts, index, itemsize) -> the first element of a slice"},
    {"scale_f32", (PyCFunction)(void (*)(void))native_scale_f32, METH_FASTCALL,
     "scale_f32(target, source, count, factor): a copy past the caches"},
    {"can_reduce", native_can_reduce, METH_VARARGS, "can_reduce(DTYPE_*, OP_*) -> bool"},
    {NULL, NULL, 0, NULL},
};

static const struct {
    const char *name;
    long value;
} constants[] = {
    {"LAYOUT_VERSION", PL_LAYOUT_VERSION},
    {"SLOTS", PL_SLOTS},
    {"MAX_WORLD", PL_MAX_WORLD},
    {"STATUS_OK", PL_OK},
    {"STATUS_PENDING", PL_PENDING},
    {"STATUS_MISMATCH", PL_MISMATCH},
    {"STATUS_BROKEN", PL_BROKEN},
    {"STATUS_SHUT", PL_SHUT},
    {"STATUS_INTERRUPTED", PL_INTERRUPTED},
    {"END_NONE", PL_END_NONE},
    {"END_LOST", PL_END_LOST},
    {"END_TIMEOUT", PL_END_TIMEOUT},
    {"END_ABORTED", PL_END_ABORTED},
    {"END_MISMATCH", PL_END_MISMATCH},
    {"END_DAMAGED", PL_END_DAMAGED},
    {"LIFE_IDLE", PL_LIFE_IDLE},
    {"LIFE_WORKING", PL_LIFE_WORKING},
    {"LIFE_CLOSED", PL_LIFE_CLOSED},
    {"KIND_BARRIER", PL_BARRIER},
    {"KIND_ALL_REDUCE", PL_ALL_REDUCE},
    {"KIND_REDUCE", PL_REDUCE},
    {"KIND_BROADCAST", PL_BROADCAST},
    {"KIND_ALL_GATHER", PL_ALL_GATHER},
    {"KIND_REDUCE_SCATTER", PL_REDUCE_SCATTER},
    {"KIND_ALL_TO_ALL", PL_ALL_TO_ALL},
    {"KIND_GATHER", PL_GATHER},
    {"KIND_SCATTER", PL_SCATTER},
    {"KIND_REDUCE_LANES", PL_REDUCE_LANES},
    {"KIND_SHARE_LANES", PL_SHARE_LANES},
    {"DTYPE_U8", PL_U8},
    {"DTYPE_I8", PL_I8},
    {"DTYPE_I16", PL_I16},
    {"DTYPE_I32", PL_I32},
    {"DTYPE_I64", PL_I64},
    {"DTYPE_F16", PL_F16},
    {"DTYPE_BF16", PL_BF16},
    {"DTYPE_F32", PL_F32},
    {"DTYPE_F64", PL_F64},
    {"DTYPE_BOOL", PL_BOOL},
    {"DTYPE_C64", PL_C64},
    {"DTYPE_C128", PL_C128},
    {"OP_SUM", PL_SUM},
    {"OP_AVG", PL_AVG},
    {"OP_PRODUCT", PL_PRODUCT},
    {"OP_MIN", PL_MIN},
    {"OP_MAX", PL_MAX},
    {"OP_BAND", PL_BAND},
    {"OP_BOR", PL_BOR},
    {"OP_BXOR", PL_BXOR},
    {"FAULT_KILL", PL_FAULT_KILL},
    {"FAULT_STOP", PL_FAULT_STOP},
    {"FAULT_DELAY", PL_FAULT_DELAY},
    {"POINT_BEGIN", PL_POINT_BEGIN},
    {"POINT_TICKET_WRITTEN", PL_POINT_TICKET_WRITTEN},
    {"POINT_DATA_PUT", PL_POINT_DATA_PUT},
    {"POINT_COUNTED", PL_POINT_COUNTED},
    {"POINT_ARRIVED", PL_POINT_ARRIVED},
    {"POINT_ASLEEP", PL_POINT_ASLEEP},
    {"POINT_RELEASED", PL_POINT_RELEASED},
    {"POINT_REDUCING", PL_POINT_REDUCING},
    {"POINT_TAKING", PL_POINT_TAKING},
    {"POINT_END", PL_POINT_END},
};

static int add_type(PyObject *module, const char *name, PyType_Spec *spec, PyTypeObject **keep) {
    PyObject *type = PyType_FromSpec(spec);
    if (type == NULL)
        return -1;
    if (keep != NULL) {
        Py_INCREF(type);
        *keep = (PyTypeObject *)type;
    }
    return PyModule_AddObject(module, name, type);
}

int pl_add_group(PyObject *module) {
    forked_error =
        PyErr_NewException("paceline.native._native.ForkedError", PyExc_RuntimeError, NULL);
    if (forked_error == NULL)
        return -1;
    Py_INCREF(forked_error);
    if (PyModule_AddObject(module, "ForkedError", forked_error) != 0 ||
        PyModule_AddFunctions(module, module_methods) != 0 ||
        add_type(module, "Operation", &operation_spec, &operation_type) != 0 ||
        add_type(module, "Core", &core_spec, NULL) != 0 || pl_add_mapping(module) != 0)
        return -1;
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) != 0)
            return -1;
    return 0;
}
