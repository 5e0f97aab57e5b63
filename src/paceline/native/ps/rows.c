/* The rows of a server, for Python (ps/state/plain_messages.py): reads messages, copies rows; see rows.h. */
#include "rows.h"

#include <string.h>

#define AHEAD 6 /* rows that are on their way from memory while one is copied */

static PyObject *none(void) {
    PyErr_Clear();
    Py_INCREF(Py_None);
    return Py_None;
}

static bool is_little_endian(void) {
    const uint16_t one = 1;
    uint8_t first;
    memcpy(&first, &one, 1);
    return first == 1;
}

/* The bytes of anything that has some. The memory stays: whoever calls has the object. */
static bool read_bytes(PyObject *object, struct pl_bytes *found) {
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_SIMPLE) < 0) {
        return false;
    }
    *found = (struct pl_bytes){view.buf, (size_t)view.len};
    PyBuffer_Release(&view);
    return true;
}

/* --- copying ----------------------------------------------------------------------------------- */

enum direction { GATHER, SCATTER };

static bool copy_lines(const struct pl_entry *entry, uint32_t column, const int32_t *slots,
                       uint32_t lines, char *packed, enum direction direction) {
    size_t bytes = entry->column[column].bytes;
    char *base = (char *)(uintptr_t)entry->column[column].address;
    for (uint32_t i = 0; i < lines; i++) {
        if (lines - i > AHEAD) {
            __builtin_prefetch(base + (size_t)(uint32_t)slots[i + AHEAD] * bytes);
        }
        if ((uint32_t)slots[i] >= entry->slots) {
            return false;
        }
        char *kept = base + (size_t)(uint32_t)slots[i] * bytes;
        if (direction == GATHER) {
            memcpy(packed + i * bytes, kept, bytes);
        } else {
            memcpy(kept, packed + i * bytes, bytes);
        }
    }
    return true;
}

/* --- a LOOKUP ---------------------------------------------------------------------------------- */

bool pl_copy_found(const struct pl_message *m, const struct pl_share *shares, const int32_t *slots,
                   char *at) {
    for (uint32_t number = 0; number < m->head.sections; number++) {
        uint32_t lines = shares[number].lines;
        const struct pl_entry *entry = pl_entry_of(m->entries, shares[number].table);
        size_t bytes = (size_t)lines * entry->row_bytes;
        if (!copy_lines(entry, 0, slots, lines, at, GATHER)) {
            return false;
        }
        memset(at + bytes, 0, pl_aligned(bytes) - bytes);
        at += pl_aligned(bytes);
        slots += lines;
    }
    return true;
}

/* (shares, frames of FOUND). The first frame is that of the LOOKUP, but for the kind. */
static PyObject *found_of(const struct pl_message *m, PyObject *shares, PyObject *slots) {
    PyObject *first = PyBytes_FromStringAndSize(m->first.at, (Py_ssize_t)m->first.count);
    PyObject *values = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)m->values_bytes);
    PyObject *found = NULL;
    if (first != NULL && values != NULL) {
        PyBytes_AsString(first)[offsetof(struct pl_head, kind)] = PL_FOUND;
        if (pl_copy_found(m, (void *)PyBytes_AsString(shares), (void *)PyBytes_AsString(slots),
                       PyBytes_AsString(values))) {
            found = Py_BuildValue("(O[Oy#O])", shares, first, "", (Py_ssize_t)0, values);
        }
    }
    Py_XDECREF(first);
    Py_XDECREF(values);
    return found;
}

/* --- a PUSH ------------------------------------------------------------------------------------ */

/* Sections that are updated together: their gradients follow each other without a gap. */
struct group {
    uint32_t start, stop;
    uint64_t lines;
    size_t offset, end; /* of their values */
    struct pl_record first;
};

static bool is_alike(const struct pl_message *m, const struct group *group,
                     const struct pl_record *record) {
    const struct pl_entry *mine = pl_entry_of(m->entries, record->table);
    const struct pl_entry *theirs = pl_entry_of(m->entries, group->first.table);
    return mine->family == theirs->family && record->lr == group->first.lr &&
           group->end % 8 == 0 && (!mine->is_stepped || mine->step == theirs->step);
}

static bool append_group(PyObject *groups, const struct group *group) {
    PyObject *made = Py_BuildValue("(IIKnId)", group->start, group->stop,
                                   (unsigned long long)group->lines, (Py_ssize_t)group->offset,
                                   group->first.table, group->first.lr);
    bool is_done = made != NULL && PyList_Append(groups, made) == 0;
    Py_XDECREF(made);
    return is_done;
}

static bool append_groups(PyObject *groups, const struct pl_message *m) {
    struct group group = {.stop = 0};
    for (uint32_t number = 0; number < m->head.sections; number++) {
        struct pl_record record = pl_record_of(m, number);
        if (number == 0 || !is_alike(m, &group, &record)) {
            if (number > 0 && !append_group(groups, &group)) {
                return false;
            }
            size_t offset = pl_aligned(group.end);
            group = (struct group){.start = number, .offset = offset, .end = offset, .first = record};
        }
        group.stop = number + 1;
        group.lines += record.ids;
        group.end += record.ids * pl_entry_of(m->entries, record.table)->row_bytes;
    }
    return m->head.sections == 0 || append_group(groups, &group);
}

/* (shares, slots, groups, request, client, sequence, the frame of DONE) */
static PyObject *push_of(const struct pl_message *m, PyObject *shares, PyObject *slots) {
    char done[sizeof(struct pl_head) + 2];
    struct pl_head head = m->head;
    head.kind = PL_DONE;
    head.sequence = 0;
    head.sections = 0;
    memcpy(done, &head, sizeof head);
    memcpy(done + sizeof head, "{}", 2);
    PyObject *groups = PyList_New(0);
    PyObject *found = NULL;
    if (groups != NULL && append_groups(groups, m)) {
        found = Py_BuildValue("(OOOKy#Ky#)", shares, slots, groups,
                              (unsigned long long)m->head.request, m->head.client, (Py_ssize_t)16,
                              (unsigned long long)m->head.sequence, done, (Py_ssize_t)sizeof done);
    }
    Py_XDECREF(groups);
    return found;
}

/* rows_read(entries, most_bytes, first, integers, values)
 * -> None: not plain, or not perfect: nothing was done, and Python does the message;
 *    (shares, frames) of a LOOKUP: the frames of its FOUND;
 *    (shares, slots, groups, request, client, sequence, done) of a PUSH, which is checked: `groups`
 *    has (start, stop, lines, offset, table, lr) for sections that are updated together, `done` is
 *    the frame of its answer.
 * `most_bytes` is of all rows. */
static PyObject *rows_read(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self;
    if (count != 5 || !PyList_Check(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "rows_read(entries, most_bytes, first, integers, values)");
        return NULL;
    }
    size_t most_bytes = PyLong_AsSize_t(arguments[1]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    struct pl_message m = {.entries = arguments[0]};
    if (!is_little_endian() || !read_bytes(arguments[2], &m.first) ||
        !read_bytes(arguments[3], &m.integers) || !read_bytes(arguments[4], &m.values) ||
        !pl_is_plain(&m, most_bytes)) {
        return none();
    }
    Py_ssize_t shares_bytes = (Py_ssize_t)(m.head.sections * sizeof(struct pl_share));
    PyObject *shares = PyBytes_FromStringAndSize(NULL, shares_bytes);
    PyObject *slots = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(m.lines * sizeof(int32_t)));
    PyObject *found = NULL;
    if (shares != NULL && slots != NULL &&
        pl_find(&m, (void *)PyBytes_AsString(shares), (void *)PyBytes_AsString(slots))) {
        found = m.head.kind == PL_PUSH ? push_of(&m, shares, slots) : found_of(&m, shares, slots);
    }
    Py_XDECREF(shares);
    Py_XDECREF(slots);
    return found == NULL ? none() : found; /* out of memory: Python may say so */
}

struct move {
    PyObject *entries;
    struct pl_bytes shares, slots;
    uint64_t start, stop; /* shares */
    char *packed[PL_COLUMNS];
    uint32_t columns;
    size_t rows_bytes; /* so many were moved */
    int64_t step;      /* of the first share */
};

static bool read_move(PyObject *const *arguments, Py_ssize_t count, struct move *m) {
    if (count < 6 || count > 5 + PL_COLUMNS || !PyList_Check(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "expected: entries, shares, slots, start, stop, addresses");
        return false;
    }
    *m = (struct move){.entries = arguments[0], .columns = (uint32_t)count - 5};
    if (!read_bytes(arguments[1], &m->shares) || !read_bytes(arguments[2], &m->slots)) {
        return false;
    }
    m->start = PyLong_AsSize_t(arguments[3]);
    m->stop = PyLong_AsSize_t(arguments[4]);
    for (uint32_t column = 0; column < m->columns; column++) {
        m->packed[column] = PyLong_AsVoidPtr(arguments[5 + column]);
    }
    return !PyErr_Occurred();
}

static bool move_share(struct move *m, const struct pl_entry *entry, const int32_t *slots,
                       uint32_t lines, enum direction direction) {
    if (lines == 0) {
        return true;
    }
    if (entry->map == 0 || entry->columns != m->columns) {
        return false;
    }
    m->rows_bytes += (size_t)lines * entry->row_bytes;
    for (uint32_t column = 0; column < m->columns; column++) {
        if (!copy_lines(entry, column, slots, lines, m->packed[column], direction)) {
            return false;
        }
        m->packed[column] += lines * entry->column[column].bytes;
    }
    return true;
}

/* Each share of a PUSH is gathered once: that is its table's next step. */
static bool move_all(struct move *m, enum direction direction) {
    const struct pl_share *shares = (const void *)m->shares.at;
    const int32_t *slots = (const void *)m->slots.at;
    uint64_t left = m->slots.count / sizeof *slots;
    bool fits = m->stop <= m->shares.count / sizeof *shares;
    for (uint64_t number = 0; fits && number < m->stop; number++) {
        struct pl_entry *entry = pl_entry_of(m->entries, shares[number].table);
        uint32_t lines = shares[number].lines;
        fits = entry != NULL && lines <= left;
        if (fits && number >= m->start) {
            entry->step += direction == GATHER;
            m->step = number == m->start ? entry->step : m->step;
            fits = move_share(m, entry, slots, lines, direction);
        }
        slots += lines;
        left -= lines;
    }
    if (!fits) {
        PyErr_SetString(PyExc_RuntimeError, "slots are not of these tables");
    }
    return fits;
}

/* rows_gather(values, offset, grad_address, entries, shares, slots, start, stop, *addresses)
 * Copy the rows of shares `start` to `stop`, and each kind of their state, to one address each,
 * line behind line; and their gradients, which follow each other in the frame `values` from
 * `offset` on. Counts the push in each table's step, and returns that of the first. */
static PyObject *rows_gather(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self;
    struct move m;
    struct pl_bytes values;
    if (!read_move(arguments + 3, count - 3, &m)) {
        return NULL;
    }
    size_t offset = PyLong_AsSize_t(arguments[1]);
    char *grad = PyLong_AsVoidPtr(arguments[2]);
    if (PyErr_Occurred() || !read_bytes(arguments[0], &values) || !move_all(&m, GATHER)) {
        return NULL;
    }
    if (offset > values.count || m.rows_bytes > values.count - offset) {
        PyErr_SetString(PyExc_RuntimeError, "slots are not of this message");
        return NULL;
    }
    memcpy(grad, values.at + offset, m.rows_bytes);
    return PyLong_FromLongLong(m.step);
}

/* rows_scatter(entries, shares, slots, start, stop, *addresses): copy rows and state back. */
static PyObject *rows_scatter(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self;
    struct move m;
    if (!read_move(arguments, count, &m) || !move_all(&m, SCATTER)) {
        return NULL;
    }
    return none();
}

PyMethodDef pl_rows_functions[] = {
    {"rows_read", (PyCFunction)(void (*)(void))rows_read, METH_FASTCALL, NULL},
    {"rows_gather", (PyCFunction)(void (*)(void))rows_gather, METH_FASTCALL, NULL},
    {"rows_scatter", (PyCFunction)(void (*)(void))rows_scatter, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
