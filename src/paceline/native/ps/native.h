/* What the files of the parameter servers' native core have in common.
 *
 * Each file is one purpose with functions for Python: `plan.c` for the trainer's plan of a batch,
 * `rows.c` for the rows of a server, `pair.c` for messages in shared memory, over `ring.c`,
 * `loop.c` for a server's loop over both, `guard.c` for who may connect to it. `ps_module.c`
 * adds them to the module. */
#ifndef PACELINE_PS_NATIVE_H
#define PACELINE_PS_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyMethodDef pl_plan_functions[];
extern PyMethodDef pl_rows_functions[];

extern PyMethodDef pl_attend_functions[];
extern PyMethodDef pl_guard_functions[];

/* Add the type `Pair`, `Attendant` to the module; -1 with an exception set. */
int pl_add_pair(PyObject *module);
int pl_add_attendant(PyObject *module);

#endif
