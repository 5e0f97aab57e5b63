/* A server's loop over shared memory, as long as it needs no Python; see ps/server/native_loop.py.
 *
 * A message costs a server of small tables more in cold caches than in work: Python and torch have
 * been thrown out of them by the trainers meanwhile. So what is native and without a fault is
 * answered here, from ring to ring (answer.c). Everything else stays in the ring, and Python takes it
 * from there. */
#include "answer.h"
#include "pair.h"

#include <poll.h>
#include <unistd.h>

enum {
    MOST_FDS = 16,
    AT_ONCE = 16,    /* messages of one trainer before the next has its turn */
    LOOK_EVERY = 16, /* busy rounds, before somebody else is looked for */
};

/* What a loop was called with. */
struct call {
    ResponderObject *self;
    PyObject *pairs;    /* list of Pair */
    PyObject *accounts; /* list of bytearray, one for each pair */
    PyObject *journal;
    PyObject *reach;
};

static bool begin_record(struct pl_reply *reply, const uint64_t *sizes, unsigned count,
                         unsigned char **places) {
    return pl_ring_begin(reply->to, sizes, count, places);
}

/* Answer the next message of a ring. What is begun in a ring and not committed was never there. */
static pl_outcome answer(const struct call *call, PairObject *pair, struct pl_account *account) {
    struct pl_request request = {.is_shared = true,
                                 .account = account,
                                 .journal = call->journal,
                                 .reach = call->reach};
    pl_ring_found found = pl_ring_peek(&pair->in, request.frames, &request.count);
    if (found == PL_RING_NOTHING) {
        return PL_NOTHING;
    }
    struct pl_reply reply = {begin_record, &pair->out};
    pl_outcome done =
        found == PL_RING_MESSAGE ? pl_answer(call->self, &request, &reply) : PL_FOR_PYTHON;
    if (done == PL_ANSWERED) {
        pl_ring_commit(&pair->out);
        pl_ring_take(&pair->in);
        pl_wake_peer(pair);
        done = pl_reach(call->reach, "SENT") ? PL_ANSWERED : PL_FAILED;
    }
    return done;
}

static PairObject *pair_at(const struct call *call, Py_ssize_t at) {
    return pl_pair_of(PyList_GetItem(call->pairs, at));
}

static struct pl_account *account_at(const struct call *call, Py_ssize_t at) {
    return pl_account_in(PyList_GetItem(call->accounts, at));
}

/* One turn for each trainer: whether something was answered, or is Python's. */
static pl_outcome answer_all(const struct call *call) {
    pl_outcome found = PL_NOTHING;
    Py_ssize_t count = PyList_Size(call->pairs);
    for (Py_ssize_t at = 0; at < count; at++) {
        PairObject *pair = pair_at(call, at);
        struct pl_account *account = account_at(call, at);
        if (pair == NULL || account == NULL) {
            return PL_FOR_PYTHON;
        }
        for (int i = 0; i < AT_ONCE; i++) {
            pl_outcome done = answer(call, pair, account);
            if (done == PL_FOR_PYTHON || done == PL_FAILED) {
                return done;
            }
            if (done == PL_NOTHING) {
                break;
            }
            found = PL_ANSWERED;
        }
    }
    return found;
}

static bool prepare_sleep_all(const struct call *call) {
    Py_ssize_t count = PyList_Size(call->pairs);
    for (Py_ssize_t at = 0; at < count; at++) {
        PairObject *pair = pair_at(call, at);
        if (pair == NULL || !pl_ring_prepare_sleep(&pair->in)) {
            return false;
        }
    }
    return true;
}

/* Wait for the event, the first of `waits`, or for Python's; true if it was the event alone. */
static bool wait_for_event(struct pollfd *waits, nfds_t count, int timeout_ms) {
    int ready;
    Py_BEGIN_ALLOW_THREADS;
    ready = poll(waits, count, timeout_ms);
    Py_END_ALLOW_THREADS;
    bool is_event = ready > 0 && (waits[0].revents & POLLIN) != 0;
    if (is_event) {
        uint64_t events;
        ssize_t ignored = read(waits[0].fd, &events, sizeof events);
        (void)ignored;
    }
    return ready == 1 && is_event;
}

/* False with an exception set. */
static bool loop(const struct call *call, struct pollfd *waits, nfds_t count, int timeout_ms) {
    uint64_t until_ns = timeout_ms < 0 ? UINT64_MAX : pl_clock_ns() + (uint64_t)timeout_ms * 1000000u;
    for (unsigned busy = 1;;) {
        pl_outcome found = answer_all(call);
        if (found == PL_FOR_PYTHON || found == PL_FAILED) {
            return found == PL_FOR_PYTHON;
        }
        if (found == PL_ANSWERED) {
            bool is_time = busy++ % LOOK_EVERY == 0;
            if (is_time && (pl_clock_ns() >= until_ns || poll(waits + 1, count - 1, 0) != 0)) {
                return true;
            }
            continue;
        }
        if (!prepare_sleep_all(call)) {
            continue;
        }
        uint64_t now = pl_clock_ns();
        int left_ms = timeout_ms < 0 ? -1 : now >= until_ns ? 0 : (int)((until_ns - now) / 1000000u);
        if (!wait_for_event(waits, count, left_ms)) {
            return true;
        }
    }
}

static bool read_fds(PyObject *list, int event, struct pollfd *waits, nfds_t *count) {
    Py_ssize_t others = PyList_Check(list) ? PyList_Size(list) : MOST_FDS;
    if (others >= MOST_FDS) {
        PyErr_SetString(PyExc_ValueError, "too many descriptors");
        return false;
    }
    waits[0] = (struct pollfd){.fd = event, .events = POLLIN};
    for (Py_ssize_t i = 0; i < others; i++) {
        long fd = PyLong_AsLong(PyList_GetItem(list, i));
        if (fd == -1 && PyErr_Occurred()) {
            return false;
        }
        waits[1 + i] = (struct pollfd){.fd = (int)fd, .events = POLLIN};
    }
    *count = (nfds_t)others + 1;
    return true;
}

/* run(pairs, accounts, journal, reach, event_fd, fds, timeout_ms): answer until there is something
 * for Python: a message, one of `fds`, or the time is over. Raises what `journal` raises. */
PyObject *pl_responder_run(ResponderObject *self, PyObject *arguments) {
    struct call call = {.self = self};
    PyObject *fds;
    int event, timeout_ms;
    if (!PyArg_ParseTuple(arguments, "OOOOiOi", &call.pairs, &call.accounts, &call.journal,
                          &call.reach, &event, &fds, &timeout_ms)) {
        return NULL;
    }
    struct pollfd waits[1 + MOST_FDS];
    nfds_t count;
    if (!read_fds(fds, event, waits, &count)) {
        return NULL;
    }
    if (!PyList_Check(call.pairs) || !PyList_Check(call.accounts) ||
        PyList_Size(call.pairs) != PyList_Size(call.accounts)) {
        PyErr_SetString(PyExc_ValueError, "pairs and accounts are lists of one length");
        return NULL;
    }
    if (!loop(&call, waits, count, timeout_ms)) {
        return NULL;
    }
    Py_RETURN_NONE;
}
