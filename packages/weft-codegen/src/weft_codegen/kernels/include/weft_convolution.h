/* A convolution in float32 of channels-last memory: the product of weft_product.h, whose rows are pixels
 * of the result, and whose terms are pairs of a channel and a place in the window.
 *
 * The weight is read as it lies: no call packs it, and none keeps a copy of it.
 *
 *     planes[image][channel][row][phase][column] = x, with a border of zeros; where windows step by s,
 *                                                  columns of one phase (modulo s) lie side by side
 *     packed[panel][term][pixel]                   copies of pieces of planes, each of one row
 */

#include "weft_product.h"

typedef struct {
    int64_t batch, channels, filters, size[2], result[2], window[2], step[2], border[2], spread[2];
    int64_t channel_stride; /* of a filter's weights: 1, or as many as there are places */
} weft_convolution_of;

typedef struct {
    weft_convolution_of of;
    const float *x;
    float *planes, *packed;
    int64_t *offsets; /* of the places of a window, in a plane */
    int64_t places, rows, row, phase, plane, area, first, pixels;
} weft_convolution_job;

/* Rows [lo, hi) of all images, with the border. */
static void weft_convolution_planes(const void *args, int64_t lo, int64_t hi)
{
    const weft_convolution_job *job = args;
    const weft_convolution_of *of = &job->of;
    const int64_t channels = of->channels, wide = of->size[1], step = of->step[1];
    for (int64_t at = lo; at < hi; at++) {
        int64_t image = at / job->rows, row = at % job->rows, from = row - of->border[0];
        _Bool inside = from >= 0 && from < of->size[0];
        for (int64_t phase = 0; phase < step; phase++) {
            float *to = job->planes + image * channels * job->plane + row * job->row + phase * job->phase;
            /* Column j of the phase is column j step - before of x. */
            int64_t before = of->border[1] - phase, start = before > 0 ? (before + step - 1) / step : 0;
            int64_t end = inside ? weft_min((wide + before + step - 1) / step, job->phase) : 0;
            start = weft_min(start, end);
            for (int64_t c = 0; c < channels; c++) {
                for (int64_t j = 0; j < start; j++)
                    to[c * job->plane + j] = 0;
                for (int64_t j = end; j < job->phase; j++)
                    to[c * job->plane + j] = 0;
            }
            const float *x = job->x + ((image * of->size[0] + from) * wide + start * step - before) * channels;
            weft_transpose(x, step * channels, to + start, job->plane, end - start, channels);
        }
    }
}

/* Panels [lo, hi) of the block. A copy is as wide as a panel: the next one writes again what is too much. */
static void weft_convolution_pack(const void *args, int64_t lo, int64_t hi)
{
    const weft_convolution_job *job = args;
    const weft_convolution_of *of = &job->of;
    const int64_t depth = of->channels * job->places, wide = of->result[1];
    for (int64_t panel = lo; panel < hi; panel++) {
        float *to = job->packed + panel * depth * WEFT_WIDE;
        const float *from[WEFT_WIDE];
        int64_t start[WEFT_WIDE + 1], pieces = 0, at = job->first + panel * WEFT_WIDE;
        int64_t left = weft_min(job->pixels - panel * WEFT_WIDE, WEFT_WIDE);
        for (int64_t done = 0; done < left; pieces++) {
            int64_t image = (at + done) / job->area, row = (at + done) % job->area / wide, column = (at + done) % wide;
            from[pieces] = job->planes + image * of->channels * job->plane + row * of->step[0] * job->row + column;
            start[pieces] = done;
            done += weft_min(wide - column, left - done);
        }
        start[pieces] = WEFT_WIDE;
        _Bool last = of->channel_stride == 1;
        int64_t outer = last ? job->places : of->channels, inner = depth / outer;
        for (int64_t o = 0; o < outer; o++)
            for (int64_t i = 0; i < inner; i++, to += WEFT_WIDE) {
                int64_t offset = last ? job->offsets[o] + i * job->plane : job->offsets[i] + o * job->plane;
                if (o == outer - 1 && i == inner - 1) /* what follows is another panel */
                    for (int64_t piece = 0; piece < pieces; piece++)
                        __builtin_memcpy(to + start[piece], from[piece] + offset,
                                         (start[piece + 1] - start[piece]) * sizeof(float));
                else
                    for (int64_t piece = 0; piece < pieces; piece++)
                        WEFT_UNROLL for (int v = 0; v < WEFT_WIDE; v += WEFT_LANES)
                            *(weft_lanes *)(to + start[piece] + v) = *(const weft_lanes *)(from[piece] + offset + v);
            }
    }
}

/* The planes' geometry, and where the places of a window are in one. */
static void weft_convolution_start(weft_convolution_job *job)
{
    const weft_convolution_of *of = &job->of;
    job->places = of->window[0] * of->window[1];
    job->area = of->result[0] * of->result[1];
    job->rows = of->size[0] + 2 * of->border[0];
    job->phase = (of->size[1] + 2 * of->border[1] + of->step[1] - 1) / of->step[1];
    job->row = job->phase * of->step[1];
    job->plane = job->rows * job->row;
}

/* `bias` may lack; the weights of a filter lie side by side. Returns 0, or -1 where memory lacks. */
int weft_convolution(float *out, const float *x, const float *weight, const float *bias, const int64_t *sizes)
{
    weft_convolution_job job = {*(const weft_convolution_of *)sizes, x};
    const weft_convolution_of *of = &job.of;
    weft_convolution_start(&job);
    if (job.places * of->step[0] * of->step[1] == 1 && of->border[0] + of->border[1] == 0)
        return weft_product(out, bias, x, weight, of->batch * job.area, of->filters, of->channels, 0, of->channels,
                            of->channels, WEFT_F32);
    int64_t depth = of->channels * job.places, most = WEFT_BLOCK / WEFT_WIDE;
    int64_t together = weft_min(of->batch, job.area < WEFT_BLOCK ? WEFT_BLOCK / job.area : 1);
    int64_t panels = (together * job.area + WEFT_WIDE - 1) / WEFT_WIDE, blocks = (panels + most - 1) / most;
    int64_t block = (panels + blocks - 1) / blocks * WEFT_WIDE;
    int64_t planes = together * of->channels * job.plane + WEFT_WIDE, strips = (of->filters + WEFT_STRIP - 1) / WEFT_STRIP;
    void *memory = malloc((planes + block * depth) * sizeof(float) + job.places * sizeof(int64_t) + 64);
    if (!memory)
        return -1;
    job.packed = (float *)(((size_t)memory + 63) / 64 * 64);
    job.offsets = (int64_t *)(job.packed + block * depth);
    job.planes = (float *)(job.offsets + job.places);
    for (int64_t place = 0; place < job.places; place++) {
        int64_t down = place / of->window[1] * of->spread[0], across = place % of->window[1] * of->spread[1];
        job.offsets[place] = down * job.row + across % of->step[1] * job.phase + across / of->step[1];
    }
    for (int64_t image = 0; image < of->batch; image += together) {
        int64_t images = weft_min(together, of->batch - image), all = images * job.area;
        job.x = x + image * of->channels * of->size[0] * of->size[1];
        weft_parallel(weft_convolution_planes, &job, images * job.rows, images * of->channels * job.plane);
        for (job.first = 0; job.first < all; job.first += block) {
            job.pixels = weft_min(block, all - job.first);
            float *to = out + (image * job.area + job.first) * of->filters;
            weft_linear_job product = {x, weight, bias, to, job.packed, job.pixels, of->filters, depth, 0, depth, 0,
                                       (job.pixels + WEFT_WIDE - 1) / WEFT_WIDE, WEFT_F32};
            weft_parallel(weft_convolution_pack, &job, product.panels, job.pixels * depth);
            weft_parallel(weft_linear_strips, &product, strips, job.pixels * depth * of->filters / 8);
        }
    }
    free(memory);
    return 0;
}
