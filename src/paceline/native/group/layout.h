/* The bytes that ranks of one host share: written down here, once.
 *
 * Python maps the segments and passes addresses; it never decodes these bytes itself: `Core.row()`
 * and `Core.verdict()` do (records.c). Whoever changes anything here raises
 * PL_LAYOUT_VERSION: ranks compare it before they map each other.
 *
 * [Note: who writes what]
 *   header            the rank that creates the segment, before it is passed on; read-only after
 *   barrier.arrived   every rank, by fetch_add, once for each phase
 *   barrier.sleepers  every rank that goes to sleep or wakes up
 *   verdict           the first rank that finds the group broken, by compare-exchange from 0
 *   row[r]            rank r alone
 *   arena of rank r   rank r: its staging slots; peers: only inside an in-place reduction, the
 *                     slice that is theirs (docs/protocol.md)
 * Every word that two ranks may touch at once is atomic. docs/protocol.md has the proof.
 */
#ifndef PACELINE_LAYOUT_H
#define PACELINE_LAYOUT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define PL_MAGIC UINT64_C(0x31454e494c454341) /* "ACELINE1" in memory order */
#define PL_LAYOUT_VERSION 3
#define PL_LINE 64       /* what one core writes at a time: words of different writers stay apart */
#define PL_SLOTS 4       /* [Note: slots] in engine.c */
#define PL_MAX_WORLD 4096

typedef struct {
    uint64_t magic;
    uint32_t version;
    uint32_t world;
    uint64_t slot_bytes;
    uint8_t unused[PL_LINE - 24];
} pl_header;

typedef struct {
    _Alignas(PL_LINE) _Atomic uint32_t arrived; /* a futex; world * phase once a phase is complete */
    _Alignas(PL_LINE) _Atomic uint32_t sleepers;
} pl_barrier;

/* What a rank brings to a collective. Two of them, used in turn: one is compared by the peers
 * while the next is already written. */
typedef struct {
    _Atomic uint64_t seq;    /* which collective of this group, from 1 */
    _Atomic uint64_t count;  /* elements (bytes for what only moves bytes) */
    _Atomic uint64_t offset; /* of the tensor in this rank's arena; PL_NOT_IN_ARENA */
    _Atomic uint32_t kind, dtype, op, root;
} pl_ticket;

#define PL_NOT_IN_ARENA UINT64_MAX

typedef struct {
    _Alignas(PL_LINE) _Atomic uint32_t life;  /* pl_life */
    _Atomic uint32_t phase;                   /* the last phase at which it has been counted */
    _Atomic uint64_t since_ns;                /* CLOCK_MONOTONIC of the latest change of life */
    _Atomic uint64_t finished;                /* seq of the last collective that ended here */
    _Alignas(PL_LINE) pl_ticket ticket[2];
} pl_row;

typedef struct {
    pl_header header;
    pl_barrier barrier;
    _Alignas(PL_LINE) _Atomic uint64_t verdict; /* 0, or pl_verdict packed: why the group is over */
    pl_row row[];
} pl_control;

enum pl_life {
    PL_LIFE_IDLE = 0,   /* between collectives */
    PL_LIFE_WORKING,    /* inside the collective of its ticket */
    PL_LIFE_CLOSED,     /* has left the group for good */
};

enum pl_end {
    PL_END_NONE = 0,
    PL_END_LOST,     /* `about` died or left while others waited for it */
    PL_END_TIMEOUT,  /* `by` waited until its deadline; `about` was the first missing */
    PL_END_ABORTED,  /* `by` called abort() */
    PL_END_MISMATCH, /* `by` waits for `about`, which waits for it elsewhere; `by`'s page says where */
    PL_END_DAMAGED,  /* `by` found words in shared memory that no rank writes */
};

/* verdict = end | by << 8 | about << 32 */
static inline uint64_t pl_pack_verdict(uint32_t end, uint32_t by, uint32_t about) {
    return (uint64_t)end | (uint64_t)by << 8 | (uint64_t)about << 32;
}

typedef struct {
    uint32_t end, by, about;
} pl_verdict;

/* A verdict that no rank of this world writes is that of a damaged control block. */
static inline pl_verdict pl_unpack_verdict(uint64_t word, uint32_t world) {
    pl_verdict found = {(uint32_t)(word & 0xff), (uint32_t)(word >> 8 & 0xffffff),
                        (uint32_t)(word >> 32)};
    bool is_sound = found.end <= PL_END_DAMAGED && (found.end != PL_END_NONE || word == 0) &&
                    found.by < world && found.about < world;
    return is_sound ? found : (pl_verdict){PL_END_DAMAGED, 0, 0};
}

static inline uint64_t pl_control_bytes(uint32_t world) {
    return sizeof(pl_control) + (uint64_t)world * sizeof(pl_row);
}

#endif
