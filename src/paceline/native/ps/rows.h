/* A table's entry and a message: what the files of a server's native core share.
 *
 * `check.c` checks a message, `update.c` does the optimizers' arithmetic, `answer.c` answers one
 * message (for ps/state/native_messages.py), `loop.c` those in shared memory (for
 * ps/server/native_loop.py).
 *
 * [Note: addresses]
 * An *entry* is a bytearray that a Table owns (ps/state/native_table.py). Its addresses are written
 * where the table gets or drops its storage, and nowhere else; without storage, the map is 0. The
 * memory behind them is mapped once for the life of the storage, and never moves. No call keeps an
 * address after it returns. */
#ifndef PACELINE_PS_ROWS_H
#define PACELINE_PS_ROWS_H

#include "native.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PL_COLUMNS 3
#define PL_AHEAD 6 /* rows that are on their way from memory while one is worked on */
#define PL_SKIPPED (-1) /* instead of a slot: the padding row, which no push changes */

enum pl_kind { PL_LOOKUP = 3, PL_PUSH = 4, PL_DONE = 65, PL_FOUND = 66 };

/* As ps/protocol/wire.py packs them; the machine has to be little endian. */
struct pl_head {
    char magic[4];
    uint16_t version;
    uint8_t kind;
    uint8_t flags;
    uint64_t request;
    char client[16];
    uint64_t sequence;
    uint32_t sections;
    uint32_t reserved;
};

#define PL_MAX_LEARNING_RATE 1e4 /* MAX_LEARNING_RATE in ps/protocol/wire.py */

struct pl_record {
    uint32_t table;
    uint8_t form;
    uint8_t mode;
    uint8_t flags;
    uint8_t dtype;
    uint64_t ids;
    uint64_t bags;
    double lr;
};

enum pl_optimizer { PL_BY_TORCH, PL_SGD, PL_ADAGRAD, PL_ROWWISE_ADAGRAD, PL_ADAM };

/* As ps/state/native_table.py packs it. */
struct pl_column {
    uint64_t address;
    uint64_t bytes; /* of one slot */
};

struct pl_entry {
    int64_t step;        /* pushes so far */
    int64_t padding_idx; /* or -1 */
    uint32_t row_bytes;
    uint8_t dtype;
    uint8_t is_renormed; /* rows change when they are looked up */
    uint8_t optimizer;   /* PL_BY_TORCH: Python does its pushes */
    uint8_t is_fused;    /* torch adds a product with one rounding, here */
    uint32_t lanes;      /* torch adds up a row in so many lanes, here */
    uint32_t columns;
    double eps;
    double beta1;
    double beta2;
    uint64_t root; /* address of a function for roots that is torch's, here; 0: sqrtf */
    uint64_t map; /* address of int32 slots, one for each id; 0: no row is kept */
    uint64_t slots;
    int64_t first; /* the id of the map's first slot */
    uint64_t span; /* how many ids the map has */
    struct pl_column column[PL_COLUMNS]; /* the rows, then each kind of state */
};

/* What a client has had applied; as ps/state/clients.py packs it. */
struct pl_account {
    uint64_t applied;
    char client[16];
};

struct pl_bytes {
    const char *at;
    size_t count;
};

struct pl_message {
    PyObject *entries;                       /* a list of bytearrays, by number of the table */
    struct pl_bytes first, integers, values; /* its frames */
    struct pl_head head;
    uint64_t lines;      /* ids of all sections */
    size_t values_bytes; /* rows of all sections, each section aligned */
};

static inline size_t pl_aligned(size_t count) { return (count + 7) / 8 * 8; }

/* The entry or account that a bytearray holds, or NULL; of a table, by its number. */
struct pl_entry *pl_entry_in(PyObject *object);
struct pl_account *pl_account_in(PyObject *object);
struct pl_entry *pl_entry_of(PyObject *entries, uint64_t number);

struct pl_record pl_record_of(const struct pl_message *m, uint32_t number);

/* Whether it is a LOOKUP or PUSH of sections that C answers, and its frames are as long as it says. */
bool pl_is_native(struct pl_message *m, size_t most_bytes);

/* Find the slots of all ids; false if an id is not fine, or has no slot. */
bool pl_find(const struct pl_message *m, int32_t *slots);

/* Apply the gradients of one table's rows, whose slots were checked, and count the push. */
void pl_update_rows(struct pl_entry *entry, const int32_t *slots, size_t lines, const float *grad,
                    double lr);

#endif
