/* What generated kernels build on: types, scalar operations, the thread team.
 *
 * No system header is included: parsing them would cost more than compiling a kernel.
 * Scalar operations are branch-free where that lets a `#pragma omp simd` loop vectorise.
 * Elementary functions are libm's; with WEFT_MVEC the compiler may call glibc's vector versions
 * (libmvec, specials as libm).  In float, what models live on is inline.  All are within two units
 * of the nearest value, libmvec's sine, cosine and tangent in double within four.
 */

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __SIZE_TYPE__ size_t;

/* A loop nest: not inlined where it is called, which would compile it once for each call. */
#ifdef __clang__
#define WEFT_PART __attribute__((noinline)) static
#else
#define WEFT_PART __attribute__((noipa)) static
#endif

void *malloc(size_t size);
void free(void *block);

/* ---- the thread team: torch's own OpenMP runtime, found when the program is loaded ---- */

typedef struct {
    void (*parallel)(void (*body)(void *), void *args, unsigned threads, unsigned flags);
    int (*max_threads)(void);
    int (*num_threads)(void);
    int (*thread_num)(void);
    int (*in_parallel)(void);
} weft_team_t;

extern weft_team_t weft_team __attribute__((visibility("hidden")));

/* How many threads `chunks` iterations keep busy that cost `work` float additions in all. */
static inline int64_t weft_sharers(int64_t chunks, int64_t work)
{
    int64_t most = weft_team.max_threads(), useful = work / 65536;
    most = most < chunks ? most : chunks;
    return most < useful ? most : useful;
}

/* Iterations [0, chunks) of a nest, for which `part` takes a range. */
typedef struct {
    void (*part)(const void *args, int64_t lo, int64_t hi);
    const void *args;
    int64_t chunks, work;
} weft_job;

/* One thread's share. */
static void weft_share(void *shared)
{
    const weft_job *job = shared;
    int64_t threads = weft_sharers(job->chunks, job->work), team = weft_team.num_threads();
    int64_t me = weft_team.thread_num(), chunks = job->chunks;
    threads = threads < team ? threads : team;
    if (me < threads)
        job->part(job->args, chunks * me / threads, chunks * (me + 1) / threads);
}

/* Runs them all, on the team where that pays. The region is then always as wide as the thread pool,
 * as torch's are: libgomp ends threads that a smaller one leaves out and makes them anew for the
 * next. */
static inline void weft_parallel(void (*part)(const void *, int64_t, int64_t), const void *args,
                                 int64_t chunks, int64_t work)
{
    weft_job job = {part, args, chunks, work};
    _Bool alone = work < 131072 || chunks < 2 || !weft_team.parallel || weft_team.in_parallel();
    if (alone || weft_sharers(chunks, work) < 2)
        part(args, 0, chunks);
    else
        weft_team.parallel(weft_share, &job, 0, 0);
}

/* ---- integers ---- */

static inline int64_t weft_min(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t weft_floordiv(int64_t a, int64_t b)
{
    int64_t q = a / b;
    return q - (q * b > a);
}

static inline int64_t weft_mod(int64_t a, int64_t b)
{
    int64_t r = a % b;
    return r < 0 ? r + b : r;
}

/* One of the four words of Philox4x32-10 with key `seed` and counter (index, stream). */
static inline int32_t philox_i64(int64_t seed, int64_t index, int64_t stream, int64_t word)
{
    uint32_t a = (uint32_t)index, b = (uint32_t)(index >> 32), key = (uint32_t)seed;
    uint32_t c = (uint32_t)stream, d = (uint32_t)(stream >> 32), high = (uint32_t)(seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        uint64_t p = a * (uint64_t)0xD2511F53u, q = c * (uint64_t)0xCD9E8D57u;
        a = (uint32_t)(q >> 32) ^ b ^ key;
        c = (uint32_t)(p >> 32) ^ d ^ high;
        b = (uint32_t)q;
        d = (uint32_t)p;
        key += 0x9E3779B9u;
        high += 0xBB67AE85u;
    }
    return (int32_t)(word == 0 ? a : word == 1 ? b : word == 2 ? c : d);
}

#define WEFT_INTEGER(T, t)                                                                       \
    static inline T maximum_##t(T a, T b) { return a > b ? a : b; }                              \
    static inline T minimum_##t(T a, T b) { return a < b ? a : b; }                              \
    static inline T not_##t(T a) { return (T)~a; }                                               \
    static inline T truncdiv_##t(T a, T b)                                                       \
    {                                                                                            \
        return b == 0 ? 0 : b == (T)-1 && (T)-1 < 0 ? (T)(0 - a) : (T)(a / b);                   \
    }                                                                                            \
    static inline T fmod_##t(T a, T b) { return (T)(a - (T)(truncdiv_##t(a, b) * b)); }          \
    static inline T remainder_##t(T a, T b)                                                      \
    {                                                                                            \
        T r = fmod_##t(a, b);                                                                    \
        return (T)(r != 0 && (r < 0) != (b < 0) ? r + b : r);                                    \
    }                                                                                            \
    static inline T floordiv_##t(T a, T b)                                                       \
    {                                                                                            \
        T q = truncdiv_##t(a, b), r = (T)(a - (T)(q * b));                                       \
        return (T)(r != 0 && (r < 0) != (b < 0) ? q - 1 : q);                                    \
    }                                                                                            \
    static inline _Bool isnan_##t(T a) { return 0; }                                             \
    static inline _Bool isinf_##t(T a) { return 0; }                                             \
    static inline _Bool signbit_##t(T a) { return a < 0; }                                       \
    static inline T abs_##t(T a) { return (T)(a < 0 ? 0 - a : a); }

WEFT_INTEGER(int8_t, i8)
WEFT_INTEGER(int16_t, i16)
WEFT_INTEGER(int32_t, i32)
WEFT_INTEGER(int64_t, i64)
WEFT_INTEGER(uint8_t, u8)
WEFT_INTEGER(uint16_t, u16)
WEFT_INTEGER(uint32_t, u32)
WEFT_INTEGER(uint64_t, u64)

static inline _Bool not_b8(_Bool a) { return !a; }
static inline _Bool maximum_b8(_Bool a, _Bool b) { return a | b; }
static inline _Bool minimum_b8(_Bool a, _Bool b) { return a & b; }
static inline _Bool abs_b8(_Bool a) { return a; }

/* ---- floats: what is the same for both widths ---- */

#define WEFT_FLOAT(T, t, f)                                                                      \
    static inline T maximum_##t(T a, T b) { return (a > b) | (a != a) ? a : b; }                 \
    static inline T minimum_##t(T a, T b) { return (a < b) | (a != a) ? a : b; }                 \
    static inline T abs_##t(T a) { return __builtin_fabs##f(a); }                                \
    static inline T copysign_##t(T a, T b) { return __builtin_copysign##f(a, b); }               \
    static inline T floor_##t(T a) { return __builtin_floor##f(a); }                             \
    static inline T ceil_##t(T a) { return __builtin_ceil##f(a); }                               \
    static inline T trunc_##t(T a) { return __builtin_trunc##f(a); }                             \
    static inline T round_##t(T a) { return __builtin_rint##f(a); }                              \
    static inline T sqrt_##t(T a) { return __builtin_sqrt##f(a); }                               \
    static inline T rsqrt_##t(T a) { return 1 / __builtin_sqrt##f(a); }                          \
    static inline T product_##t(T a, T b) { return a * b; }                                      \
    static inline _Bool signbit_##t(T a) { return __builtin_copysign##f(1, a) < 0; }             \
    static inline _Bool isnan_##t(T a) { return a != a; }                                        \
    static inline _Bool isinf_##t(T a) { return __builtin_fabs##f(a) == __builtin_inf##f(); }    \
    static inline T truncdiv_##t(T a, T b) { return __builtin_trunc##f(a / b); }                 \
    T fmod##f(T a, T b);                                                                         \
    static inline T fmod_##t(T a, T b) { return fmod##f(a, b); }                                 \
    static inline T remainder_##t(T a, T b)                                                      \
    {                                                                                            \
        T r = fmod##f(a, b);                                                                     \
        return r != 0 && (r < 0) != (b < 0) ? r + b : r;                                         \
    }                                                                                            \
    static inline T floordiv_##t(T a, T b)                                                       \
    {                                                                                            \
        if (b == 0)                                                                              \
            return a / b;                                                                        \
        T r = fmod##f(a, b), q = (a - r) / b;                                                    \
        if (r != 0 && (r < 0) != (b < 0))                                                        \
            q -= 1;                                                                              \
        if (q == 0)                                                                              \
            return __builtin_copysign##f(0, a / b);                                              \
        T whole = __builtin_floor##f(q);                                                         \
        return q - whole > (T)0.5 ? whole + 1 : whole;                                           \
    }

WEFT_FLOAT(float, f32, f)
WEFT_FLOAT(double, f64, )

static inline int32_t weft_bits_f32(float a)
{
    int32_t bits;
    __builtin_memcpy(&bits, &a, 4);
    return bits;
}

static inline float weft_from_bits_f32(int32_t bits)
{
    float a;
    __builtin_memcpy(&a, &bits, 4);
    return a;
}

/* ---- elementary functions ---- */

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
WEFT_LIBM_F32(tanh) WEFT_LIBM_F32(asinh) WEFT_LIBM_F32(acosh) WEFT_LIBM_F32(atanh)
WEFT_LIBM_F32(erfc) WEFT_WIDE_F32(log10) WEFT_WIDE_F32(tan) WEFT_WIDE_F32(asin)

#define WEFT_LIBM2(name)                                                                         \
    WEFT_VECTOR float name##f(float a, float b);                                                 \
    WEFT_VECTOR double name(double a, double b);                                                 \
    static inline double name##_f64(double a, double b) { return name(a, b); }

WEFT_LIBM2(pow) WEFT_LIBM2(atan2) WEFT_LIBM2(hypot)
static inline float pow_f32(float a, float b) { return powf(a, b); }
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

/* ---- sums: 64 partial sums are added up by a tree ---- */

#define WEFT_ALIGNED __attribute__((aligned(64)))

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

/* ---- turning tiles: to[r*width + c] = from[c*step + r], in blocks of 8 by 8 ---- */

#define WEFT_TURN(T, bytes)                                                                      \
    typedef T weft_turn_v##bytes __attribute__((vector_size(8 * sizeof(T)), aligned(bytes)));    \
    static inline void weft_turn_block_##bytes(const T *from, int64_t step, T *to, int64_t width) \
    {                                                                                            \
        typedef weft_turn_v##bytes v;                                                            \
        v a[8], b[8];                                                                            \
        for (int k = 0; k < 8; k += 2) {                                                         \
            v x = *(const v *)(from + k * step), y = *(const v *)(from + (k + 1) * step);        \
            a[k] = __builtin_shufflevector(x, y, 0, 8, 1, 9, 4, 12, 5, 13);                      \
            a[k + 1] = __builtin_shufflevector(x, y, 2, 10, 3, 11, 6, 14, 7, 15);                \
        }                                                                                        \
        for (int k = 0; k < 8; k += 4)                                                           \
            for (int h = 0; h < 2; h++) {                                                        \
                v x = a[k + h], y = a[k + h + 2];                                                \
                b[k + 2 * h] = __builtin_shufflevector(x, y, 0, 1, 8, 9, 4, 5, 12, 13);          \
                b[k + 2 * h + 1] = __builtin_shufflevector(x, y, 2, 3, 10, 11, 6, 7, 14, 15);    \
            }                                                                                    \
        for (int k = 0; k < 4; k++) {                                                            \
            v x = b[k], y = b[k + 4];                                                            \
            *(v *)(to + k * width) = __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11);    \
            *(v *)(to + (k + 4) * width) =                                                       \
                __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15);                       \
        }                                                                                        \
    }                                                                                            \
    static inline void weft_turn_##bytes(const void *from, int64_t step, void *to,               \
                                         int64_t width, int64_t rows, int64_t columns)           \
    {                                                                                            \
        const T *f = from;                                                                       \
        T *t = to;                                                                               \
        for (int64_t c = 0; c < columns; c += 8)                                                 \
            for (int64_t r = 0; r < rows; r += 8)                                                \
                if (c + 8 <= columns && r + 8 <= rows)                                           \
                    weft_turn_block_##bytes(f + c * step + r, step, t + r * width + c, width);   \
                else                                                                             \
                    for (int64_t j = c; j < weft_min(c + 8, columns); j++)                       \
                        for (int64_t k = r; k < weft_min(r + 8, rows); k++)                      \
                            t[k * width + j] = f[j * step + k];                                  \
    }

WEFT_TURN(int16_t, 2)
WEFT_TURN(float, 4)
WEFT_TURN(double, 8)

/* ---- 16-bit floats live in memory as their bits; arithmetic is float's ---- */

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

/* Blocks of 64: in a loop of lanes compilers do not use the CPU's own conversions. */
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
