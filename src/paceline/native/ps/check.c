/* Reads and checks a LOOKUP or PUSH; see rows.h.
 *
 * Only for messages that are native and without a fault. All others are Python's (ps/protocol/wire.py,
 * ps/state/validate.py), which does them from their beginning and words the refusal if there is one: so
 * nothing here has a text, and nothing is accepted here that Python would refuse
 * (tests/ps/state/test_native_messages.py compares them).
 *
 * What is native: sections of ROWS whose rows all have a slot, in tables without max_norm; for a
 * PUSH, in tables whose optimizer update.c has. Nothing in a message is believed: counts are compared
 * with the bytes that are there before they are multiplied, ids with the table before the map is
 * read. */
#include "rows.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MOST_SECTIONS 4096
#define MOST_TABLES 4096

_Static_assert(sizeof(struct pl_head) == 48, "as on the wire");
_Static_assert(sizeof(struct pl_record) == 32, "as on the wire");
_Static_assert(sizeof(struct pl_entry) == 144, "as ps/state/native_table.py packs it");

/* What a bytearray of this size holds, or NULL. */
static void *held_in(PyObject *object, size_t size) {
    bool is_one = PyByteArray_Check(object) && PyByteArray_Size(object) == (Py_ssize_t)size;
    return is_one ? PyByteArray_AsString(object) : NULL;
}

struct pl_entry *pl_entry_in(PyObject *object) { return held_in(object, sizeof(struct pl_entry)); }

struct pl_account *pl_account_in(PyObject *object) {
    return held_in(object, sizeof(struct pl_account));
}

struct pl_entry *pl_entry_of(PyObject *entries, uint64_t number) {
    if (number >= (uint64_t)PyList_Size(entries)) {
        return NULL;
    }
    return pl_entry_in(PyList_GetItem(entries, (Py_ssize_t)number));
}

struct pl_record pl_record_of(const struct pl_message *m, uint32_t number) {
    struct pl_record found;
    memcpy(&found, m->first.at + sizeof(struct pl_head) + number * sizeof found, sizeof found);
    return found;
}

static bool is_native_head(struct pl_message *m) {
    struct pl_head *head = &m->head;
    if (m->first.count < sizeof *head) {
        return false;
    }
    memcpy(head, m->first.at, sizeof *head);
    if (memcmp(head->magic, "PLPS", 4) != 0 || head->version != 1 || head->flags != 0 ||
        head->reserved != 0 || head->sections > MOST_SECTIONS) {
        return false;
    }
    bool is_lookup = head->kind == PL_LOOKUP && head->sequence == 0;
    bool is_push = head->kind == PL_PUSH && head->sequence != 0;
    size_t records_bytes = head->sections * sizeof(struct pl_record);
    return (is_lookup || is_push) && m->first.count == sizeof *head + records_bytes;
}

static bool is_native_record(const struct pl_record *record, const struct pl_entry *entry) {
    if (record->form != 0 || record->mode != 0 || record->flags != 0 || record->bags != 0) {
        return false;
    }
    if (record->dtype != entry->dtype || entry->is_renormed) {
        return false;
    }
    if (!(record->lr >= 0) || record->lr > PL_MAX_LEARNING_RATE) {
        return false;
    }
    return entry->map != 0 || record->ids == 0;
}

bool pl_is_native(struct pl_message *m, size_t most_bytes) {
    uint64_t seen[MOST_TABLES / 64] = {0};
    if (!is_native_head(m) || m->integers.count % 8 != 0) {
        return false;
    }
    uint64_t integers = m->integers.count / 8;
    for (uint32_t number = 0; number < m->head.sections; number++) {
        struct pl_record record = pl_record_of(m, number);
        const struct pl_entry *entry = pl_entry_of(m->entries, record.table);
        if (entry == NULL || record.table >= MOST_TABLES || !is_native_record(&record, entry)) {
            return false;
        }
        uint64_t bit = UINT64_C(1) << record.table % 64;
        if (m->head.kind == PL_PUSH && entry->optimizer == PL_BY_TORCH) {
            return false;
        }
        if (m->head.kind == PL_PUSH && (seen[record.table / 64] & bit) != 0) {
            return false; /* twice */
        }
        seen[record.table / 64] |= bit;
        if (record.ids > integers - m->lines || record.ids > UINT32_MAX) {
            return false;
        }
        m->lines += record.ids;
        m->values_bytes += pl_aligned(record.ids * entry->row_bytes); /* both are below 2**32 */
        if (m->values_bytes > most_bytes) {
            return false;
        }
    }
    return m->lines == integers &&
           m->values.count == (m->head.kind == PL_PUSH ? m->values_bytes : 0);
}

static int compare(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* Whether no slot comes twice. Sorted, because a hash could be made to collide by who sends. */
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

static bool find_slots(const struct pl_entry *entry, const char *ids, uint64_t count, bool is_push,
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
        is_ascending = is_ascending && id > last;
        last = id;
        slots[i] = is_push && id == entry->padding_idx ? PL_SKIPPED : map[place];
    }
    return !is_push || is_ascending || are_different(slots, count);
}

bool pl_find(const struct pl_message *m, int32_t *slots) {
    const char *ids = m->integers.at;
    for (uint32_t number = 0; number < m->head.sections; number++) {
        struct pl_record record = pl_record_of(m, number);
        const struct pl_entry *entry = pl_entry_of(m->entries, record.table);
        if (!find_slots(entry, ids, record.ids, m->head.kind == PL_PUSH, slots)) {
            return false;
        }
        ids += record.ids * 8;
        slots += record.ids;
    }
    return true;
}
