/* kernel kernel0(a0: f32, a1: f32*) locals (t0: f32[64])
    for i0 in 0..64:
        t0[i0] = 0.0
    for i1 in 0..32:
        for i0 in 0..64:
            v0 = a0[i0 + i1*64]
            t0[i0] sum= (v0 * v0)
    for i0 in 0..64:
        a1[i0] = t0[i0]
 */
WEFT_PART void weft_k8d18f2a4874e0e49_part(const float *restrict a0, float *restrict a1)
{
    float t0[64] WEFT_ALIGNED;
    #pragma omp simd
    for (int64_t i0 = 0; i0 < 64; i0++) {
        t0[i0] = 0.0f;
    }
    /* golden_graphs.py:29: return (x * x).sum(0)  [mul.Tensor, sum.dim_IntList] */
    int64_t row0 = 0;
    for (; row0 + 8 <= 32; row0 += 8) {
        #pragma omp simd
        for (int64_t i0 = 0; i0 < 64; i0++) {
            for (int64_t next = 0; next < 8; next++) {
                const int64_t i1 = row0 + next;
                const float v0 = a0[i0 + i1*64];
                t0[i0] = ((v0 * v0) + t0[i0]);
            }
        }
    }
    for (int64_t i1 = row0; i1 < 32; i1++) {
        #pragma omp simd
        for (int64_t i0 = 0; i0 < 64; i0++) {
            const float v1 = a0[i0 + i1*64];
            t0[i0] = ((v1 * v1) + t0[i0]);
        }
    }
    #pragma omp simd
    for (int64_t i0 = 0; i0 < 64; i0++) {
        a1[i0] = t0[i0];
    }
}

__attribute__((weak, visibility("hidden")))
void weft_k8d18f2a4874e0e49(const float *a0, float *a1)
{
    weft_k8d18f2a4874e0e49_part(a0, a1);
}


void weft_k8d18f2a4874e0e49(const float *a0, float *a1);

static const int64_t dims_32_64[] = {32, 64};
static const int64_t dims_64_1[] = {64, 1};
static const int64_t dims_64[] = {64};
static const int64_t dims_1[] = {1};
static weft_symbol symbols[] = {{NULL}};

WEFT_RUN int weft_run(weft_call *call, weft_tensor *in, weft_tensor *out, int64_t *sizes)
{
    int status = 1;
    weft_program *const program = call->program;
    weft_tensor own[2] = {NULL};
    weft_tensor constant[1];
    if (weft_expect(call, &in[0], &own[0], "argument 0", 2, dims_32_64, dims_64_1, 6, 0)) goto done;
    float *const p_in0 = (void *)(weft_data(in[0]));
    /* golden_graphs.py:29: return (x * x).sum(0)  [mul.Tensor, sum.dim_IntList] */
    if (weft_empty(&own[1], 1, dims_64, dims_1, 6)) goto done;
    float *const p_buf1 = (void *)(weft_data(own[1]));
    weft_k8d18f2a4874e0e49(p_in0, p_buf1);
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
