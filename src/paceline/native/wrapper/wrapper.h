/* What the files of this folder tell each other. */
#ifndef PACELINE_WRAPPER_H
#define PACELINE_WRAPPER_H

#include <Python.h>

/* ready_queue.c: add the type ReadyQueue to the module; -1 with an exception set. */
int pl_add_ready_queue(PyObject *module);

/* copy_in.c: once; -1 with an exception set. */
int pl_prepare_copy_in(void);

/* copy_in.c: DLPack's functions from the capsule of a tensor type; NULL if they are not for us, with
 * an exception set if it is no such capsule. */
struct DLPackExchangeAPI;
const struct DLPackExchangeAPI *pl_exchange(PyObject *capsule);

/* copy_in.c: let a slot's view hold its parameter's gradient times the factor, and be the gradient.
 * 1 if that is done, 0 if Python has to. Raises nothing. */
int pl_copy_in(const struct DLPackExchangeAPI *api, PyObject *slot, float factor);

/* bytes.c: functions of the module. */
PyObject *pl_write_floats(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *pl_read_floats(PyObject *module, PyObject *const *args, Py_ssize_t count);

#endif
