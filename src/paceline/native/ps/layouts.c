/* The layouts that Python and C both write down, for the test that compares them. */
#include "answer.h"
#include "plan.h"

#define LAYOUT(type, ...)                                                                          \
    do {                                                                                           \
        const uint32_t offsets[] = {__VA_ARGS__, sizeof(struct type)};                             \
        PyObject *made = PyBytes_FromStringAndSize((const char *)offsets, sizeof offsets);         \
        int failed = made == NULL || PyDict_SetItemString(found, #type, made) != 0;                \
        Py_XDECREF(made);                                                                          \
        if (failed) {                                                                              \
            Py_DECREF(found);                                                                      \
            return NULL;                                                                           \
        }                                                                                          \
    } while (0)
#define AT(type, field) offsetof(struct type, field)

/* layouts() -> {name: where each field begins, and the size, as uint32} */
static PyObject *layouts(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    PyObject *found = PyDict_New();
    if (found == NULL) {
        return NULL;
    }
    LAYOUT(pl_head, AT(pl_head, magic), AT(pl_head, version), AT(pl_head, kind),
           AT(pl_head, flags), AT(pl_head, request), AT(pl_head, client), AT(pl_head, sequence),
           AT(pl_head, sections), AT(pl_head, reserved));
    LAYOUT(pl_record, AT(pl_record, table), AT(pl_record, form), AT(pl_record, mode),
           AT(pl_record, flags), AT(pl_record, dtype), AT(pl_record, ids), AT(pl_record, bags),
           AT(pl_record, lr));
    LAYOUT(pl_entry, AT(pl_entry, step), AT(pl_entry, padding_idx), AT(pl_entry, row_bytes),
           AT(pl_entry, dtype), AT(pl_entry, is_renormed), AT(pl_entry, optimizer),
           AT(pl_entry, is_fused), AT(pl_entry, lanes), AT(pl_entry, columns), AT(pl_entry, eps),
           AT(pl_entry, beta1), AT(pl_entry, beta2), AT(pl_entry, root), AT(pl_entry, map),
           AT(pl_entry, slots), AT(pl_entry, first), AT(pl_entry, span), AT(pl_entry, column));
    LAYOUT(pl_column, AT(pl_column, address), AT(pl_column, bytes));
    LAYOUT(pl_account, AT(pl_account, applied), AT(pl_account, client));
    LAYOUT(pl_tally, AT(pl_tally, table), AT(pl_tally, lines), AT(pl_tally, end_ns),
           AT(pl_tally, took_ns), AT(pl_tally, is_push));
    LAYOUT(pl_batch, AT(pl_batch, ids), AT(pl_batch, count), AT(pl_batch, offsets),
           AT(pl_batch, bags));
    LAYOUT(pl_plan_head, AT(pl_plan_head, places), AT(pl_plan_head, bag_of),
           AT(pl_plan_head, offsets), AT(pl_plan_head, ranks), AT(pl_plan_head, gather),
           AT(pl_plan_head, ids), AT(pl_plan_head, starts), AT(pl_plan_head, end));
    return found;
}

PyMethodDef pl_layout_functions[] = {
    {"layouts", layouts, METH_NOARGS, "layouts() -> {name: offsets and size}"},
    {NULL, NULL, 0, NULL},
};
