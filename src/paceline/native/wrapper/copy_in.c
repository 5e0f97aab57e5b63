/* Copies one gradient into its bucket, scaled, in the hook that autograd calls when it is ready.
 *
 * It has just been written then, and lies in a cache; and once its parameter shows the bucket's view
 * in its place, its memory is free for the next gradient, which finds that in the cache as well.
 * Knows what a slot is (paceline.buckets.bucket) and asks DLPack where tensors lie. What is not as
 * usual is left to Python: a gradient with a graph, of another type or layout, or none at all.
 * [Note: scaling] in ddp/reduce/gradient_access.py says why it is scaled here. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

#include "core.h"
#include "dlpack.h"
#include "wrapper.h"

static struct {
    PyObject *parameter, *view, *grad, *requires_grad, *is_neg;
} names;

int pl_prepare_copy_in(void) {
    names.parameter = PyUnicode_InternFromString("parameter");
    names.view = PyUnicode_InternFromString("view");
    names.grad = PyUnicode_InternFromString("grad");
    names.requires_grad = PyUnicode_InternFromString("requires_grad");
    names.is_neg = PyUnicode_InternFromString("is_neg");
    return names.parameter && names.view && names.grad && names.requires_grad && names.is_neg ? 0
                                                                                              : -1;
}

const struct DLPackExchangeAPI *pl_exchange(PyObject *capsule) {
    const DLPackExchangeAPI *api = PyCapsule_GetPointer(capsule, DLPACK_CAPSULE);
    while (api != NULL && api->version.major > DLPACK_MAJOR)
        api = api->older;
    return api != NULL && api->version.major == DLPACK_MAJOR && api->tensor_of ? api : NULL;
}

/* 1 if an object is what was asked for, 0 if not, -1 if it could not be asked; steals it. */
static int is(PyObject *object, PyObject *wanted) {
    Py_XDECREF(object); /* True and False live for ever */
    return object == NULL ? -1 : object == wanted;
}

static int is_cpu_float32(const DLTensor *tensor) {
    return tensor->device.device_type == kDLCPU && tensor->dtype.code == kDLFloat &&
           tensor->dtype.bits == 32 && tensor->dtype.lanes == 1;
}

/* The number of elements if both are laid out alike, else -1. A view fills its memory, so elements
 * then lie in the same order in both. */
static int64_t same_layout(const DLTensor *gradient, const DLTensor *view) {
    if (gradient->ndim != view->ndim)
        return -1;
    int64_t elements = 1;
    for (int32_t i = 0; i < view->ndim; i++) {
        if (gradient->shape[i] != view->shape[i])
            return -1;
        if (view->shape[i] != 1 && gradient->strides[i] != view->strides[i])
            return -1;
        elements *= view->shape[i];
    }
    return elements;
}

static float *data_of(const DLTensor *tensor) {
    return (float *)((char *)tensor->data + tensor->byte_offset);
}

static void scale(float *target, const float *source, size_t elements, float factor) {
    if (elements * sizeof(float) < PL_STREAM_BYTES || target == source) {
        for (size_t i = 0; i < elements; i++)
            target[i] = source[i] * factor;
        return;
    }
    Py_BEGIN_ALLOW_THREADS;
    pl_scale_f32(target, source, elements, factor);
    Py_END_ALLOW_THREADS;
}

/* As below, for a gradient that is there; both tensors stay alive meanwhile. */
static int copy(const DLPackExchangeAPI *api, PyObject *gradient, PyObject *view, float factor) {
    if (Py_TYPE(gradient) != Py_TYPE(view))
        return 0;
    if (is(PyObject_GetAttr(gradient, names.requires_grad), Py_False) != 1 ||
        is(PyObject_CallMethodObjArgs(gradient, names.is_neg, NULL), Py_False) != 1)
        return 0;
    DLTensor from, to;
    if (api->tensor_of(gradient, &from) != 0 || api->tensor_of(view, &to) != 0)
        return 0;
    if (!is_cpu_float32(&from) || !is_cpu_float32(&to))
        return 0;
    int64_t elements = same_layout(&from, &to);
    if (elements < 0)
        return 0;
    scale(data_of(&to), data_of(&from), (size_t)elements, factor);
    return 1;
}

int pl_copy_in(const struct DLPackExchangeAPI *api, PyObject *slot, float factor) {
    PyObject *parameter = PyObject_GetAttr(slot, names.parameter);
    PyObject *view = PyObject_GetAttr(slot, names.view);
    PyObject *gradient = parameter != NULL ? PyObject_GetAttr(parameter, names.grad) : NULL;
    int copied = 0;
    if (view != NULL && gradient != NULL && view != Py_None && gradient != Py_None)
        copied = copy(api, gradient, view, factor);
    if (copied && gradient != view && PyObject_SetAttr(parameter, names.grad, view) != 0)
        copied = 0; /* and Python copies it once more */
    if (!copied)
        PyErr_Clear();
    Py_XDECREF(gradient);
    Py_XDECREF(view);
    Py_XDECREF(parameter);
    return copied;
}
