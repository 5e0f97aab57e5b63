/* Mappings of shared memory, and what becomes of them in a forked child: the type `Mapping`.
 *
 * [Note: forks]
 * A forked child has no part in a group, but it inherits the mappings. What it wrote there, its
 * parent and the parent's peers would read. So in every child that fork() makes, a handler replaces
 * each mapping at the same address before any other code runs:
 *   - with `keeps_copy` (the rank's own arena, where gradients lie) by a private, copy-on-write
 *     mapping of the same memory: the child reads what its parent has there, and what it writes is
 *     its own. A page that it has not written to yet shows what the parent writes later: a
 *     snapshot would cost a copy of all gradients at every fork (docs/decisions/0008-forks.md);
 *   - otherwise (control block, peers' arenas) by private zeros. Nothing of the child's lies there.
 * If the system refuses that, by memory that cannot be touched. The child's own children get copies
 * of the child's memory from the kernel as of any other: a mapping is replaced once.
 *
 * The handler is pthread_atfork's, so it also runs for forks from C. It runs in the child of a
 * process with threads, and makes system calls only. What it does not see: vfork (the child only
 * execs), and a bare clone system call. Those are why `discard` looks at the process id.
 *
 * All mappings are in one list, under a lock that is taken before a fork and released after it in
 * both processes: the child finds the list whole. */
#define PY_SSIZE_T_CLEAN
#include "group.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct MappingObject {
    PyObject_HEAD void *address; /* NULL: not mapped */
    size_t bytes;
    int copied_from; /* our own descriptor of the segment; -1 without `keeps_copy` */
    pid_t owner;
    struct MappingObject *before, *after;
} MappingObject;

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static MappingObject *list_head;

/* --- forks --------------------------------------------------------------------------------------- */

static void replace(MappingObject *self) {
    const int private = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
    const int usable = PROT_READ | PROT_WRITE;
    void *found = MAP_FAILED;
    if (self->copied_from >= 0) {
        found = mmap(self->address, self->bytes, usable, private, self->copied_from, 0);
        close(self->copied_from);
        self->copied_from = -1;
    } else {
        found = mmap(self->address, self->bytes, usable, private | MAP_ANONYMOUS, -1, 0);
    }
    if (found == MAP_FAILED)
        found = mmap(self->address, self->bytes, PROT_NONE, private | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED)
        _exit(70); /* a child that could write to its parent's memory must not go on */
}

static void before_fork(void) { pthread_mutex_lock(&list_lock); }

static void after_in_parent(void) { pthread_mutex_unlock(&list_lock); }

static void after_in_child(void) {
    for (MappingObject *each = list_head; each != NULL; each = each->after)
        replace(each);
    list_head = NULL; /* `owner` says that they are not in the list any more */
    pthread_mutex_unlock(&list_lock);
}

/* --- the type ------------------------------------------------------------------------------------ */

static void enlist(MappingObject *self) {
    pthread_mutex_lock(&list_lock);
    self->after = list_head;
    if (list_head != NULL)
        list_head->before = self;
    list_head = self;
    pthread_mutex_unlock(&list_lock);
}

/* Out of the list and unmapped at once: in between, another thread's fork would replace what lies
 * there then. */
static void release(MappingObject *self) {
    pthread_mutex_lock(&list_lock);
    if (self->owner == getpid()) {
        if (self->before != NULL)
            self->before->after = self->after;
        else
            list_head = self->after;
        if (self->after != NULL)
            self->after->before = self->before;
    }
    munmap(self->address, self->bytes);
    pthread_mutex_unlock(&list_lock);
    if (self->copied_from >= 0)
        close(self->copied_from);
}

static int mapping_init(MappingObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"descriptor", "size_bytes", "keeps_copy", NULL};
    int descriptor, keeps_copy;
    Py_ssize_t bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "inp", names, &descriptor, &bytes, &keeps_copy))
        return -1;
    if (self->address != NULL || bytes <= 0) {
        PyErr_SetString(PyExc_ValueError, "a mapping is made once, of at least one byte");
        return -1;
    }
    void *address =
        mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (address == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    /* The caller's descriptor is the caller's to close. */
    self->copied_from = keeps_copy ? fcntl(descriptor, F_DUPFD_CLOEXEC, 3) : -1;
    if (keeps_copy && self->copied_from < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        munmap(address, (size_t)bytes);
        return -1;
    }
    self->bytes = (size_t)bytes;
    self->owner = getpid();
    self->address = address;
    enlist(self);
    return 0;
}

static void mapping_dealloc(MappingObject *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->address != NULL)
        release(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *mapping_address(MappingObject *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromVoidPtr(self->address);
}

/* discard(offset, size_bytes): in a child nothing happens, whichever way it was made. */
static PyObject *mapping_discard(MappingObject *self, PyObject *args) {
    Py_ssize_t offset, bytes;
    if (!PyArg_ParseTuple(args, "nn", &offset, &bytes))
        return NULL;
    if (self->address == NULL || offset < 0 || bytes < 0 || (size_t)offset > self->bytes ||
        (size_t)bytes > self->bytes - (size_t)offset) {
        PyErr_SetString(PyExc_ValueError, "that is not in the mapping");
        return NULL;
    }
    if (self->owner == getpid() &&
        madvise((char *)self->address + offset, (size_t)bytes, MADV_REMOVE) != 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"address", (PyCFunction)mapping_address, METH_NOARGS, "where it begins; 0: not mapped"},
    {"discard", (PyCFunction)mapping_discard, METH_VARARGS,
     "discard(offset, size_bytes): give memory back to the system; it reads as zeros then"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, mapping_init},
    {Py_tp_dealloc, mapping_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_doc, "Mapping(descriptor, size_bytes, keeps_copy): shared memory; private in a fork."},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "paceline.native._native.Mapping",
    .basicsize = sizeof(MappingObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

/* Once for the process: the module may be set up again, under another name or for another
 * interpreter, and a second `before_fork` would wait for the first. */
static int handle_forks(void) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static bool is_done;
    pthread_mutex_lock(&lock);
    int problem = is_done ? 0 : pthread_atfork(before_fork, after_in_parent, after_in_child);
    is_done = problem == 0;
    pthread_mutex_unlock(&lock);
    return problem;
}

int pl_add_mapping(PyObject *module) {
    errno = handle_forks();
    if (errno != 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    PyObject *type = PyType_FromSpec(&spec);
    return type == NULL ? -1 : PyModule_AddObject(module, "Mapping", type);
}
