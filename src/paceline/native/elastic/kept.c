/* What state.commit() calls in every step (elastic/commit/): bytes of generators, and copies of plain
 * values. One short loop each: after a step nothing of it is in the caches, so little code counts. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#include "module.h"

/* read_memory(spans) -> bytes: what lies in memory at (address, size, address, size, ...), in a row.
 * Who calls it holds the owners of that memory. */
static PyObject *read_memory(PyObject *module, PyObject *spans) {
    (void)module;
    if (!PyTuple_Check(spans) || PyTuple_Size(spans) % 2 != 0)
        return PyErr_Format(PyExc_TypeError, "read_memory takes a tuple of addresses and sizes");
    Py_ssize_t total = 0, count = PyTuple_Size(spans);
    for (Py_ssize_t i = 1; i < count; i += 2) {
        Py_ssize_t size = PyLong_AsSsize_t(PyTuple_GetItem(spans, i));
        if (size < 0 || size > PY_SSIZE_T_MAX - total)
            return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "not a size: %zd", size);
        total += size;
    }
    PyObject *result = PyBytes_FromStringAndSize(NULL, total);
    if (result == NULL)
        return NULL;
    char *into = PyBytes_AsString(result);
    for (Py_ssize_t i = 0; i < count; i += 2) {
        uint64_t address = PyLong_AsUnsignedLongLong(PyTuple_GetItem(spans, i));
        if (PyErr_Occurred()) {
            Py_DECREF(result);
            return NULL;
        }
        size_t size = (size_t)PyLong_AsSsize_t(PyTuple_GetItem(spans, i + 1));
        memcpy(into, (const void *)(uintptr_t)address, size);
        into += size;
    }
    return result;
}

static PyObject *copied(PyObject *value, PyObject *left_out, PyObject *otherwise);

static PyObject *copied_dict(PyObject *value, PyObject *left_out, PyObject *otherwise) {
    PyObject *result = PyDict_New(), *key, *each;
    Py_ssize_t place = 0;
    while (result != NULL && PyDict_Next(value, &place, &key, &each)) {
        int is_left_out = PySet_Contains(left_out, key);
        if (is_left_out > 0)
            continue;
        Py_INCREF(key); /* `otherwise` may run anything */
        Py_INCREF(each);
        PyObject *copy = is_left_out < 0 ? NULL : copied(each, left_out, otherwise);
        if (copy == NULL || PyDict_SetItem(result, key, copy) < 0)
            Py_CLEAR(result);
        Py_XDECREF(copy);
        Py_DECREF(each);
        Py_DECREF(key);
    }
    return result;
}

static PyObject *copied_list(PyObject *value, PyObject *left_out, PyObject *otherwise) {
    PyObject *result = PyList_New(0);
    for (Py_ssize_t i = 0; result != NULL && i < PyList_Size(value); i++) {
        PyObject *each = PyList_GetItem(value, i);
        Py_INCREF(each);
        PyObject *copy = copied(each, left_out, otherwise);
        Py_DECREF(each);
        if (copy == NULL || PyList_Append(result, copy) < 0)
            Py_CLEAR(result);
        Py_XDECREF(copy);
    }
    return result;
}

static PyObject *copied_tuple(PyObject *value, PyObject *left_out, PyObject *otherwise) {
    Py_ssize_t count = PyTuple_Size(value);
    PyObject *result = PyTuple_New(count);
    for (Py_ssize_t i = 0; result != NULL && i < count; i++) {
        PyObject *copy = copied(PyTuple_GetItem(value, i), left_out, otherwise);
        if (copy == NULL || PyTuple_SetItem(result, i, copy) < 0) /* it takes the copy */
            Py_CLEAR(result);
    }
    return result;
}

static PyObject *copied_container(PyObject *value, PyObject *left_out, PyObject *otherwise) {
    if (PyDict_CheckExact(value))
        return copied_dict(value, left_out, otherwise);
    if (PyList_CheckExact(value))
        return copied_list(value, left_out, otherwise);
    if (PyTuple_CheckExact(value))
        return copied_tuple(value, left_out, otherwise);
    return PyObject_CallFunctionObjArgs(otherwise, value, NULL);
}

static PyObject *copied(PyObject *value, PyObject *left_out, PyObject *otherwise) {
    if (value == Py_None || PyFloat_CheckExact(value) || PyLong_CheckExact(value) ||
        PyUnicode_CheckExact(value) || PyBool_Check(value)) {
        Py_INCREF(value);
        return value;
    }
    if (Py_EnterRecursiveCall(" while a state is copied") != 0)
        return NULL;
    PyObject *result = copied_container(value, left_out, otherwise);
    Py_LeaveRecursiveCall();
    return result;
}

/* copy_plain(value, left_out, otherwise): a copy of dicts, lists and tuples, however deep, without the
 * keys in `left_out`. Numbers and texts are shared; what is none of these is otherwise(value). */
static PyObject *copy_plain(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 3 || !PyFrozenSet_CheckExact(args[1]))
        return PyErr_Format(PyExc_TypeError, "copy_plain takes a value, a frozenset, a function");
    return copied(args[0], args[1], args[2]);
}

static PyMethodDef functions[] = {
    {"read_memory", read_memory, METH_O, "read_memory((address, size, ...)) -> bytes"},
    {"copy_plain", (PyCFunction)(void (*)(void))copy_plain, METH_FASTCALL,
     "copy_plain(value, left_out, otherwise): copies dicts, lists and tuples"},
    {NULL, NULL, 0, NULL},
};

int pl_add_elastic(PyObject *module) {
    return PyModule_AddFunctions(module, functions);
}
