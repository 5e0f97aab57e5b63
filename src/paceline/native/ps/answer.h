/* Answering one native message; for loop.c. */
#ifndef PACELINE_PS_ANSWER_H
#define PACELINE_PS_ANSWER_H

#include "rows.h" /* first: it brings Python.h */

#include "ring.h"

enum { PL_TALLIES = 1024 };

/* One table's share of a message that was answered, for meters; as ps/state/native_messages.py
 * unpacks it. */
struct pl_tally {
    uint32_t table;
    uint32_t lines;
    uint64_t end_ns;
    uint32_t took_ns;
    uint32_t is_push;
};

/* Memory for one message at a time, and tallies of those before. */
typedef struct {
    PyObject_HEAD size_t tallied;
    struct pl_tally tallies[PL_TALLIES];
    PyObject *entries; /* list of bytearray, by number of the table */
    size_t most_bytes; /* of all rows of a message */
    char *copy;        /* of a message */
    size_t copy_bytes;
    int32_t *slots; /* of all ids of a message */
    size_t slots_count;
} ResponderObject;

/* Where the frames of a reply go: `begin` finds room for them, or says that there is none. */
struct pl_reply {
    bool (*begin)(struct pl_reply *reply, const uint64_t *sizes, unsigned count,
                  unsigned char **places);
    void *to;
};

struct pl_request {
    pl_frame frames[PL_RING_FRAMES];
    unsigned count;
    bool is_shared;             /* somebody else may write to the frames */
    struct pl_account *account; /* of the client that may push; NULL: none */
    PyObject *journal;          /* called with the frames before a push is applied; or None */
    PyObject *reach;            /* called with the name of a place, in tests; or None */
};

typedef enum {
    PL_NOTHING,
    PL_ANSWERED,
    PL_FOR_PYTHON, /* nothing was done */
    PL_FAILED,     /* an exception is set */
} pl_outcome;

uint64_t pl_clock_ns(void);

pl_outcome pl_answer(ResponderObject *self, const struct pl_request *request,
                     struct pl_reply *reply);

/* Say that a push has come to a place of ps/storage/faults.py; false with an exception set. */
bool pl_reach(PyObject *reach, const char *place);

/* Answers from shared memory; see loop.c. */
PyObject *pl_responder_run(ResponderObject *self, PyObject *arguments);

#endif
