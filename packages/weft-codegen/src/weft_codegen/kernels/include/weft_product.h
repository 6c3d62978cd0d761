/* out[m][n] = added[m][n] + sum over k of packed[k][m] weight[n][k]: what weft_linear.h and
 * weft_convolution.h share, which pack their inputs in ways of their own.
 *
 *     packed[panel][k][row]           a panel has WEFT_WIDE rows
 *     tile[n][row]                    a strip of WEFT_STRIP columns of the result
 *     WEFT_ROWS by WEFT_WIDE sums     in registers, for WEFT_DEPTH terms; added to the tile then,
 *                                     so rounding errors grow with the shorter sums
 */

#ifndef WEFT_PRODUCT_H
#define WEFT_PRODUCT_H

#include "weft_block.h"

/* Of the packed x, WEFT_DEPTH by WEFT_BLOCK floats are in use at a time: 384 kB, for the second cache. */
enum { WEFT_STRIP = 48, WEFT_DEPTH = 384, WEFT_BLOCK = 256 };
enum { WEFT_COPY_STRIDE = WEFT_DEPTH + 16 };

WEFT_BLOCKS_OF(weft_block, WEFT_ROWS, WEFT_COPY_STRIDE, 1)

/* How a weight is stored; it is widened where it comes into the first cache. */
typedef enum { WEFT_F32, WEFT_BF16, WEFT_F16 } weft_kept;

typedef struct {
    const float *x;
    const void *weight;
    const float *added;
    float *out, *packed;
    int64_t rows, columns, depth, x_stride, weight_stride, added_stride, panels;
    weft_kept kept;
} weft_linear_job;

/* wide[i] = kept[i] */
static void weft_widen(const uint16_t *from, float *to, int64_t count, weft_kept kept)
{
    if (kept == WEFT_BF16)
#pragma omp simd
        for (int64_t i = 0; i < count; i++)
            to[i] = bf16_to_f32(from[i]);
    else
#pragma omp simd
        for (int64_t i = 0; i < count; i++)
            to[i] = f16_to_f32(from[i]);
}

static inline const void *weft_element(const weft_linear_job *job, int64_t position)
{
    return (const char *)job->weight + position * (job->kept ? 2 : 4);
}

/* Start the tile of the strip at `first` with what is added to the product. */
static void weft_linear_start(const weft_linear_job *job, int64_t first, int64_t columns, float *tile)
{
    const int64_t across = job->panels * WEFT_WIDE;
    for (int64_t n = 0; n < WEFT_STRIP; n++) {
        _Bool row = job->added && n < columns && !job->added_stride;
        float value = row ? job->added[first + n] : 0;
        for (int64_t m = 0; m < across; m++)
            tile[n * across + m] = value;
    }
    if (job->added && job->added_stride)
        weft_transpose(job->added + first, job->added_stride, tile, across, job->rows, columns);
}

/* copy[r][i] = weight[r][i], rows of zeros after the first `rows`. Copied, rows of a weight do not want
 * the same lines of the first cache, however far apart they lie. */
static void weft_linear_copy(const weft_linear_job *job, int64_t first, int64_t rows, int64_t depth, float *copy)
{
    for (int64_t r = 0; r < WEFT_ROWS; r++)
        if (r < rows && job->kept)
            weft_widen(weft_element(job, first + r * job->weight_stride), copy + r * WEFT_COPY_STRIDE, depth, job->kept);
        else if (r < rows)
            __builtin_memcpy(copy + r * WEFT_COPY_STRIDE, weft_element(job, first + r * job->weight_stride), depth * sizeof(float));
        else
            __builtin_memset(copy + r * WEFT_COPY_STRIDE, 0, depth * sizeof(float));
}

/* Strips [lo, hi) of columns of the result. */
static void weft_linear_strips(const void *args, int64_t lo, int64_t hi)
{
    const weft_linear_job *job = args;
    const int64_t across = job->panels * WEFT_WIDE, stride = job->weight_stride;
    float tile[WEFT_STRIP * WEFT_BLOCK] __attribute__((aligned(64)));
    float copy[WEFT_ROWS * WEFT_COPY_STRIDE] __attribute__((aligned(64)));
    for (int64_t strip = lo; strip < hi; strip++) {
        int64_t first = strip * WEFT_STRIP, columns = weft_min(WEFT_STRIP, job->columns - first);
        weft_linear_start(job, first, columns, tile);
        for (int64_t k = 0; k < job->depth; k += WEFT_DEPTH) {
            int64_t depth = weft_min(WEFT_DEPTH, job->depth - k);
            for (int64_t n = 0; n < columns; n += WEFT_ROWS) {
                int64_t at = (first + n) * stride + k, far = job->kept ? stride / 2 : stride;
                const float *next = weft_element(job, at + WEFT_ROWS * stride);
                if (n + WEFT_ROWS >= columns && k + depth < job->depth)
                    next = weft_element(job, first * stride + k + depth);
                weft_linear_copy(job, at, columns - n, depth, copy);
                for (int64_t row = 0, wide; row < job->rows; row += wide) {
                    int64_t within = row % WEFT_WIDE, quarters = weft_quarters(job->rows - row);
                    const float *panel = job->packed + (row - within) * job->depth + k * WEFT_WIDE + within;
                    quarters = quarters == 3 ? 2 : quarters;
                    wide = quarters * (WEFT_WIDE / 4);
                    weft_pick(quarters, weft_block)(copy, 0, panel, depth, tile + n * across + row, across, next, far);
                    next = copy, far = 0;
                }
            }
        }
        weft_transpose(tile, across, job->out + first, job->columns, columns, job->rows);
    }
}

/* Pack panels [lo, hi) of x, with zeros for the rows that the last one lacks. */
static void weft_linear_pack(const void *args, int64_t lo, int64_t hi)
{
    const weft_linear_job *job = args;
    for (int64_t panel = lo; panel < hi; panel++) {
        int64_t first = panel * WEFT_WIDE, rows = weft_min(WEFT_WIDE, job->rows - first);
        float *to = job->packed + first * job->depth;
        for (int64_t k = 0; k < (rows < WEFT_WIDE ? job->depth : 0); k++)
            for (int64_t row = rows; row < WEFT_WIDE; row++)
                to[k * WEFT_WIDE + row] = 0;
        weft_transpose(job->x + first * job->x_stride, job->x_stride, to, WEFT_WIDE, rows, job->depth);
    }
}

/* See weft_linear.h. */
static int weft_product(float *out, const float *added, const float *x, const void *weight, int64_t rows,
                        int64_t columns, int64_t depth, int64_t added_stride, int64_t x_stride,
                        int64_t weight_stride, weft_kept kept)
{
    int64_t panels = (rows + WEFT_WIDE - 1) / WEFT_WIDE, most = WEFT_BLOCK / WEFT_WIDE;
    int64_t blocks = (panels + most - 1) / most;
    int64_t wide = blocks ? (panels + blocks - 1) / blocks * WEFT_WIDE : 0;
    int64_t strips = (columns + WEFT_STRIP - 1) / WEFT_STRIP;
    void *memory = malloc(wide * depth * sizeof(float) + 64);
    if (!memory)
        return -1;
    float *packed = (float *)(((size_t)memory + 63) / 64 * 64);
    for (int64_t row = 0; row < rows; row += wide) {
        int64_t here = weft_min(wide, rows - row);
        weft_linear_job job = {x + row * x_stride, weight, added ? added + row * added_stride : added,
                               out + row * columns, packed, here, columns, depth, x_stride,
                               weight_stride, added_stride, (here + WEFT_WIDE - 1) / WEFT_WIDE, kept};
        weft_parallel(weft_linear_pack, &job, job.panels, here * depth);
        weft_parallel(weft_linear_strips, &job, strips, here * depth * columns / 8);
    }
    free(memory);
    return 0;
}

#endif
