/* What host and kernels share. No system header is included: parsing those would cost more than
 * compiling a kernel. */
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __SIZE_TYPE__ size_t;

void free(void *block);

/* The thread team: torch's own OpenMP runtime, found when the program is loaded. */
typedef struct {
    void (*parallel)(void (*body)(void *), void *args, unsigned threads, unsigned flags);
    int (*max_threads)(void);
    int (*num_threads)(void);
    int (*thread_num)(void);
    int (*in_parallel)(void);
} weft_team_t;

extern weft_team_t weft_team __attribute__((visibility("hidden")));

static inline int64_t weft_min(int64_t a, int64_t b) { return a < b ? a : b; }

/* gcc 12 takes the truth values in a vector for 0 and -1 where they are places in memory. That a place
   is one it cannot know behind a mask whose value the linker might still change. */
__attribute__((weak, visibility("hidden"))) int64_t weft_every_bit = -1;

static inline int64_t weft_place(int64_t place)
{
    return place & weft_every_bit;
}

static inline int64_t weft_floordiv(int64_t a, int64_t b)
{
    return a / b - (a % b && (a ^ b) < 0);
}

static inline int64_t weft_mod(int64_t a, int64_t b)
{
    int64_t r = a % b;
    return r && (r ^ b) < 0 ? r + b : r;
}
