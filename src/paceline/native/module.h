/* What each part of the native core adds to the module; -1 with an exception set. */
#ifndef PACELINE_MODULE_H
#define PACELINE_MODULE_H

#include <Python.h>

int pl_add_group(PyObject *module);
int pl_add_wrapper(PyObject *module);
int pl_add_ps(PyObject *module);
int pl_add_elastic(PyObject *module);

#endif
