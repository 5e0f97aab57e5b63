/* What the parameter servers' part adds to the module; see native.h. */
#include "native.h"

#include "module.h"

int pl_add_ps(PyObject *module) {
    if (PyModule_AddFunctions(module, pl_plan_functions) < 0 ||
        PyModule_AddFunctions(module, pl_batch_functions) < 0 ||
        PyModule_AddFunctions(module, pl_update_functions) < 0 ||
        PyModule_AddFunctions(module, pl_guard_functions) < 0 ||
        PyModule_AddFunctions(module, pl_layout_functions) < 0)
        return -1;
    return pl_add_pair(module) < 0 || pl_add_responder(module) < 0 ? -1 : 0;
}
