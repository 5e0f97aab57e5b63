/* What the wrapper's part adds to the module: the type ReadyQueue, bytes as numbers, and from which
 * size on copies go past the caches (shm/collectives/streaming.py). */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "core.h"
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
    if (PyModule_AddFunctions(module, functions) != 0 ||
        PyModule_AddIntConstant(module, "STREAM_BYTES", PL_STREAM_BYTES) != 0)
        return -1;
    return pl_add_ready_queue(module);
}
