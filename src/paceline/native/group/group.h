/* What the files of this folder that know Python tell each other; core.h is for those that do not. */
#ifndef PACELINE_GROUP_H
#define PACELINE_GROUP_H

#include <Python.h>

/* mapping.c: add the type Mapping to the module, and see to forks; -1 with an exception set. */
int pl_add_mapping(PyObject *module);

#endif
