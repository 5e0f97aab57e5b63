/* What the core tells Python in several words at once: struct sequences. The fields are written
 * down here, once; Python reads them by name. */
#define PY_SSIZE_T_CLEAN
#include "group.h"

static PyStructSequence_Field request_fields[] = {
    {"kind", "KIND_*"},
    {"dtype", "DTYPE_*"},
    {"op", "OP_*"},
    {"root", "a rank; of *_leaders, how many there are"},
    {"count", "elements"},
    {"seq", "which collective of the group, from 1"},
    {NULL, NULL},
};
static PyStructSequence_Field mismatch_fields[] = {
    {"first", "a rank"},
    {"second", "a rank that brought something else"},
    {"first_request", "what the first brought"},
    {"second_request", "what the second brought"},
    {"sent_bytes", "of an all_to_all: what the first sends to the second"},
    {"expected_bytes", "what the second expects of the first"},
    {NULL, NULL},
};
static PyStructSequence_Field row_fields[] = {
    {"life", "LIFE_*"},
    {"phase", "the last that it has been counted at, modulo 2^32"},
    {"since_ns", "when its life last changed, by CLOCK_MONOTONIC"},
    {"finished", "seq of its last collective that ended"},
    {"is_alive", "whether its process has not ended"},
    {"request", "what it is in, or was in last"},
    {NULL, NULL},
};
static PyStructSequence_Field verdict_fields[] = {
    {"end", "END_*"},
    {"by", "the rank that says so"},
    {"about", "the rank that it is about"},
    {NULL, NULL},
};

static PyStructSequence_Desc descriptions[] = {
    {"paceline.native._native.Request", "What a rank brings to a collective.", request_fields, 6},
    {"paceline.native._native.Mismatch", "How two ranks differ.", mismatch_fields, 6},
    {"paceline.native._native.Row", "What a rank says about itself.", row_fields, 6},
    {"paceline.native._native.Verdict", "Why a group is over.", verdict_fields, 3},
};
enum { REQUEST, MISMATCH, ROW, VERDICT, RECORDS };
static PyTypeObject *types[RECORDS];

/* Make a record; takes over the references to its fields. NULL if one of them is. */
static PyObject *fill(int which, PyObject *const *fields) {
    PyObject *record = PyStructSequence_New(types[which]);
    bool is_whole = record != NULL;
    for (int i = 0; i < descriptions[which].n_in_sequence; i++) {
        is_whole = is_whole && fields[i] != NULL;
        if (record != NULL)
            PyStructSequence_SetItem(record, i, fields[i]);
        else
            Py_XDECREF(fields[i]);
    }
    if (is_whole)
        return record;
    Py_XDECREF(record);
    return NULL;
}

static PyObject *number(uint64_t value) { return PyLong_FromUnsignedLongLong(value); }

PyObject *pl_request_record(const pl_request *request) {
    PyObject *fields[] = {number(request->kind), number(request->dtype), number(request->op),
                          number(request->root), number(request->count), number(request->seq)};
    return fill(REQUEST, fields);
}

PyObject *pl_mismatch_record(const pl_operation *operation) {
    PyObject *fields[] = {
        number(operation->differing[0]),
        number(operation->differing[1]),
        pl_request_record(&operation->brought[0]),
        pl_request_record(&operation->brought[1]),
        number(operation->expected_bytes[0]),
        number(operation->expected_bytes[1]),
    };
    return fill(MISMATCH, fields);
}

/* What a rank that works is in may change while we read: a request is then a mixture, which is good
 * enough to tell people. */
PyObject *pl_row_record(pl_core *core, uint32_t rank) {
    pl_row *row = &core->control->row[rank];
    uint64_t finished = atomic_load(&row->finished);
    uint32_t life = atomic_load(&row->life);
    pl_request request = pl_read_ticket(core, rank, finished + (life == PL_LIFE_WORKING));
    PyObject *fields[] = {
        number(life),
        number(atomic_load(&row->phase)),
        number(atomic_load(&row->since_ns)),
        number(finished),
        PyBool_FromLong(pl_alive(core, rank)),
        pl_request_record(&request),
    };
    return fill(ROW, fields);
}

PyObject *pl_verdict_record(pl_core *core) {
    pl_verdict verdict = pl_unpack_verdict(atomic_load(&core->control->verdict), core->world);
    PyObject *fields[] = {number(verdict.end), number(verdict.by), number(verdict.about)};
    return fill(VERDICT, fields);
}

int pl_add_records(PyObject *module) {
    for (int i = 0; i < RECORDS; i++) {
        types[i] = PyStructSequence_NewType(&descriptions[i]);
        if (types[i] == NULL)
            return -1;
        Py_INCREF((PyObject *)types[i]);
        const char *name = descriptions[i].name + sizeof "paceline.native._native";
        if (PyModule_AddObject(module, name, (PyObject *)types[i]) != 0)
            return -1;
    }
    return 0;
}
