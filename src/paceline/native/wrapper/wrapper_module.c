/* What the wrapper's part adds to the module: the type Inbox, and bytes as numbers. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "module.h"
#include "wrapper.h"

static PyMethodDef functions[] = {
    {"write_floats", (PyCFunction)(void (*)(void))pl_write_floats, METH_FASTCALL,
     "write_floats(address, bytearray): bytes as float32 numbers"},
    {"read_floats", (PyCFunction)(void (*)(void))pl_read_floats, METH_FASTCALL,
     "read_floats(address, count) -> bytes"},
    {NULL, NULL, 0, NULL},
};

int pl_add_wrapper(PyObject *module) {
    return PyModule_AddFunctions(module, functions) != 0 ? -1 : pl_add_inbox(module);
}
