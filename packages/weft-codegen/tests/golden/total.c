/* kernel kernel0(a0: f32, a1: f32*) locals (t0: f32[1])
    for i0 in 0..50 parallel:
        t0 = 0.0
        for i1 in 0..20000:
            t0 sum= a0[i0*20000 + i1]
        a1[i0] = t0
 */
WEFT_PART void weft_k7607d8099ad5ab5e_part(const float *restrict a0, float *restrict a1, int64_t lo, int64_t hi)
{
    for (int64_t i0 = lo; i0 < hi; i0++) {
        double t0;
        t0 = 0.0f;
        /* golden_graphs.py:33: return x.sum()  [sum] */
        for (int64_t first = 0; first < 20000; first += 4096) {
            float r0_lanes[64] WEFT_ALIGNED = {0};
            int64_t block1 = first;
            for (; block1 + 64 <= weft_min(first + 4096, 20000); block1 += 64) {
                #pragma omp simd
                for (int64_t lane = 0; lane < 64; lane++) {
                    const int64_t i1 = block1 + lane;
                    r0_lanes[lane] = (a0[i0*20000 + i1] + r0_lanes[lane]);
                }
            }
            float r0 = sum_lanes_f32(r0_lanes);
            #pragma omp simd reduction(+:r0)
            for (int64_t i1 = block1; i1 < weft_min(first + 4096, 20000); i1++) {
                r0 += a0[i0*20000 + i1];
            }
            t0 += r0;
        }
        a1[i0] = (float)t0;
    }
}

struct weft_k7607d8099ad5ab5e_args { const float *a0; float *a1; };

static void weft_k7607d8099ad5ab5e_part_share(const void *args, int64_t lo, int64_t hi)
{
    const struct weft_k7607d8099ad5ab5e_args *a = args;
    weft_k7607d8099ad5ab5e_part(a->a0, a->a1, lo, hi);
}

__attribute__((weak, visibility("hidden")))
void weft_k7607d8099ad5ab5e(const float *a0, float *a1)
{
    {
        const struct weft_k7607d8099ad5ab5e_args args = {a0, a1};
        weft_parallel(weft_k7607d8099ad5ab5e_part_share, &args, 50, 2000200);
    }
}


/* kernel kernel1(a0: f32, a1: f32*) locals (t0: f32[1])
    t0 = 0.0
    for i0 in 0..50:
        t0 sum= a0[i0]
    a1[0] = t0
 */
WEFT_PART void weft_k6aec3a5b85262b64_part(const float *restrict a0, float *restrict a1)
{
    float t0;
    t0 = 0.0f;
    /* golden_graphs.py:33: return x.sum()  [sum] */
    float r0 = 0;
    #pragma omp simd reduction(+:r0)
    for (int64_t i0 = 0; i0 < 50; i0++) {
        r0 += a0[i0];
    }
    t0 += r0;
    a1[0] = t0;
}

__attribute__((weak, visibility("hidden")))
void weft_k6aec3a5b85262b64(const float *a0, float *a1)
{
    weft_k6aec3a5b85262b64_part(a0, a1);
}

