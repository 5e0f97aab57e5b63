/* The type `Pair` of pair.c, for loop.c. */
#ifndef PACELINE_PS_PAIR_H
#define PACELINE_PS_PAIR_H

#include "native.h"
#include "ring.h"

typedef struct {
    PyObject_HEAD void *memory; /* NULL: closed */
    size_t size;
    pl_ring in;
    pl_ring out;
    int own_event;
    int peer_event;
} PairObject;

/* The object as a pair, or NULL if it is not one, or is closed. */
PairObject *pl_pair_of(PyObject *object);

/* Wake the reader of `out`, if it sleeps. */
void pl_wake_peer(PairObject *pair);

#endif
