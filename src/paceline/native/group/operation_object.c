/* The type `Operation`: one collective that was handed in to a Core, and how Python hands it in. */
#define PY_SSIZE_T_CLEAN
#include "group.h"

/* How long a wait goes on before it looks for Ctrl-C. */
#define SIGNAL_CHECK_NS UINT64_C(50000000)

typedef struct {
    PyObject_HEAD CoreObject *owner;
    pl_operation *operation;
} OperationObject;

static PyTypeObject *operation_type;

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

/* wait(timeout_s) -> status. A negative time-out waits for ever (the operation has its own). */
static PyObject *operation_wait(OperationObject *self, PyObject *argument) {
    double timeout_s = PyFloat_AsDouble(argument);
    if (timeout_s == -1.0 && PyErr_Occurred())
        return NULL;
    if (!pl_is_usable(self->owner))
        return NULL;
    uint64_t now_ns = pl_now_ns();
    uint64_t until_ns = timeout_s < 0 ? UINT64_MAX : now_ns + (uint64_t)(timeout_s * 1e9);
    int status = atomic_load(&self->operation->status);
    if (status == PL_PENDING && pl_refuse_in_handler(self->owner))
        return NULL;
    do {
        uint64_t slice_ns = pl_now_ns() + SIGNAL_CHECK_NS;
        Py_BEGIN_ALLOW_THREADS;
        status = pl_wait(self->owner->core, self->operation,
                         slice_ns < until_ns ? slice_ns : until_ns);
        Py_END_ALLOW_THREADS;
        /* A signal's handler may have forked, and this be the child, in which nobody works. */
        if (status == PL_PENDING && (PyErr_CheckSignals() != 0 || !pl_is_usable(self->owner)))
            return NULL;
    } while (status == PL_PENDING && pl_now_ns() < until_ns);
    return PyLong_FromLong(status);
}

/* ended_ns() -> when it ended, by CLOCK_MONOTONIC. Meaningful once it has. */
static PyObject *operation_ended_ns(OperationObject *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(self->operation->ended_ns);
}

static PyObject *operation_request(OperationObject *self, PyObject *unused) {
    (void)unused;
    return pl_request_record(&self->operation->request);
}

static PyObject *operation_mismatch(OperationObject *self, PyObject *unused) {
    (void)unused;
    return pl_mismatch_record(self->operation);
}

static PyMethodDef operation_methods[] = {
    {"status", (PyCFunction)operation_status, METH_NOARGS, "A STATUS_*, without waiting."},
    {"wait", (PyCFunction)operation_wait, METH_O, "wait(timeout_s) -> STATUS_*"},
    {"ended_ns", (PyCFunction)operation_ended_ns, METH_NOARGS, "When, by CLOCK_MONOTONIC."},
    {"request", (PyCFunction)operation_request, METH_NOARGS, "A Request: what was handed in."},
    {"mismatch", (PyCFunction)operation_mismatch, METH_NOARGS, "A Mismatch, for STATUS_MISMATCH."},
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

/* --- arguments --------------------------------------------------------------------------------- */

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
    bool has_leaders = kind == PL_REDUCE_TO_LEADERS || kind == PL_COPY_FROM_LEADERS;
    bool reduces = kind == PL_ALL_REDUCE || kind == PL_REDUCE || kind == PL_REDUCE_SCATTER ||
                   kind == PL_REDUCE_TO_LEADERS;
    if (kind < PL_KINDS && dtype < PL_DTYPES && root < core->world + has_leaders &&
        (!reduces || pl_can_reduce((uint32_t)dtype, (uint32_t)op)))
        return true;
    PyErr_SetString(PyExc_ValueError, "no such collective, dtype, reduce operation or root");
    return false;
}

/* (kind, dtype, op, root, count, offset, inputs, outputs, splits, timeout_s) */
pl_operation *pl_read_operation(pl_core *core, PyObject *const *args, Py_ssize_t count) {
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

PyObject *pl_wrap_operation(CoreObject *self, pl_operation *operation) {
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

int pl_add_operation(PyObject *module) {
    operation_type = (PyTypeObject *)PyType_FromSpec(&operation_spec);
    if (operation_type == NULL)
        return -1;
    Py_INCREF((PyObject *)operation_type);
    return PyModule_AddObject(module, "Operation", (PyObject *)operation_type);
}
