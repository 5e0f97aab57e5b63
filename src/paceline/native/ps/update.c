/* The optimizers' arithmetic on a table's rows, in place, with the bits of ps/state/updates.py.
 *
 * The order of operations is that of torch's kernels on gathered rows. Three things depend on how
 * torch was built and on the machine: whether it adds a product with one rounding or with two, in
 * how many lanes it adds up a row, and how it takes roots: MKL's are not always the nearest number.
 * ps/state/native_updates.py tries out what gives torch's bits here, and leaves an optimizer to
 * torch if nothing does. -std=c11 keeps the compiler from fusing by itself.
 *
 * Roots are taken of many values at once, so rows are updated in blocks: first the state of all
 * rows of a block, then its roots, then the values. */
#include "mean_of_squares.h"
#include "rows.h"

#include <math.h>

#define BLOCK_ROWS 64
#define BLOCK_VALUES 2048

#if defined(__x86_64__)
#define FMA_TARGET __attribute__((target("avx2,fma")))
static bool has_fma(void) {
    return __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx2");
}
#elif defined(__aarch64__)
#define FMA_TARGET
static bool has_fma(void) { return true; }
#else
#define FMA_TARGET
static bool has_fma(void) { return false; }
#endif

/* As MKL declares vmsSqrt: count, values, roots, mode. */
typedef void (*root_function)(int64_t, const float *, float *, int64_t);
/* High accuracy, denormal numbers as they are, no errors: as torch calls it. */
#define ROOT_MODE INT64_C(0x140102)

/* What is the same for all rows of a push. */
struct update {
    float alpha; /* what is added is multiplied by it */
    float eps;
    float new1; /* Adam: the share of the new value in each mean */
    float new2;
    uint32_t lanes;
    size_t dim;
    root_function root; /* or NULL */
};

/* One row, or a part of one: its values, its state, its gradient. */
struct row {
    float *values;
    float *state[2];
    const float *grad;
};

struct block {
    size_t count; /* of rows */
    size_t width; /* values of each */
    struct row rows[BLOCK_ROWS];
    float roots[BLOCK_VALUES];
};

INLINE float add_product(bool is_fused, float sum, float a, float b) {
    return is_fused ? __builtin_fmaf(a, b, sum) : sum + a * b;
}

INLINE void take_roots(const struct update *u, float *roots, size_t count) {
    if (u->root != NULL) {
        u->root((int64_t)count, roots, roots, ROOT_MODE);
        return;
    }
    for (size_t i = 0; i < count; i++) {
        roots[i] = sqrtf(roots[i]);
    }
}

INLINE void sgd(bool is_fused, const struct update *u, const struct block *block) {
    for (size_t line = 0; line < block->count; line++) {
        float *restrict values = block->rows[line].values;
        const float *restrict grad = block->rows[line].grad;
        for (size_t i = 0; i < block->width; i++) {
            values[i] = add_product(is_fused, values[i], u->alpha, grad[i]);
        }
    }
}

INLINE void adagrad(bool is_fused, const struct update *u, struct block *block) {
    size_t width = block->width;
    for (size_t line = 0; line < block->count; line++) {
        float *restrict sums = block->rows[line].state[0];
        float *restrict roots = block->roots + line * width;
        const float *restrict grad = block->rows[line].grad;
        for (size_t i = 0; i < width; i++) {
            roots[i] = sums[i] = add_product(is_fused, sums[i], grad[i], grad[i]);
        }
    }
    take_roots(u, block->roots, block->count * width);
    for (size_t line = 0; line < block->count; line++) {
        float *restrict values = block->rows[line].values;
        const float *restrict roots = block->roots + line * width;
        const float *restrict grad = block->rows[line].grad;
        for (size_t i = 0; i < width; i++) {
            values[i] += u->alpha * grad[i] / (roots[i] + u->eps);
        }
    }
}

INLINE void rowwise_adagrad(bool is_fused, const struct update *u, struct block *block) {
    for (size_t line = 0; line < block->count; line++) {
        struct row row = block->rows[line];
        /* Written out for the usual number: so the compiler makes vectors of the lanes. */
        float mean = u->lanes == 8 ? mean_of_squares(row.grad, u->dim, 8)
                                   : mean_of_squares(row.grad, u->dim, u->lanes);
        block->roots[line] = row.state[0][0] += mean;
    }
    take_roots(u, block->roots, block->count);
    for (size_t line = 0; line < block->count; line++) {
        float *restrict values = block->rows[line].values;
        const float *restrict grad = block->rows[line].grad;
        float divisor = block->roots[line] + u->eps;
        for (size_t i = 0; i < u->dim; i++) {
            values[i] = add_product(is_fused, values[i], u->alpha, grad[i] / divisor);
        }
    }
}

INLINE void adam(const struct update *u, struct block *block) {
    size_t width = block->width;
    for (size_t line = 0; line < block->count; line++) {
        float *restrict means = block->rows[line].state[0];
        float *restrict squares = block->rows[line].state[1];
        float *restrict roots = block->roots + line * width;
        const float *restrict grad = block->rows[line].grad;
        for (size_t i = 0; i < width; i++) {
            float square = grad[i] * grad[i];
            means[i] += (grad[i] - means[i]) * u->new1;
            roots[i] = squares[i] += (square - squares[i]) * u->new2;
        }
    }
    take_roots(u, block->roots, block->count * width);
    for (size_t line = 0; line < block->count; line++) {
        float *restrict values = block->rows[line].values;
        const float *restrict means = block->rows[line].state[0];
        const float *restrict roots = block->roots + line * width;
        for (size_t i = 0; i < width; i++) {
            values[i] += u->alpha * (means[i] / (roots[i] + u->eps));
        }
    }
}

/* --- all rows of a push ------------------------------------------------------------------------- */

INLINE void update_block(enum pl_optimizer optimizer, bool is_fused, const struct update *u,
                         struct block *block) {
    switch (optimizer) {
    case PL_SGD:
        sgd(is_fused, u, block);
        break;
    case PL_ADAGRAD:
        adagrad(is_fused, u, block);
        break;
    case PL_ROWWISE_ADAGRAD:
        rowwise_adagrad(is_fused, u, block);
        break;
    case PL_ADAM:
        adam(u, block);
        break;
    case PL_BY_TORCH:
        break;
    }
    block->count = 0;
}

static float *line_at(const struct pl_entry *entry, uint32_t column, int32_t slot) {
    const struct pl_column *at = &entry->column[column];
    return (float *)(uintptr_t)(at->address + (uint64_t)(uint32_t)slot * at->bytes);
}

static void prefetch(const struct pl_entry *entry, int32_t slot) {
    for (uint32_t column = 0; column < entry->columns && slot != PL_SKIPPED; column++) {
        __builtin_prefetch(line_at(entry, column, slot), 1);
    }
}

static void add_row(struct block *block, const struct pl_entry *entry, int32_t slot,
                    const float *grad, size_t from) {
    struct row *row = &block->rows[block->count++];
    *row = (struct row){.values = line_at(entry, 0, slot) + from, .grad = grad + from};
    for (uint32_t column = 1; column < entry->columns; column++) {
        size_t skipped = entry->column[column].bytes == sizeof(float) ? 0 : from;
        row->state[column - 1] = line_at(entry, column, slot) + skipped;
    }
}

/* The values `from` to `from + width` of all rows. */
INLINE void update_part(bool is_fused, const struct pl_entry *entry, const struct update *u,
                        const int32_t *slots, size_t lines, const float *grad, size_t from,
                        struct block *block) {
    size_t most = BLOCK_VALUES / (block->width < BLOCK_VALUES ? block->width : BLOCK_VALUES);
    most = most < BLOCK_ROWS ? most : BLOCK_ROWS;
    for (size_t i = 0; i < lines; i++) {
        if (lines - i > PL_AHEAD) {
            prefetch(entry, slots[i + PL_AHEAD]);
        }
        if (slots[i] != PL_SKIPPED) {
            add_row(block, entry, slots[i], grad + i * u->dim, from);
        }
        if (block->count == most) {
            update_block((enum pl_optimizer)entry->optimizer, is_fused, u, block);
        }
    }
    update_block((enum pl_optimizer)entry->optimizer, is_fused, u, block);
}

/* Rows that are wider than a block's roots are updated in parts, but for the optimizer that has one
 * root for each row. */
INLINE void update_all(bool is_fused, const struct pl_entry *entry, const struct update *u,
                       const int32_t *slots, size_t lines, const float *grad) {
    size_t most = entry->optimizer == PL_ROWWISE_ADAGRAD ? u->dim : BLOCK_VALUES;
    struct block block;
    block.count = 0;
    for (size_t from = 0; from < u->dim; from += most) {
        block.width = u->dim - from < most ? u->dim - from : most;
        update_part(is_fused, entry, u, slots, lines, grad, from, &block);
    }
}

FMA_TARGET static void update_fused(const struct pl_entry *entry, const struct update *u,
                                    const int32_t *slots, size_t lines, const float *grad) {
    update_all(true, entry, u, slots, lines, grad);
}

FMA_TARGET static void update_wide(const struct pl_entry *entry, const struct update *u,
                                   const int32_t *slots, size_t lines, const float *grad) {
    update_all(false, entry, u, slots, lines, grad);
}

static void update_anywhere(const struct pl_entry *entry, const struct update *u,
                            const int32_t *slots, size_t lines, const float *grad) {
    update_all(false, entry, u, slots, lines, grad);
}

static struct update update_of(const struct pl_entry *entry, double lr) {
    double rate = lr;
    if (entry->optimizer == PL_ADAM) {
        double step = (double)entry->step;
        rate = lr * sqrt(1 - pow(entry->beta2, step)) / (1 - pow(entry->beta1, step));
    }
    return (struct update){
        .alpha = (float)-rate,
        .eps = (float)entry->eps,
        .new1 = (float)(1 - entry->beta1),
        .new2 = (float)(1 - entry->beta2),
        .dim = entry->row_bytes / sizeof(float),
        .lanes = entry->lanes,
        .root = (root_function)(uintptr_t)entry->root,
    };
}

void pl_update_rows(struct pl_entry *entry, const int32_t *slots, size_t lines, const float *grad,
                    double lr) {
    entry->step++;
    struct update u = update_of(entry, lr);
    if (!has_fma()) {
        update_anywhere(entry, &u, slots, lines, grad);
    } else if (entry->is_fused) {
        update_fused(entry, &u, slots, lines, grad);
    } else {
        update_wide(entry, &u, slots, lines, grad);
    }
}

/* --- for Python --------------------------------------------------------------------------------- */

static bool are_slots_of(const struct pl_entry *entry, const int32_t *slots, size_t lines) {
    for (size_t i = 0; i < lines; i++) {
        if ((uint32_t)slots[i] >= entry->slots && slots[i] != PL_SKIPPED) {
            return false;
        }
    }
    return true;
}

static bool can_update(const struct pl_entry *entry, const Py_buffer *slots,
                       const Py_buffer *grad) {
    size_t lines = (size_t)slots->len / sizeof(int32_t);
    return entry != NULL && entry->optimizer != PL_BY_TORCH &&
           (!entry->is_fused || has_fma()) && entry->lanes - 1u < MOST_LANES &&
           (size_t)grad->len == lines * entry->row_bytes && (uintptr_t)grad->buf % 4 == 0 &&
           are_slots_of(entry, slots->buf, lines);
}

/* update_rows(entry, slots, gradient, lr) -> bool: whether it was done; slots are int32. */
static PyObject *update_rows(PyObject *self, PyObject *arguments) {
    (void)self;
    PyObject *object;
    Py_buffer slots, grad;
    double lr;
    if (!PyArg_ParseTuple(arguments, "Oy*y*d", &object, &slots, &grad, &lr)) {
        return NULL;
    }
    struct pl_entry *entry = pl_entry_in(object);
    bool can = can_update(entry, &slots, &grad);
    if (can) {
        pl_update_rows(entry, slots.buf, (size_t)slots.len / sizeof(int32_t), grad.buf, lr);
    }
    PyBuffer_Release(&slots);
    PyBuffer_Release(&grad);
    return PyBool_FromLong(can);
}

PyMethodDef pl_update_functions[] = {
    {"update_rows", update_rows, METH_VARARGS, "update_rows(entry, slots, gradient, lr) -> bool"},
    {NULL, NULL, 0, NULL},
};
