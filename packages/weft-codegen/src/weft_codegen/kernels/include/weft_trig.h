/* sin, cos and tan of double in vector lanes, within two units: libmvec's are off by up to four.
 *
 * These are the vector forms of libm's functions under the names that compilers call (the letter
 * says which instruction set), in place of libmvec's.  A kernel that needs them includes this.
 */

#pragma once

#if defined(WEFT_MVEC) && defined(__FMA__)
#define WEFT_FAR 0x1p30

/* With a = n pi/2 + r: pi/2 in three parts, of which the first product is subtracted exactly, and
 * what r leaves of the rest is kept (`low`), as far as n has 31 bits.  sin and cos of r in
 * [-0.79, 0.79] are polynomials; which of them, and the sign, follow from n.  `turn` is 1 for cos. */
static inline double weft_trig(double a, int turn, _Bool tangent)
{
    double shifted = __builtin_fma(a, 0.63661977236758138, 0x1.8p52), n = shifted - 0x1.8p52;
    double first = __builtin_fma(n, -1.5707963267948966, a);
    double second = n * 6.123233995736766e-17;
    double third = __builtin_fma(n, 6.123233995736766e-17, -second);
    double sum = first - second, back = sum - first;
    double low = (first - (sum - back)) - (second + back);
    low -= __builtin_fma(n, -1.4973849048591698e-33, third);
    double r = sum + low, z = r * r;
    low += sum - r;
    double s = 1.5918115263265974e-10, c = -1.1382623647474604e-11;
    s = __builtin_fma(s, z, -2.505113165023518e-08);
    c = __builtin_fma(c, z, 2.087614614655861e-09);
    s = __builtin_fma(s, z, 2.7557316101617874e-06);
    c = __builtin_fma(c, z, -2.7557317271145144e-07);
    s = __builtin_fma(s, z, -0.00019841269836756774);
    c = __builtin_fma(c, z, 2.480158729876456e-05);
    s = __builtin_fma(s, z, 0.008333333333330948);
    c = __builtin_fma(c, z, -0.0013888888888887398);
    s = __builtin_fma(s, z, -0.16666666666666666);
    c = __builtin_fma(c, z, 0.041666666666666664);
    s = r + __builtin_fma(r * z, s, low);
    double near = 1.0 - 0.5 * z;
    c = near + (((1.0 - near) - 0.5 * z) + __builtin_fma(z * z, c, -r * low));
    int64_t quarter, bits;
    __builtin_memcpy(&quarter, &shifted, 8);
    quarter += turn;
    double y = quarter & 1 ? c : s;
    y = tangent ? y / (quarter & 1 ? -s : c) : y;
    __builtin_memcpy(&bits, &y, 8);
    bits ^= tangent ? 0 : quarter >> 1 << 63;
    __builtin_memcpy(&y, &bits, 8);
    return a == 0.0 && !turn ? a : y; /* -0.0 */
}

typedef double weft_trig2 __attribute__((vector_size(16)));
typedef double weft_trig4 __attribute__((vector_size(32)));
typedef double weft_trig8 __attribute__((vector_size(64)));

/* Lanes with larger arguments, infinities and nan are libm's, one at a time. */
#define WEFT_TRIG_LANES(isa, lanes, name, turn, tangent)                                         \
    __attribute__((weak, visibility("hidden"))) weft_trig##lanes                                 \
        _ZGV##isa##N##lanes##v_##name(weft_trig##lanes a)                                        \
    {                                                                                            \
        double x[lanes], y[lanes];                                                               \
        int64_t far = 0;                                                                         \
        __builtin_memcpy(x, &a, sizeof a);                                                       \
        _Pragma("omp simd reduction(|:far)") for (int k = 0; k < lanes; k++) {                   \
            y[k] = weft_trig(x[k], turn, tangent);                                               \
            far |= !(__builtin_fabs(x[k]) < WEFT_FAR);                                           \
        }                                                                                        \
        for (int k = 0; far && k < lanes; k++)                                                   \
            if (!(__builtin_fabs(x[k]) < WEFT_FAR))                                              \
                y[k] = weft_one_##name(x[k]);                                                    \
        __builtin_memcpy(&a, y, sizeof a);                                                       \
        return a;                                                                                \
    }
#define WEFT_TRIG(name, turn, tangent)                                                           \
    double weft_one_##name(double a) __asm__(#name); /* never in lanes */                        \
    WEFT_TRIG_LANES(b, 2, name, turn, tangent)                                                   \
    WEFT_TRIG_LANES(c, 4, name, turn, tangent)                                                   \
    WEFT_TRIG_LANES(d, 4, name, turn, tangent)                                                   \
    WEFT_TRIG_LANES(e, 8, name, turn, tangent)

WEFT_TRIG(sin, 0, 0)
WEFT_TRIG(cos, 1, 0)
WEFT_TRIG(tan, 0, 1)
#endif
