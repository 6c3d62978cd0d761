/* Blocks of memory: sums of lanes, results that pass the caches, tiles that are turned. */

/* ---- sums: 64 partial sums are added up by a tree ---- */

typedef float weft_f32x16 __attribute__((vector_size(64)));
typedef double weft_f64x8 __attribute__((vector_size(64)));

static inline float sum_lanes_f32(const float *lanes)
{
    const weft_f32x16 *p = (const weft_f32x16 *)lanes;
    weft_f32x16 a = (p[0] + p[1]) + (p[2] + p[3]);
    a += __builtin_shufflevector(a, a, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15);
    a += __builtin_shufflevector(a, a, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7);
    return (a[0] + a[1]) + (a[2] + a[3]);
}

static inline double sum_lanes_f64(const double *lanes)
{
    const weft_f64x8 *p = (const weft_f64x8 *)lanes;
    weft_f64x8 a = (p[0] + p[1]) + (p[2] + p[3]);
    a += (p[4] + p[5]) + (p[6] + p[7]);
    a += __builtin_shufflevector(a, a, 4, 5, 6, 7, 4, 5, 6, 7);
    return (a[0] + a[1]) + (a[2] + a[3]);
}

/* ---- results that no cache could hold: whole lines go to memory without being read first ---- */

typedef float weft_line __attribute__((vector_size(64), aligned(4)));

static inline void weft_stream(void *to, const void *from, int64_t bytes)
{
    char *t = to;
    const char *f = from;
    int64_t at = weft_min(-(int64_t)t & 63, bytes);
    if (at)
        __builtin_memcpy(t, f, at);
    for (; at + 64 <= bytes; at += 64) {
        weft_line line = *(const weft_line *)(f + at);
#if defined(__clang__)
        __builtin_nontemporal_store((weft_f32x16)line, (weft_f32x16 *)(t + at));
#elif defined(__AVX512F__)
        __builtin_ia32_movntps512((float *)(t + at), line);
#elif defined(__AVX__)
        typedef float half __attribute__((vector_size(32)));
        __builtin_ia32_movntps256((float *)(t + at), ((half *)&line)[0]);
        __builtin_ia32_movntps256((float *)(t + at + 32), ((half *)&line)[1]);
#else
        *(weft_f32x16 *)(t + at) = line;
#endif
    }
    if (at < bytes)
        __builtin_memcpy(t + at, f + at, bytes - at);
}

/* Before other threads read what was streamed. */
static inline void weft_stream_end(void)
{
#ifdef __SSE__
    __builtin_ia32_sfence();
#endif
}

/* ---- turning tiles: to[r*width + c] = from[c*step + r], in blocks of 8 by 8 (floats: 16 by 16,
 * whole cache lines) ---- */

#define WEFT_TRANSPOSE_8(T, bytes)                                                               \
    typedef T weft_transpose_v##bytes __attribute__((vector_size(8 * sizeof(T)), aligned(bytes))); \
    static inline void weft_transpose_8_##bytes(weft_transpose_v##bytes *a)                      \
    {                                                                                            \
        weft_transpose_v##bytes b[8];                                                            \
        for (int k = 0; k < 8; k += 2) {                                                         \
            b[k] = __builtin_shufflevector(a[k], a[k + 1], 0, 8, 1, 9, 4, 12, 5, 13);            \
            b[k + 1] = __builtin_shufflevector(a[k], a[k + 1], 2, 10, 3, 11, 6, 14, 7, 15);      \
        }                                                                                        \
        for (int k = 0; k < 8; k += 4)                                                           \
            for (int h = 0; h < 2; h++) {                                                        \
                weft_transpose_v##bytes x = b[k + h], y = b[k + h + 2];                          \
                a[k + 2 * h] = __builtin_shufflevector(x, y, 0, 1, 8, 9, 4, 5, 12, 13);          \
                a[k + 2 * h + 1] = __builtin_shufflevector(x, y, 2, 3, 10, 11, 6, 7, 14, 15);    \
            }                                                                                    \
        for (int k = 0; k < 4; k++) {                                                            \
            weft_transpose_v##bytes x = a[k], y = a[k + 4];                                      \
            a[k] = __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11);                      \
            a[k + 4] = __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15);                \
        }                                                                                        \
    }

#define WEFT_TRANSPOSE_BLOCK(T, bytes)                                                           \
    static inline void weft_transpose_block_##bytes(const T *from, int64_t step, T *to, int64_t width) \
    {                                                                                            \
        weft_transpose_v##bytes a[8];                                                            \
        for (int k = 0; k < 8; k++)                                                              \
            a[k] = *(const weft_transpose_v##bytes *)(from + k * step);                          \
        weft_transpose_8_##bytes(a);                                                             \
        for (int k = 0; k < 8; k++)                                                              \
            *(weft_transpose_v##bytes *)(to + k * width) = a[k];                                 \
    }

#define WEFT_TRANSPOSE(T, bytes, side)                                                           \
    static inline void weft_transpose_##bytes(const void *from, int64_t step, void *to,          \
                                         int64_t width, int64_t rows, int64_t columns)           \
    {                                                                                            \
        const T *f = from;                                                                       \
        T *t = to;                                                                               \
        for (int64_t c = 0; c < columns; c += side)                                              \
            for (int64_t r = 0; r < rows; r += side)                                             \
                if (c + side <= columns && r + side <= rows)                                     \
                    weft_transpose_block_##bytes(f + c * step + r, step, t + r * width + c, width); \
                else                                                                             \
                    for (int64_t j = c; j < weft_min(c + side, columns); j++)                    \
                        for (int64_t k = r; k < weft_min(r + side, rows); k++)                   \
                            t[k * width + j] = f[j * step + k];                                  \
    }

WEFT_TRANSPOSE_8(int16_t, 2)
WEFT_TRANSPOSE_8(double, 8)
WEFT_TRANSPOSE_BLOCK(int16_t, 2)
WEFT_TRANSPOSE_BLOCK(double, 8)

/* Floats of two rows as pairs that stay together: 8 by 8 pairs, once of each row's even elements. */
static inline void weft_transpose_block_4(const float *from, int64_t step, float *to, int64_t width)
{
    typedef float v __attribute__((vector_size(64), aligned(4)));
    weft_transpose_v8 even[8], odd[8];
    for (int k = 0; k < 8; k++) {
        v x = *(const v *)(from + 2 * k * step), y = *(const v *)(from + (2 * k + 1) * step);
        even[k] = (weft_transpose_v8)__builtin_shufflevector(x, y, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10,
                                                        26, 12, 28, 14, 30);
        odd[k] = (weft_transpose_v8)__builtin_shufflevector(x, y, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11,
                                                       27, 13, 29, 15, 31);
    }
    weft_transpose_8_8(even);
    weft_transpose_8_8(odd);
    for (int k = 0; k < 8; k++) {
        *(weft_transpose_v8 *)(to + 2 * k * width) = even[k];
        *(weft_transpose_v8 *)(to + (2 * k + 1) * width) = odd[k];
    }
}

WEFT_TRANSPOSE(int16_t, 2, 8)
WEFT_TRANSPOSE(float, 4, 16)
WEFT_TRANSPOSE(double, 8, 8)
