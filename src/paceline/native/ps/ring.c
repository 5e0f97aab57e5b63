/* See ring.h. Knows nothing of Python, descriptors or what messages mean. */
#include "ring.h"

#include <string.h>

enum { MESSAGE = 0, SKIP = 1, MARK = 2, KIND_BITS = 7 };

/* A record: its bytes (a multiple of 8) with its kind in the low bits, the number of frames, their
 * sizes; then the frames, each from a multiple of 8. */
enum { HEAD_WORDS = 2 + PL_RING_FRAMES, HEAD_BYTES = 8 * HEAD_WORDS };

static uint64_t aligned(uint64_t bytes) { return (bytes + 7) & ~UINT64_C(7); }

static uint64_t read_word(const unsigned char *from) {
    /* Once, whatever the compiler thinks: the other side may change it. */
    return atomic_load_explicit((const _Atomic uint64_t *)(const void *)from,
                                memory_order_relaxed);
}

/* The size of a record with frames of these sizes; UINT64_MAX if it is larger than any ring. */
static uint64_t record_bytes(const uint64_t *sizes, unsigned count) {
    uint64_t bytes = HEAD_BYTES;
    for (unsigned i = 0; i < count; i++) {
        if (sizes[i] > (UINT64_C(1) << 60)) {
            return UINT64_MAX;
        }
        bytes += aligned(sizes[i]);
    }
    return bytes;
}

/* How many bytes to skip before a record of this size; UINT64_MAX if there is no room. */
static uint64_t room_after(pl_ring *ring, uint64_t bytes) {
    uint64_t taken = atomic_load_explicit(&ring->words->taken, memory_order_acquire);
    uint64_t used = ring->position - taken;
    if (used > ring->capacity) {
        return UINT64_MAX; /* the reader lies: a ring that stays full */
    }
    if (used == 0) {
        ring->origin = ring->position;
        atomic_store_explicit(&ring->words->origin, ring->origin, memory_order_relaxed);
    }
    uint64_t offset = (ring->position - ring->origin) & (ring->capacity - 1);
    uint64_t skip = offset + bytes > ring->capacity ? ring->capacity - offset : 0;
    return used + skip + bytes <= ring->capacity ? skip : UINT64_MAX;
}

bool pl_ring_begin(pl_ring *ring, const uint64_t *sizes, unsigned count, unsigned char **places) {
    uint64_t bytes = record_bytes(sizes, count);
    uint64_t skip = bytes > pl_ring_most(ring) ? UINT64_MAX : room_after(ring, bytes);
    if (skip == UINT64_MAX) {
        return false;
    }
    uint64_t mask = ring->capacity - 1, from_origin = ring->position - ring->origin;
    if (skip != 0) {
        uint64_t word = skip | SKIP;
        memcpy(ring->data + (from_origin & mask), &word, sizeof word);
    }
    unsigned char *at = ring->data + ((from_origin + skip) & mask);
    uint64_t head[HEAD_WORDS] = {bytes | (count == 0 ? MARK : MESSAGE), count};
    if (count != 0) {
        memcpy(head + 2, sizes, count * sizeof *sizes);
    }
    memcpy(at, head, HEAD_BYTES);
    at += HEAD_BYTES;
    for (unsigned i = 0; i < count; i++) {
        places[i] = at;
        at += aligned(sizes[i]);
    }
    ring->begun = skip + bytes;
    return true;
}

void pl_ring_commit(pl_ring *ring) {
    ring->position += ring->begun;
    ring->begun = 0;
    atomic_store_explicit(&ring->words->written, ring->position, memory_order_release);
}

bool pl_ring_write(pl_ring *ring, const pl_frame *frames, unsigned count) {
    uint64_t sizes[PL_RING_FRAMES] = {0};
    unsigned char *places[PL_RING_FRAMES];
    for (unsigned i = 0; i < count; i++) {
        sizes[i] = frames[i].size;
    }
    if (!pl_ring_begin(ring, sizes, count, places)) {
        return false;
    }
    for (unsigned i = 0; i < count; i++) {
        if (sizes[i] != 0) {
            memcpy(places[i], frames[i].data, sizes[i]);
        }
    }
    pl_ring_commit(ring);
    return true;
}

/* The frames of a record of `bytes` bytes; false if they do not fill it exactly. */
static bool read_frames(const unsigned char *record, uint64_t bytes, pl_frame *frames,
                        unsigned *count) {
    uint64_t number = read_word(record + 8);
    if (number > PL_RING_FRAMES) {
        return false;
    }
    uint64_t at = HEAD_BYTES;
    for (unsigned i = 0; i < number; i++) {
        uint64_t size = read_word(record + 16 + 8 * i);
        if (size > bytes - at || aligned(size) > bytes - at) {
            return false;
        }
        frames[i] = (pl_frame){record + at, size};
        at += aligned(size);
    }
    *count = (unsigned)number;
    return at == bytes;
}

pl_ring_found pl_ring_peek(pl_ring *ring, pl_frame *frames, unsigned *count) {
    /* A skip leads to a record: who writes one skip after the other would keep us here for ever. */
    for (bool has_skipped = false;;) {
        uint64_t written = atomic_load_explicit(&ring->words->written, memory_order_acquire);
        uint64_t there = written - ring->position;
        if (there == 0) {
            return PL_RING_NOTHING;
        }
        uint64_t origin = atomic_load_explicit(&ring->words->origin, memory_order_relaxed);
        uint64_t offset = (ring->position - origin) & (ring->capacity - 1);
        uint64_t left = ring->capacity - offset;
        if (there > ring->capacity || there % 8 != 0 || origin % 8 != 0) {
            return PL_RING_TORN;
        }
        const unsigned char *record = ring->data + offset;
        uint64_t word = read_word(record);
        uint64_t kind = word & KIND_BITS, bytes = word - kind;
        if (kind == SKIP && bytes == left && bytes < there && !has_skipped) {
            ring->position += bytes;
            has_skipped = true;
            continue;
        }
        if (bytes < HEAD_BYTES || bytes > left || bytes > there ||
            !read_frames(record, bytes, frames, count)) {
            return PL_RING_TORN;
        }
        ring->peeked = bytes;
        if (kind == MESSAGE && *count != 0) {
            return PL_RING_MESSAGE;
        }
        return kind == MARK && *count == 0 ? PL_RING_MARK : PL_RING_TORN;
    }
}

void pl_ring_take(pl_ring *ring) {
    ring->position += ring->peeked;
    ring->peeked = 0;
    atomic_store_explicit(&ring->words->taken, ring->position, memory_order_release);
}

bool pl_ring_prepare_sleep(pl_ring *ring) {
    atomic_store_explicit(&ring->words->sleeps, 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&ring->words->written, memory_order_acquire) == ring->position) {
        return true;
    }
    pl_ring_end_sleep(ring);
    return false;
}

void pl_ring_end_sleep(pl_ring *ring) {
    atomic_store_explicit(&ring->words->sleeps, 0, memory_order_relaxed);
}

bool pl_ring_must_wake(pl_ring *ring) {
    atomic_thread_fence(memory_order_seq_cst);
    return atomic_load_explicit(&ring->words->sleeps, memory_order_relaxed) != 0 &&
           atomic_exchange_explicit(&ring->words->sleeps, 0, memory_order_relaxed) != 0;
}
