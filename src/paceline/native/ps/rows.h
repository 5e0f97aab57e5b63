/* What the files for a server's rows share: a table's entry, a message, and what it asks for.
 *
 * `check.c` reads and checks messages, `rows.c` copies rows and talks to Python (ps/state/plain_messages.py),
 * `loop.c` answers without Python (ps/server/native_loop.py).
 *
 * [Note: addresses]
 * An *entry* is a bytearray that a Table owns (ps/state/native_table.py). Its addresses are written where the
 * table gets or drops its storage, and nowhere else; without storage, the map is 0. The memory
 * behind them is mapped once for the life of the storage, and never moves. Each call reads them
 * from the entries and keeps none: between the calls for one PUSH there are slots only, and a slot
 * is compared with the entry of that moment before memory is touched. */
#ifndef PACELINE_PS_ROWS_H
#define PACELINE_PS_ROWS_H

#include "native.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PL_COLUMNS 3

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

/* As ps/state/native_table.py packs it. */
struct pl_column {
    uint64_t address;
    uint64_t bytes; /* of one slot */
};

struct pl_entry {
    int64_t step;        /* pushes so far */
    int64_t padding_idx; /* or -1 */
    uint32_t row_bytes;
    uint32_t family; /* tables of one family can be updated together */
    uint8_t dtype;
    uint8_t is_renormed; /* rows change when they are looked up */
    uint8_t is_stepped;  /* its update depends on `step` */
    uint8_t is_sgd;      /* float32, with no state: loop.c can do its update */
    uint32_t columns;
    uint64_t map; /* address of int32 slots, one for each id; 0: no row is kept */
    uint64_t slots;
    int64_t first; /* the id of the map's first slot */
    uint64_t span; /* how many ids the map has */
    struct pl_column column[PL_COLUMNS]; /* the rows, then each kind of state */
};

/* One section of a checked message. Arrays of it go to Python as bytes. */
struct pl_share {
    uint32_t table;
    uint32_t lines;
};

struct pl_bytes {
    const char *at;
    size_t count;
};

struct pl_message {
    PyObject *entries;                      /* a list of bytearrays, by number of the table */
    struct pl_bytes first, integers, values; /* its frames */
    struct pl_head head;
    uint64_t lines;      /* ids of all sections */
    size_t values_bytes; /* rows of all sections, each section aligned */
};

static inline size_t pl_aligned(size_t count) { return (count + 7) / 8 * 8; }

/* The entry of a table, or NULL. */
struct pl_entry *pl_entry_of(PyObject *entries, uint64_t number);

struct pl_record pl_record_of(const struct pl_message *m, uint32_t number);

/* Whether it is a LOOKUP or PUSH of plain sections, and its frames are as long as it says. */
bool pl_is_plain(struct pl_message *m, size_t most_bytes);

/* Find shares and slots; false if an id is not fine, or has no slot. */
bool pl_find(const struct pl_message *m, struct pl_share *shares, int32_t *slots);

/* Copy the rows of a LOOKUP to `at`, which has room for `values_bytes`; false: not their slots. */
bool pl_copy_found(const struct pl_message *m, const struct pl_share *shares, const int32_t *slots,
                   char *at);

#endif
