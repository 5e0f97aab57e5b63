/* The inbox of a reducer, and the hooks that fill it: paceline.ddp.autograd.hooks says what they are for, and
 * has the same in Python for installations without this extension.
 *
 * Here because autograd calls a hook for every gradient: a call of an object in C costs a fraction
 * of a call of a function in Python. Knows neither torch nor the group. Everything but the copy of
 * a large gradient happens under the interpreter lock. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "wrapper.h"

typedef struct {
    PyObject_HEAD
    PyObject *tell; /* called without arguments; holds the reducer weakly, so there is no cycle */
    uint32_t *items; /* indices, with LEFT where the gradient is not in its bucket yet */
    Py_ssize_t count, capacity;
    Py_ssize_t due;
    const struct DLPackExchangeAPI *exchange; /* NULL: gradients are left to the listener */
    PyObject *slots; /* a list of its own while it is open: what hooks still bring in; or NULL */
    float factor;
    uint64_t waiting_bytes, most_bytes; /* of large gradients */
} InboxObject;

typedef struct {
    PyObject_HEAD
    InboxObject *inbox;
    uint32_t index;
    uint64_t large_bytes; /* 0: not large */
} TapObject;

#define LEFT 0x80000000u

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
    static char *names[] = {"tell", "most_bytes", "exchange", NULL};
    PyObject *tell, *exchange = Py_None;
    unsigned long long most_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OK|O", names, &tell, &most_bytes, &exchange))
        return -1;
    self->exchange = exchange == Py_None ? NULL : pl_exchange(exchange);
    if (PyErr_Occurred())
        return -1;
    Py_INCREF(tell);
    Py_XDECREF(self->tell);
    self->tell = tell;
    self->due = 1;
    self->most_bytes = most_bytes;
    return 0;
}

static void inbox_dealloc(InboxObject *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->tell);
    Py_XDECREF(self->slots);
    free(self->items);
    PyObject_Free(self);
    Py_DECREF(type);
}

static Py_ssize_t inbox_length(InboxObject *self) { return self->count; }

/* open(slots, factor) -> bool */
static PyObject *inbox_open(InboxObject *self, PyObject *args) {
    PyObject *slots;
    float factor;
    if (!PyArg_ParseTuple(args, "O!f", &PyList_Type, &slots, &factor))
        return NULL;
    if (self->exchange == NULL)
        Py_RETURN_FALSE;
    PyObject *own = PyList_GetSlice(slots, 0, PyList_Size(slots));
    if (own == NULL)
        return NULL;
    Py_XDECREF(self->slots);
    self->slots = own;
    self->factor = factor;
    Py_RETURN_TRUE;
}

static PyObject *inbox_shut(InboxObject *self, PyObject *unused) {
    (void)unused;
    Py_CLEAR(self->slots);
    Py_RETURN_NONE;
}

/* Take one slot out of a list of them: its place stays, with None in it. */
static int take_out(PyObject *slots, Py_ssize_t index) {
    Py_INCREF(Py_None);
    return PyList_SetItem(slots, index, Py_None);
}

static PyObject *inbox_withhold(InboxObject *self, PyObject *number) {
    Py_ssize_t index = PyLong_AsSsize_t(number);
    if (PyErr_Occurred())
        return NULL;
    if (self->slots != NULL && take_out(self->slots, index) != 0)
        return NULL;
    Py_RETURN_NONE;
}

/* The indices of all items, or of those that were left, as a list. */
static PyObject *list_items(InboxObject *self, uint32_t flag) {
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list != NULL && i < self->count; i++) {
        if ((self->items[i] & flag) != flag)
            continue;
        PyObject *item = PyLong_FromUnsignedLong(self->items[i] & ~LEFT);
        if (item == NULL || PyList_Append(list, item) != 0)
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

/* take() -> (all, left), in order of arrival; the inbox is empty then */
static PyObject *inbox_take(InboxObject *self, PyObject *unused) {
    (void)unused;
    PyObject *all = list_items(self, 0), *left = list_items(self, LEFT);
    PyObject *taken = all != NULL && left != NULL ? PyTuple_Pack(2, all, left) : NULL;
    Py_XDECREF(all);
    Py_XDECREF(left);
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
    return PyLong_FromUnsignedLong(self->items[0] & ~LEFT);
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
    if (index & LEFT)
        return PyErr_Format(PyExc_ValueError, "%u is no index of a parameter", index);
    TapObject *tap = PyObject_New(TapObject, tap_type);
    if (tap == NULL)
        return NULL;
    Py_INCREF((PyObject *)self);
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
    {"open", (PyCFunction)inbox_open, METH_VARARGS,
     "open(slots, factor) -> whether hooks bring gradients in from now on"},
    {"withhold", (PyCFunction)inbox_withhold, METH_O, "Let the hook of one parameter leave it."},
    {"shut", (PyCFunction)inbox_shut, METH_NOARGS, "Let hooks leave gradients where they are."},
    {"take", (PyCFunction)inbox_take, METH_NOARGS, "Remove what is there: (all, left)."},
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
    .name = "paceline.native._native.Inbox",
    .basicsize = sizeof(InboxObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = inbox_slots,
};

/* --- Tap --------------------------------------------------------------------------------------- */

static void tap_dealloc(TapObject *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_DECREF(self->inbox);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* Whether the gradient is in its bucket now. Once only: the bucket may be on its way when it comes
 * again, which is an error that the listener finds. */
static int bring_in(InboxObject *inbox, uint32_t index) {
    PyObject *slots = inbox->slots;
    if (slots == NULL || index >= (size_t)PyList_Size(slots))
        return 0;
    PyObject *slot = PyList_GetItem(slots, index);
    if (slot == NULL || slot == Py_None)
        return 0;
    Py_INCREF(slots); /* the copy may let go of the interpreter lock */
    Py_INCREF(slot);
    int brought = pl_bring_in(inbox->exchange, slot, inbox->factor);
    if (brought && take_out(slots, index) != 0)
        PyErr_Clear(); /* cannot be: the index is within the list */
    Py_DECREF(slot);
    Py_DECREF(slots);
    return brought;
}

/* Whatever autograd hands a hook, this one does not look at it: under distributed autograd it is not
 * what is reduced. */
static PyObject *tap_call(TapObject *self, PyObject *args, PyObject *kwargs) {
    (void)args, (void)kwargs;
    InboxObject *inbox = self->inbox;
    int brought = bring_in(inbox, self->index);
    if (append(inbox, self->index | (brought ? 0 : LEFT)) != 0)
        return NULL;
    if (!brought)
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
    .name = "paceline.native._native.Tap",
    .basicsize = sizeof(TapObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = tap_slots,
};

int pl_add_inbox(PyObject *module) {
    tap_type = (PyTypeObject *)PyType_FromSpec(&tap_spec);
    if (tap_type == NULL || pl_prepare_intake() != 0)
        return -1;
    PyObject *inbox_type = PyType_FromSpec(&inbox_spec);
    return inbox_type == NULL ? -1 : PyModule_AddObject(module, "Inbox", inbox_type);
}
