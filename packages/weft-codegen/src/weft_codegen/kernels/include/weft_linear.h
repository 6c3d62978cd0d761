/* out[m][n] = added[m][n] + sum over k of x[m][k] weight[n][k]: a linear layer in float32.
 *
 * Blocked as every fast product is (Goto and van de Geijn, "Anatomy of high-performance matrix
 * multiplication", 2008), with the operands' roles exchanged: lanes are rows of x, which is packed,
 * and elements of the weight are broadcast from where they lie. So a weight is read once, in
 * order, and no call packs it and none keeps a copy of it.
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
typedef float weft_four __attribute__((vector_size(16), aligned(4), may_alias));

typedef struct {
    const float *x, *weight, *added;
    float *out, *packed;
    int64_t rows, columns, depth, x_stride, weight_stride, added_stride, panels;
} weft_linear_job;

#ifdef __clang__
#define WEFT_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define WEFT_SHUFFLE(a, b, ...)                                                                  \
    __builtin_shuffle(a, b, (int __attribute__((vector_size(16)))){__VA_ARGS__})
#endif

/* to[c * to_stride + r] = from[r * from_stride + c] for four rows and columns. */
static inline void weft_transpose_four(const float *from, int64_t from_stride, float *to, int64_t to_stride)
{
    weft_four row[4];
    for (int r = 0; r < 4; r++)
        row[r] = *(const weft_four *)(from + r * from_stride);
    weft_four a = WEFT_SHUFFLE(row[0], row[1], 0, 4, 1, 5), b = WEFT_SHUFFLE(row[0], row[1], 2, 6, 3, 7);
    weft_four c = WEFT_SHUFFLE(row[2], row[3], 0, 4, 1, 5), d = WEFT_SHUFFLE(row[2], row[3], 2, 6, 3, 7);
    *(weft_four *)to = WEFT_SHUFFLE(a, c, 0, 1, 4, 5);
    *(weft_four *)(to + to_stride) = WEFT_SHUFFLE(a, c, 2, 3, 6, 7);
    *(weft_four *)(to + 2 * to_stride) = WEFT_SHUFFLE(b, d, 0, 1, 4, 5);
    *(weft_four *)(to + 3 * to_stride) = WEFT_SHUFFLE(b, d, 2, 3, 6, 7);
}

/* The same for any number of them. */
static void weft_transpose(const float *from, int64_t from_stride, float *to, int64_t to_stride, int64_t rows,
                      int64_t columns)
{
    for (int64_t r = 0; r < rows; r += 4) {
        int64_t c = 0;
        for (; r + 4 <= rows && c + 4 <= columns; c += 4)
            weft_transpose_four(from + r * from_stride + c, from_stride, to + c * to_stride + r, to_stride);
        for (; c < columns; c++)
            for (int64_t i = r; i < weft_min(r + 4, rows); i++)
                to[c * to_stride + i] = from[i * from_stride + c];
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

/* Other units of generated code round each product. */
#ifdef __clang__
#define WEFT_CONTRACT _Pragma("clang fp contract(fast)")
#else
#define WEFT_CONTRACT
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
#endif

/* tile[n][row] += sum over k of weight[n][k] panel[k][row], WEFT_ROWS by `vectors` of lanes. */
static inline __attribute__((always_inline)) void
weft_block(const float *weight, int64_t stride, const float *panel, int64_t depth, float *tile,
           int64_t across, int vectors)
{
    WEFT_CONTRACT
    weft_lanes sum[WEFT_ROWS][WEFT_VECTORS] = {0};
    for (int64_t k = 0; k < depth; k++) {
        weft_lanes x[WEFT_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            x[v] = *(const weft_lanes *)(panel + k * WEFT_WIDE + v * WEFT_LANES);
#pragma GCC unroll 12
        for (int n = 0; n < WEFT_ROWS; n++) {
            const float factor = weight[n * stride + k];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                sum[n][v] += factor * x[v];
        }
    }
#pragma GCC unroll 12
    for (int n = 0; n < WEFT_ROWS; n++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            *(weft_lanes *)(tile + n * across + v * WEFT_LANES) += sum[n][v];
}

static __attribute__((noinline)) void weft_block_wide(const float *weight, int64_t stride, const float *panel,
                                                      int64_t depth, float *tile, int64_t across)
{
    weft_block(weight, stride, panel, depth, tile, across, WEFT_VECTORS);
}

static __attribute__((noinline)) void weft_block_half(const float *weight, int64_t stride, const float *panel,
                                                      int64_t depth, float *tile, int64_t across)
{
    weft_block(weight, stride, panel, depth, tile, across, WEFT_VECTORS / 2);
}

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

/* Strips [lo, hi) of columns of the result. */
static void weft_linear_strips(const void *args, int64_t lo, int64_t hi)
{
    const weft_linear_job *job = args;
    const int64_t across = job->panels * WEFT_WIDE;
    float tile[WEFT_STRIP * WEFT_BLOCK] __attribute__((aligned(64)));
    float copy[WEFT_ROWS * WEFT_COPY_STRIDE] __attribute__((aligned(64)));
    for (int64_t strip = lo; strip < hi; strip++) {
        int64_t first = strip * WEFT_STRIP, columns = weft_min(WEFT_STRIP, job->columns - first);
        weft_linear_start(job, first, columns, tile);
        for (int64_t k = 0; k < job->depth; k += WEFT_DEPTH) {
            int64_t depth = weft_min(WEFT_DEPTH, job->depth - k);
            for (int64_t n = 0; n < columns; n += WEFT_ROWS) {
                const float *weight = job->weight + (first + n) * job->weight_stride + k;
                int64_t stride = job->weight_stride, there = weft_min(WEFT_ROWS, columns - n);
                /* Rows that are missing, or that all want the same lines of the first cache. */
                if (there < WEFT_ROWS || (stride % 512 == 0 && job->panels > 1)) {
                    for (int64_t r = 0; r < WEFT_ROWS; r++)
                        for (int64_t i = 0; i < depth; i++)
                            copy[r * WEFT_COPY_STRIDE + i] = r < there ? weight[r * stride + i] : 0;
                    weight = copy, stride = WEFT_COPY_STRIDE;
                }
                for (int64_t row = 0; row < across; row += WEFT_WIDE) {
                    const float *panel = job->packed + row * job->depth + k * WEFT_WIDE;
                    float *into = tile + n * across + row;
                    if (job->rows - row > WEFT_WIDE / 2)
                        weft_block_wide(weight, stride, panel, depth, into, across);
                    else
                        weft_block_half(weight, stride, panel, depth, into, across);
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
