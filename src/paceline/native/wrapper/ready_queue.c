/* The ready queue of a reducer, and the hooks that fill it: paceline.ddp.autograd.hooks says what
 * they are for, and has the same in Python for installations without this extension.
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
    PyObject *slots; /* a list of its own while hooks copy: what hooks still copy in; or NULL */
    float factor;
    uint64_t waiting_bytes, most_bytes; /* of large gradients */
} QueueObject;

typedef struct {
    PyObject_HEAD
    QueueObject *queue;
    uint32_t index;
    uint64_t large_bytes; /* 0: not large */
} HookObject;

#define LEFT 0x80000000u

static PyTypeObject *hook_type;

/* --- ReadyQueue -------------------------------------------------------------------------------- */

static int append(QueueObject *self, uint32_t index) {
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

static int queue_init(QueueObject *self, PyObject *args, PyObject *kwargs) {
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

static void queue_dealloc(QueueObject *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->tell);
    Py_XDECREF(self->slots);
    free(self->items);
    PyObject_Free(self);
    Py_DECREF(type);
}

static Py_ssize_t queue_length(QueueObject *self) { return self->count; }

/* start_copying(slots, factor) -> bool */
static PyObject *queue_start_copying(QueueObject *self, PyObject *args) {
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

static PyObject *queue_stop_copying(QueueObject *self, PyObject *unused) {
    (void)unused;
    Py_CLEAR(self->slots);
    Py_RETURN_NONE;
}

/* Take one slot out of a list of them: its place stays, with None in it. */
static int take_out(PyObject *slots, Py_ssize_t index) {
    Py_INCREF(Py_None);
    return PyList_SetItem(slots, index, Py_None);
}

static PyObject *queue_exclude(QueueObject *self, PyObject *number) {
    Py_ssize_t index = PyLong_AsSsize_t(number);
    if (PyErr_Occurred())
        return NULL;
    if (self->slots != NULL && take_out(self->slots, index) != 0)
        return NULL;
    Py_RETURN_NONE;
}

/* The indices of all items, or of those that were left, as a list. */
static PyObject *list_items(QueueObject *self, uint32_t flag) {
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

/* take() -> (all, left), in order of arrival; the queue is empty then */
static PyObject *queue_take(QueueObject *self, PyObject *unused) {
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

static PyObject *queue_first(QueueObject *self, PyObject *unused) {
    (void)unused;
    if (self->count == 0) {
        PyErr_SetString(PyExc_IndexError, "the queue is empty");
        return NULL;
    }
    return PyLong_FromUnsignedLong(self->items[0] & ~LEFT);
}

static PyObject *queue_clear(QueueObject *self, PyObject *unused) {
    (void)unused;
    self->count = 0;
    self->waiting_bytes = 0;
    Py_RETURN_NONE;
}

static PyObject *queue_make_hook(QueueObject *self, PyObject *args) {
    unsigned index;
    unsigned long long large_bytes;
    if (!PyArg_ParseTuple(args, "IK", &index, &large_bytes))
        return NULL;
    if (index & LEFT)
        return PyErr_Format(PyExc_ValueError, "%u is no index of a parameter", index);
    HookObject *hook = PyObject_New(HookObject, hook_type);
    if (hook == NULL)
        return NULL;
    Py_INCREF((PyObject *)self);
    hook->queue = self;
    hook->index = index;
    hook->large_bytes = large_bytes;
    return (PyObject *)hook;
}

static PyObject *queue_get_due(QueueObject *self, void *unused) {
    (void)unused;
    return PyLong_FromSsize_t(self->due);
}

static int queue_set_due(QueueObject *self, PyObject *value, void *unused) {
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

static PyMethodDef queue_methods[] = {
    {"start_copying", (PyCFunction)queue_start_copying, METH_VARARGS,
     "start_copying(slots, factor) -> whether hooks copy gradients in from now on"},
    {"exclude", (PyCFunction)queue_exclude, METH_O, "Let the hook of one parameter leave it."},
    {"stop_copying", (PyCFunction)queue_stop_copying, METH_NOARGS, "Let hooks leave gradients where they are."},
    {"take", (PyCFunction)queue_take, METH_NOARGS, "Remove what is there: (all, left)."},
    {"first", (PyCFunction)queue_first, METH_NOARGS, "Return what came first, and leave it."},
    {"clear", (PyCFunction)queue_clear, METH_NOARGS, "Forget what is there."},
    {"make_hook", (PyCFunction)queue_make_hook, METH_VARARGS,
     "make_hook(index, large_bytes) -> a hook"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef queue_attributes[] = {
    {"due", (getter)queue_get_due, (setter)queue_set_due, "Tell when so many are there.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot queue_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, queue_init},
    {Py_tp_dealloc, queue_dealloc},
    {Py_tp_methods, queue_methods},
    {Py_tp_getset, queue_attributes},
    {Py_sq_length, queue_length},
    {Py_tp_doc, "Parameters, by index, whose gradients have arrived and have not been taken yet."},
    {0, NULL},
};

static PyType_Spec queue_spec = {
    .name = "paceline.native._native.ReadyQueue",
    .basicsize = sizeof(QueueObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = queue_slots,
};

/* --- GradientHook -------------------------------------------------------------------------------- */

static void hook_dealloc(HookObject *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_DECREF(self->queue);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* Whether the gradient is in its bucket now. Once only: the bucket may be on its way when it comes
 * again, which is an error that the listener finds. */
static int copy_in(QueueObject *queue, uint32_t index) {
    PyObject *slots = queue->slots;
    if (slots == NULL || index >= (size_t)PyList_Size(slots))
        return 0;
    PyObject *slot = PyList_GetItem(slots, index);
    if (slot == NULL || slot == Py_None)
        return 0;
    Py_INCREF(slots); /* the copy may let go of the interpreter lock */
    Py_INCREF(slot);
    int copied = pl_copy_in(queue->exchange, slot, queue->factor);
    if (copied && take_out(slots, index) != 0)
        PyErr_Clear(); /* cannot be: the index is within the list */
    Py_DECREF(slot);
    Py_DECREF(slots);
    return copied;
}

/* Whatever autograd hands a hook, this one does not look at it: under distributed autograd it is not
 * what is reduced. */
static PyObject *hook_call(HookObject *self, PyObject *args, PyObject *kwargs) {
    (void)args, (void)kwargs;
    QueueObject *queue = self->queue;
    int copied = copy_in(queue, self->index);
    if (append(queue, self->index | (copied ? 0 : LEFT)) != 0)
        return NULL;
    if (!copied)
        queue->waiting_bytes += self->large_bytes;
    if (queue->waiting_bytes >= queue->most_bytes)
        queue->due = 1;
    if (queue->count < queue->due)
        Py_RETURN_NONE;
    PyObject *told = PyObject_CallObject(queue->tell, NULL);
    if (told == NULL)
        return NULL;
    Py_DECREF(told); /* a hook that returned something would replace the gradient */
    Py_RETURN_NONE;
}

static PyType_Slot hook_slots[] = {
    {Py_tp_dealloc, hook_dealloc},
    {Py_tp_call, hook_call},
    {Py_tp_doc, "A hook that puts one parameter into a queue, whatever it is called with."},
    {0, NULL},
};

static PyType_Spec hook_spec = {
    .name = "paceline.native._native.GradientHook",
    .basicsize = sizeof(HookObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = hook_slots,
};

int pl_add_ready_queue(PyObject *module) {
    hook_type = (PyTypeObject *)PyType_FromSpec(&hook_spec);
    if (hook_type == NULL || pl_prepare_copy_in() != 0)
        return -1;
    PyObject *queue_type = PyType_FromSpec(&queue_spec);
    return queue_type == NULL ? -1 : PyModule_AddObject(module, "ReadyQueue", queue_type);
}
