/* kernel kernel0(a0: bf16, a1: bf16*) locals ()
    for i0 in 0..2048 parallel:
        a1[i0] = bf16(((f32(a0[i0]) * 0.5) + 1.0))
 */
WEFT_PART void weft_ke07c90aaf41ee523_part(const uint16_t *a0, uint16_t *a1, int64_t lo, int64_t hi)
{
    /* golden_graphs.py:49: return x * 0.5 + 1  [mul.Tensor, add.Tensor] */
    #pragma omp simd
    for (int64_t i0 = lo; i0 < hi; i0++) {
        a1[i0] = f32_to_bf16((float)((bf16_to_f32(a0[i0]) * 0.5f) + 1.0f));
    }
}

__attribute__((weak, visibility("hidden")))
void weft_ke07c90aaf41ee523(const uint16_t *a0, uint16_t *a1)
{
    weft_ke07c90aaf41ee523_part(a0, a1, 0, 2048);
}


void weft_ke07c90aaf41ee523(const uint16_t *a0, uint16_t *a1);

static const int64_t dims_32_64[] = {32, 64};
static const int64_t dims_64_1[] = {64, 1};
static weft_symbol symbols[] = {{NULL}};

WEFT_RUN int weft_run(weft_call *call, weft_tensor *in, weft_tensor *out, int64_t *sizes)
{
    int status = 1;
    weft_program *const program = call->program;
    weft_tensor own[2] = {NULL};
    weft_tensor constant[1];
    if (weft_expect(call, in[0], "argument 0", 15)) goto done;
    if (weft_layout(call, &in[0], &own[0], "argument 0", 2, dims_32_64, dims_64_1, 15)) goto done;
    uint16_t *const p_in0 = (void *)(weft_data(in[0]));
    /* golden_graphs.py:49: return x * 0.5 + 1  [mul.Tensor, add.Tensor] */
    if (weft_empty(&own[1], 2, dims_32_64, dims_64_1, 15)) goto done;
    uint16_t *const p_buf1 = (void *)(weft_data(own[1]));
    weft_ke07c90aaf41ee523(p_in0, p_buf1);
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
