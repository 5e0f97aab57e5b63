#include "native.h"

PyMethodDef pl_rows_functions[] = {
    {NULL, NULL, 0, NULL},
};
