/* A server's loop over shared memory, as long as it needs no Python; see ps/server/native_loop.py.
 *
 * A message costs a server of small tables more in cold caches than in work: Python and torch have
 * been thrown out of them by the trainers meanwhile. So what is plain and perfect (check.c) is
 * answered here, from ring to ring: a LOOKUP, and, if pushes need no journal, a PUSH to tables with
 * SGD. Everything else stays in the ring, and Python takes it from there.
 *
 * [Note: what is believed]
 * The trainer can write to the ring at any time. Head, records and ids are copied to private memory
 * before they are checked; gradients are numbers, whatever they are, and are read in place. */
#include "pair.h"
#include "rows.h"

#include <poll.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    MOST_SECTIONS = 256,
    MOST_IDS = 8192,
    MOST_FDS = 16,
    TALLIES = 1024,
    AT_ONCE = 16,  /* messages of one trainer before the next has its turn */
    LOOK_EVERY = 16, /* busy rounds, before somebody else is looked for */
};

/* One table's share of a message that was answered, for meters; as ps/server/native_loop.py reads it. */
struct tally {
    uint32_t table;
    uint32_t lines;
    uint64_t end_ns;
    uint32_t took_ns;
    uint32_t is_push;
};

/* Who asks, and what was applied; as ps/state/clients.py packs it. */
struct account {
    uint64_t applied;
    char client[16];
};

typedef struct {
    PyObject_HEAD size_t tallied;
    struct tally tallies[TALLIES];
    struct pl_share shares[MOST_SECTIONS];
    int32_t slots[MOST_IDS];
    char first[sizeof(struct pl_head) + MOST_SECTIONS * sizeof(struct pl_record)];
    char integers[8 * MOST_IDS];
} AttendantObject;

typedef enum { NOTHING, ANSWERED, FOR_PYTHON } outcome;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* --- SGD ----------------------------------------------------------------------------------------- */

/* torch adds a product with one rounding or with two, as its build and the machine are. Which one
 * gives its bits here is tried out (ps/server/native_loop.py); -std=c11 keeps the compiler from choosing. */
enum sgd_way { SGD_NONE, SGD_TWO_ROUNDINGS, SGD_ONE_ROUNDING };

static void sgd_two(float *row, const float *grad, size_t count, float alpha) {
    for (size_t i = 0; i < count; i++) {
        row[i] += alpha * grad[i];
    }
}

#if defined(__x86_64__)
#define FMA_TARGET __attribute__((target("avx2,fma")))
static bool has_fma(void) {
    return __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx2");
}
#elif defined(__aarch64__)
#define FMA_TARGET
static bool has_fma(void) { return true; }
#else
#define FMA_TARGET
static bool has_fma(void) { return false; }
#endif

FMA_TARGET static void sgd_one(float *row, const float *grad, size_t count, float alpha) {
    for (size_t i = 0; i < count; i++) {
        row[i] = __builtin_fmaf(alpha, grad[i], row[i]);
    }
}

static void sgd(enum sgd_way way, float *row, const float *grad, size_t count, float alpha) {
    if (way == SGD_ONE_ROUNDING) {
        sgd_one(row, grad, count, alpha);
    } else {
        sgd_two(row, grad, count, alpha);
    }
}

/* sgd(row address, gradient address, count, alpha, way) -> bool: false if this machine cannot. */
static PyObject *attend_sgd(PyObject *self, PyObject *arguments) {
    (void)self;
    unsigned long long row, grad, count;
    double alpha;
    int way;
    if (!PyArg_ParseTuple(arguments, "KKKdi", &row, &grad, &count, &alpha, &way)) {
        return NULL;
    }
    bool can = way == SGD_TWO_ROUNDINGS || (way == SGD_ONE_ROUNDING && has_fma());
    if (can) {
        sgd((enum sgd_way)way, (float *)(uintptr_t)row, (const float *)(uintptr_t)grad,
            (size_t)count, (float)alpha);
    }
    return PyBool_FromLong(can);
}

/* --- one message --------------------------------------------------------------------------------- */

/* What a loop was called with. */
struct call {
    AttendantObject *self;
    PyObject *pairs;    /* list of Pair */
    PyObject *accounts; /* list of bytearray, one for each pair */
    PyObject *entries;  /* list of bytearray, by number of the table */
    size_t most_bytes;
    enum sgd_way way; /* SGD_NONE: Python does all pushes */
};

static void count_shares(AttendantObject *self, const struct pl_message *m, uint64_t start_ns) {
    uint32_t sections = m->head.sections;
    uint64_t end_ns = now_ns();
    uint64_t each_ns = sections == 0 ? 0 : (end_ns - start_ns) / sections;
    uint32_t took_ns = each_ns > UINT32_MAX ? UINT32_MAX : (uint32_t)each_ns;
    for (uint32_t i = 0; i < sections; i++) {
        self->tallies[self->tallied++] =
            (struct tally){self->shares[i].table, self->shares[i].lines, end_ns, took_ns,
                           m->head.kind == PL_PUSH};
    }
}

static outcome answer_lookup(const struct call *call, PairObject *pair, struct pl_message *m) {
    const uint64_t sizes[3] = {m->first.count, 0, m->values_bytes};
    unsigned char *places[3];
    if (!pl_ring_begin(&pair->out, sizes, 3, places)) {
        return FOR_PYTHON;
    }
    memcpy(places[0], m->first.at, m->first.count);
    places[0][offsetof(struct pl_head, kind)] = PL_FOUND;
    if (!pl_copy_found(m, call->self->shares, call->self->slots, (char *)places[2])) {
        return FOR_PYTHON; /* what is begun and not committed was never there */
    }
    pl_ring_commit(&pair->out);
    return ANSWERED;
}

/* Whether all tables have SGD, and slots that are theirs. */
static bool can_push(const struct call *call, const struct pl_message *m) {
    const int32_t *slots = call->self->slots;
    for (uint32_t number = 0; number < m->head.sections; number++) {
        struct pl_share share = call->self->shares[number];
        const struct pl_entry *entry = pl_entry_of(m->entries, share.table);
        if (!entry->is_sgd || (share.lines != 0 && entry->columns != 1)) {
            return false;
        }
        for (uint32_t i = 0; i < share.lines; i++) {
            if ((uint32_t)slots[i] >= entry->slots) {
                return false;
            }
        }
        slots += share.lines;
    }
    return true;
}

static void apply(const struct call *call, const struct pl_message *m) {
    const int32_t *slots = call->self->slots;
    const char *values = m->values.at;
    for (uint32_t number = 0; number < m->head.sections; number++) {
        struct pl_record record = pl_record_of(m, number);
        struct pl_entry *entry = pl_entry_of(m->entries, record.table);
        size_t bytes = entry->row_bytes;
        char *rows = (char *)(uintptr_t)entry->column[0].address;
        for (uint32_t i = 0; i < record.ids; i++) {
            sgd(call->way, (float *)(void *)(rows + (size_t)slots[i] * bytes),
                (const float *)(const void *)(values + i * bytes), bytes / sizeof(float),
                (float)-record.lr);
        }
        entry->step++;
        slots += record.ids;
        values += pl_aligned(record.ids * bytes);
    }
}

static outcome answer_push(const struct call *call, PairObject *pair, struct account *account,
                           struct pl_message *m) {
    bool is_next = memcmp(account->client, m->head.client, sizeof account->client) == 0 &&
                   m->head.sequence == account->applied + 1;
    const uint64_t sizes[1] = {sizeof(struct pl_head) + 2};
    unsigned char *places[1];
    if (call->way == SGD_NONE || !is_next || !can_push(call, m) ||
        !pl_ring_begin(&pair->out, sizes, 1, places)) {
        return FOR_PYTHON;
    }
    apply(call, m);
    account->applied++;
    struct pl_head done = m->head;
    done.kind = PL_DONE;
    done.sequence = 0;
    done.sections = 0;
    memcpy(places[0], &done, sizeof done);
    memcpy(places[0] + sizeof done, "{}", 2);
    pl_ring_commit(&pair->out);
    return ANSWERED;
}

/* Copy what is checked, and check it; false if it is for Python. */
static bool read_message(const struct call *call, const pl_frame *frames, struct pl_message *m) {
    AttendantObject *self = call->self;
    if (frames[0].size > sizeof self->first || frames[1].size > sizeof self->integers) {
        return false;
    }
    memcpy(self->first, frames[0].data, frames[0].size);
    memcpy(self->integers, frames[1].data, frames[1].size);
    *m = (struct pl_message){
        .entries = call->entries,
        .first = {self->first, frames[0].size},
        .integers = {self->integers, frames[1].size},
        .values = {frames[2].data, frames[2].size},
    };
    return pl_is_plain(m, call->most_bytes) && m->head.sections <= TALLIES - self->tallied &&
           pl_find(m, self->shares, self->slots);
}

static outcome answer(const struct call *call, PairObject *pair, struct account *account) {
    pl_frame frames[PL_RING_FRAMES];
    unsigned count = 0;
    pl_ring_found found = pl_ring_peek(&pair->in, frames, &count);
    if (found == PL_RING_NOTHING) {
        return NOTHING;
    }
    uint64_t start_ns = now_ns();
    struct pl_message m;
    if (found != PL_RING_MESSAGE || count != 3 || !read_message(call, frames, &m)) {
        return FOR_PYTHON;
    }
    outcome done = m.head.kind == PL_PUSH ? answer_push(call, pair, account, &m)
                                          : answer_lookup(call, pair, &m);
    if (done == ANSWERED) {
        pl_ring_take(&pair->in);
        pl_wake_peer(pair);
        count_shares(call->self, &m, start_ns);
    }
    return done;
}

/* --- the loop ------------------------------------------------------------------------------------ */

static PairObject *pair_at(const struct call *call, Py_ssize_t at) {
    return pl_pair_of(PyList_GetItem(call->pairs, at));
}

static struct account *account_at(const struct call *call, Py_ssize_t at) {
    PyObject *found = PyList_GetItem(call->accounts, at);
    bool is_one = PyByteArray_Check(found) && PyByteArray_Size(found) == sizeof(struct account);
    return is_one ? (struct account *)(void *)PyByteArray_AsString(found) : NULL;
}

/* One turn for each trainer: whether something was answered, or is Python's. */
static outcome answer_all(const struct call *call) {
    outcome found = NOTHING;
    Py_ssize_t count = PyList_Size(call->pairs);
    for (Py_ssize_t at = 0; at < count; at++) {
        PairObject *pair = pair_at(call, at);
        struct account *account = account_at(call, at);
        if (pair == NULL || account == NULL) {
            return FOR_PYTHON;
        }
        for (int i = 0; i < AT_ONCE; i++) {
            outcome done = answer(call, pair, account);
            if (done == FOR_PYTHON) {
                return FOR_PYTHON;
            }
            if (done == NOTHING) {
                break;
            }
            found = ANSWERED;
        }
    }
    return found;
}

static bool rest_all(const struct call *call) {
    Py_ssize_t count = PyList_Size(call->pairs);
    for (Py_ssize_t at = 0; at < count; at++) {
        PairObject *pair = pair_at(call, at);
        if (pair == NULL || !pl_ring_rest(&pair->in)) {
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

static void loop(const struct call *call, struct pollfd *waits, nfds_t count, int timeout_ms) {
    uint64_t until_ns = timeout_ms < 0 ? UINT64_MAX : now_ns() + (uint64_t)timeout_ms * 1000000u;
    for (unsigned busy = 1;;) {
        outcome found = answer_all(call);
        if (found == FOR_PYTHON) {
            return;
        }
        if (found == ANSWERED) {
            bool is_time = busy++ % LOOK_EVERY == 0;
            if (is_time && (now_ns() >= until_ns || poll(waits + 1, count - 1, 0) != 0)) {
                return;
            }
            continue;
        }
        if (!rest_all(call)) {
            continue;
        }
        uint64_t now = now_ns();
        int left_ms = timeout_ms < 0 ? -1 : now >= until_ns ? 0 : (int)((until_ns - now) / 1000000u);
        if (!wait_for_event(waits, count, left_ms)) {
            return;
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

/* attend(pairs, accounts, entries, most_bytes, way, event_fd, fds, timeout_ms): answer until there
 * is something for Python: a message, one of `fds`, or the time is over. */
static PyObject *attendant_attend(AttendantObject *self, PyObject *arguments) {
    struct call call = {.self = self};
    PyObject *fds;
    int way, event, timeout_ms;
    Py_ssize_t most_bytes;
    if (!PyArg_ParseTuple(arguments, "OOOniiOi", &call.pairs, &call.accounts, &call.entries,
                          &most_bytes, &way, &event, &fds, &timeout_ms)) {
        return NULL;
    }
    call.most_bytes = (size_t)most_bytes;
    call.way = (enum sgd_way)way;
    struct pollfd waits[1 + MOST_FDS];
    nfds_t count;
    if (!read_fds(fds, event, waits, &count)) {
        return NULL;
    }
    bool are_lists =
        PyList_Check(call.pairs) && PyList_Check(call.accounts) && PyList_Check(call.entries);
    if (!are_lists || PyList_Size(call.pairs) != PyList_Size(call.accounts)) {
        PyErr_SetString(PyExc_ValueError, "pairs and accounts are lists of one length");
        return NULL;
    }
    loop(&call, waits, count, timeout_ms);
    Py_RETURN_NONE;
}

/* tallies() -> bytes of what was answered since the last call. */
static PyObject *attendant_tallies(AttendantObject *self, PyObject *unused) {
    (void)unused;
    Py_ssize_t size = (Py_ssize_t)(self->tallied * sizeof *self->tallies);
    self->tallied = 0;
    return PyBytes_FromStringAndSize((const char *)self->tallies, size);
}

static void attendant_dealloc(AttendantObject *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"attend", (PyCFunction)attendant_attend, METH_VARARGS, "answer until Python is needed"},
    {"tallies", (PyCFunction)attendant_tallies, METH_NOARGS, "tallies() -> bytes, for meters"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_dealloc, attendant_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_doc, "Answers what is in shared memory."},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "paceline.native._native.Attendant",
    .basicsize = sizeof(AttendantObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

PyMethodDef pl_attend_functions[] = {
    {"sgd", attend_sgd, METH_VARARGS, "sgd(rows, gradients, count, alpha, way) -> bool"},
    {NULL, NULL, 0, NULL},
};

int pl_add_attendant(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    if (type == NULL || PyModule_AddObject(module, "Attendant", type) != 0) {
        Py_XDECREF(type);
        return -1;
    }
    return 0;
}
