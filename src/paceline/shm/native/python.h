/* What the files that know Python tell each other; core.h is for those that do not. */
#ifndef PACELINE_PYTHON_H
#define PACELINE_PYTHON_H

#include <Python.h>

/* inbox.c: add the type Inbox to the module; -1 with an exception set. */
int pl_add_inbox(PyObject *module);

/* bytes.c: functions of the module. */
PyObject *pl_write_floats(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *pl_read_floats(PyObject *module, PyObject *const *args, Py_ssize_t count);

#endif
