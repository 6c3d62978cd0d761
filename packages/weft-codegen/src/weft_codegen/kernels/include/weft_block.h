/* What products of float32 are made of (weft_linear.h, weft_attention.h): transposition, and blocks of
 * sums in registers.
 *
 *     tile[n][row] += sum over k of weight[n][k] panel[k][row]      WEFT_ROWS by WEFT_WIDE at most
 *
 * Lanes are rows; elements of the other operand are broadcast.
 */

#ifndef WEFT_BLOCK_H
#define WEFT_BLOCK_H

#if defined(__AVX512F__)
enum { WEFT_LANES = 16, WEFT_VECTORS = 2, WEFT_ROWS = 12 };
#elif defined(__AVX__)
enum { WEFT_LANES = 8, WEFT_VECTORS = 2, WEFT_ROWS = 6 };
#else
enum { WEFT_LANES = 4, WEFT_VECTORS = 4, WEFT_ROWS = 6 };
#endif
enum { WEFT_WIDE = WEFT_LANES * WEFT_VECTORS };

typedef float weft_lanes __attribute__((vector_size(4 * WEFT_LANES), aligned(4), may_alias));
typedef float weft_part __attribute__((vector_size(WEFT_WIDE), aligned(4), may_alias)); /* a quarter of a panel */

#if defined(__AVX512F__)
#define WEFT_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define WEFT_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX__)
#define WEFT_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define WEFT_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define WEFT_LOW 0, 4, 1, 5
#define WEFT_HIGH 2, 6, 3, 7
#endif
#ifdef __clang__
#define WEFT_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int weft_order __attribute__((vector_size(4 * WEFT_LANES)));
#define WEFT_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (weft_order){__VA_ARGS__})
#endif

/* to[c * to_stride + r] = from[r * from_stride + c] for WEFT_LANES rows and columns: each line of
 * memory is read once and written once, since lines of one column may exclude each other in a cache. */
static inline void weft_transpose_lanes(const float *from, int64_t from_stride, float *to, int64_t to_stride)
{
    weft_lanes row[WEFT_LANES], next[WEFT_LANES];
#pragma GCC unroll 16
    for (int r = 0; r < WEFT_LANES; r++)
        row[r] = *(const weft_lanes *)(from + r * from_stride);
    /* Each round interleaves row r with row r + half. */
#pragma GCC unroll 4
    for (int round = 1; round < WEFT_LANES; round *= 2) {
#pragma GCC unroll 8
        for (int r = 0; r < WEFT_LANES / 2; r++) {
            next[2 * r] = WEFT_SHUFFLE(row[r], row[r + WEFT_LANES / 2], WEFT_LOW);
            next[2 * r + 1] = WEFT_SHUFFLE(row[r], row[r + WEFT_LANES / 2], WEFT_HIGH);
        }
#pragma GCC unroll 16
        for (int r = 0; r < WEFT_LANES; r++)
            row[r] = next[r];
    }
#pragma GCC unroll 16
    for (int r = 0; r < WEFT_LANES; r++)
        *(weft_lanes *)(to + r * to_stride) = row[r];
}

/* The same for any number of them. */
static void weft_transpose(const float *from, int64_t from_stride, float *to, int64_t to_stride, int64_t rows,
                           int64_t columns)
{
    for (int64_t c = 0; c < columns; c += WEFT_LANES)
        for (int64_t r = 0; r < rows; r += WEFT_LANES)
            if (r + WEFT_LANES <= rows && c + WEFT_LANES <= columns)
                weft_transpose_lanes(from + r * from_stride + c, from_stride, to + c * to_stride + r, to_stride);
            else
                for (int64_t i = r; i < weft_min(r + WEFT_LANES, rows); i++)
                    for (int64_t j = c; j < weft_min(c + WEFT_LANES, columns); j++)
                        to[j * to_stride + i] = from[i * from_stride + j];
}

/* Other units of generated code round each product. */
#ifdef __clang__
#define WEFT_CONTRACT _Pragma("clang fp contract(fast)")
#define WEFT_CONTRACTED
#define WEFT_UNROLL _Pragma("unroll")
#else
#define WEFT_CONTRACT
#define WEFT_CONTRACTED __attribute__((optimize("fp-contract=fast")))
#define WEFT_UNROLL _Pragma("GCC unroll 16")
#endif

/* tile[n][row] += sum over k of weight[n][k] panel[k][row], ROWS by VECTORS of lanes. With AHEAD, `next`,
 * whose rows are `far` elements apart, comes into the cache meanwhile: what is computed after this. */
typedef void weft_block_of(const float *weight, int64_t stride, const float *panel, int64_t depth,
                           float *tile, int64_t across, const float *next, int64_t far);
#define WEFT_BLOCK_OF(NAME, LANES, ROWS, VECTORS, STRIDE, AHEAD)                                  \
    static WEFT_CONTRACTED __attribute__((noinline)) void NAME(                                   \
        const float *weight, int64_t stride, const float *panel, int64_t depth, float *tile,      \
        int64_t across, const float *next, int64_t far)                                           \
    {                                                                                             \
        WEFT_CONTRACT                                                                             \
        LANES sum[ROWS][VECTORS] = {0};                                                           \
        const int lanes = sizeof(LANES) / sizeof(float);                                          \
        for (int64_t k = 0; k < depth; k++) {                                                     \
            if (AHEAD)                                                                            \
                __builtin_prefetch(next + (k & 15) * far + k);                                    \
            LANES x[VECTORS];                                                                     \
            WEFT_UNROLL for (int v = 0; v < VECTORS; v++)                                         \
                x[v] = *(const LANES *)(panel + k * WEFT_WIDE + v * lanes);                       \
            WEFT_UNROLL for (int n = 0; n < ROWS; n++)                                            \
                WEFT_UNROLL for (int v = 0; v < VECTORS; v++)                                     \
                    sum[n][v] += weight[n * STRIDE + k] * x[v];                                   \
        }                                                                                         \
        WEFT_UNROLL for (int n = 0; n < ROWS; n++)                                                \
            WEFT_UNROLL for (int v = 0; v < VECTORS; v++)                                         \
                *(LANES *)(tile + n * across + v * lanes) += sum[n][v];                           \
    }

/* The same for panels of which all, a half or a quarter is filled. */
#define WEFT_BLOCKS_OF(NAME, ROWS, STRIDE, AHEAD)                                                 \
    WEFT_BLOCK_OF(NAME##_wide, weft_lanes, ROWS, WEFT_VECTORS, STRIDE, AHEAD)                     \
    WEFT_BLOCK_OF(NAME##_half, weft_lanes, ROWS, WEFT_VECTORS / 2, STRIDE, AHEAD)                 \
    WEFT_BLOCK_OF(NAME##_quarter, weft_part, ROWS, 1, STRIDE, AHEAD)

/* How many quarters of a panel so many rows fill, and a function for that. */
static inline int64_t weft_quarters(int64_t rows)
{
    return weft_min((rows + WEFT_WIDE / 4 - 1) / (WEFT_WIDE / 4), 4);
}
#define weft_pick(quarters, NAME) ((quarters) > 2 ? NAME##_wide : (quarters) > 1 ? NAME##_half : NAME##_quarter)

#endif
