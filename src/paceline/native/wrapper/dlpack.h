/* The part of DLPack's C exchange interface (major version 1) that is used here: where the memory of
 * a Python tensor lies and how it is laid out, without a reference and without a copy. The names and
 * the order of the fields are DLPack's; dmlc.github.io/dlpack has the whole of it. */
#ifndef PACELINE_DLPACK_H
#define PACELINE_DLPACK_H

#include <stdint.h>

#define DLPACK_MAJOR 1
#define DLPACK_CAPSULE "dlpack_exchange_api"

enum { kDLCPU = 1 };   /* DLDevice.device_type */
enum { kDLFloat = 2 }; /* DLDataType.code */

typedef struct {
    int32_t device_type;
    int32_t device_id;
} DLDevice;

typedef struct {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} DLDataType;

typedef struct {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape;   /* owned by the Python tensor, as strides are */
    int64_t *strides; /* in elements */
    uint64_t byte_offset;
} DLTensor;

typedef struct DLPackExchangeAPI {
    struct {
        uint32_t major, minor;
    } version;
    struct DLPackExchangeAPI *older;
    void (*unused[3])(void);
    int (*tensor_of)(void *object, DLTensor *out); /* 0, or -1 with an exception set; may be NULL */
    void (*current_work_stream)(void);
} DLPackExchangeAPI;

#endif
