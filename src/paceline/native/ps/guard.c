/* Closes a server's socket file when descriptors run out; see [Note: the socket's file] in ps/server/listener.py.
 *
 * A thread of Python's is in here, without the interpreter's lock, waits for connections and counts
 * while they come: whatever the server's loop computes, the name of the socket is gone before libzmq
 * finds no descriptor. */
#include "native.h"

#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

enum { PL_PAUSE_MS = 1, PL_QUIET = 100 };

/* How many descriptors below `limit` are open: the kernel says of each that is not that it is none,
 * in one call. */
static long count_open(struct pollfd *all, long limit) {
    for (long at = 0; at < limit; at++) {
        all[at] = (struct pollfd){.fd = (int)at};
    }
    if (poll(all, (nfds_t)limit, 0) < 0) {
        return -1;
    }
    long used = 0;
    for (long at = 0; at < limit; at++) {
        used += !(all[at].revents & POLLNVAL);
    }
    return used;
}

/* Wait for an event; then count again and again until the number has stayed the same for a while.
 * 1: there were `most`, and the socket was renamed; 0: all is quiet, or `end_fd` has something to
 * read; -1: errno. */
static int watch(int end_fd, int event_fd, struct pollfd *all, const long *limits,
                 const char *path, const char *aside) {
    struct pollfd ends[] = {{.fd = end_fd, .events = POLLIN}, {.fd = event_fd, .events = POLLIN}};
    while (poll(ends, 2, -1) < 0) {
        if (errno != EINTR) {
            return -1;
        }
    }
    long last = -1;
    for (int quiet = 0; quiet < PL_QUIET;) {
        long used = count_open(all, limits[0]);
        if (used < 0 && errno != EINTR) {
            return -1;
        }
        if (used >= limits[1]) {
            return rename(path, aside) == 0 ? 1 : -1;
        }
        bool is_rush = used > last && last >= 0; /* hundreds may come in a millisecond */
        quiet = used == last ? quiet + 1 : 0;
        last = used;
        if (poll(ends, 1, is_rush ? 0 : PL_PAUSE_MS) > 0) {
            return 0;
        }
    }
    return 0;
}

/* guard(end_fd, event_fd, limit, most, path, aside) -> bool: whether the socket file is closed now. */
static PyObject *guard(PyObject *self, PyObject *args) {
    (void)self;
    int end_fd, event_fd;
    long limits[2];
    const char *path, *aside;
    if (!PyArg_ParseTuple(args, "iillyy", &end_fd, &event_fd, &limits[0], &limits[1], &path,
                          &aside)) {
        return NULL;
    }
    if (limits[0] < 1 || limits[0] > 1 << 20) {
        PyErr_SetString(PyExc_ValueError, "a limit of descriptors");
        return NULL;
    }
    struct pollfd *all = malloc((size_t)limits[0] * sizeof *all);
    if (all == NULL) {
        return PyErr_NoMemory();
    }
    int found;
    Py_BEGIN_ALLOW_THREADS
    found = watch(end_fd, event_fd, all, limits, path, aside);
    Py_END_ALLOW_THREADS
    free(all);
    if (found < 0) {
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyBool_FromLong(found);
}

PyMethodDef pl_guard_functions[] = {
    {"guard", guard, METH_VARARGS, "Wait for connections, count descriptors meanwhile; close the socket file."},
    {NULL, NULL, 0, NULL},
};
