/* Two rings between a trainer and a server, as a Python type; see ring.h for how a ring works.
 *
 * The memory: one page of counts and facts, the ring of requests, the ring of replies. The server
 * makes and formats it; the trainer checks what it was handed. Descriptors stay the caller's; the
 * mapping is the object's. Not for several threads at once: callers have a lock. */
#include "pair.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAGIC UINT64_C(0x31676e6972534c50) /* "PLSring1" */
#define DATA_OFFSET 4096
/* A wait gives its core away so many times before it sleeps. */
#define YIELDS 8

typedef struct {
    uint64_t magic;
    uint64_t capacity;
    pl_ring_words requests;
    pl_ring_words replies;
} pl_segment;

_Static_assert(sizeof(pl_segment) <= DATA_OFFSET, "the counts are on the first page");

static bool is_open(PairObject *self) {
    if (self->memory == NULL) {
        PyErr_SetString(PyExc_ValueError, "this pair of rings is closed");
        return false;
    }
    return true;
}

static pl_ring ring_over(pl_ring_words *words, unsigned char *data, uint64_t capacity) {
    return (pl_ring){.words = words, .data = data, .capacity = capacity};
}

static bool is_power_of_two(uint64_t value) { return value != 0 && (value & (value - 1)) == 0; }

/* Map the segment; the server writes its facts, the trainer checks them. */
static int pair_map(PairObject *self, int memory_fd, uint64_t capacity, bool is_server) {
    struct stat facts;
    if (fstat(memory_fd, &facts) != 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    if (!is_power_of_two(capacity) || capacity < DATA_OFFSET || capacity > (UINT64_C(1) << 40) ||
        (uint64_t)facts.st_size != DATA_OFFSET + 2 * capacity) {
        PyErr_SetString(PyExc_ValueError, "the memory does not have the size of two rings");
        return -1;
    }
    self->size = (size_t)facts.st_size;
    void *memory = mmap(NULL, self->size, PROT_READ | PROT_WRITE, MAP_SHARED, memory_fd, 0);
    if (memory == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    self->memory = memory;
    pl_segment *segment = memory;
    if (is_server) {
        segment->capacity = capacity;
        segment->magic = MAGIC;
    } else if (segment->magic != MAGIC || segment->capacity != capacity) {
        PyErr_SetString(PyExc_ValueError, "the memory is no pair of rings of this version");
        return -1;
    }
    unsigned char *data = (unsigned char *)memory + DATA_OFFSET;
    pl_ring requests = ring_over(&segment->requests, data, capacity);
    pl_ring replies = ring_over(&segment->replies, data + capacity, capacity);
    self->in = is_server ? requests : replies;
    self->out = is_server ? replies : requests;
    return 0;
}

static void pair_unmap(PairObject *self) {
    if (self->memory != NULL) {
        munmap(self->memory, self->size);
        self->memory = NULL;
    }
}

static int pair_init(PairObject *self, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"memory_fd", "capacity", "own_event", "peer_event", "is_server", NULL};
    int memory_fd, own_event, peer_event, is_server;
    unsigned long long capacity;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "iKiip", names, &memory_fd, &capacity,
                                     &own_event, &peer_event, &is_server)) {
        return -1;
    }
    pair_unmap(self);
    self->own_event = own_event;
    self->peer_event = peer_event;
    if (pair_map(self, memory_fd, capacity, is_server) != 0) {
        pair_unmap(self);
        return -1;
    }
    return 0;
}

static void pair_dealloc(PairObject *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    pair_unmap(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

void pl_wake_peer(PairObject *self) {
    if (pl_ring_must_wake(&self->out)) {
        uint64_t one = 1;
        /* Fails only when the counter is full, and then there is an event already. */
        ssize_t ignored = write(self->peer_event, &one, sizeof one);
        (void)ignored;
    }
}

/* put(frames) -> bool; false: no room now, or too large for ever. The reader is not woken. */
static PyObject *pair_put(PairObject *self, PyObject *frames) {
    if (!is_open(self)) {
        return NULL;
    }
    Py_ssize_t count = PyList_Check(frames) ? PyList_Size(frames) : 0;
    if (count < 1 || count > PL_RING_FRAMES) {
        PyErr_SetString(PyExc_ValueError, "a message is a list of 1 to 3 frames");
        return NULL;
    }
    Py_buffer views[PL_RING_FRAMES];
    pl_frame parts[PL_RING_FRAMES];
    Py_ssize_t held = 0;
    while (held < count) {
        if (PyObject_GetBuffer(PyList_GetItem(frames, held), &views[held], PyBUF_SIMPLE) != 0) {
            break;
        }
        parts[held] = (pl_frame){views[held].buf, (uint64_t)views[held].len};
        held++;
    }
    bool is_sent = held == count && pl_ring_write(&self->out, parts, (unsigned)count);
    for (Py_ssize_t i = 0; i < held; i++) {
        PyBuffer_Release(&views[i]);
    }
    return held < count ? NULL : PyBool_FromLong(is_sent);
}

/* wake(): wake the reader, if it sleeps. */
static PyObject *pair_wake(PairObject *self, PyObject *unused) {
    (void)unused;
    if (!is_open(self)) {
        return NULL;
    }
    pl_wake_peer(self);
    Py_RETURN_NONE;
}

/* send(frames) -> bool: put, and wake the reader. */
static PyObject *pair_send(PairObject *self, PyObject *frames) {
    PyObject *is_sent = pair_put(self, frames);
    if (is_sent == Py_True) {
        pl_wake_peer(self);
    }
    return is_sent;
}

/* mark() -> bool: tell the reader that what comes next comes another way. */
static PyObject *pair_mark(PairObject *self, PyObject *unused) {
    (void)unused;
    if (!is_open(self)) {
        return NULL;
    }
    bool is_sent = pl_ring_write(&self->out, NULL, 0);
    if (is_sent) {
        pl_wake_peer(self);
    }
    return PyBool_FromLong(is_sent);
}

static PyObject *copied(const pl_frame *frames, unsigned count) {
    PyObject *found = PyList_New(count);
    for (unsigned i = 0; found != NULL && i < count; i++) {
        PyObject *frame = PyByteArray_FromStringAndSize(frames[i].data, (Py_ssize_t)frames[i].size);
        if (frame == NULL || PyList_SetItem(found, i, frame) != 0) {
            Py_DECREF(found);
            return NULL;
        }
    }
    return found;
}

/* receive() -> None: nothing; []: a mark; else the frames of a message, as bytearrays. */
static PyObject *pair_receive(PairObject *self, PyObject *unused) {
    (void)unused;
    if (!is_open(self)) {
        return NULL;
    }
    pl_frame frames[PL_RING_FRAMES];
    unsigned count = 0;
    pl_ring_found found = pl_ring_peek(&self->in, frames, &count);
    if (found == PL_RING_NOTHING) {
        Py_RETURN_NONE;
    }
    if (found == PL_RING_TORN) {
        PyErr_SetString(PyExc_ValueError, "what is in the ring is no message");
        return NULL;
    }
    PyObject *message = copied(frames, count);
    if (message != NULL) {
        pl_ring_take(&self->in);
    }
    return message;
}

/* prepare_sleep() -> bool: the reader will sleep; false: there is something to read after all. */
static PyObject *pair_prepare_sleep(PairObject *self, PyObject *unused) {
    (void)unused;
    return is_open(self) ? PyBool_FromLong(pl_ring_prepare_sleep(&self->in)) : NULL;
}

static bool has_more(const pl_ring *ring) {
    return atomic_load_explicit(&ring->words->written, memory_order_acquire) != ring->position;
}

/* Sleep until an event, an event of the connection, or the time is over. Needs no GIL. */
static bool sleep_until(PairObject *self, int connection, int timeout_ms) {
    struct pollfd waits[2] = {{self->own_event, POLLIN, 0}, {connection, POLLIN, 0}};
    int ready = poll(waits, 2, timeout_ms);
    if (ready > 0 && (waits[0].revents & POLLIN)) {
        uint64_t events;
        ssize_t ignored = read(self->own_event, &events, sizeof events);
        (void)ignored;
    }
    return ready > 0 && waits[1].revents != 0;
}

/* wait(connection_fd, timeout_ms) -> bool: whether the connection has an event. Returns at once if
 * there is a message; may return early for nothing. */
static PyObject *pair_wait(PairObject *self, PyObject *arguments) {
    int connection, timeout_ms;
    if (!PyArg_ParseTuple(arguments, "ii", &connection, &timeout_ms) || !is_open(self)) {
        return NULL;
    }
    bool has_event = false;
    Py_BEGIN_ALLOW_THREADS;
    for (int i = 0; i < YIELDS && !has_more(&self->in); i++) {
        sched_yield();
    }
    if (!has_more(&self->in) && pl_ring_prepare_sleep(&self->in)) {
        has_event = sleep_until(self, connection, timeout_ms);
        pl_ring_end_sleep(&self->in);
    }
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(has_event);
}

static PyObject *pair_close(PairObject *self, PyObject *unused) {
    (void)unused;
    pair_unmap(self);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"put", (PyCFunction)pair_put, METH_O, "put(frames) -> bool: false if there is no room"},
    {"wake", (PyCFunction)pair_wake, METH_NOARGS, "wake(): wake the reader, if it sleeps"},
    {"send", (PyCFunction)pair_send, METH_O, "send(frames) -> bool: put, and wake"},
    {"mark", (PyCFunction)pair_mark, METH_NOARGS, "mark() -> bool: the next comes another way"},
    {"receive", (PyCFunction)pair_receive, METH_NOARGS, "receive() -> None, [] for a mark, frames"},
    {"prepare_sleep", (PyCFunction)pair_prepare_sleep, METH_NOARGS, "prepare_sleep() -> bool: false if there is a message"},
    {"wait", (PyCFunction)pair_wait, METH_VARARGS, "wait(connection_fd, timeout_ms) -> bool: event"},
    {"close", (PyCFunction)pair_close, METH_NOARGS, "close(): unmap; idempotent"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_init, pair_init},
    {Py_tp_dealloc, pair_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_doc, "Two rings of messages in shared memory."},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "paceline.native._native.Pair",
    .basicsize = sizeof(PairObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

static PyTypeObject *pair_type;

PairObject *pl_pair_of(PyObject *object) {
    bool is_pair = pair_type != NULL && PyObject_TypeCheck(object, pair_type);
    return is_pair && ((PairObject *)object)->memory != NULL ? (PairObject *)object : NULL;
}

int pl_add_pair(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    if (type == NULL) {
        return -1;
    }
    pair_type = (PyTypeObject *)type;
    Py_INCREF(type);
    if (PyModule_AddObject(module, "Pair", type) != 0) {
        Py_DECREF(type);
        return -1;
    }
    return PyModule_AddIntConstant(module, "DATA_OFFSET", DATA_OFFSET);
}
