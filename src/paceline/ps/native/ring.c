#include "native.h"

PyMethodDef pl_ring_functions[] = {
    {NULL, NULL, 0, NULL},
};
