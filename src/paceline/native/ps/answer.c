/* Answers one LOOKUP or PUSH that is native and without a fault (check.c), from its frames to its reply.
 *
 * The only code that does so without Python: messages come from shared memory (loop.c), from ZeroMQ
 * or from a journal that is replayed (`Responder.answer`, for ps/state/native_messages.py). A push is
 * checked, journaled, applied and acknowledged, in this order (decision 0007).
 *
 * [Note: what is believed]
 * A trainer can write to its ring at any time. Head, records and ids are copied to private memory
 * before they are checked, and gradients before they are journaled, so that a replay applies the
 * same ones. Gradients that are not journaled are read in place: they are numbers, whatever they
 * are. */
#include "answer.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

uint64_t pl_clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* --- reading ------------------------------------------------------------------------------------ */

/* Memory of at least so many bytes, kept for the next message; NULL: there is none. */
static void *grown(void *memory, size_t *has_bytes, size_t bytes) {
    if (bytes <= *has_bytes) {
        return memory;
    }
    void *found = realloc(memory, 2 * bytes);
    *has_bytes = found == NULL ? *has_bytes : 2 * bytes;
    return found;
}

static bool copy_frames(ResponderObject *self, struct pl_message *m, bool with_values) {
    struct pl_bytes *frames[PL_RING_FRAMES] = {&m->first, &m->integers, &m->values};
    unsigned count = with_values ? 3 : 2;
    size_t bytes = 0;
    for (unsigned i = 0; i < count; i++) {
        bytes += pl_aligned(frames[i]->count);
    }
    char *at = grown(self->copy, &self->copy_bytes, bytes + 1);
    if (at == NULL) {
        return false;
    }
    self->copy = at;
    for (unsigned i = 0; i < count; i++) {
        if (frames[i]->count != 0) {
            memcpy(at, frames[i]->at, frames[i]->count);
        }
        frames[i]->at = at;
        at += pl_aligned(frames[i]->count);
    }
    return true;
}

static bool is_little_endian(void) {
    const uint16_t one = 1;
    uint8_t first;
    memcpy(&first, &one, 1);
    return first == 1;
}

/* Copy what must not change, and check all of it; false if it is for Python. */
static bool read_message(ResponderObject *self, const struct pl_request *r, struct pl_message *m) {
    if (r->count != 3 || !is_little_endian()) {
        return false;
    }
    *m = (struct pl_message){
        .entries = self->entries,
        .first = {r->frames[0].data, r->frames[0].size},
        .integers = {r->frames[1].data, r->frames[1].size},
        .values = {r->frames[2].data, r->frames[2].size},
    };
    bool is_aligned = (uintptr_t)m->values.at % sizeof(float) == 0;
    bool with_values = r->is_shared ? r->journal != Py_None : !is_aligned;
    if ((r->is_shared || with_values) && !copy_frames(self, m, with_values)) {
        return false;
    }
    if (!pl_is_native(m, self->most_bytes) || m->head.sections > PL_TALLIES - self->tallied) {
        return false;
    }
    int32_t *slots = grown(self->slots, &self->slots_count, (m->lines + 1) * sizeof *slots);
    if (slots == NULL) {
        return false;
    }
    self->slots = slots;
    return pl_find(m, slots);
}

/* --- a LOOKUP ----------------------------------------------------------------------------------- */

static void copy_lines(const struct pl_entry *entry, const int32_t *slots, uint64_t lines,
                       unsigned char *to) {
    size_t bytes = entry->row_bytes;
    const char *rows = (const char *)(uintptr_t)entry->column[0].address;
    for (uint64_t i = 0; i < lines; i++) {
        if (lines - i > PL_AHEAD) {
            __builtin_prefetch(rows + (size_t)slots[i + PL_AHEAD] * bytes);
        }
        memcpy(to + i * bytes, rows + (size_t)slots[i] * bytes, bytes);
    }
}

static void copy_rows(const ResponderObject *self, const struct pl_message *m, unsigned char *to) {
    const int32_t *slots = self->slots;
    for (uint32_t number = 0; number < m->head.sections; number++) {
        struct pl_record record = pl_record_of(m, number);
        const struct pl_entry *entry = pl_entry_of(m->entries, record.table);
        size_t bytes = (size_t)record.ids * entry->row_bytes;
        copy_lines(entry, slots, record.ids, to);
        memset(to + bytes, 0, pl_aligned(bytes) - bytes);
        to += pl_aligned(bytes);
        slots += record.ids;
    }
}

/* The first frame of FOUND is that of the LOOKUP, but for the kind. */
static pl_outcome answer_lookup(const ResponderObject *self, const struct pl_message *m,
                                struct pl_reply *reply) {
    const uint64_t sizes[3] = {m->first.count, 0, m->values_bytes};
    unsigned char *places[3];
    if (!reply->begin(reply, sizes, 3, places)) {
        return PL_FOR_PYTHON;
    }
    memcpy(places[0], m->first.at, m->first.count);
    places[0][offsetof(struct pl_head, kind)] = PL_FOUND;
    copy_rows(self, m, places[2]);
    return PL_ANSWERED;
}

/* --- a PUSH ------------------------------------------------------------------------------------- */

static void apply(const ResponderObject *self, const struct pl_message *m) {
    const int32_t *slots = self->slots;
    const char *values = m->values.at;
    for (uint32_t number = 0; number < m->head.sections; number++) {
        struct pl_record record = pl_record_of(m, number);
        struct pl_entry *entry = pl_entry_of(m->entries, record.table);
        pl_update_rows(entry, slots, record.ids, (const float *)(const void *)values, record.lr);
        slots += record.ids;
        values += pl_aligned(record.ids * entry->row_bytes);
    }
}

static bool append(PyObject *journal, const struct pl_message *m) {
    if (journal == Py_None) {
        return true;
    }
    const struct pl_bytes *frames[PL_RING_FRAMES] = {&m->first, &m->integers, &m->values};
    PyObject *list = PyList_New(0);
    for (unsigned i = 0; list != NULL && i < PL_RING_FRAMES; i++) {
        Py_ssize_t count = (Py_ssize_t)frames[i]->count;
        /* An empty frame may have no address. */
        char *at = count == 0 ? "" : (char *)(uintptr_t)frames[i]->at;
        PyObject *view = PyMemoryView_FromMemory(at, count, PyBUF_READ);
        if (view == NULL || PyList_Append(list, view) != 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(view);
    }
    PyObject *done =
        list == NULL ? NULL : PyObject_CallFunctionObjArgs(journal, list, (PyObject *)NULL);
    Py_XDECREF(list);
    Py_XDECREF(done);
    return done != NULL;
}

bool pl_reach(PyObject *reach, const char *place) {
    PyObject *done = reach == Py_None ? Py_None : PyObject_CallFunction(reach, "s", place);
    if (done != NULL && reach != Py_None) {
        Py_DECREF(done);
    }
    return done != NULL;
}

static void write_done(const struct pl_message *m, unsigned char *to) {
    struct pl_head done = m->head;
    done.kind = PL_DONE;
    done.sequence = 0;
    done.sections = 0;
    memcpy(to, &done, sizeof done);
    memcpy(to + sizeof done, "{}", 2);
}

static pl_outcome answer_push(const ResponderObject *self, const struct pl_request *r,
                              const struct pl_message *m, struct pl_reply *reply) {
    const uint64_t sizes[1] = {sizeof(struct pl_head) + 2};
    unsigned char *places[1];
    bool is_next = r->account != NULL && m->head.sequence == r->account->applied + 1 &&
                   memcmp(r->account->client, m->head.client, sizeof m->head.client) == 0;
    if (!is_next || !reply->begin(reply, sizes, 1, places)) {
        return PL_FOR_PYTHON;
    }
    if (!append(r->journal, m)) {
        return PL_FAILED;
    }
    apply(self, m);
    r->account->applied++;
    write_done(m, places[0]);
    return pl_reach(r->reach, "APPLIED") ? PL_ANSWERED : PL_FAILED;
}

/* --- both --------------------------------------------------------------------------------------- */

static void count_sections(ResponderObject *self, const struct pl_message *m, uint64_t start_ns) {
    uint32_t sections = m->head.sections;
    uint64_t end_ns = pl_clock_ns();
    uint64_t each_ns = sections == 0 ? 0 : (end_ns - start_ns) / sections;
    uint32_t took_ns = each_ns > UINT32_MAX ? UINT32_MAX : (uint32_t)each_ns;
    for (uint32_t i = 0; i < sections; i++) {
        struct pl_record record = pl_record_of(m, i);
        self->tallies[self->tallied++] = (struct pl_tally){
            record.table, (uint32_t)record.ids, end_ns, took_ns, m->head.kind == PL_PUSH};
    }
}

pl_outcome pl_answer(ResponderObject *self, const struct pl_request *request,
                     struct pl_reply *reply) {
    uint64_t start_ns = pl_clock_ns();
    struct pl_message m;
    if (!read_message(self, request, &m)) {
        return PL_FOR_PYTHON;
    }
    pl_outcome done = m.head.kind == PL_PUSH ? answer_push(self, request, &m, reply)
                                             : answer_lookup(self, &m, reply);
    if (done == PL_ANSWERED) {
        count_sections(self, &m, start_ns);
    }
    return done;
}

/* --- for Python --------------------------------------------------------------------------------- */

/* Frames as new bytes in a list. */
static bool begin_list(struct pl_reply *reply, const uint64_t *sizes, unsigned count,
                       unsigned char **places) {
    for (unsigned i = 0; i < count; i++) {
        PyObject *frame = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)sizes[i]);
        if (frame == NULL || PyList_Append(reply->to, frame) != 0) {
            Py_XDECREF(frame);
            PyErr_Clear();
            return false;
        }
        places[i] = (unsigned char *)PyBytes_AsString(frame);
        Py_DECREF(frame); /* the list has it */
    }
    return true;
}

static PyObject *answer_frames(ResponderObject *self, struct pl_request *request) {
    struct pl_reply reply = {begin_list, PyList_New(0)};
    if (reply.to == NULL) {
        return NULL;
    }
    pl_outcome done = pl_answer(self, request, &reply);
    if (done == PL_ANSWERED) {
        return reply.to;
    }
    Py_DECREF(reply.to);
    if (done == PL_FAILED) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* answer(first, integers, values, account, journal) -> the frames of the reply; None: the message is
 * Python's, and nothing was done. `account` is a bytearray of ps/state/clients.py, or None. */
static PyObject *responder_answer(ResponderObject *self, PyObject *arguments) {
    struct pl_request request = {.count = 3, .reach = Py_None};
    Py_buffer views[3];
    PyObject *account;
    if (!PyArg_ParseTuple(arguments, "y*y*y*OO", &views[0], &views[1], &views[2], &account,
                          &request.journal)) {
        return NULL;
    }
    for (unsigned i = 0; i < 3; i++) {
        request.frames[i] = (pl_frame){views[i].buf, (uint64_t)views[i].len};
    }
    request.account = pl_account_in(account);
    PyObject *found = answer_frames(self, &request);
    for (unsigned i = 0; i < 3; i++) {
        PyBuffer_Release(&views[i]);
    }
    return found;
}

/* tallies() -> bytes of what was answered since the last call. */
static PyObject *responder_tallies(ResponderObject *self, PyObject *unused) {
    (void)unused;
    Py_ssize_t size = (Py_ssize_t)(self->tallied * sizeof *self->tallies);
    self->tallied = 0;
    return PyBytes_FromStringAndSize((const char *)self->tallies, size);
}

static int responder_init(ResponderObject *self, PyObject *arguments, PyObject *keywords) {
    (void)keywords;
    PyObject *entries;
    Py_ssize_t most_bytes;
    if (!PyArg_ParseTuple(arguments, "On", &entries, &most_bytes)) {
        return -1;
    }
    if (!PyList_Check(entries) || self->entries != NULL) {
        PyErr_SetString(PyExc_TypeError, "Responder(list of entries, most_bytes), once");
        return -1;
    }
    Py_INCREF(entries);
    self->entries = entries;
    self->most_bytes = (size_t)most_bytes;
    return 0;
}

static void responder_dealloc(ResponderObject *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->entries);
    free(self->copy);
    free(self->slots);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"answer", (PyCFunction)responder_answer, METH_VARARGS, "answer one message, or None"},
    {"run", (PyCFunction)pl_responder_run, METH_VARARGS, "answer until Python is needed"},
    {"tallies", (PyCFunction)responder_tallies, METH_NOARGS, "tallies() -> bytes, for meters"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_init, responder_init},
    {Py_tp_dealloc, responder_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_doc, "Answers native messages of one server."},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "paceline.native._native.Responder",
    .basicsize = sizeof(ResponderObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

int pl_add_responder(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    if (type == NULL || PyModule_AddObject(module, "Responder", type) != 0) {
        Py_XDECREF(type);
        return -1;
    }
    return 0;
}
