/* Elementary functions: libm's; with WEFT_MVEC the compiler may call glibc's vector versions
 * (libmvec, specials as libm).  In float, what models live on is inline.  All are within two units
 * of the nearest value (sin, cos and tan of double: see weft_trig.h).
 */

#ifdef WEFT_MVEC
#define WEFT_VECTOR __attribute__((simd("notinbranch"), const))
#else
#define WEFT_VECTOR __attribute__((const))
#endif

#define WEFT_LIBM(name)                                                                          \
    WEFT_VECTOR float name##f(float a);                                                          \
    WEFT_VECTOR double name(double a);                                                           \
    static inline double name##_f64(double a) { return name(a); }
#define WEFT_LIBM_F32(name)                                                                      \
    static inline float name##_f32(float a) { return name##f(a); }
/* libmvec's float function is 3 ulp off or more: the double one, rounded. */
#define WEFT_WIDE_F32(name)                                                                      \
    static inline float name##_f32(float a) { return (float)name(a); }

WEFT_LIBM(exp) WEFT_LIBM(exp2) WEFT_LIBM(expm1)
WEFT_LIBM(log) WEFT_LIBM(log1p) WEFT_LIBM(log2) WEFT_LIBM(log10)
WEFT_LIBM(sin) WEFT_LIBM(cos) WEFT_LIBM(tan) WEFT_LIBM(asin) WEFT_LIBM(acos) WEFT_LIBM(atan)
WEFT_LIBM(sinh) WEFT_LIBM(cosh) WEFT_LIBM(tanh) WEFT_LIBM(asinh) WEFT_LIBM(acosh)
WEFT_LIBM(atanh) WEFT_LIBM(erf) WEFT_LIBM(erfc)
WEFT_LIBM_F32(exp2) WEFT_LIBM_F32(log1p) WEFT_LIBM_F32(log2) WEFT_LIBM_F32(sin) WEFT_LIBM_F32(cos)
WEFT_LIBM_F32(acos) WEFT_LIBM_F32(atan) WEFT_LIBM_F32(sinh) WEFT_LIBM_F32(cosh)
WEFT_LIBM_F32(tanh) WEFT_LIBM_F32(asinh) WEFT_LIBM_F32(atanh)
WEFT_LIBM_F32(erfc) WEFT_WIDE_F32(log10) WEFT_WIDE_F32(tan) WEFT_WIDE_F32(asin) WEFT_WIDE_F32(acosh)

#define WEFT_LIBM2(name)                                                                         \
    WEFT_VECTOR float name##f(float a, float b);                                                 \
    WEFT_VECTOR double name(double a, double b);                                                 \
    static inline double name##_f64(double a, double b) { return name(a, b); }

/* gcc's vectoriser takes a power of 0.5 for the root, which differs for -inf and -0. */
#define WEFT_POW(type, suffix, root, power)                                                      \
    static inline type pow_##suffix(type a, type b)                                              \
    {                                                                                            \
        if (__builtin_constant_p(b) && b == 0.5)                                                 \
            return a == -__builtin_inf() ? __builtin_inf() : root(a) + 0.0f;                     \
        return power(a, b);                                                                      \
    }

WEFT_LIBM2(atan2) WEFT_LIBM2(hypot)
WEFT_VECTOR float powf(float a, float b);
WEFT_VECTOR double pow(double a, double b);
WEFT_POW(float, f32, sqrtf, powf) WEFT_POW(double, f64, sqrt, pow)
static inline float hypot_f32(float a, float b) { return hypotf(a, b); }
static inline float atan2_f32(float a, float b) { return (float)atan2(a, b); }
static inline double logaddexp_f64(double a, double b)
{
    double low = minimum_f64(a, b), high = maximum_f64(a, b);
    return low == high && low - low != 0 ? a : high + log1p(exp(low - high));
}
static inline float logaddexp_f32(float a, float b) { return (float)logaddexp_f64(a, b); }

#ifdef __FMA__
#define WEFT_FMA(a, b, c) __builtin_fmaf(a, b, c)
#else
#define WEFT_FMA(a, b, c) ((a) * (b) + (c))
#endif

/* Where a loop adds several elements to one float, and not as they lie in memory, gcc 12 vectorises
 * the sum and takes some twice.  Behind this it sees no sum.
 */
#if defined(__x86_64__)
#define WEFT_IN_ORDER(total) __asm__("" : "+x"(total))
#elif defined(__aarch64__)
#define WEFT_IN_ORDER(total) __asm__("" : "+w"(total))
#else
#define WEFT_IN_ORDER(total) __asm__("" : "+m"(total))
#endif

/* exp(a) = 2^n exp(r), r = a - n ln 2 in [-0.35, 0.35]; a minimax polynomial for exp(r), n rounded
 * by adding 1.5 * 2^23.  254 more leaves the sum of two biased exponents in the low bits: the power
 * takes two steps, so that subnormal results round once.  Below, a is clamped (which keeps nan) and
 * multiplied by zero: a product that underflows, as where masks add -inf, costs the CPU hundreds of
 * cycles.  Above, only n is (as an integer, which vectorises better), and the polynomial grows.
 * Within 1 ulp. */
static inline float exp_f32(float a)
{
    _Bool none = a < -104.0f;
    float x = none ? -104.0f : a;
    int32_t shifted = weft_bits_f32(WEFT_FMA(x, 1.44269504088896341f, 12583166.0f));
    shifted = shifted < 0x4b40017f ? shifted : 0x4b40017f;
    float n = weft_from_bits_f32(shifted) - 12583166.0f;
    float r = WEFT_FMA(n, -0.693359375f, x);
    r = WEFT_FMA(n, 2.12194440e-4f, r);
    float p = 1.381432064e-03f;
    p = WEFT_FMA(p, r, 8.368851097e-03f);
    p = WEFT_FMA(p, r, 4.166840108e-02f);
    p = WEFT_FMA(p, r, 1.666651952e-01f);
    p = WEFT_FMA(p, r, 4.999999337e-01f);
    p = WEFT_FMA(p, r, 1.0f);
    p = WEFT_FMA(p, r, 1.0f);
    uint32_t both = none ? 0 : (uint32_t)shifted, half = both >> 1;
    return p * weft_from_bits_f32(half << 23) * weft_from_bits_f32((both - half) << 23);
}

/* erf: odd below 1.7, one polynomial around 2.815 above (where 1 - erf is small, so that rounding in
 * it does not show).  Both are centred, which keeps their terms small, and cheaper than an
 * exponential.  Each lane picks its coefficients: one chain of products serves both.
 * Within 1.5 ulp. */
static inline float erf_f32(float a)
{
    float t = __builtin_fabsf(a), u = (3.93f < t ? 3.93f : t) - 2.81500006f;
    _Bool low = t < 1.7f;
    float z = (low ? WEFT_FMA(a, a, -1.44500005f) : u);
    float p = (low ? 4.75491646e-07f : WEFT_FMA(4.09841814e-05f, u, -7.89644109e-05f));
    p = WEFT_FMA(p, z, (low ? -4.43674753e-06f : -0.000115723342f));
    p = WEFT_FMA(p, z, (low ? 3.49601505e-05f : 0.00063422753f));
    p = WEFT_FMA(p, z, (low ? -0.00025634226f : -0.00137867278f));
    p = WEFT_FMA(p, z, (low ? 0.0016436649f : 0.00214301958f));
    p = WEFT_FMA(p, z, (low ? -0.00904815737f : -0.00246063154f));
    p = WEFT_FMA(p, z, (low ? 0.0422902554f : 0.00202578073f));
    p = WEFT_FMA(p, z, (low ? -0.17014952f : -0.00114948978f));
    p = WEFT_FMA(p, z, (low ? -0.242256835f : 0.000408033782f));
    p = WEFT_FMA(p, (low ? t : u), (low ? t : 0.999931395f));
    return __builtin_copysignf(p, a);
}

/* log(a) = e ln 2 + log(1 + f), 1 + f in [0.71, 1.41]: f - f^2 / 2 + f^3 p(f), the small terms first.
 * Subnormals are scaled up; the last lines are for 0, infinity and what has no logarithm.
 * Within 1 ulp. */
static inline float log_f32(float a)
{
    int32_t tiny = (weft_bits_f32(a) - 0x00800000) >> 31; /* all ones (a condition is slower) */
    int32_t bits = weft_bits_f32(a * weft_from_bits_f32(0x3f800000 + (tiny & 0x0b800000)));
    int32_t e = (bits - 0x3f3504f3) >> 23;
    float f = weft_from_bits_f32(bits - (e << 23)) - 1.0f, n = (float)(e + (tiny & -23));
    float s = f * f, p = -0.0790274441f;
    p = WEFT_FMA(p, f, 0.126223207f);
    p = WEFT_FMA(p, f, -0.129981831f);
    p = WEFT_FMA(p, f, 0.142144963f);
    p = WEFT_FMA(p, f, -0.166412815f);
    p = WEFT_FMA(p, f, 0.200010449f);
    p = WEFT_FMA(p, f, -0.25000307f);
    p = WEFT_FMA(p, f, 0.333333313f);
    float y = WEFT_FMA(n, -2.12194440e-4f, s * f * p);
    y = WEFT_FMA(n, 0.693359375f, WEFT_FMA(s, -0.5f, y) + f);
    y = 3.4028235e38f < a ? a : y;
    return 0.0f < a ? y : a == 0.0f ? -__builtin_inff() : __builtin_nanf("");
}

/* expm1(a) = 2^n q + (2^n - 1), q = exp(r) - 1 with r as above; twice half of it, which n = 128
 * needs.  The sign is a's, which keeps -0.0.  Within 1.3 ulp. */
static inline float expm1_f32(float a)
{
    float x = a < -18.0f ? -18.0f : a;
    int32_t shifted = weft_bits_f32(WEFT_FMA(x, 1.44269504088896341f, 12583038.0f));
    shifted = shifted < 0x4b4000fe ? shifted : 0x4b4000fe;
    float n = weft_from_bits_f32(shifted) - 12583038.0f;
    float r = WEFT_FMA(n, -0.693359375f, x);
    r = WEFT_FMA(n, 2.12194440e-4f, r);
    float q = 0.0013926191f;
    q = WEFT_FMA(q, r, 0.00836318545f);
    q = WEFT_FMA(q, r, 0.0416665561f);
    q = WEFT_FMA(q, r, 0.166665763f);
    q = WEFT_FMA(q, r, 0.5f);
    q = WEFT_FMA(r * r, q, r);
    float half = weft_from_bits_f32((int32_t)((uint32_t)shifted << 23));
    return __builtin_copysignf(2.0f * WEFT_FMA(half, q, half - 0.5f), a);
}
