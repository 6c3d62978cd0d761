/* kernel kernel0(a0: f32, a1: f32, a2: f32*) locals ()
    for i0 in 0..32 parallel:
        for i1 in 0..64:
            v0 = (a0[i0*64 + i1] + a1[i1])
            a2[i0*64 + i1] = ((v0 * 0.5) * (1.0 + erf((v0 * 0.7071067811865476))))
 */
WEFT_PART void weft_k0099397b4fce919d_part(const float *a0, const float *restrict a1, float *a2, int64_t lo, int64_t hi)
{
    for (int64_t i0 = lo; i0 < hi; i0++) {
        /* golden_graphs.py:17: return F.gelu(x + b)  [add.Tensor, gelu] */
        #pragma omp simd
        for (int64_t i1 = 0; i1 < 64; i1++) {
            const float v0 = (a0[i0*64 + i1] + a1[i1]);
            const float v1 = erf_f32((v0 * 0.70710677f));
            a2[i0*64 + i1] = ((v0 * 0.5f) * (1.0f + v1));
        }
    }
}

__attribute__((weak, visibility("hidden")))
void weft_k0099397b4fce919d(const float *a0, const float *a1, float *a2)
{
    weft_k0099397b4fce919d_part(a0, a1, a2, 0, 32);
}


void weft_k0099397b4fce919d(const float *a0, const float *a1, float *a2);

static const int64_t dims_32_64[] = {32, 64};
static const int64_t dims_64_1[] = {64, 1};
static const int64_t dims_64[] = {64};
static const int64_t dims_1[] = {1};
static weft_symbol symbols[] = {{NULL}};

WEFT_RUN int weft_run(weft_call *call, weft_tensor *in, weft_tensor *out, int64_t *sizes)
{
    int status = 1;
    weft_program *const program = call->program;
    weft_tensor own[3] = {NULL};
    weft_tensor constant[1];
    if (weft_expect(call, &in[0], &own[0], "argument 0", 2, dims_32_64, dims_64_1, 6, 0)) goto done;
    float *const p_in0 = (void *)(weft_data(in[0]));
    if (weft_expect(call, &in[1], &own[1], "argument 1", 1, dims_64, dims_1, 6, 0)) goto done;
    float *const p_in1 = (void *)(weft_data(in[1]));
    /* golden_graphs.py:17: return F.gelu(x + b)  [add.Tensor, gelu] */
    if (weft_empty(&own[2], 2, dims_32_64, dims_64_1, 6)) goto done;
    float *const p_buf2 = (void *)(weft_data(own[2]));
    weft_k0099397b4fce919d(p_in0, p_in1, p_buf2);
    out[0] = own[2];
    own[2] = NULL;
    status = 0;
done:
    for (int k = 0; k < 3; k++)
        weft_drop(&own[k]);
    return status;
}

#define WEFT_INPUTS 2
#define WEFT_INPUT_KINDS "tt"
#define WEFT_OUTPUTS 1
#define WEFT_OUTPUT_KINDS "t"
#include "weft_entry.h"
