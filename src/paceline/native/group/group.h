/* What the files of this folder that include Python.h tell each other; core.h is for all.
 *
 *   group_module.c      functions and constants of the module
 *   core_object.c       the type Core
 *   operation_object.c  the type Operation
 *   records.c           struct sequences: Request, Mismatch, Row, Verdict
 *   mapping.c           the type Mapping: shared memory here and in forked children */
#ifndef PACELINE_GROUP_H
#define PACELINE_GROUP_H

#include <Python.h>

#include "core.h"

typedef struct {
    PyObject_HEAD pl_core *core;
} CoreObject;

/* core_object.c: false, with an exception set, for one that was never set up or in a forked child;
 * true, with an exception set, in a signal handler inside of a collective of this very thread. */
bool pl_is_usable(CoreObject *core);
bool pl_refuse_in_handler(CoreObject *core);

/* operation_object.c: NULL with an exception set. pl_wrap_operation takes the operation over. */
pl_operation *pl_read_operation(pl_core *core, PyObject *const *args, Py_ssize_t count);
PyObject *pl_wrap_operation(CoreObject *owner, pl_operation *operation);

/* records.c */
PyObject *pl_request_record(const pl_request *request);
PyObject *pl_mismatch_record(const pl_operation *operation);
PyObject *pl_row_record(pl_core *core, uint32_t rank);
PyObject *pl_verdict_record(pl_core *core);

/* Add to the module; -1 with an exception set. */
int pl_add_core(PyObject *module);
int pl_add_mapping(PyObject *module); /* sees to forks, too */
int pl_add_operation(PyObject *module);
int pl_add_records(PyObject *module);

#endif
