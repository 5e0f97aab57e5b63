/* Bytes as float32 numbers, and back: for the control block of the DDP wrapper (ddp/agree/byte_sum.py). */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

#include "wrapper.h"

/* write_floats(address, bytearray): number i becomes byte i. */
PyObject *pl_write_floats(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 2 || !PyByteArray_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "write_floats takes an address and a bytearray");
    float *numbers = (float *)(uintptr_t)PyLong_AsUnsignedLongLong(args[0]);
    if (PyErr_Occurred())
        return NULL;
    const uint8_t *bytes = (const uint8_t *)PyByteArray_AsString(args[1]);
    Py_ssize_t size = PyByteArray_Size(args[1]);
    for (Py_ssize_t i = 0; i < size; i++)
        numbers[i] = bytes[i];
    Py_RETURN_NONE;
}

/* read_floats(address, count) -> bytes. Raises ValueError for a number that is no byte. */
PyObject *pl_read_floats(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "read_floats takes an address and a count");
    const float *numbers = (const float *)(uintptr_t)PyLong_AsUnsignedLongLong(args[0]);
    Py_ssize_t size = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred())
        return NULL;
    PyObject *result = PyBytes_FromStringAndSize(NULL, size);
    if (result == NULL)
        return NULL;
    uint8_t *bytes = (uint8_t *)PyBytes_AsString(result);
    for (Py_ssize_t i = 0; i < size; i++) {
        if (!(numbers[i] >= 0.0f && numbers[i] <= 255.0f)) {
            Py_DECREF(result);
            return PyErr_Format(PyExc_ValueError, "number %zd is no byte", i);
        }
        bytes[i] = (uint8_t)numbers[i];
    }
    return result;
}
