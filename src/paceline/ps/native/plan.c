#include "native.h"

PyMethodDef pl_plan_functions[] = {
    {NULL, NULL, 0, NULL},
};
