/* kernel kernel0(a0: f32, a1: f32, a2: f32, a3: f32*) locals (t0: f32[1], t1: f32[1], t2: f32[1], t3: f32[1], t4: f32[1], t5: f32[1], t6: f32[1])
    for i0 in 0..32 parallel:
        t0 = 0.0
        for i1 in 0..64:
            t0 sum= a0[i0*64 + i1]
        t1 = 0.0
        t2 = 0.0
        v0 = (t0 / 64.0)
        t3 = v0
        for i1 in 0..64:
            v1 = (a0[i0*64 + i1] - t3)
            t1 sum= (v1 * v1)
            t2 sum= v1
        t4 = (t1 / 64.0)
        v2 = (t2 / 64.0)
        t5 = (v0 + where((v2 == v2), v2, 0.0))
        t6 = rsqrt((t4 + 1e-05))
        for i1 in 0..64:
            a3[i0*64 + i1] = ((((a0[i0*64 + i1] - t5) * t6) * a1[i1]) + a2[i1])
 */
WEFT_PART void weft_k01f66d4616051ecd_part(const float *a0, const float *restrict a1, const float *restrict a2, float *a3, int64_t lo, int64_t hi)
{
    for (int64_t i0 = lo; i0 < hi; i0++) {
        float t0;
        float t1;
        float t2;
        float t3;
        float t4;
        float t5;
        float t6;
        t0 = 0.0f;
        /* golden_graphs.py:25: return F.layer_norm(x, (64,), w, b)  [var_mean.correction] */
        float r0_lanes[64] WEFT_ALIGNED = {0};
        int64_t block1 = 0;
        for (; block1 + 64 <= 64; block1 += 64) {
            #pragma omp simd
            for (int64_t lane = 0; lane < 64; lane++) {
                const int64_t i1 = block1 + lane;
                r0_lanes[lane] = (a0[i0*64 + i1] + r0_lanes[lane]);
            }
        }
        float r0 = sum_lanes_f32(r0_lanes);
        t0 += r0;
        t1 = 0.0f;
        t2 = 0.0f;
        const float v0 = (t0 / 64.0f);
        t3 = v0;
        /* golden_graphs.py:25: return F.layer_norm(x, (64,), w, b)  [var_mean.correction] */
        float r2_lanes[64] WEFT_ALIGNED = {0};
        float r3_lanes[64] WEFT_ALIGNED = {0};
        int64_t block4 = 0;
        for (; block4 + 64 <= 64; block4 += 64) {
            for (int64_t line = 0; line < 64; line += 16)
                __builtin_prefetch(a0 + i0*64 + 64 + block4 + line);
            #pragma omp simd
            for (int64_t lane = 0; lane < 64; lane++) {
                const int64_t i1 = block4 + lane;
                const float v1 = (a0[i0*64 + i1] - t3);
                r2_lanes[lane] = ((v1 * v1) + r2_lanes[lane]);
                r3_lanes[lane] = (v1 + r3_lanes[lane]);
            }
        }
        float r2 = sum_lanes_f32(r2_lanes);
        float r3 = sum_lanes_f32(r3_lanes);
        t1 += r2;
        t2 += r3;
        const float v2 = (t1 / 64.0f);
        t4 = v2;
        const float v3 = (t2 / 64.0f);
        t5 = (v0 + ((v3 == v3) ? v3 : 0.0f));
        const float v4 = rsqrt_f32((t4 + 1e-05f));
        t6 = v4;
        /* golden_graphs.py:25: return F.layer_norm(x, (64,), w, b)  [sub.Tensor, add.Tensor, rsqrt, mul.Tensor] */
        #pragma omp simd
        for (int64_t i1 = 0; i1 < 64; i1++) {
            a3[i0*64 + i1] = ((((a0[i0*64 + i1] - t5) * t6) * a1[i1]) + a2[i1]);
        }
    }
}

__attribute__((weak, visibility("hidden")))
void weft_k01f66d4616051ecd(const float *a0, const float *a1, const float *a2, float *a3)
{
    weft_k01f66d4616051ecd_part(a0, a1, a2, a3, 0, 32);
}

