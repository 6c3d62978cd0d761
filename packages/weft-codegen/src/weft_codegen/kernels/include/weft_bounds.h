#pragma once
/* Checked accesses, with the setting check_bounds: each load and store of a kernel is compared with
 * how many elements its buffer has, which the host takes from the tensor itself. */
typedef struct {
    const char *kernel, *buffer;
    int64_t index, count, size;
} weft_outside_t;

/* The first access outside of a buffer; the host looks after each launch. */
extern weft_outside_t weft_outside __attribute__((visibility("hidden")));

#ifdef WEFT_PART
/* Where `count` elements from `index` on are, or memory that stands for them.  Not inlined: lanes
 * under a `simd` pragma would drop the note. */
WEFT_PART void *weft_within(const void *buffer, int64_t index, int64_t count, int64_t size,
                            int64_t bytes, const char *kernel, const char *name)
{
    static char elsewhere[4096] __attribute__((aligned(64)));
    if (index >= 0 && index + count <= size)
        return (char *)buffer + index * bytes;
    if (!weft_outside.kernel)
        weft_outside = (weft_outside_t){kernel, name, index, count, size};
    return elsewhere;
}

#define WEFT_BLOCK(buffer, index, count)                                                         \
    ((__typeof__(*(buffer)) *)weft_within(buffer, index, count, buffer##_size, sizeof *(buffer), \
                                          __func__, #buffer))
#define WEFT_AT(buffer, index) (*WEFT_BLOCK(buffer, index, 1))
#else /* in the host */
weft_outside_t weft_outside;

/* Elements from the first to past the last one of a layout. */
static int64_t weft_span(const weft_value *as)
{
    int64_t span = 1;
    for (int64_t d = 0; d < as->dims; d++) {
        if (as->sizes[d] == 0)
            return 0;
        span += (as->sizes[d] - 1) * as->strides[d];
    }
    return span;
}

/* That of a tensor as it is. */
static int64_t weft_extent(weft_tensor tensor)
{
    int64_t *sizes, *strides, dims = 0;
    torch.get_dim(tensor, &dims);
    if (torch.get_sizes(tensor, &sizes) || torch.get_strides(tensor, &strides))
        return 0;
    return weft_span(&(weft_value){.dims = (int32_t)dims, .sizes = sizes, .strides = strides});
}

/* Fail for a view of `span` elements from `offset` on of a buffer that has `size`. */
static int weft_inside(weft_call *call, const char *name, int64_t offset, int64_t span,
                       int64_t size)
{
    if (span == 0 || (offset >= 0 && offset + span <= size))
        return 0;
    call->outside = 1;
    snprintf(call->message, sizeof call->message,
             "%s takes %lld elements from %lld on of a buffer that has %lld", name,
             (long long)span, (long long)offset, (long long)size);
    return 1;
}

/* Fail if a kernel, launched on these buffers, has left one. */
static int weft_left(weft_call *call, const char *buffers)
{
    const weft_outside_t found = weft_outside;
    if (!found.kernel)
        return 0;
    weft_outside.kernel = NULL;
    call->outside = 1;
    snprintf(call->message, sizeof call->message,
             "%s accesses %lld elements of %s from %lld on, which has %lld (%s)", found.kernel,
             (long long)found.count, found.buffer, (long long)found.index, (long long)found.size,
             buffers);
    return 1;
}
#endif
