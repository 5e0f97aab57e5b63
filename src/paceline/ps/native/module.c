/* The module that Python imports; see native.h. */
#include "native.h"

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "paceline.ps._native",
    .m_doc = "The native core of paceline.ps.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) {
        return NULL;
    }
    if (PyModule_AddFunctions(module, pl_plan_functions) < 0 ||
        PyModule_AddFunctions(module, pl_rows_functions) < 0 ||
        PyModule_AddFunctions(module, pl_attend_functions) < 0 ||
        PyModule_AddFunctions(module, pl_guard_functions) < 0 ||
        pl_add_pair(module) < 0 || pl_add_attendant(module) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
