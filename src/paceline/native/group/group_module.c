/* What Python sees of the group besides its types: functions, and the constants of the layout. */
#define PY_SSIZE_T_CLEAN
#include "group.h"
#include "module.h"

static PyObject *native_format(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long control, slot_bytes;
    unsigned world;
    if (!PyArg_ParseTuple(args, "KIK", &control, &world, &slot_bytes))
        return NULL;
    pl_format((pl_control *)(uintptr_t)control, world, slot_bytes);
    Py_RETURN_NONE;
}

static PyObject *native_control_bytes(PyObject *module, PyObject *argument) {
    (void)module;
    unsigned long world = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred())
        return NULL;
    return PyLong_FromUnsignedLongLong(pl_control_bytes((uint32_t)world));
}

static PyObject *native_can_reduce(PyObject *module, PyObject *args) {
    (void)module;
    unsigned dtype, op;
    if (!PyArg_ParseTuple(args, "II", &dtype, &op))
        return NULL;
    return PyBool_FromLong(pl_can_reduce(dtype, op));
}

static PyObject *native_cut(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long count, itemsize;
    unsigned parts, index;
    if (!PyArg_ParseTuple(args, "KIIK", &count, &parts, &index, &itemsize))
        return NULL;
    return PyLong_FromUnsignedLongLong(pl_cut(count, parts, index, itemsize));
}

static PyObject *native_scale_f32(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 4)
        return PyErr_Format(PyExc_TypeError, "scale_f32 takes 4 arguments");
    float *target = (float *)(uintptr_t)PyLong_AsUnsignedLongLong(args[0]);
    const float *source = (const float *)(uintptr_t)PyLong_AsUnsignedLongLong(args[1]);
    size_t elements = PyLong_AsSize_t(args[2]);
    double factor = PyFloat_AsDouble(args[3]);
    if (PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    pl_scale_f32(target, source, elements, (float)factor);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *native_ring_doorbell(PyObject *module, PyObject *address) {
    (void)module;
    _Atomic uint32_t *doorbell = (_Atomic uint32_t *)(uintptr_t)PyLong_AsUnsignedLongLong(address);
    if (PyErr_Occurred())
        return NULL;
    pl_ring_doorbell(doorbell);
    Py_RETURN_NONE;
}

static PyObject *native_await_doorbell(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long address;
    unsigned seen, count;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "KId", &address, &seen, &timeout_s))
        return NULL;
    uint64_t duration_ns = timeout_s < 0 ? UINT64_MAX : (uint64_t)(timeout_s * 1e9);
    Py_BEGIN_ALLOW_THREADS;
    count = pl_await_doorbell((_Atomic uint32_t *)(uintptr_t)address, seen, duration_ns);
    Py_END_ALLOW_THREADS;
    return PyLong_FromUnsignedLong(count);
}

static PyMethodDef module_methods[] = {
    {"ring_doorbell", native_ring_doorbell, METH_O,
     "ring_doorbell(address): count it up, and wake who waits for it"},
    {"await_doorbell", native_await_doorbell, METH_VARARGS,
     "await_doorbell(address, seen, timeout_s) -> its count, once that is not `seen`"},
    {"format", native_format, METH_VARARGS,
     "format(address, world, slot_bytes): make zeroed memory a control segment"},
    {"control_bytes", native_control_bytes, METH_O, "control_bytes(world) -> int"},
    {"cut", native_cut, METH_VARARGS,
     "cut(count, parts, index, itemsize) -> the first element of a slice"},
    {"scale_f32", (PyCFunction)(void (*)(void))native_scale_f32, METH_FASTCALL,
     "scale_f32(target, source, count, factor): a copy past the caches"},
    {"can_reduce", native_can_reduce, METH_VARARGS, "can_reduce(DTYPE_*, OP_*) -> bool"},
    {NULL, NULL, 0, NULL},
};

static const struct {
    const char *name;
    long value;
} constants[] = {
    {"LAYOUT_VERSION", PL_LAYOUT_VERSION},
    {"SLOTS", PL_SLOTS},
    {"MAX_WORLD", PL_MAX_WORLD},
    {"STATUS_OK", PL_OK},
    {"STATUS_PENDING", PL_PENDING},
    {"STATUS_MISMATCH", PL_MISMATCH},
    {"STATUS_BROKEN", PL_BROKEN},
    {"STATUS_SHUT", PL_SHUT},
    {"STATUS_INTERRUPTED", PL_INTERRUPTED},
    {"END_NONE", PL_END_NONE},
    {"END_LOST", PL_END_LOST},
    {"END_TIMEOUT", PL_END_TIMEOUT},
    {"END_ABORTED", PL_END_ABORTED},
    {"END_MISMATCH", PL_END_MISMATCH},
    {"END_DAMAGED", PL_END_DAMAGED},
    {"LIFE_IDLE", PL_LIFE_IDLE},
    {"LIFE_WORKING", PL_LIFE_WORKING},
    {"LIFE_CLOSED", PL_LIFE_CLOSED},
    {"KIND_BARRIER", PL_BARRIER},
    {"KIND_ALL_REDUCE", PL_ALL_REDUCE},
    {"KIND_REDUCE", PL_REDUCE},
    {"KIND_BROADCAST", PL_BROADCAST},
    {"KIND_ALL_GATHER", PL_ALL_GATHER},
    {"KIND_REDUCE_SCATTER", PL_REDUCE_SCATTER},
    {"KIND_ALL_TO_ALL", PL_ALL_TO_ALL},
    {"KIND_GATHER", PL_GATHER},
    {"KIND_SCATTER", PL_SCATTER},
    {"KIND_REDUCE_TO_LEADERS", PL_REDUCE_TO_LEADERS},
    {"KIND_COPY_FROM_LEADERS", PL_COPY_FROM_LEADERS},
    {"DTYPE_U8", PL_U8},
    {"DTYPE_I8", PL_I8},
    {"DTYPE_I16", PL_I16},
    {"DTYPE_I32", PL_I32},
    {"DTYPE_I64", PL_I64},
    {"DTYPE_F16", PL_F16},
    {"DTYPE_BF16", PL_BF16},
    {"DTYPE_F32", PL_F32},
    {"DTYPE_F64", PL_F64},
    {"DTYPE_BOOL", PL_BOOL},
    {"DTYPE_C64", PL_C64},
    {"DTYPE_C128", PL_C128},
    {"OP_SUM", PL_SUM},
    {"OP_AVG", PL_AVG},
    {"OP_PRODUCT", PL_PRODUCT},
    {"OP_MIN", PL_MIN},
    {"OP_MAX", PL_MAX},
    {"OP_BAND", PL_BAND},
    {"OP_BOR", PL_BOR},
    {"OP_BXOR", PL_BXOR},
    {"FAULT_KILL", PL_FAULT_KILL},
    {"FAULT_STOP", PL_FAULT_STOP},
    {"FAULT_DELAY", PL_FAULT_DELAY},
    {"POINT_BEGIN", PL_POINT_BEGIN},
    {"POINT_TICKET_WRITTEN", PL_POINT_TICKET_WRITTEN},
    {"POINT_DATA_PUT", PL_POINT_DATA_PUT},
    {"POINT_COUNTED", PL_POINT_COUNTED},
    {"POINT_ARRIVED", PL_POINT_ARRIVED},
    {"POINT_ASLEEP", PL_POINT_ASLEEP},
    {"POINT_RELEASED", PL_POINT_RELEASED},
    {"POINT_REDUCING", PL_POINT_REDUCING},
    {"POINT_TAKING", PL_POINT_TAKING},
    {"POINT_END", PL_POINT_END},
};

int pl_add_group(PyObject *module) {
    PyObject *nowhere = PyLong_FromUnsignedLongLong(PL_NOT_IN_ARENA);
    if (PyModule_AddFunctions(module, module_methods) != 0 || pl_add_records(module) != 0 ||
        pl_add_operation(module) != 0 || pl_add_core(module) != 0 || pl_add_mapping(module) != 0 ||
        nowhere == NULL || PyModule_AddObject(module, "NOT_IN_ARENA", nowhere) != 0)
        return -1;
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) != 0)
            return -1;
    return 0;
}
