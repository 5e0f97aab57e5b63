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

enum { PL_PAUSE_MS = 1, PL_QUIET = 100, PL_AGAIN_MS = 100 };

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

/* The socket's file is not there: put it back when there is room. 0: it is there; 1: there is an
 * event to read first; -1: errno. */
static int reopen(struct pollfd *ends, struct pollfd *all, const long *limits, const char *path,
                  const char *aside) {
    for (;;) {
        int found = poll(ends, 2, PL_AGAIN_MS);
        long used = found == 0 ? count_open(all, limits[0]) : 0;
        if (found > 0) {
            return 1;
        }
        if ((found < 0 || used < 0) && errno != EINTR) {
            return -1;
        }
        if (found == 0 && used >= 0 && used < limits[1]) {
            return rename(aside, path);
        }
    }
}

/* Wait for an event, or for room; then count again and again until the number has stayed the same
 * for a while: nobody comes in uncounted from the moment at which the file is there. 1: there were
 * `most`, and the file is not there; 0: all is quiet, or `end_fd` has something to read; -1: errno. */
static int watch(struct pollfd *ends, bool is_open, struct pollfd *all, const long *limits,
                 const char *path, const char *aside) {
    while (is_open && poll(ends, 2, -1) < 0) {
        if (errno != EINTR) {
            return -1;
        }
    }
    int found = is_open ? 0 : reopen(ends, all, limits, path, aside);
    if (found != 0) {
        return found;
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

/* guard(end_fd, event_fd, is_open, limit, most, path, aside) -> bool: whether the file is there. */
static PyObject *guard(PyObject *self, PyObject *args) {
    (void)self;
    int end_fd, event_fd, is_open;
    long limits[2];
    const char *path, *aside;
    if (!PyArg_ParseTuple(args, "iipllyy", &end_fd, &event_fd, &is_open, &limits[0], &limits[1],
                          &path, &aside)) {
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
    struct pollfd ends[] = {{.fd = end_fd, .events = POLLIN}, {.fd = event_fd, .events = POLLIN}};
    int found;
    Py_BEGIN_ALLOW_THREADS
    found = watch(ends, is_open, all, limits, path, aside);
    Py_END_ALLOW_THREADS
    free(all);
    if (found < 0) {
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyBool_FromLong(!found);
}

PyMethodDef pl_guard_functions[] = {
    {"guard", guard, METH_VARARGS, "Wait for connections, count descriptors meanwhile; close the socket file."},
    {NULL, NULL, 0, NULL},
};
