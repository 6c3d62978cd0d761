/* kernel kernel0(a0: f32, a1: f32*, a2: f32) locals ()
    for i0 in 0..32 parallel:
        for i1 in 0..64:
            a1[i0*64 + i1] = (a0[i0*64 + i1] * 2.0)
    for i2 in 0..32 parallel:
        for i1 in 0..64:
            a1[i1 + i2*64 + 2048] = (a2[i1 + i2*64] * 2.0)
 */
WEFT_PART void weft_k3e7b54174b0bce2c_part0(const float *restrict a0, float *restrict a1, const float *restrict a2, int64_t lo, int64_t hi)
{
    for (int64_t i0 = lo; i0 < hi; i0++) {
        /* golden_graphs.py:45: return torch.cat([x, y]) * 2  [cat, mul.Tensor] */
        #pragma omp simd
        for (int64_t i1 = 0; i1 < 64; i1++) {
            a1[i0*64 + i1] = (a0[i0*64 + i1] * 2.0f);
        }
    }
}

WEFT_PART void weft_k3e7b54174b0bce2c_part1(const float *restrict a0, float *restrict a1, const float *restrict a2, int64_t lo, int64_t hi)
{
    for (int64_t i2 = lo; i2 < hi; i2++) {
        /* golden_graphs.py:45: return torch.cat([x, y]) * 2  [cat, mul.Tensor] */
        #pragma omp simd
        for (int64_t i1 = 0; i1 < 64; i1++) {
            a1[i1 + i2*64 + 2048] = (a2[i1 + i2*64] * 2.0f);
        }
    }
}

__attribute__((weak, visibility("hidden")))
void weft_k3e7b54174b0bce2c(const float *a0, float *a1, const float *a2)
{
    weft_k3e7b54174b0bce2c_part0(a0, a1, a2, 0, 32);
    weft_k3e7b54174b0bce2c_part1(a0, a1, a2, 0, 32);
}

