/* sum.dim_IntList */
WEFT_PART void weft_kcd93f7dfe2f01ffb_part(const float *restrict a0, float *restrict a1)
{
    float t0;
    t0 = 0.0f;
    for (int64_t first = 0; first < 1000000; first += 16384) {
        float r0_lanes[64] WEFT_ALIGNED = {0};
        int64_t block1 = first;
        for (; block1 + 64 <= weft_min(first + 16384, 1000000); block1 += 64) {
            #pragma omp simd
            for (int64_t lane = 0; lane < 64; lane++) {
                const int64_t i0 = block1 + lane;
                r0_lanes[lane] = (a0[i0] + r0_lanes[lane]);
            }
        }
        float r0 = sum_lanes_f32(r0_lanes);
        t0 += r0;
    }
    a1[0] = t0;
}

__attribute__((weak, visibility("hidden")))
void weft_kcd93f7dfe2f01ffb(const float *a0, float *a1)
{
    weft_kcd93f7dfe2f01ffb_part(a0, a1);
}


void weft_kcd93f7dfe2f01ffb(const float *a0, float *a1);

static const int64_t dims_1000_1000[] = {1000, 1000};
static const int64_t dims_1000_1[] = {1000, 1};
static const int64_t dims_[] = {0};
static weft_symbol symbols[] = {{NULL}};

WEFT_RUN int weft_run(weft_call *call, weft_tensor *in, weft_tensor *out, int64_t *sizes)
{
    int status = 1;
    weft_program *const program = call->program;
    weft_tensor own[2] = {NULL};
    weft_tensor constant[1];
    if (weft_expect(call, in[0], "argument 0", 6)) goto done;
    if (weft_layout(call, &in[0], &own[0], "argument 0", 2, dims_1000_1000, dims_1000_1, 6)) goto done;
    float *const p_in0 = (void *)(weft_data(in[0]));
    /* sum.dim_IntList */
    if (weft_empty(&own[1], 0, dims_, dims_, 6)) goto done;
    float *const p_buf1 = (void *)(weft_data(own[1]));
    weft_kcd93f7dfe2f01ffb(p_in0, p_buf1);
    out[0] = own[1];
    own[1] = NULL;
    status = 0;
done:
    for (int k = 0; k < 2; k++)
        weft_drop(&own[k]);
    return status;
}

#define WEFT_INPUTS 1
#define WEFT_INPUT_KINDS "t"
#define WEFT_OUTPUTS 1
#define WEFT_OUTPUT_KINDS "t"
#include "weft_entry.h"
