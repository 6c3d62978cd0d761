/* kernel kernel0(a0: f32, a1: f32, a2: f32*) locals ()
    for i0 in 0..32 parallel:
        for i1 in 0..64:
            a2[i0*64 + i1] = tanh((a0[i0*64 + i1] + a1[i1]))
 */
WEFT_PART void weft_ke7ea16aa9d0d7481_part(const float *a0, const float *restrict a1, float *a2, int64_t lo, int64_t hi)
{
    for (int64_t i0 = lo; i0 < hi; i0++) {
        /* golden_graphs.py:37: return torch.tanh(x @ w + b)  [add.Tensor, tanh] */
        #pragma omp simd
        for (int64_t i1 = 0; i1 < 64; i1++) {
            const float v0 = tanh_f32((a0[i0*64 + i1] + a1[i1]));
            a2[i0*64 + i1] = v0;
        }
    }
}

__attribute__((weak, visibility("hidden")))
void weft_ke7ea16aa9d0d7481(const float *a0, const float *a1, float *a2)
{
    weft_ke7ea16aa9d0d7481_part(a0, a1, a2, 0, 32);
}


void weft_ke7ea16aa9d0d7481(const float *a0, const float *a1, float *a2);

static const int64_t dims_8192[] = {8192};
static const int64_t dims_1[] = {1};
static const weft_value v_scratch = {"scratch", WEFT_TENSOR, 0, WEFT_CPU, 1, dims_8192, dims_1};
static const int64_t dims_32_64[] = {32, 64};
static const int64_t dims_64_1[] = {64, 1};
static const weft_value v_buf3 = {"buf3", WEFT_TENSOR, 6, WEFT_CPU, 2, dims_32_64, dims_64_1};
static const int64_t dims_64_64[] = {64, 64};
static const int64_t dims_64[] = {64};
static const weft_value inputs[] = {
    {"in0", WEFT_TENSOR, 6, WEFT_CPU, 2, dims_32_64, dims_64_1},
    {"in1", WEFT_TENSOR, 6, WEFT_CPU, 2, dims_64_64, dims_64_1},
    {"in2", WEFT_TENSOR, 6, WEFT_CPU, 1, dims_64, dims_1},
};
static const weft_value outputs[] = {
    {"buf4", WEFT_TENSOR, 6, WEFT_CPU, 2, dims_32_64, dims_64_1},
};
const weft_description weft_program = {WEFT_ABI, WEFT_CPU, 3, 1, 0, inputs, outputs, NULL};

static weft_symbol symbols[] = {{"aoti_torch_cpu_mm_out"}, {NULL}};

const char *weft_load(void *(*find)(void *, const char *), void *library)
{
    return weft_link(find, library, symbols);
}

WEFT_RUN int weft_run(weft_call *call, weft_tensor *in, weft_tensor *out, int64_t *integers)
{
    int status = 1;
    weft_tensor own[6] = {NULL};
    const _Bool grad = torch.grad_mode_is_enabled();
    if (grad)
        torch.grad_mode_set_enabled(0);
    if (weft_expect(call, &in[0], &own[0], "argument 0", &inputs[0], 0)) goto done;
    if (weft_expect(call, &in[1], &own[1], "argument 1", &inputs[1], 0)) goto done;
    if (weft_expect(call, &in[2], &own[2], "argument 2", &inputs[2], 0)) goto done;
    float *const p_in2 = (void *)(weft_data(in[2]));
    if (weft_empty(&own[3], &v_scratch)) goto done;
    char *const scratch = weft_data(own[3]);
    WEFT_BEGIN(0);
    /* golden_graphs.py:37: return torch.tanh(x @ w + b)  [mm] */
    float *const p_buf3 = (void *)(scratch + 0);
    if (weft_wrap(&own[4], scratch + 0 + 0, &v_buf3)) goto done;
    if (WEFT_CALL(0, aoti_torch_cpu_mm_out, own[4], in[0], in[1]) && weft_step_into(call, 0, 2, (const weft_tensor[]){in[0], in[1]}, 0, (const int64_t[]){0}, own[4])) goto done;
    weft_drop(&own[1]);
    weft_release(call, 1);
    WEFT_BEGIN(1);
    /* golden_graphs.py:37: return torch.tanh(x @ w + b)  [add.Tensor, tanh] */
    if (weft_empty(&own[5], &outputs[0])) goto done;
    float *const p_buf4 = (void *)(weft_data(own[5]));
    weft_ke7ea16aa9d0d7481(p_buf3, p_in2, p_buf4);
    out[0] = own[5];
    own[5] = NULL;
    status = 0;
done:
    for (int k = 0; k < 6; k++)
        weft_drop(&own[k]);
    if (grad)
        torch.grad_mode_set_enabled(1);
    return status;
}
