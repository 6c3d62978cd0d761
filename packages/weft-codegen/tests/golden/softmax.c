/* kernel kernel0(a0: f32, a1: f32*) locals (t0: f32[1], t1: f32[1], t2: f32[64])
    for i0 in 0..32 parallel:
        t0 = -inf
        for i1 in 0..64:
            t0 max= a0[i0*64 + i1]
        t1 = 0.0
        for i1 in 0..64:
            v0 = exp((a0[i0*64 + i1] - t0))
            t2[i1] = v0
            t1 sum= v0
        for i1 in 0..64:
            a1[i0*64 + i1] = (t2[i1] / t1)
 */
WEFT_PART void weft_k5561c4247b707aa0_part(const float *a0, float *a1, int64_t lo, int64_t hi)
{
    for (int64_t i0 = lo; i0 < hi; i0++) {
        float t0;
        float t1;
        float t2[64] WEFT_ALIGNED;
        t0 = (-__builtin_inff());
        /* golden_graphs.py:21: return x.softmax(-1)  [amax] */
        float r0 = t0;
        int32_t r0_nan = r0 != r0;
        #pragma omp simd reduction(max:r0) reduction(|:r0_nan)
        for (int64_t i1 = 0; i1 < 64; i1++) {
            const float r0_x = a0[i0*64 + i1];
            r0 = r0_x > r0 ? r0_x : r0;
            r0_nan |= r0_x != r0_x;
        }
        r0 = r0_nan ? __builtin_nanf("") : r0;
        t0 = r0;
        t1 = 0.0f;
        /* golden_graphs.py:21: return x.softmax(-1)  [sub.Tensor, exp, sum.dim_IntList] */
        float r1_lanes[64] WEFT_ALIGNED = {0};
        int64_t block2 = 0;
        for (; block2 + 64 <= 64; block2 += 64) {
            for (int64_t line = 0; line < 64; line += 16)
                __builtin_prefetch(a0 + i0*64 + 64 + block2 + line);
            #pragma omp simd
            for (int64_t lane = 0; lane < 64; lane++) {
                const int64_t i1 = block2 + lane;
                const float v0 = exp_f32((a0[i0*64 + i1] - t0));
                t2[i1] = v0;
                r1_lanes[lane] = (v0 + r1_lanes[lane]);
            }
        }
        float r1 = sum_lanes_f32(r1_lanes);
        t1 += r1;
        /* golden_graphs.py:21: return x.softmax(-1)  [div.Tensor] */
        #pragma omp simd
        for (int64_t i1 = 0; i1 < 64; i1++) {
            const float v1 = (t2[i1] / t1);
            a1[i0*64 + i1] = v1;
        }
    }
}

__attribute__((weak, visibility("hidden")))
void weft_k5561c4247b707aa0(const float *a0, float *a1)
{
    weft_k5561c4247b707aa0_part(a0, a1, 0, 32);
}

