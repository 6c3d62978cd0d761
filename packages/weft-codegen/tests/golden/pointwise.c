/* kernel kernel0(a0: f32, a1: f32*) locals ()
    for i0 in 0..2048 parallel:
        v0 = a0[i0]
        a1[i0] = (maximum(0.0, ((v0 * 2.0) + 1.0)) * v0)
 */
WEFT_PART void weft_k84e3d65af0a9915b_part(const float *a0, float *a1, int64_t lo, int64_t hi)
{
    /* golden_graphs.py:13: return (x * 2 + 1).relu() * x  [mul.Tensor, add.Tensor, relu] */
    #pragma omp simd
    for (int64_t i0 = lo; i0 < hi; i0++) {
        const float v0 = a0[i0];
        a1[i0] = (maximum_f32(0.0f, ((v0 * 2.0f) + 1.0f)) * v0);
    }
}

__attribute__((weak, visibility("hidden")))
void weft_k84e3d65af0a9915b(const float *a0, float *a1)
{
    weft_k84e3d65af0a9915b_part(a0, a1, 0, 2048);
}


void weft_k84e3d65af0a9915b(const float *a0, float *a1);

static const int64_t dims_32_64[] = {32, 64};
static const int64_t dims_64_1[] = {64, 1};
static weft_symbol symbols[] = {{NULL}};

WEFT_RUN int weft_run(weft_call *call, weft_tensor *in, weft_tensor *out, int64_t *sizes)
{
    int status = 1;
    weft_program *const program = call->program;
    weft_tensor own[2] = {NULL};
    weft_tensor constant[1];
    if (weft_expect(call, &in[0], &own[0], "argument 0", 2, dims_32_64, dims_64_1, 6, 0)) goto done;
    float *const p_in0 = (void *)(weft_data(in[0]));
    /* golden_graphs.py:13: return (x * 2 + 1).relu() * x  [mul.Tensor, add.Tensor, relu] */
    if (weft_empty(&own[1], 2, dims_32_64, dims_64_1, 6)) goto done;
    float *const p_buf1 = (void *)(weft_data(own[1]));
    weft_k84e3d65af0a9915b(p_in0, p_buf1);
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
