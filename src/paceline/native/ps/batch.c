/* Offsets and rows of a trainer's batch, before and after its plan (plan.c); called by
 * `ps/client/message_plan.py` and `ps/client/batch.py`. */
#include <stdint.h>
#include <string.h>

#include "native.h"

static const char gather_doc[] =
    "gather(address, row_bytes, memory, first, counts) -> tuple of bytes\n\n"
    "Rows in the order of `gather` of a plan, which begins at number `first` of its memory, cut\n"
    "into as many as counts says.";

static PyObject *gather(PyObject *module, PyObject *arguments) {
    (void)module;
    long long address, row_bytes, first;
    PyObject *memory, *counts;
    if (!PyArg_ParseTuple(arguments, "LLOLO", &address, &row_bytes, &memory, &first, &counts)) {
        return NULL;
    }
    if (!PyByteArray_Check(memory) || !PyTuple_Check(counts)) {
        return PyErr_Format(PyExc_TypeError, "memory is a bytearray, counts a tuple");
    }
    const char *rows = (const char *)(intptr_t)address;
    const int64_t *order = (const int64_t *)PyByteArray_AsString(memory) + first;
    Py_ssize_t pieces = PyTuple_Size(counts);
    PyObject *found = PyTuple_New(pieces);
    for (Py_ssize_t piece = 0; found != NULL && piece < pieces; piece++) {
        Py_ssize_t count = PyLong_AsSsize_t(PyTuple_GetItem(counts, piece));
        PyObject *bytes = PyBytes_FromStringAndSize(NULL, count * row_bytes);
        if (bytes == NULL) {
            Py_CLEAR(found);
            break;
        }
        char *to = PyBytes_AsString(bytes);
        for (Py_ssize_t at = 0; at < count; at++, to += row_bytes) {
            memcpy(to, rows + *order++ * row_bytes, row_bytes);
        }
        PyTuple_SetItem(found, piece, bytes);
    }
    return found;
}

static const char offsets_doc[] =
    "are_offsets(address, bags, ids) -> bool\n\n"
    "Whether offsets begin with 0, never shrink, and end within the ids.";

static PyObject *are_offsets(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    long long found[3];
    for (int at = 0; at < 3; at++) {
        found[at] = count == 3 ? PyLong_AsLongLong(arguments[at]) : -1;
        if (found[at] == -1) {
            return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "three integers");
        }
    }
    const int64_t *offsets = (const int64_t *)(intptr_t)found[0];
    int64_t bags = found[1], before = 0;
    int is_right = bags == 0 ? found[2] == 0 : offsets[0] == 0;
    for (int64_t bag = 0; is_right && bag < bags; bag++) {
        is_right = offsets[bag] >= before;
        before = offsets[bag];
    }
    return PyBool_FromLong(is_right && before <= found[2]);
}

PyMethodDef pl_batch_functions[] = {
    {"gather", gather, METH_VARARGS, gather_doc},
    {"are_offsets", (PyCFunction)(void (*)(void))are_offsets, METH_FASTCALL, offsets_doc},
    {NULL, NULL, 0, NULL},
};
