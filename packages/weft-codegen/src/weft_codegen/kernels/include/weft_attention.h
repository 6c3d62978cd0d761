/* out = softmax(scale q k^T + mask) v, of each head, in float32.
 *
 * Scores exist for a panel of queries and WEFT_KEYS keys at a time: the largest score and the sum so
 * far are kept, and what was added up is scaled when a larger one comes (Milakov and Gimelshein,
 * "Online normalizer calculation for softmax", 2018). Lanes are queries, as rows are in
 * weft_linear.h, so that each step of the softmax is one of vectors.
 *
 *     keys[key][d], values[block][d][key]    packed once a head, by each thread
 *     scores[key][query] = keys . panel      panel[d][query] = scale q
 *     sums[d][query] += values . exp(scores - largest)
 */

#include "weft_block.h"

#if defined(__AVX512F__)
enum { WEFT_HEAD_ROWS = 8 };
#else
enum { WEFT_HEAD_ROWS = 6 };
#endif
enum { WEFT_KEYS = 192, WEFT_KEYS_STRIDE = WEFT_KEYS + 16, WEFT_MOST_WIDTH = 256 };
enum { WEFT_ROUND_WIDTH = (WEFT_MOST_WIDTH + WEFT_HEAD_ROWS - 1) / WEFT_HEAD_ROWS * WEFT_HEAD_ROWS };

typedef struct {
    int64_t batch, head, row;
} weft_strides;

typedef struct {
    float *out;
    int *failed;
    const float *q, *k, *v, *mask;
    int64_t heads, queries, keys, width, causal;
    weft_strides to, of_q, of_k, of_v, of_mask;
    float scale;
    int64_t panels, key_floats, value_floats;
} weft_attention_job;

WEFT_BLOCKS_OF(weft_scores, WEFT_ROWS, stride, 0)
WEFT_BLOCKS_OF(weft_sums, WEFT_HEAD_ROWS, WEFT_KEYS_STRIDE, 0)

static inline int64_t weft_round_up(int64_t size, int64_t unit)
{
    return (size + unit - 1) / unit * unit;
}

/* Pack keys and values of a head; rows of zeros fill the last block of registers. */
static void weft_attention_pack(const weft_attention_job *job, int64_t batch, int64_t head, float *keys)
{
    const int64_t width = job->width, lacking = weft_round_up(width, WEFT_HEAD_ROWS) - width;
    float *values = keys + job->key_floats;
    const float *k = job->k + batch * job->of_k.batch + head * job->of_k.head;
    const float *v = job->v + batch * job->of_v.batch + head * job->of_v.head;
    for (int64_t key = 0; key < job->keys; key++)
        __builtin_memcpy(keys + key * width, k + key * job->of_k.row, width * sizeof(float));
    __builtin_memset(keys + job->keys * width, 0, (job->key_floats - job->keys * width) * sizeof(float));
    for (int64_t first = 0; first < job->keys; first += WEFT_KEYS) {
        int64_t count = weft_min(WEFT_KEYS, job->keys - first);
        weft_transpose(v + first * job->of_v.row, job->of_v.row, values, WEFT_KEYS_STRIDE, count, width);
        values += width * WEFT_KEYS_STRIDE;
        __builtin_memset(values, 0, lacking * WEFT_KEYS_STRIDE * sizeof(float));
        values += lacking * WEFT_KEYS_STRIDE;
    }
}

/* scores = exp(scores - largest), whose sums over keys are added to `total`; `factor` is what sums of
 * earlier keys are to be multiplied by. */
static void weft_softmax(float (*scores)[WEFT_WIDE], int64_t keys, float *largest, float *total, float *factor)
{
    float before[WEFT_WIDE];
    __builtin_memcpy(before, largest, sizeof before);
    for (int64_t key = 0; key < keys; key++)
#pragma omp simd
        for (int lane = 0; lane < WEFT_WIDE; lane++)
            largest[lane] = scores[key][lane] > largest[lane] ? scores[key][lane] : largest[lane];
    float from[WEFT_WIDE]; /* where all is masked, exp(-inf - 0) */
#pragma omp simd
    for (int lane = 0; lane < WEFT_WIDE; lane++) {
        from[lane] = largest[lane] == -__builtin_inff() ? 0 : largest[lane];
        factor[lane] = exp_f32(before[lane] - from[lane]);
        total[lane] *= factor[lane];
    }
    for (int64_t key = 0; key < keys; key++)
#pragma omp simd
        for (int lane = 0; lane < WEFT_WIDE; lane++) {
            scores[key][lane] = exp_f32(scores[key][lane] - from[lane]);
            total[lane] += scores[key][lane];
        }
}

/* Start scores of keys [first, first + count) with the mask, or zeros. */
static void weft_scores_start(const float *mask, int64_t stride, float (*scores)[WEFT_WIDE], int64_t rows,
                              int64_t count)
{
    if (!mask || rows < WEFT_WIDE)
        __builtin_memset(scores, 0, weft_round_up(count, WEFT_ROWS) * sizeof *scores);
    if (mask)
        weft_transpose(mask, stride, *scores, WEFT_WIDE, rows, count);
}

/* Panels [lo, hi) of all heads' queries. */
static void weft_attention_panels(const void *args, int64_t lo, int64_t hi)
{
    const weft_attention_job *job = args;
    const int64_t width = job->width;
    float panel[WEFT_MOST_WIDTH][WEFT_WIDE] __attribute__((aligned(64)));
    float scores[WEFT_KEYS + WEFT_ROWS][WEFT_WIDE] __attribute__((aligned(64)));
    float sums[WEFT_ROUND_WIDTH][WEFT_WIDE] __attribute__((aligned(64)));
    void *memory = malloc((job->key_floats + job->value_floats) * sizeof(float) + 64);
    float *keys = (float *)(((size_t)memory + 63) / 64 * 64);
    *job->failed |= !memory;
    for (int64_t item = lo; item < hi && memory; item++) {
        int64_t query = item % job->panels * WEFT_WIDE;
        int64_t batch = item / job->panels / job->heads, head = item / job->panels % job->heads;
        if (item == lo || query == 0)
            weft_attention_pack(job, batch, head, keys);
        int64_t rows = weft_min(WEFT_WIDE, job->queries - query);
        int64_t quarters = weft_quarters(rows);
        const float *values = keys + job->key_floats;
        const float *q = job->q + batch * job->of_q.batch + head * job->of_q.head + query * job->of_q.row;
        const float *mask = job->mask ? job->mask + batch * job->of_mask.batch + head * job->of_mask.head +
                                            query * job->of_mask.row
                                      : job->mask;
        float largest[WEFT_WIDE], total[WEFT_WIDE] = {0}, factor[WEFT_WIDE];
        for (int lane = 0; lane < WEFT_WIDE; lane++)
            largest[lane] = -__builtin_inff();
        __builtin_memset(panel, 0, width * sizeof *panel);
        __builtin_memset(sums, 0, weft_round_up(width, WEFT_HEAD_ROWS) * sizeof *sums);
        weft_transpose(q, job->of_q.row, *panel, WEFT_WIDE, rows, width);
        for (int64_t d = 0; d < width; d++)
            for (int lane = 0; lane < WEFT_WIDE; lane++)
                panel[d][lane] *= job->scale;

        int64_t seen = job->causal ? weft_min(job->keys, query + rows) : job->keys;
        for (int64_t first = 0; first < seen; first += WEFT_KEYS) {
            int64_t count = weft_min(WEFT_KEYS, seen - first);
            weft_scores_start(mask ? mask + first : mask, job->of_mask.row, scores, rows, count);
            for (int64_t key = 0; key < count; key += WEFT_ROWS)
                weft_pick(quarters, weft_scores)(keys + (first + key) * width, width, *panel, width, scores[key],
                                                 WEFT_WIDE, 0, 0);
            for (int64_t key = job->causal ? query > first ? query - first : 0 : count; key < count; key++)
                for (int64_t lane = 0; lane < weft_min(first + key - query, WEFT_WIDE); lane++)
                    scores[key][lane] = -__builtin_inff();
            weft_softmax(scores, count, largest, total, factor);
            for (int64_t d = 0; d < width; d++)
                for (int lane = 0; lane < WEFT_WIDE; lane++)
                    sums[d][lane] *= factor[lane];
            for (int64_t d = 0; d < width; d += WEFT_HEAD_ROWS)
                weft_pick(quarters, weft_sums)(values + d * WEFT_KEYS_STRIDE, 0, *scores, count, sums[d], WEFT_WIDE,
                                               0, 0);
            values += weft_round_up(width, WEFT_HEAD_ROWS) * WEFT_KEYS_STRIDE;
        }
        for (int64_t d = 0; d < width; d++)
            for (int lane = 0; lane < WEFT_WIDE; lane++)
                sums[d][lane] /= total[lane] == 0 ? 1 : total[lane];
        float *out = job->out + batch * job->to.batch + head * job->to.head + query * job->to.row;
        weft_transpose(*sums, WEFT_WIDE, out, job->to.row, width, rows);
    }
    free(memory);
}

/* Elements of a row lie side by side, of the mask as well, if there is one. Returns 0, or -1 where
 * memory lacks.
 *
 * sizes: batch, heads, queries, keys, width (at most WEFT_MOST_WIDTH), causal; then how far apart
 * batches, heads and rows of out, q, k, v and mask are. */
int weft_attention(float *out, const float *q, const float *k, const float *v, const float *mask,
                   const int64_t *sizes, double scale)
{
    int failed = 0;
    weft_attention_job job = {out, &failed, q, k, v, mask, sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]};
    __builtin_memcpy(&job.to, sizes + 6, 5 * sizeof job.to);
    job.scale = (float)scale;
    job.panels = (job.queries + WEFT_WIDE - 1) / WEFT_WIDE;
    job.key_floats = weft_round_up(weft_round_up(job.keys, WEFT_ROWS) * job.width, 16);
    job.value_floats = (job.keys + WEFT_KEYS - 1) / WEFT_KEYS * weft_round_up(job.width, WEFT_HEAD_ROWS) * WEFT_KEYS_STRIDE;
    int64_t items = sizes[0] * job.heads * job.panels;
    weft_parallel(weft_attention_panels, &job, items, items * WEFT_WIDE * job.keys * job.width / 4);
    return -failed;
}
