/* A trainer's plan of a batch: which rows, of which server, and the lookup for each of them.
 *
 * Called by `ps/client/message_plan.py`; `Layout.find` of `ps/client/row_plan.py` says the same in numpy, and a test
 * compares the two. All tables of a group are planned by one call. Tables that follow each other
 * with the same ids (the same memory) are sorted once.
 *
 * What comes in was checked by whoever calls, except for ids and their ranges: ids are read once,
 * so that another thread that writes to them cannot make this code leave its arrays. */
#include <stdint.h>
#include <string.h>

#include "native.h"
#include "plan.h"
#include "rows.h"

#define RECORD_BYTES ((Py_ssize_t)sizeof(struct pl_record))

enum { BY_TABLE = 0, BY_HASH = 1, BY_RANGE = 2 };

/* Sorted ids: of one table, or of several with the same ids. */
typedef struct {
    const int64_t *ids;
    int64_t count, distinct;
    uint64_t largest, rows;
    uint64_t *values; /* the distinct ids, in order */
    int64_t *ranks;   /* for each id, which of the distinct ones it is */
    int32_t *owners;  /* for each distinct id, its server; unused with BY_TABLE */
    int64_t *shares;  /* for each server, how many distinct ids; unused with BY_TABLE */
    unsigned char has_pairs, has_triples;
} Source;

typedef struct {
    const int64_t *ids, *offsets;
    int64_t count, bags;
    Source *source;
} Input;

typedef struct {
    int64_t *places, *bag_of, *offsets, *ranks, *gather, *ids, *starts;
} Results;

typedef struct {
    const Layout *layout;
    const uint64_t *rows;
    const int64_t *table_servers;
    Input *inputs;
    Source *sources;
    int64_t source_count, ids, bags, largest_input;
    int is_shared; /* all tables have the same bags: [Note: shared bags] in message_plan.py */
    Entry *entries; /* two buffers */
    Results results;
} Plan;

/* ---- one source ---------------------------------------------------------------------------- */

static void find_distinct(Source *source, const Entry *entries) {
    int64_t distinct = 0, equal = 0;
    for (int64_t at = 0; at < source->count; at++) {
        if (at > 0 && entries[at].id == entries[at - 1].id) {
            equal++;
            source->has_pairs = 1;
            source->has_triples |= equal >= 2;
        } else {
            equal = 0;
            source->values[distinct++] = entries[at].id;
        }
        source->ranks[entries[at].at] = distinct - 1;
    }
    source->distinct = distinct;
}

/* The same as `owners` of ps/protocol/sharding.py. */
static void find_owners(const Plan *plan, Source *source) {
    uint64_t servers = (uint64_t)plan->layout->servers, passed = 0;
    memset(source->shares, 0, sizeof(int64_t) * servers);
    for (int64_t at = 0; at < source->distinct; at++) {
        uint64_t id = source->values[at], owner;
        if (plan->layout->sharding == BY_HASH) {
            owner = (((id * UINT64_C(0x9E3779B97F4A7C15)) >> 32) * servers) >> 32;
        } else { /* ids grow, and so does the index of the server that has them */
            while (passed + 1 < servers && source->rows * (passed + 1) / servers <= id) {
                passed++;
            }
            owner = passed;
        }
        source->owners[at] = (int32_t)owner;
        source->shares[owner]++;
    }
}

static void read_source(const Plan *plan, Source *source) {
    Entry *entries = plan->entries;
    for (int64_t at = 0; at < source->count; at++) {
        uint64_t id = (uint64_t)source->ids[at]; /* a negative one becomes too large */
        entries[at] = (Entry){id, (uint64_t)at};
        source->largest = id > source->largest ? id : source->largest;
    }
    entries = pl_sorted(entries, entries + plan->largest_input, source->count, source->largest);
    find_distinct(source, entries);
    if (plan->layout->sharding != BY_TABLE) {
        find_owners(plan, source);
    }
}

static int is_same(const Plan *plan, const Input *input, const Source *source, uint64_t rows) {
    return input->ids == source->ids && input->count == source->count &&
           (plan->layout->sharding != BY_RANGE || rows == source->rows);
}

/* Sort what each table has; 0 if an id is out of range. */
static int read_sources(Plan *plan, uint64_t *values, int64_t *ranks, int64_t *shares,
                        int32_t *owners) {
    for (int64_t table = 0; table < plan->layout->tables; table++) {
        Input *input = plan->inputs + table;
        Source *source = plan->sources + plan->source_count - 1;
        uint64_t rows = plan->rows[table];
        if (table == 0 || !is_same(plan, input, source, rows)) {
            source = plan->sources + plan->source_count++;
            *source = (Source){.ids = input->ids, .count = input->count, .rows = rows,
                               .values = values, .ranks = ranks, .owners = owners,
                               .shares = shares};
            values += input->count;
            ranks += input->count;
            owners += input->count;
            shares += plan->layout->servers;
            read_source(plan, source);
        }
        if (source->count && source->largest >= rows) {
            return 0;
        }
        input->source = source;
    }
    return 1;
}

/* ---- results ------------------------------------------------------------------------------- */

static int64_t share_of(const Plan *plan, int64_t table, int64_t server) {
    const Source *source = plan->inputs[table].source;
    if (plan->layout->sharding == BY_TABLE) {
        return plan->table_servers[table] == server ? source->distinct : 0;
    }
    return source->shares[server];
}

static void write_starts(const Plan *plan) {
    int64_t *start = plan->results.starts, before = 0;
    for (int64_t server = 0; server < plan->layout->servers; server++) {
        for (int64_t table = 0; table < plan->layout->tables; table++) {
            *start++ = before;
            before += share_of(plan, table, server);
        }
    }
    *start = before;
}

/* One table's rows: where each distinct id is. `places_of` and `next` are scratch. */
static void write_ids(const Plan *plan, int64_t table, int64_t *places_of, int64_t *next) {
    const Results *out = &plan->results;
    const Source *source = plan->inputs[table].source;
    int64_t tables = plan->layout->tables, table_server = plan->table_servers[table];
    int is_whole = plan->layout->sharding == BY_TABLE;
    for (int64_t server = 0; server < plan->layout->servers; server++) {
        next[server] = out->starts[server * tables + table];
    }
    for (int64_t at = 0; at < source->distinct; at++) {
        int64_t place = next[is_whole ? table_server : source->owners[at]]++;
        places_of[at] = place;
        out->ids[place] = (int64_t)source->values[at];
        if (out->gather) {
            out->gather[place] = at * tables + table;
        }
    }
}

static void write_bags(const Plan *plan, const Input *input, int64_t first_id, int64_t first_bag) {
    const Results *out = &plan->results;
    int64_t at = 0;
    for (int64_t bag = 0; bag < input->bags; bag++) {
        int64_t end = bag + 1 < input->bags ? input->offsets[bag + 1] : input->count;
        out->offsets[first_bag + bag] = first_id + input->offsets[bag];
        for (; at < end && at < input->count; at++) {
            out->bag_of[first_id + at] = first_bag + bag;
        }
    }
}

static void write_results(const Plan *plan, int64_t *places_of, int64_t *next) {
    const Results *out = &plan->results;
    int64_t first_id = 0, first_bag = 0;
    write_starts(plan);
    for (int64_t table = 0; table < plan->layout->tables; table++) {
        const Input *input = plan->inputs + table;
        write_ids(plan, table, places_of, next);
        for (int64_t at = 0; at < input->count; at++) {
            out->places[first_id + at] = places_of[input->source->ranks[at]];
        }
        write_bags(plan, input, first_id, first_bag);
        first_id += input->count;
        first_bag += input->bags;
    }
    if (out->ranks) {
        memcpy(out->ranks, plan->sources[0].ranks, sizeof(int64_t) * plan->sources[0].count);
    }
}

/* ---- what Python gets ---------------------------------------------------------------------- */

/* Records of the tables that have a row here, with or without their learning rates. */
static PyObject *records_of(const int64_t *starts, int64_t tables, int64_t sections,
                            const char *templates, int is_push) {
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, sections * RECORD_BYTES);
    char *record = bytes == NULL ? NULL : PyBytes_AsString(bytes);
    for (int64_t table = 0; record != NULL && table < tables; table++) {
        int64_t count = starts[table + 1] - starts[table];
        if (count) {
            memcpy(record, templates + table * RECORD_BYTES, RECORD_BYTES);
            memcpy(record + offsetof(struct pl_record, ids), &count, sizeof count);
            if (!is_push) {
                memset(record + offsetof(struct pl_record, lr), 0, sizeof(double));
            }
            record += RECORD_BYTES;
        }
    }
    return bytes;
}

/* What one server is sent; None if it has no row of this batch. */
static PyObject *share_for(const Plan *plan, const char *records, int64_t server) {
    int64_t tables = plan->layout->tables, sections = 0;
    const int64_t *starts = plan->results.starts + server * tables;
    const char *templates = records + server * tables * RECORD_BYTES;
    for (int64_t table = 0; table < tables; table++) {
        sections += starts[table + 1] > starts[table];
    }
    if (!sections) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(NNy#)", records_of(starts, tables, sections, templates, 0),
                         records_of(starts, tables, sections, templates, 1),
                         (const char *)(plan->results.ids + starts[0]),
                         (Py_ssize_t)((starts[tables] - starts[0]) * sizeof(int64_t)));
}

static PyObject *shares_for_all(const Plan *plan, const char *records) {
    int64_t servers = plan->layout->servers;
    PyObject *shares = PyTuple_New(servers);
    for (int64_t server = 0; shares != NULL && server < servers; server++) {
        PyObject *share = share_for(plan, records, server);
        if (share == NULL || PyTuple_SetItem(shares, server, share) < 0) {
            Py_CLEAR(shares);
        }
    }
    return shares;
}

/* For each table two bytes: has it an id twice, has it one three times. */
static PyObject *repeats(const Plan *plan) {
    int64_t tables = plan->layout->tables;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, 2 * tables);
    char *found = bytes == NULL ? NULL : PyBytes_AsString(bytes);
    for (int64_t table = 0; found != NULL && table < tables; table++) {
        found[table] = (char)plan->inputs[table].source->has_pairs;
        found[tables + table] = (char)plan->inputs[table].source->has_triples;
    }
    return bytes;
}

/* ---- the call ------------------------------------------------------------------------------ */

static void read_inputs(Plan *plan, const struct pl_batch *batches) {
    for (int64_t table = 0; table < plan->layout->tables; table++) {
        struct pl_batch in;
        memcpy(&in, batches + table, sizeof in);
        plan->inputs[table] = (Input){(const int64_t *)(intptr_t)in.ids,
                                      (const int64_t *)(intptr_t)in.offsets, in.count, in.bags, NULL};
        plan->ids += in.count;
        plan->bags += in.bags;
        if (in.count > plan->largest_input) {
            plan->largest_input = in.count;
        }
    }
}

/* Where each array begins in the memory of a plan, after this head. */
static struct pl_plan_head lay_out(const Plan *plan) {
    struct pl_plan_head at = {.places = sizeof at / sizeof(int64_t)};
    at.bag_of = at.places + plan->ids;
    at.offsets = at.bag_of + plan->ids;
    at.ranks = at.offsets + plan->bags;
    at.gather = at.ranks + plan->inputs[0].count;
    at.ids = at.gather + plan->ids;
    at.starts = at.ids + plan->ids;
    at.end = at.starts + plan->layout->servers * plan->layout->tables + 1;
    return at;
}

/* The results as Python gets them, once the sources are read. */
static PyObject *results_of(Plan *plan, const char *records, int64_t *places_of, int64_t *next) {
    struct pl_plan_head at = lay_out(plan);
    PyObject *memory = PyByteArray_FromStringAndSize(NULL, at.end * sizeof(int64_t));
    if (memory == NULL) {
        return NULL;
    }
    int64_t *base = (int64_t *)PyByteArray_AsString(memory);
    memcpy(base, &at, sizeof at);
    plan->results = (Results){.places = base + at.places, .bag_of = base + at.bag_of,
                              .offsets = base + at.offsets, .ids = base + at.ids,
                              .starts = base + at.starts};
    if (plan->is_shared) {
        plan->results.ranks = base + at.ranks;
        plan->results.gather = base + at.gather;
    }
    write_results(plan, places_of, next);
    /* N takes the references, and frees them if one of them is NULL. */
    return Py_BuildValue("(NNN)", memory, shares_for_all(plan, records), repeats(plan));
}

static PyObject *planned(Plan *plan, const char *records) {
    int64_t ids = plan->ids, largest = plan->largest_input, servers = plan->layout->servers;
    int64_t tables = plan->layout->tables;
    size_t numbers = 2 * ids + largest + servers * (tables + 1) + (ids + 1) / 2;
    char *scratch = PyMem_Malloc(numbers * sizeof(int64_t) + 2 * largest * sizeof(Entry) +
                                 tables * sizeof(Source));
    if (scratch == NULL) {
        return PyErr_NoMemory();
    }
    plan->sources = (Source *)scratch;
    plan->entries = (Entry *)(plan->sources + tables);
    uint64_t *values = (uint64_t *)(plan->entries + 2 * largest);
    int64_t *ranks = (int64_t *)(values + ids), *places_of = ranks + ids;
    int64_t *next = places_of + largest, *shares = next + servers;
    int32_t *owners = (int32_t *)(shares + servers * tables);
    PyObject *result = read_sources(plan, values, ranks, shares, owners)
                           ? results_of(plan, records, places_of, next)
                           : Py_BuildValue("");
    PyMem_Free(scratch);
    return result;
}

static const char plan_doc[] =
    "plan(layout, records, batches, is_shared) -> None | (memory, shares, repeats)\n\n"
    "layout: as Layout.packed; records: of all servers and tables; batches: a pl_batch for each\n"
    "table; is_shared: all of them are the same. memory begins with a pl_plan_head; shares has for\n"
    "each server None or (lookup, push, ids). None: an id is out of range.";

static PyObject *plan_batch(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 4 || !PyBytes_Check(arguments[0]) || !PyBytes_Check(arguments[1]) ||
        !PyBytes_Check(arguments[2])) {
        return PyErr_Format(PyExc_TypeError, "plan(bytes, bytes, bytes, bool)");
    }
    const Layout *layout = (const Layout *)PyBytes_AsString(arguments[0]);
    if (PyBytes_Size(arguments[2]) != layout->tables * (Py_ssize_t)sizeof(struct pl_batch) ||
        PyBytes_Size(arguments[1]) != layout->tables * layout->servers * RECORD_BYTES) {
        return PyErr_Format(PyExc_ValueError, "a batch for each table, and a record by server");
    }
    Plan plan = {.layout = layout, .rows = (const uint64_t *)layout->numbers,
                 .table_servers = layout->numbers + layout->tables,
                 .is_shared = arguments[3] == Py_True};
    plan.inputs = PyMem_Malloc(layout->tables * sizeof(Input));
    if (plan.inputs == NULL) {
        return PyErr_NoMemory();
    }
    read_inputs(&plan, (const struct pl_batch *)(const void *)PyBytes_AsString(arguments[2]));
    PyObject *result = planned(&plan, PyBytes_AsString(arguments[1]));
    PyMem_Free(plan.inputs);
    return result;
}

PyMethodDef pl_plan_functions[] = {
    {"plan", (PyCFunction)(void (*)(void))plan_batch, METH_FASTCALL, plan_doc},
    {NULL, NULL, 0, NULL},
};
