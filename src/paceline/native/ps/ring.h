/* A ring of messages in memory that two processes share: one writes, one reads.
 *
 * [Note: the ring]
 * Who writes which word. `written` belongs to the writer, `taken` to the reader; both only grow,
 * and count bytes since the start. What lies between `taken` and `written` is the reader's, the
 * rest is the writer's. The writer fills in a record and then stores `written` (release); the
 * reader loads it (acquire), copies the record out and then stores `taken` (release), which the
 * writer loads (acquire) before it uses that space again. So nobody reads what somebody writes.
 * Each side keeps its own count to itself and never reads it back from shared memory.
 *
 * A record is contiguous: one that does not fit before the end of the ring is preceded by a *skip*
 * to the start. `origin`, the writer's too, is the count that lies at the start of the memory. The
 * writer moves it when it finds the ring empty, so that messages that are answered one by one stay
 * in the same few cache lines. It stores `origin` before `written`, and cannot move it again before
 * the reader has taken what `written` announced: so a reader that finds a record, and loads
 * `origin` after `written`, has the right one.
 *
 * Who sleeps. The reader stores `sleeps` = 1, then looks at `written` once more; the writer stores
 * `written`, then looks at `sleeps`, with a full fence between in both, so at least one sees the
 * other. Whoever changes `sleeps` from 1 to 0 as a writer writes to the reader's eventfd. An event
 * too many is a wake-up for nothing; an event too few is impossible.
 *
 * Who may be dead. A writer that dies has stored `written` or not: a record that is half there is
 * never seen. A reader that dies leaves a ring that fills up, and a full ring is not waited for.
 * That a peer is dead is not seen here, but at the connection over which the memory was handed.
 *
 * Who may lie. Counts, sizes and kinds are read once, into private memory, and checked against the
 * ring before they are used; data are copied before they are looked at. What does not fit is
 * PL_RING_TORN, for good. The memory cannot shrink, because the memfd is sealed (ps/protocol/shm_ring.py). */
#ifndef PACELINE_PS_RING_H
#define PACELINE_PS_RING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PL_RING_FRAMES 3

typedef struct {
    _Alignas(64) _Atomic uint64_t written;
    _Atomic uint64_t origin;
    _Alignas(64) _Atomic uint64_t taken;
    _Alignas(64) _Atomic uint32_t sleeps;
} pl_ring_words;

/* One side of a ring: private, but for what `words` and `data` point to. */
typedef struct {
    pl_ring_words *words;
    unsigned char *data;
    uint64_t capacity; /* a power of two */
    uint64_t position; /* the writer's `written`, or the reader's `taken` */
    uint64_t origin;   /* the writer's; the reader has none of its own */
    uint64_t peeked;   /* reader: bytes of the record that was looked at, or 0 */
    uint64_t begun;    /* writer: bytes of the record that is begun, with its skip */
} pl_ring;

typedef struct {
    const void *data;
    uint64_t size;
} pl_frame;

typedef enum {
    PL_RING_NOTHING,
    PL_RING_MESSAGE,
    PL_RING_MARK,
    PL_RING_TORN,
} pl_ring_found;

/* A record that is larger than this may not fit even into an empty ring. */
static inline uint64_t pl_ring_most(const pl_ring *ring) { return ring->capacity / 2; }

/* Begin a message whose frames have these sizes: `places` get where to put them. The reader sees
 * nothing before pl_ring_commit. False if there is no room now. A mark has no frame. */
bool pl_ring_begin(pl_ring *ring, const uint64_t *sizes, unsigned count, unsigned char **places);
void pl_ring_commit(pl_ring *ring);

/* Both, with a copy; false if there is no room now. */
bool pl_ring_write(pl_ring *ring, const pl_frame *frames, unsigned count);

/* Look at the next record without taking it; `frames` point into the ring. */
pl_ring_found pl_ring_peek(pl_ring *ring, pl_frame *frames, unsigned *count);

/* Give back the record that was peeked at. */
void pl_ring_take(pl_ring *ring);

/* Reader: say that it will sleep; false if there is something to read after all. */
bool pl_ring_prepare_sleep(pl_ring *ring);

/* Reader: it is awake. */
void pl_ring_end_sleep(pl_ring *ring);

/* Writer: must the reader be woken? True once for each time that it went to sleep. */
bool pl_ring_must_wake(pl_ring *ring);

#endif
