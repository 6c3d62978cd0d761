/* out[m][n] = added[m][n] + sum over k of x[m][k] weight[n][k]: a linear layer in float32.
 *
 * Blocked as every fast product is (Goto and van de Geijn, "Anatomy of high-performance matrix
 * multiplication", 2008), with the operands' roles exchanged: lanes are rows of x, which is packed,
 * and elements of the weight are broadcast. So a weight is read once, in order, and no call packs
 * it and none keeps a copy of it; WEFT_ROWS by WEFT_DEPTH of it come into the first cache at a time.
 *
 *     packed[panel][k][row] = x       a panel has WEFT_WIDE rows
 *     tile[n][row]                    a strip of WEFT_STRIP columns of the result
 *     WEFT_ROWS by WEFT_WIDE sums     in registers, for WEFT_DEPTH terms; added to the tile then,
 *                                     so rounding errors grow with the shorter sums
 */

#if defined(__AVX512F__)
enum { WEFT_LANES = 16, WEFT_VECTORS = 2, WEFT_ROWS = 12 };
#elif defined(__AVX__)
enum { WEFT_LANES = 8, WEFT_VECTORS = 2, WEFT_ROWS = 6 };
#else
enum { WEFT_LANES = 4, WEFT_VECTORS = 4, WEFT_ROWS = 6 };
#endif
/* Of the packed x, WEFT_DEPTH by WEFT_BLOCK floats are in use at a time: 384 kB, for the second cache. */
enum { WEFT_WIDE = WEFT_LANES * WEFT_VECTORS, WEFT_STRIP = 48, WEFT_DEPTH = 384, WEFT_BLOCK = 256 };
enum { WEFT_COPY_STRIDE = WEFT_DEPTH + 16 };

typedef float weft_lanes __attribute__((vector_size(4 * WEFT_LANES), aligned(4), may_alias));
typedef float weft_part __attribute__((vector_size(WEFT_WIDE), aligned(4), may_alias)); /* a quarter of a panel */

typedef struct {
    const float *x, *weight, *added;
    float *out, *packed;
    int64_t rows, columns, depth, x_stride, weight_stride, added_stride, panels;
} weft_linear_job;

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

/* Other units of generated code round each product. */
#ifdef __clang__
#define WEFT_CONTRACT _Pragma("clang fp contract(fast)")
#define WEFT_UNROLL _Pragma("unroll")
#else
#define WEFT_CONTRACT
#define WEFT_UNROLL _Pragma("GCC unroll 16")
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
#endif

/* tile[n][row] += sum over k of weight[n][k] panel[k][row], WEFT_ROWS by `vectors` of lanes. Meanwhile
 * `next`, whose rows are `far` elements apart, comes into the cache: what is computed after this. */
typedef void weft_block_of(const float *weight, const float *panel, int64_t depth, float *tile,
                           int64_t across, const float *next, int64_t far);
#define WEFT_BLOCK_OF(NAME, LANES, VECTORS)                                                       \
    static __attribute__((noinline)) void NAME(const float *weight, const float *panel,           \
                                               int64_t depth, float *tile, int64_t across,        \
                                               const float *next, int64_t far)                    \
    {                                                                                             \
        WEFT_CONTRACT                                                                             \
        LANES sum[WEFT_ROWS][VECTORS] = {0};                                                      \
        const int lanes = sizeof(LANES) / sizeof(float);                                          \
        for (int64_t k = 0; k < depth; k++) {                                                     \
            __builtin_prefetch(next + (k & 15) * far + k);                                        \
            LANES x[VECTORS];                                                                     \
            WEFT_UNROLL for (int v = 0; v < VECTORS; v++)                                         \
                x[v] = *(const LANES *)(panel + k * WEFT_WIDE + v * lanes);                       \
            WEFT_UNROLL for (int n = 0; n < WEFT_ROWS; n++)                                       \
                WEFT_UNROLL for (int v = 0; v < VECTORS; v++)                                     \
                    sum[n][v] += weight[n * WEFT_COPY_STRIDE + k] * x[v];                         \
        }                                                                                         \
        WEFT_UNROLL for (int n = 0; n < WEFT_ROWS; n++)                                           \
            WEFT_UNROLL for (int v = 0; v < VECTORS; v++)                                         \
                *(LANES *)(tile + n * across + v * lanes) += sum[n][v];                           \
    }

WEFT_BLOCK_OF(weft_block_wide, weft_lanes, WEFT_VECTORS)
WEFT_BLOCK_OF(weft_block_half, weft_lanes, WEFT_VECTORS / 2)
WEFT_BLOCK_OF(weft_block_quarter, weft_part, 1)

#ifndef __clang__
#pragma GCC pop_options
#endif

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
static void weft_linear_copy(const float *weight, int64_t stride, int64_t rows, int64_t depth, float *copy)
{
    for (int64_t r = 0; r < WEFT_ROWS; r++)
        if (r < rows)
            __builtin_memcpy(copy + r * WEFT_COPY_STRIDE, weight + r * stride, depth * sizeof(float));
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
                const float *weight = job->weight + (first + n) * stride + k;
                const float *next = weight + WEFT_ROWS * stride;
                int64_t far = stride;
                if (n + WEFT_ROWS >= columns && k + depth < job->depth)
                    next = job->weight + first * stride + k + depth;
                weft_linear_copy(weight, stride, columns - n, depth, copy);
                for (int64_t row = 0, wide; row < job->rows; row += wide) {
                    int64_t within = row % WEFT_WIDE, quarters = (job->rows - row + WEFT_WIDE / 4 - 1) / (WEFT_WIDE / 4);
                    const float *panel = job->packed + (row - within) * job->depth + k * WEFT_WIDE + within;
                    weft_block_of *block = quarters > 3 ? weft_block_wide : quarters > 1 ? weft_block_half : weft_block_quarter;
                    wide = quarters > 3 ? WEFT_WIDE : quarters > 1 ? WEFT_WIDE / 2 : WEFT_WIDE / 4;
                    block(copy, panel, depth, tile + n * across + row, across, next, far);
                    next = copy, far = 0;
                }
            }
        }
        weft_transpose(tile, across, job->out + first, job->columns, columns, job->rows);
    }
}

/* `out` is contiguous, rows of the others are `*_stride` elements apart; an `added` whose stride is 0
 * is a bias, and there may be none. `out` may be `added`. Returns 0, or -1 where memory lacks. */
int weft_linear(float *out, const float *added, const float *x, const float *weight, int64_t rows,
                int64_t columns, int64_t depth, int64_t added_stride, int64_t x_stride,
                int64_t weight_stride)
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
                               weight_stride, added_stride, (here + WEFT_WIDE - 1) / WEFT_WIDE};
        weft_parallel(weft_linear_pack, &job, job.panels, here * depth);
        weft_parallel(weft_linear_strips, &job, strips, here * depth * columns / 8);
    }
    free(memory);
    return 0;
}
