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
    return weft_product(out, added, x, weight, rows, columns, depth, added_stride, x_stride, weight_stride);
}
