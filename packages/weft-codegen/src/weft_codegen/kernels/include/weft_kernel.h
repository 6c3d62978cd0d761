/* What generated kernels build on: the thread team, arithmetic.
 *
 * Scalar operations are branch-free where that lets a `#pragma omp simd` loop vectorise.
 */

#include "weft_base.h"

/* A loop nest: not inlined where it is called, which would compile it once for each call. */
#ifdef __clang__
#define WEFT_PART __attribute__((noinline)) static
#else
#define WEFT_PART __attribute__((noipa)) static
#endif

void *malloc(size_t size);

/* ---- the thread team ---- */

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

/* ---- floats: what is the same for both widths ----
 * A maximum asks about b, often a constant: of `log(a) != log(a)` gcc makes branches, not lanes. */

#define WEFT_FLOAT(T, t, f)                                                                      \
    static inline T maximum_##t(T a, T b) { return (a <= b) | (b != b) ? b : a; }                \
    static inline T minimum_##t(T a, T b) { return (a >= b) | (b != b) ? b : a; }                \
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

#define WEFT_ALIGNED __attribute__((aligned(64)))

#include "weft_math.h"
#include "weft_memory.h"
#include "weft_half.h"
