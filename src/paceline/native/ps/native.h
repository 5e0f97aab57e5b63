/* What the files of the parameter servers' native core have in common.
 *
 * Each file is one purpose with functions for Python: `batch.c` and `plan.c` for a trainer's
 * batch, `pair.c` for messages in shared memory, over `ring.c`; of a server, `update.c` for the optimizers,
 * `answer.c` for a message, over `check.c`, `loop.c` for those in shared memory, `guard.c` for who
 * may connect. `ps_module.c` adds them to the module. */
#ifndef PACELINE_PS_NATIVE_H
#define PACELINE_PS_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyMethodDef pl_plan_functions[];
extern PyMethodDef pl_batch_functions[];
extern PyMethodDef pl_update_functions[];
extern PyMethodDef pl_guard_functions[];
extern PyMethodDef pl_layout_functions[];

/* Add the type `Pair`, `Responder` to the module; -1 with an exception set. */
int pl_add_pair(PyObject *module);
int pl_add_responder(PyObject *module);

#endif
