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

