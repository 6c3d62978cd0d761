/* out[m][n] = added[m][n] + sum over k of x[m][k] weight[n][k]: a linear layer in float32.
 *
 * Blocked as every fast product is (Goto and van de Geijn, "Anatomy of high-performance matrix
 * multiplication", 2008), with the operands' roles exchanged: lanes are rows of x, which is packed,
 * and elements of the weight are broadcast. So a weight is read once, in order, and no call packs
 * it and none keeps a copy of it; WEFT_ROWS by WEFT_DEPTH of it come into the first cache at a time.
 */

#include "weft_product.h"

/* `out` is contiguous, rows of the others are `*_stride` elements apart; an `added` whose stride is 0
 * is a bias, and there may be none. `out` may be `added`. Returns 0, or -1 where memory lacks. */
int weft_linear(float *out, const float *added, const float *x, const float *weight, int64_t rows,
                int64_t columns, int64_t depth, int64_t added_stride, int64_t x_stride,
                int64_t weight_stride)
{
    return weft_product(out, added, x, weight, rows, columns, depth, added_stride, x_stride, weight_stride, WEFT_F32);
}

/* Rows of floats as 16-bit ones, [lo, hi); `kept` of the job says which. */
static void weft_linear_narrow(const void *args, int64_t lo, int64_t hi)
{
    const weft_linear_job *job = args;
    uint16_t *to = (uint16_t *)job->packed;
    if (job->kept == WEFT_BF16)
#pragma omp simd
        for (int64_t i = lo * job->columns; i < hi * job->columns; i++)
            to[i] = f32_to_bf16(job->x[i]);
    else
#pragma omp simd
        for (int64_t i = lo * job->columns; i < hi * job->columns; i++)
            to[i] = f32_to_f16(job->x[i]);
}

/* The same in 16-bit floats, whose sums are float32: rounded once. */
static int weft_linear_half(uint16_t *out, const uint16_t *added, const uint16_t *x, const uint16_t *weight,
                            int64_t rows, int64_t columns, int64_t depth, int64_t added_stride, int64_t x_stride,
                            int64_t weight_stride, weft_kept kept)
{
    float *wide = malloc((rows * (depth + columns) + columns) * sizeof(float)), *sums = wide + rows * depth;
    float *bias = sums + rows * columns;
    if (!wide)
        return -1;
    for (int64_t row = 0; row < rows; row++) {
        weft_widen(x + row * x_stride, wide + row * depth, depth, kept);
        if (added && added_stride)
            weft_widen(added + row * added_stride, sums + row * columns, columns, kept);
    }
    if (added && !added_stride)
        weft_widen(added, bias, columns, kept);
    const float *start = !added ? 0 : added_stride ? sums : bias;
    int failed = weft_product(sums, start, wide, weight, rows, columns, depth, added_stride ? columns : 0, depth,
                              weight_stride, kept);
    weft_linear_job job = {.x = sums, .packed = (float *)out, .columns = columns, .kept = kept};
    weft_parallel(weft_linear_narrow, &job, rows, rows * columns);
    free(wide);
    return failed;
}

int weft_linear_bf16(uint16_t *out, const uint16_t *added, const uint16_t *x, const uint16_t *weight, int64_t rows,
                     int64_t columns, int64_t depth, int64_t added_stride, int64_t x_stride, int64_t weight_stride)
{
    return weft_linear_half(out, added, x, weight, rows, columns, depth, added_stride, x_stride, weight_stride,
                            WEFT_BF16);
}

int weft_linear_f16(uint16_t *out, const uint16_t *added, const uint16_t *x, const uint16_t *weight, int64_t rows,
                    int64_t columns, int64_t depth, int64_t added_stride, int64_t x_stride, int64_t weight_stride)
{
    return weft_linear_half(out, added, x, weight, rows, columns, depth, added_stride, x_stride, weight_stride,
                            WEFT_F16);
}
