/* Two threads, each with one side of a ring, for sanitizers; run by test_sanitizers.py.
 *
 * One writes messages whose sizes and bytes follow from their number, the other reads and compares.
 * Both sleep: the reader on a condition that stands for the eventfd. Ends with 1 if a message is
 * wrong, with 2 if a wake-up was missed. Usage: stress MESSAGES */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ring.h"

enum { CAPACITY = 4096 };

static pl_ring_words words;
static _Alignas(8) unsigned char data[CAPACITY];
static long messages;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t event = PTHREAD_COND_INITIALIZER;
static int events;

static unsigned size_of(long number, unsigned frame) {
    return (unsigned)((number * 7919 + 613 * frame) % (number % 7 == 0 ? 600 : 40));
}

static void ring_bell(void) {
    pthread_mutex_lock(&lock);
    events++;
    pthread_cond_signal(&event);
    pthread_mutex_unlock(&lock);
}

static void sleep_until_bell(void) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 30;
    pthread_mutex_lock(&lock);
    while (events == 0) {
        if (pthread_cond_timedwait(&event, &lock, &until) == ETIMEDOUT) {
            fprintf(stderr, "nobody rang\n");
            exit(2);
        }
    }
    events = 0;
    pthread_mutex_unlock(&lock);
}

static void *write_all(void *unused) {
    (void)unused;
    pl_ring ring = {.words = &words, .data = data, .capacity = CAPACITY};
    unsigned char bytes[600];
    for (long number = 0; number < messages;) {
        memset(bytes, (int)(number % 251), sizeof bytes);
        pl_frame frames[PL_RING_FRAMES];
        unsigned count = (unsigned)(number % 4);
        for (unsigned i = 0; i < count; i++) {
            frames[i] = (pl_frame){bytes, size_of(number, i)};
        }
        if (!pl_ring_write(&ring, frames, count)) {
            continue;
        }
        number++;
        if (pl_ring_must_wake(&ring)) {
            ring_bell();
        }
    }
    return NULL;
}

static void compare(long number, pl_ring_found found, const pl_frame *frames, unsigned count) {
    int is_right = found == (number % 4 == 0 ? PL_RING_MARK : PL_RING_MESSAGE) &&
                   count == (unsigned)(number % 4);
    for (unsigned i = 0; is_right && i < count; i++) {
        is_right = frames[i].size == size_of(number, i);
        for (uint64_t at = 0; is_right && at < frames[i].size; at++) {
            is_right = ((const unsigned char *)frames[i].data)[at] == number % 251;
        }
    }
    if (!is_right) {
        fprintf(stderr, "message %ld is wrong (%d, %u frames)\n", number, (int)found, count);
        exit(1);
    }
}

static void *read_all(void *unused) {
    (void)unused;
    pl_ring ring = {.words = &words, .data = data, .capacity = CAPACITY};
    for (long number = 0; number < messages;) {
        pl_frame frames[PL_RING_FRAMES];
        unsigned count = 0;
        pl_ring_found found = pl_ring_peek(&ring, frames, &count);
        if (found != PL_RING_NOTHING) {
            compare(number++, found, frames, count);
            pl_ring_take(&ring);
        } else if (pl_ring_prepare_sleep(&ring)) {
            sleep_until_bell();
            pl_ring_end_sleep(&ring);
        }
    }
    return NULL;
}

int main(int argc, char **argv) {
    messages = argc > 1 ? atol(argv[1]) : 100000;
    pthread_t writer, reader;
    pthread_create(&writer, NULL, write_all, NULL);
    pthread_create(&reader, NULL, read_all, NULL);
    pthread_join(writer, NULL);
    pthread_join(reader, NULL);
    return 0;
}
