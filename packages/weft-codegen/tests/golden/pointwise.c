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

