/* kernel kernel0(a0: bf16, a1: bf16*) locals ()
    for i0 in 0..2048 parallel:
        a1[i0] = bf16(((f32(a0[i0]) * 0.5) + 1.0))
 */
WEFT_PART void weft_k8266da328a17afeb_part(const uint16_t *a0, uint16_t *a1, int64_t lo, int64_t hi)
{
    /* golden_graphs.py:49: return x * 0.5 + 1  [mul.Tensor, add.Tensor] */
    int64_t block0 = lo;
    for (; block0 + 64 <= hi; block0 += 64) {
        const int64_t i0 = block0;
        float h1[64] WEFT_ALIGNED;
        #pragma omp simd
        for (int64_t lane = 0; lane < 64; lane++) {
            const int64_t i0 = block0 + lane;
            h1[lane] = ((bf16_to_f32(a0[i0]) * 0.5f) + 1.0f);
        }
        weft_narrow_bf16(h1, a1 + i0);
    }
    #pragma omp simd
    for (int64_t i0 = block0; i0 < hi; i0++) {
        a1[i0] = f32_to_bf16((float)((bf16_to_f32(a0[i0]) * 0.5f) + 1.0f));
    }
}

__attribute__((weak, visibility("hidden")))
void weft_k8266da328a17afeb(const uint16_t *a0, uint16_t *a1)
{
    weft_k8266da328a17afeb_part(a0, a1, 0, 2048);
}

