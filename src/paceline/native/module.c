/* The module that Python imports: the parts of the native core, put together. Only the stable ABI is
 * used. Everything here has a way around it in Python, for where there is no compiler, and for
 * PACELINE_DISABLE_NATIVE (native/extension.py). */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "module.h"

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "paceline.native._native",
    .m_doc = "The native core of Paceline.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    if (pl_add_group(module) < 0 || pl_add_wrapper(module) < 0 || pl_add_ps(module) < 0 ||
        pl_add_elastic(module) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
