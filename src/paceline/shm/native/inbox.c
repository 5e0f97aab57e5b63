/* The inbox of a reducer, and the hooks that fill it: paceline.ddp.taps says what they are for, and
 * has the same in Python for installations without this extension.
 *
 * Here because autograd calls a hook for every gradient: a call of an object in C costs a fraction
 * of a call of a function in Python. Knows neither torch nor the group. Everything happens under
 * the interpreter lock. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "python.h"

typedef struct {
    PyObject_HEAD
    PyObject *tell; /* called without arguments; holds the reducer weakly, so there is no cycle */
    uint32_t *items;
    Py_ssize_t count, capacity;
    Py_ssize_t due;
    uint64_t waiting_bytes, most_bytes; /* of large gradients */
} InboxObject;

typedef struct {
    PyObject_HEAD
    InboxObject *inbox;
    uint32_t index;
    uint64_t large_bytes; /* 0: not large */
} TapObject;

static PyTypeObject *tap_type;

/* --- Inbox ------------------------------------------------------------------------------------- */

static int append(InboxObject *self, uint32_t index) {
    if (self->count == self->capacity) {
        Py_ssize_t capacity = self->capacity ? 2 * self->capacity : 64;
        uint32_t *items = realloc(self->items, (size_t)capacity * sizeof *items);
        if (items == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        self->items = items;
        self->capacity = capacity;
    }
    self->items[self->count++] = index;
    return 0;
}

static int inbox_init(InboxObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"tell", "most_bytes", NULL};
    PyObject *tell;
    unsigned long long most_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OK", names, &tell, &most_bytes))
        return -1;
    Py_INCREF(tell);
    Py_XDECREF(self->tell);
    self->tell = tell;
    self->due = 1;
    self->most_bytes = most_bytes;
    return 0;
}

static void inbox_dealloc(InboxObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->tell);
    free(self->items);
    PyObject_Free(self);
    Py_DECREF(type);
}

static Py_ssize_t inbox_length(InboxObject *self) { return self->count; }

/* take() -> list of int, in order of arrival; the inbox is empty then */
static PyObject *inbox_take(InboxObject *self, PyObject *unused) {
    (void)unused;
    PyObject *taken = PyList_New(self->count);
    for (Py_ssize_t i = 0; taken != NULL && i < self->count; i++) {
        PyObject *item = PyLong_FromUnsignedLong(self->items[i]);
        if (item == NULL || PyList_SetItem(taken, i, item) != 0)
            Py_CLEAR(taken);
    }
    if (taken != NULL) {
        self->count = 0;
        self->waiting_bytes = 0;
    }
    return taken;
}

static PyObject *inbox_first(InboxObject *self, PyObject *unused) {
    (void)unused;
    if (self->count == 0) {
        PyErr_SetString(PyExc_IndexError, "the inbox is empty");
        return NULL;
    }
    return PyLong_FromUnsignedLong(self->items[0]);
}

static PyObject *inbox_clear(InboxObject *self, PyObject *unused) {
    (void)unused;
    self->count = 0;
    self->waiting_bytes = 0;
    Py_RETURN_NONE;
}

static PyObject *inbox_tap(InboxObject *self, PyObject *args) {
    unsigned index;
    unsigned long long large_bytes;
    if (!PyArg_ParseTuple(args, "IK", &index, &large_bytes))
        return NULL;
    TapObject *tap = PyObject_New(TapObject, tap_type);
    if (tap == NULL)
        return NULL;
    Py_INCREF(self);
    tap->inbox = self;
    tap->index = index;
    tap->large_bytes = large_bytes;
    return (PyObject *)tap;
}

static PyObject *inbox_get_due(InboxObject *self, void *unused) {
    (void)unused;
    return PyLong_FromSsize_t(self->due);
}

static int inbox_set_due(InboxObject *self, PyObject *value, void *unused) {
    (void)unused;
    Py_ssize_t due = value == NULL ? -1 : PyLong_AsSsize_t(value);
    if (PyErr_Occurred())
        return -1;
    if (due < 0) {
        PyErr_SetString(PyExc_ValueError, "due is a count");
        return -1;
    }
    self->due = due;
    return 0;
}

static PyMethodDef inbox_methods[] = {
    {"take", (PyCFunction)inbox_take, METH_NOARGS, "Remove and return what is there."},
    {"first", (PyCFunction)inbox_first, METH_NOARGS, "Return what came first, and leave it."},
    {"clear", (PyCFunction)inbox_clear, METH_NOARGS, "Forget what is there."},
    {"tap", (PyCFunction)inbox_tap, METH_VARARGS, "tap(index, large_bytes) -> a hook"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef inbox_attributes[] = {
    {"due", (getter)inbox_get_due, (setter)inbox_set_due, "Tell when so many are there.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot inbox_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, inbox_init},
    {Py_tp_dealloc, inbox_dealloc},
    {Py_tp_methods, inbox_methods},
    {Py_tp_getset, inbox_attributes},
    {Py_sq_length, inbox_length},
    {Py_tp_doc, "Parameters, by index, whose gradients have arrived and have not been taken yet."},
    {0, NULL},
};

static PyType_Spec inbox_spec = {
    .name = "paceline.shm._native.Inbox",
    .basicsize = sizeof(InboxObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = inbox_slots,
};

/* --- Tap --------------------------------------------------------------------------------------- */

static void tap_dealloc(TapObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_DECREF(self->inbox);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* Whatever autograd hands a hook, this one does not look at it. */
static PyObject *tap_call(TapObject *self, PyObject *args, PyObject *kwargs) {
    (void)args, (void)kwargs;
    InboxObject *inbox = self->inbox;
    if (append(inbox, self->index) != 0)
        return NULL;
    inbox->waiting_bytes += self->large_bytes;
    if (inbox->waiting_bytes >= inbox->most_bytes)
        inbox->due = 1;
    if (inbox->count < inbox->due)
        Py_RETURN_NONE;
    PyObject *told = PyObject_CallObject(inbox->tell, NULL);
    if (told == NULL)
        return NULL;
    Py_DECREF(told); /* a hook that returned something would replace the gradient */
    Py_RETURN_NONE;
}

static PyType_Slot tap_slots[] = {
    {Py_tp_dealloc, tap_dealloc},
    {Py_tp_call, tap_call},
    {Py_tp_doc, "A hook that puts one parameter into an inbox, whatever it is called with."},
    {0, NULL},
};

static PyType_Spec tap_spec = {
    .name = "paceline.shm._native.Tap",
    .basicsize = sizeof(TapObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = tap_slots,
};

int pl_add_inbox(PyObject *module) {
    tap_type = (PyTypeObject *)PyType_FromSpec(&tap_spec);
    if (tap_type == NULL)
        return -1;
    PyObject *inbox_type = PyType_FromSpec(&inbox_spec);
    return inbox_type == NULL ? -1 : PyModule_AddObject(module, "Inbox", inbox_type);
}
