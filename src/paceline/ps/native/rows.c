/* The rows of a server: reads a LOOKUP or PUSH, finds its rows, copies them.
 *
 * Called by ps/quick.py. Only for messages that are plain and perfect: for all others `rows_read`
 * says None, and Python (ps/wire.py, ps/sections.py) does the message from its beginning, and words
 * the refusal if it is one. So nothing here has an error text for a client, and nothing here
 * decides anything that Python does not decide the same way (tests/ps/test_quick.py compares them).
 *
 * What is plain: sections of ROWS whose rows all have a slot, in tables without max_norm, and with
 * no gradient for a padding row. Nothing in a message is believed: counts are compared with the
 * bytes that are there before they are multiplied, ids with the table before the map is read.
 *
 * [Note: addresses]
 * An *entry* is a bytearray that a Table owns, written by ps/entry.py where the table gets or drops
 * its storage, and nowhere else; without storage its map is 0. The memory behind it is mapped once
 * for the life of the storage and never moves. Addresses are read from the entries in each call
 * and kept by none: between the calls for one PUSH there is a *plan*, which has slots only. */
#include "native.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define HEAD_BYTES 48
#define RECORD_BYTES 32
#define MOST_SECTIONS 4096
#define MOST_TABLES 4096
#define MOST_COLUMNS 3
#define ALIGNMENT 8
#define AHEAD 6 /* rows that are on their way from memory while one is copied */

enum { LOOKUP = 3, PUSH = 4, FOUND = 66 };

/* As ps/wire.py packs them; the machine has to be little endian. */
struct head {
    char magic[4];
    uint16_t version;
    uint8_t kind;
    uint8_t flags;
    uint64_t request;
    char client[16];
    uint64_t sequence;
    uint32_t sections;
    uint32_t reserved;
};

struct record {
    uint32_t table;
    uint8_t form;
    uint8_t mode;
    uint8_t flags;
    uint8_t dtype;
    uint64_t ids;
    uint64_t bags;
    double lr;
};

/* As ps/entry.py packs it. */
struct column {
    uint64_t address;
    uint64_t bytes; /* of one slot */
};

struct entry {
    uint64_t map; /* address of int32 slots, one for each id; 0: no row is kept */
    uint64_t slots;
    int64_t first; /* the id of the map's first slot */
    uint64_t span; /* how many ids the map has */
    int64_t padding_idx; /* or -1 */
    uint32_t row_bytes;
    uint8_t dtype;
    uint8_t is_renormed; /* rows change when they are looked up */
    uint16_t columns;
    struct column column[MOST_COLUMNS]; /* the rows, then each kind of state */
};

_Static_assert(sizeof(struct head) == HEAD_BYTES, "as on the wire");
_Static_assert(sizeof(struct record) == RECORD_BYTES, "as on the wire");
_Static_assert(sizeof(struct entry) == 96, "as ps/entry.py packs it");

/* A plan: a struct plan, then its shares, then the slots of all of them. */
struct share {
    uint32_t table;
    uint32_t lines;
};

struct plan {
    uint64_t shares;
    uint64_t lines;
};

struct bytes {
    const char *at;
    size_t count;
};

static bool is_little_endian(void) {
    const uint16_t one = 1;
    uint8_t first;
    memcpy(&first, &one, 1);
    return first == 1;
}

static size_t aligned(size_t count) { return (count + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

static PyObject *none(void) {
    PyErr_Clear();
    Py_INCREF(Py_None);
    return Py_None;
}

/* The entry of a table, or NULL. */
static const struct entry *entry_of(PyObject *entries, uint64_t number) {
    if (number >= (uint64_t)PyList_Size(entries)) {
        return NULL;
    }
    PyObject *found = PyList_GetItem(entries, (Py_ssize_t)number);
    if (!PyByteArray_Check(found) || PyByteArray_Size(found) != (Py_ssize_t)sizeof(struct entry)) {
        return NULL;
    }
    return (const struct entry *)(void *)PyByteArray_AsString(found);
}

/* --- a plan ------------------------------------------------------------------------------------ */

static size_t plan_bytes(uint64_t shares, uint64_t lines) {
    return sizeof(struct plan) + shares * sizeof(struct share) + lines * sizeof(int32_t);
}

static struct share *shares_of(char *plan) { return (struct share *)(void *)(plan + sizeof(struct plan)); }

static int32_t *slots_of(char *plan) {
    return (int32_t *)(void *)(shares_of(plan) + ((struct plan *)(void *)plan)->shares);
}

/* --- reading a message ------------------------------------------------------------------------- */

struct message {
    struct bytes head, integers, values;
    struct head fixed;
    PyObject *entries;
    uint64_t lines;
    size_t row_bytes; /* of all sections, each aligned */
};

static bool is_plain_head(struct message *m) {
    struct head *head = &m->fixed;
    if (m->head.count < HEAD_BYTES) {
        return false;
    }
    memcpy(head, m->head.at, HEAD_BYTES);
    if (memcmp(head->magic, "PLPS", 4) != 0 || head->version != 1 || head->flags != 0 ||
        head->reserved != 0 || head->sections > MOST_SECTIONS) {
        return false;
    }
    if (head->kind == LOOKUP ? head->sequence != 0 : head->kind != PUSH || head->sequence == 0) {
        return false;
    }
    return m->head.count == HEAD_BYTES + (size_t)head->sections * RECORD_BYTES;
}

static struct record record_of(const struct message *m, uint32_t number) {
    struct record found;
    memcpy(&found, m->head.at + HEAD_BYTES + (size_t)number * RECORD_BYTES, RECORD_BYTES);
    return found;
}

static bool is_plain_record(const struct message *m, const struct record *record,
                            const struct entry *entry) {
    if (record->form != 0 || record->mode != 0 || record->flags != 0 || record->bags != 0) {
        return false;
    }
    if (entry == NULL || record->dtype != entry->dtype || entry->is_renormed) {
        return false;
    }
    if (!(record->lr >= 0) || !isfinite(record->lr)) {
        return false;
    }
    /* So many integers are there at all: whatever is multiplied now is small. */
    return record->ids <= m->integers.count / 8 - m->lines && (entry->map != 0 || record->ids == 0);
}

/* Look at all records: are they plain, and are the frames as long as they say? */
static bool are_plain_records(struct message *m, size_t most_bytes) {
    uint64_t seen[MOST_TABLES / 64] = {0};
    if (m->integers.count % 8 != 0) {
        return false;
    }
    for (uint32_t number = 0; number < m->fixed.sections; number++) {
        struct record record = record_of(m, number);
        const struct entry *entry = entry_of(m->entries, record.table);
        if (record.table >= MOST_TABLES || !is_plain_record(m, &record, entry)) {
            return false;
        }
        uint64_t bit = UINT64_C(1) << record.table % 64;
        if (m->fixed.kind == PUSH && (seen[record.table / 64] & bit) != 0) {
            return false;
        }
        seen[record.table / 64] |= bit;
        if (record.ids > UINT32_MAX) {
            return false;
        }
        m->lines += record.ids;
        m->row_bytes += aligned(record.ids * entry->row_bytes); /* both are below 2**32 */
        if (m->row_bytes > most_bytes) {
            return false;
        }
    }
    return m->lines == m->integers.count / 8 &&
           m->values.count == (m->fixed.kind == PUSH ? m->row_bytes : 0);
}

static int compare(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* Whether no slot comes twice; sorted, because a hash could be made to collide by who sends. */
static bool are_different(const int32_t *slots, uint64_t count) {
    int32_t *sorted = malloc(count * sizeof *sorted);
    if (sorted == NULL) {
        return false;
    }
    memcpy(sorted, slots, count * sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, compare);
    bool found = true;
    for (uint64_t i = 1; i < count && found; i++) {
        found = sorted[i - 1] != sorted[i];
    }
    free(sorted);
    return found;
}

/* Find the slots of a section's ids; false if one is out of range, or has none. */
static bool find_slots(const struct entry *entry, const char *ids, uint64_t count, bool is_push,
                       int32_t *slots) {
    const int32_t *map = (const int32_t *)(uintptr_t)entry->map;
    bool is_ascending = true;
    int64_t last = -1;
    for (uint64_t i = 0; i < count; i++) {
        int64_t id;
        memcpy(&id, ids + i * 8, 8);
        /* Unsigned: an id below the first one is too large as well. */
        uint64_t place = (uint64_t)id - (uint64_t)entry->first;
        if (place >= entry->span || map[place] == 0) {
            return false;
        }
        if (is_push && id == entry->padding_idx) {
            return false;
        }
        is_ascending = is_ascending && id > last;
        last = id;
        slots[i] = map[place];
    }
    return !is_push || is_ascending || are_different(slots, count);
}

static bool fill_plan(const struct message *m, char *plan) {
    struct plan *fixed = (struct plan *)(void *)plan;
    fixed->shares = m->fixed.sections;
    fixed->lines = m->lines;
    int32_t *slots = slots_of(plan);
    const char *ids = m->integers.at;
    for (uint32_t number = 0; number < m->fixed.sections; number++) {
        struct record record = record_of(m, number);
        const struct entry *entry = entry_of(m->entries, record.table);
        shares_of(plan)[number] = (struct share){record.table, (uint32_t)record.ids};
        if (!find_slots(entry, ids, record.ids, m->fixed.kind == PUSH, slots)) {
            return false;
        }
        ids += record.ids * 8;
        slots += record.ids;
    }
    return true;
}

/* --- copying rows ------------------------------------------------------------------------------ */

enum direction { GATHER, SCATTER };

static bool copy_lines(const struct entry *entry, uint64_t column, const int32_t *slots,
                       uint64_t lines, char *packed, enum direction direction) {
    size_t bytes = entry->column[column].bytes;
    char *base = (char *)(uintptr_t)entry->column[column].address;
    for (uint64_t i = 0; i < lines; i++) {
        if (i + AHEAD < lines) {
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

/* --- for Python -------------------------------------------------------------------------------- */

/* The bytes of anything that has some. The stable ABI has buffers from 3.11 on; this function of it
 * is older, and gone from the headers since 3.13. Its memory stays: whoever calls holds the object. */
#if defined(Py_LIMITED_API)
extern int PyObject_AsReadBuffer(PyObject *object, const void **at, Py_ssize_t *count);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

static bool read_bytes(PyObject *object, struct bytes *found) {
    const void *at = NULL;
    Py_ssize_t count = 0;
    if (PyObject_AsReadBuffer(object, &at, &count) < 0) {
        return false;
    }
    *found = (struct bytes){at, (size_t)count};
    return true;
}

#pragma GCC diagnostic pop
#else
static bool read_bytes(PyObject *object, struct bytes *found) {
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_SIMPLE) < 0) {
        return false;
    }
    *found = (struct bytes){view.buf, (size_t)view.len};
    PyBuffer_Release(&view);
    return true;
}
#endif

/* The sections as Python wants them: ((table, ids, lr), ...). */
static PyObject *sections_of(const struct message *m) {
    PyObject *found = PyTuple_New(m->fixed.sections);
    for (uint32_t number = 0; found != NULL && number < m->fixed.sections; number++) {
        struct record record = record_of(m, number);
        PyObject *section =
            Py_BuildValue("(IKd)", record.table, (unsigned long long)record.ids, record.lr);
        if (section == NULL || PyTuple_SetItem(found, number, section) < 0) {
            Py_DECREF(found);
            return NULL;
        }
    }
    return found;
}

/* The frames of FOUND. The first is that of the LOOKUP, but for the kind. */
static PyObject *found_of(const struct message *m, char *plan) {
    PyObject *head = PyBytes_FromStringAndSize(m->head.at, (Py_ssize_t)m->head.count);
    PyObject *values = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)m->row_bytes);
    if (head == NULL || values == NULL) {
        Py_XDECREF(head);
        Py_XDECREF(values);
        return NULL;
    }
    PyBytes_AsString(head)[offsetof(struct head, kind)] = FOUND;
    char *at = PyBytes_AsString(values);
    const int32_t *slots = slots_of(plan);
    bool is_done = true;
    for (uint32_t number = 0; number < m->fixed.sections; number++) {
        struct share share = shares_of(plan)[number];
        const struct entry *entry = entry_of(m->entries, share.table);
        size_t bytes = (size_t)share.lines * entry->row_bytes;
        is_done = is_done && copy_lines(entry, 0, slots, share.lines, at, GATHER);
        memset(at + bytes, 0, aligned(bytes) - bytes);
        at += aligned(bytes);
        slots += share.lines;
    }
    PyObject *found = is_done ? Py_BuildValue("[Oy#O]", head, "", (Py_ssize_t)0, values) : NULL;
    Py_DECREF(head);
    Py_DECREF(values);
    return found;
}

static PyObject *answer_of(const struct message *m) {
    PyObject *plan = PyBytes_FromStringAndSize(
        NULL, (Py_ssize_t)plan_bytes(m->fixed.sections, m->lines));
    PyObject *sections = NULL, *found = NULL, *answer = NULL;
    if (plan == NULL || !fill_plan(m, PyBytes_AsString(plan))) {
        Py_XDECREF(plan);
        return none();
    }
    sections = sections_of(m);
    if (sections != NULL && m->fixed.kind == LOOKUP) {
        found = found_of(m, PyBytes_AsString(plan));
        answer = found == NULL ? NULL : PyTuple_Pack(2, sections, found);
    } else if (sections != NULL) {
        answer = Py_BuildValue("(OOKy#K)", sections, plan, (unsigned long long)m->fixed.request,
                               m->fixed.client, (Py_ssize_t)16,
                               (unsigned long long)m->fixed.sequence);
    }
    Py_XDECREF(found);
    Py_XDECREF(sections);
    Py_DECREF(plan);
    return answer == NULL ? none() : answer; /* out of memory: Python may say so */
}

/* rows_read(entries, most_bytes, head, integers, values)
 * -> None: not plain, or not perfect: nothing was done, and Python does the message;
 *    (sections, frames) of a LOOKUP: the frames of its FOUND;
 *    (sections, plan, request, client, sequence) of a PUSH, which is checked completely.
 * `sections` has (table, ids, lr) for each section; `most_bytes` is of rows. */
static PyObject *rows_read(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self;
    if (count != 5 || !PyList_Check(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "rows_read(entries, most_bytes, head, integers, values)");
        return NULL;
    }
    size_t most_bytes = PyLong_AsSize_t(arguments[1]);
    if (most_bytes == (size_t)-1 && PyErr_Occurred()) {
        return NULL;
    }
    struct message m = {.entries = arguments[0]};
    if (!is_little_endian() || !read_bytes(arguments[2], &m.head) ||
        !read_bytes(arguments[3], &m.integers) || !read_bytes(arguments[4], &m.values) ||
        !is_plain_head(&m) || !are_plain_records(&m, most_bytes)) {
        return none();
    }
    return answer_of(&m);
}

struct move {
    PyObject *entries;
    char *plan;
    uint64_t start, stop; /* shares */
    char *packed[MOST_COLUMNS];
    uint64_t columns;
    size_t moved_bytes; /* of rows */
};

static bool read_move(PyObject *const *arguments, Py_ssize_t count, struct move *m) {
    if (count < 5 || count > 4 + MOST_COLUMNS || !PyList_Check(arguments[0]) ||
        !PyBytes_Check(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "expected: entries, plan, start, stop, addresses");
        return false;
    }
    m->entries = arguments[0];
    m->plan = PyBytes_AsString(arguments[1]);
    m->start = PyLong_AsSize_t(arguments[2]);
    m->stop = PyLong_AsSize_t(arguments[3]);
    m->columns = (uint64_t)count - 4;
    m->moved_bytes = 0;
    for (uint64_t column = 0; column < m->columns; column++) {
        m->packed[column] = PyLong_AsVoidPtr(arguments[4 + column]);
    }
    return !PyErr_Occurred();
}

static bool move_share(struct move *m, struct share share, const int32_t *slots,
                       enum direction direction) {
    const struct entry *entry = entry_of(m->entries, share.table);
    if (share.lines == 0) {
        return true;
    }
    if (entry == NULL || entry->map == 0 || entry->columns != m->columns) {
        return false;
    }
    m->moved_bytes += (size_t)share.lines * entry->row_bytes;
    for (uint64_t column = 0; column < m->columns; column++) {
        if (!copy_lines(entry, column, slots, share.lines, m->packed[column], direction)) {
            return false;
        }
        m->packed[column] += share.lines * entry->column[column].bytes;
    }
    return true;
}

static bool move_all(struct move *m, enum direction direction) {
    bool fits = m->stop <= ((struct plan *)(void *)m->plan)->shares;
    const int32_t *slots = slots_of(m->plan);
    for (uint64_t number = 0; fits && number < m->stop; number++) {
        struct share share = shares_of(m->plan)[number];
        fits = number < m->start || move_share(m, share, slots, direction);
        slots += share.lines;
    }
    if (!fits) {
        PyErr_SetString(PyExc_RuntimeError, "a plan is not of these tables");
    }
    return fits;
}

/* rows_gather(values, offset, grad_address, entries, plan, start, stop, *addresses): copy the rows
 * of these shares of a plan, and each kind of their state, to one address each, line behind line;
 * and their gradients, which follow each other in the frame `values` from `offset` on. */
static PyObject *rows_gather(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self;
    struct move m;
    struct bytes values;
    if (!read_move(arguments + 3, count - 3, &m)) {
        return NULL;
    }
    size_t offset = PyLong_AsSize_t(arguments[1]);
    char *grad = PyLong_AsVoidPtr(arguments[2]);
    if (PyErr_Occurred() || !read_bytes(arguments[0], &values) || !move_all(&m, GATHER)) {
        return NULL;
    }
    if (offset > values.count || m.moved_bytes > values.count - offset) {
        PyErr_SetString(PyExc_RuntimeError, "a plan is not of this message");
        return NULL;
    }
    memcpy(grad, values.at + offset, m.moved_bytes);
    Py_INCREF(Py_None);
    return Py_None;
}

/* rows_scatter(entries, plan, start, stop, *addresses): the inverse, without gradients. */
static PyObject *rows_scatter(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self;
    struct move m;
    if (!read_move(arguments, count, &m) || !move_all(&m, SCATTER)) {
        return NULL;
    }
    Py_INCREF(Py_None);
    return Py_None;
}

PyMethodDef pl_rows_functions[] = {
    {"rows_read", (PyCFunction)(void (*)(void))rows_read, METH_FASTCALL, NULL},
    {"rows_gather", (PyCFunction)(void (*)(void))rows_gather, METH_FASTCALL, NULL},
    {"rows_scatter", (PyCFunction)(void (*)(void))rows_scatter, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
