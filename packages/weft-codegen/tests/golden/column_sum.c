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
WEFT_PART void weft_k33b091ce151f2c4c_part(const float *restrict a0, float *restrict a1)
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
            float s1 = 0;
            for (int64_t next = 0; next < 8; next++) {
                const int64_t i1 = row0 + next;
                const float v0 = a0[i0 + i1*64];
                s1 = ((v0 * v0) + s1);
            }
            t0[i0] += s1;
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
void weft_k33b091ce151f2c4c(const float *a0, float *a1)
{
    weft_k33b091ce151f2c4c_part(a0, a1);
}

