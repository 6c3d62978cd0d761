/* 16-bit floats live in memory as their bits; arithmetic is float's. */

static inline float bf16_to_f32(uint16_t bits) { return weft_from_bits_f32((int32_t)bits << 16); }

static inline uint16_t f32_to_bf16(float a)
{
    uint32_t bits = (uint32_t)weft_bits_f32(a);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)(a != a ? 0x7fc0 : rounded);
}

/* f32(bf16(a)) and f32(f16(a)), in lanes of 32 bits.  A sum with 1.5 * 2^(e + 13) rounds at the last
 * bit of a half with exponent e. */
static inline float rounded_bf16(float a)
{
    uint32_t bits = (uint32_t)weft_bits_f32(a);
    float rounded = weft_from_bits_f32((int32_t)((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000));
    return a != a ? a : rounded;
}

static inline float rounded_f16(float a)
{
    int32_t e = weft_bits_f32(a) & 0x7f800000;
    float shift = weft_from_bits_f32((e > 0x38800000 ? e : 0x38800000) + 0x06c00000);
    float rounded = __builtin_copysignf((a + shift) - shift, a);
    return __builtin_fabsf(a) < 65520.0f ? rounded : a * __builtin_inff();
}

#if defined(__AVX512FP16__) || defined(__aarch64__)
static inline float f16_to_f32(uint16_t bits)
{
    _Float16 half;
    __builtin_memcpy(&half, &bits, 2);
    return (float)half;
}

static inline uint16_t f32_to_f16(float a)
{
    _Float16 half = (_Float16)a;
    uint16_t bits;
    __builtin_memcpy(&bits, &half, 2);
    return bits;
}
#else
/* By integers: elsewhere compilers convert a _Float16 at a time.  A subnormal half is its last bit
 * so many times, and a sum with 0.5 rounds there.  Exact for all values, ties to even. */
static inline float f16_to_f32(uint16_t bits)
{
    uint32_t h = bits & 0x7fff, sign = (uint32_t)(bits & 0x8000) << 16;
    uint32_t normal = (h << 13) + (h < 0x7c00 ? 0x38000000u : 0x70000000u);
    uint32_t small = (uint32_t)weft_bits_f32((float)(int32_t)h * 5.9604644775390625e-08f);
    return weft_from_bits_f32((int32_t)((h < 0x400 ? small : normal) | sign));
}

static inline uint16_t f32_to_f16(float a)
{
    uint32_t bits = (uint32_t)weft_bits_f32(a), b = bits & 0x7fffffff;
    uint32_t h = (b + 0xc8000fff + (b >> 13 & 1)) >> 13;
    uint32_t small = (uint32_t)weft_bits_f32(weft_from_bits_f32((int32_t)b) + 0.5f) - 0x3f000000;
    h = b < 0x38800000 ? small : h;
    h = b < 0x477ff000 ? h : 0x7c00;
    return (uint16_t)((b > 0x7f800000 ? 0x7e00 : h) | (bits >> 16 & 0x8000));
}
#endif

/* Blocks of 64, apart from the loop of lanes that uses them: there compilers do not use the CPU's own
 * conversions. */
#ifdef __F16C__
#ifdef __AVX512F__
#define WEFT_WIDTH 16
#else
#define WEFT_WIDTH 8
#endif
typedef float weft_wide __attribute__((vector_size(4 * WEFT_WIDTH)));
typedef uint16_t weft_half __attribute__((vector_size(2 * WEFT_WIDTH), aligned(2)));
#define WEFT_EACH for (int k = 0; k < 64; k += WEFT_WIDTH)

static inline void weft_widen_1(const uint16_t *from, float *to)
{
    weft_wide value; /* a local, so that compilers see what the store holds */
    __asm__("vcvtph2ps %1, %0" : "=v"(value) : "m"(*(const weft_half *)from));
    *(weft_wide *)to = value;
}

static inline void weft_narrow_1(const float *from, uint16_t *to)
{
    __asm__("vcvtps2ph $0, %1, %0" : "=m"(*(weft_half *)to) : "v"(*(const weft_wide *)from));
}
#else
#define WEFT_EACH _Pragma("omp simd") for (int k = 0; k < 64; k++)

static inline void weft_widen_1(const uint16_t *from, float *to) { *to = f16_to_f32(*from); }
static inline void weft_narrow_1(const float *from, uint16_t *to) { *to = f32_to_f16(*from); }
#endif

static inline void weft_widen_f16(const uint16_t *from, float *to)
{
    WEFT_EACH weft_widen_1(from + k, to + k);
}

static inline void weft_narrow_f16(const float *from, uint16_t *to)
{
    WEFT_EACH weft_narrow_1(from + k, to + k);
}

static inline void weft_narrow_bf16(const float *from, uint16_t *to)
{
#ifdef __AVX512BF16__
    uint32_t any = 0; /* subnormal numbers, which the instruction takes for zero */
    WEFT_EACH {
        weft_wide value = *(const weft_wide *)(from + k);
        weft_half rounded;
        uint16_t small;
        __asm__("vfpclassps $0x20, %1, %0" : "=k"(small) : "v"(value));
        __asm__("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(value));
        *(weft_half *)(to + k) = rounded;
        any |= small;
    }
    if (__builtin_expect(!any, 1))
        return;
#endif
    _Pragma("omp simd") for (int k = 0; k < 64; k++)
        to[k] = f32_to_bf16(from[k]);
}
