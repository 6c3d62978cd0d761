/* What the generated host function builds on: libtorch's C functions, memory, the caller's functions.
 *
 * Nothing is linked: libtorch's functions are looked up when the library is loaded.  They are declared
 * by hand, because their headers would take longer to parse than the program takes to compile.
 * Functions return 0 for success.
 */
#include "weft.h"
#include "weft_base.h"

#define NULL ((void *)0)

/* The run function is long and straight: optimising it costs much time and saves none. */
#ifdef __clang__
#define WEFT_RUN __attribute__((optnone))
#else
#define WEFT_RUN __attribute__((optimize(0)))
#endif

#define WEFT_BEGIN(k) ((void)(call->begin && (call->begin(call, k), 0)))

int snprintf(char *text, size_t size, const char *format, ...);

/* In the kernels' unit, where the program calls them (weft_linear.h and so on). */
int weft_linear(float *out, const float *added, const float *x, const float *weight, int64_t rows,
                int64_t columns, int64_t depth, int64_t added_stride, int64_t x_stride,
                int64_t weight_stride);
int weft_linear_bf16(uint16_t *out, const uint16_t *added, const uint16_t *x, const uint16_t *weight, int64_t rows,
                     int64_t columns, int64_t depth, int64_t added_stride, int64_t x_stride,
                     int64_t weight_stride);
int weft_linear_f16(uint16_t *out, const uint16_t *added, const uint16_t *x, const uint16_t *weight, int64_t rows,
                    int64_t columns, int64_t depth, int64_t added_stride, int64_t x_stride, int64_t weight_stride);
int weft_attention(float *out, const float *q, const float *k, const float *v, const float *mask,
                   const int64_t *sizes, double scale);
int weft_convolution(float *out, const float *x, const float *weight, const float *bias, const int64_t *sizes);

/* ---- libtorch ---- */

typedef const int64_t *weft_dims;

/* Type and index of a device. */
#define WEFT_CPU 0, 0
#define WEFT_CUDA(index) 1, index

#define WEFT_TORCH(X)                                                                            \
    X(empty_strided, (int64_t, weft_dims, weft_dims, int32_t, int32_t, int32_t, weft_tensor *))  \
    X(create_tensor_from_blob,                                                                   \
      (void *, int64_t, weft_dims, weft_dims, int64_t, int32_t, int32_t, int32_t, weft_tensor *)) \
    X(_reinterpret_tensor,                                                                       \
      (weft_tensor, int64_t, weft_dims, weft_dims, int64_t, weft_tensor *))                      \
    X(new_tensor_handle, (weft_tensor, weft_tensor *))                                           \
    X(delete_tensor_object, (weft_tensor))                                                       \
    X(copy_, (weft_tensor, weft_tensor, int32_t))                                                \
    X(get_data_ptr, (weft_tensor, void **))                                                      \
    X(get_dim, (weft_tensor, int64_t *))                                                         \
    X(get_sizes, (weft_tensor, int64_t **))                                                      \
    X(get_strides, (weft_tensor, int64_t **))                                                    \
    X(get_dtype, (weft_tensor, int32_t *))                                                       \
    X(get_device_index, (weft_tensor, int32_t *))                                                \
    X(get_device_type, (weft_tensor, int32_t *))

static struct {
#define X(name, parameters) int32_t(*name) parameters;
    WEFT_TORCH(X)
#undef X
    _Bool (*grad_mode_is_enabled)(void);
    void (*grad_mode_set_enabled)(_Bool);
    int32_t (*get_current_cuda_stream)(int32_t device, void **stream);
    int32_t (*create_cuda_guard)(int32_t device, void **guard);
    int32_t (*delete_cuda_guard)(void *guard);
} torch;

weft_team_t weft_team;

/* A function of libtorch that only this program needs. */
typedef struct {
    const char *name;
    void *address;
} weft_symbol;

/* Call symbol number k, or fail where this libtorch lacks it: then the caller runs the step. */
#define WEFT_CALL(k, function, ...)                                                              \
    (!symbols[k].address ? -1 : ((int (*)())symbols[k].address)(__VA_ARGS__))

/* Look up everything; the name of what is missing, or NULL.  `extras` may stay unresolved. */
static const char *weft_link(void *(*find)(void *, const char *), void *library, weft_symbol *extras)
{
#define X(name, parameters)                                                                      \
    if (!(*(void **)&torch.name = find(library, "aoti_torch_" #name)))                           \
        return "aoti_torch_" #name;
    WEFT_TORCH(X)
#undef X
    *(void **)&torch.grad_mode_is_enabled = find(library, "aoti_torch_grad_mode_is_enabled");
    *(void **)&torch.grad_mode_set_enabled = find(library, "aoti_torch_grad_mode_set_enabled");
    *(void **)&torch.get_current_cuda_stream = find(library, "aoti_torch_get_current_cuda_stream");
    *(void **)&torch.create_cuda_guard = find(library, "aoti_torch_create_cuda_guard");
    *(void **)&torch.delete_cuda_guard = find(library, "aoti_torch_delete_cuda_guard");
    for (; extras->name; extras++)
        extras->address = find(library, extras->name);
    /* What libtorch links to is searched too: this is torch's own OpenMP runtime. */
    *(void **)&weft_team.max_threads = find(library, "omp_get_max_threads");
    *(void **)&weft_team.num_threads = find(library, "omp_get_num_threads");
    *(void **)&weft_team.thread_num = find(library, "omp_get_thread_num");
    *(void **)&weft_team.in_parallel = find(library, "omp_in_parallel");
    if (weft_team.max_threads && weft_team.in_parallel)
        *(void **)&weft_team.parallel = find(library, "GOMP_parallel");
    return NULL;
}

/* ---- one call ---- */

static void weft_drop(weft_tensor *slot)
{
    if (*slot)
        torch.delete_tensor_object(*slot);
    *slot = NULL;
}

static void *weft_data(weft_tensor tensor)
{
    void *data = NULL;
    torch.get_data_ptr(tensor, &data);
    return data;
}

static int64_t weft_size(weft_tensor tensor, int64_t dim)
{
    int64_t *sizes, dims = 0;
    torch.get_dim(tensor, &dims);
    if (dim >= dims || torch.get_sizes(tensor, &sizes))
        return -1;
    return sizes[dim];
}

/* Make a tensor as `as` describes one: with memory of its own, */
static int weft_empty(weft_tensor *slot, const weft_value *as)
{
    return torch.empty_strided(as->dims, as->sizes, as->strides, as->dtype, as->device_type,
                               as->device_index, slot);
}

/* with the elements of `tensor`, */
static int weft_copy(weft_tensor *slot, weft_tensor tensor, const weft_value *as)
{
    return weft_empty(slot, as) || torch.copy_(*slot, tensor, 0);
}

/* in the memory of `base`, from element `start` on, */
static int weft_view(weft_tensor *slot, weft_tensor base, int64_t start, const weft_value *as)
{
    return torch._reinterpret_tensor(base, as->dims, as->sizes, as->strides, start, slot);
}

/* or at an address. */
static int weft_wrap(weft_tensor *slot, void *address, const weft_value *as)
{
    return torch.create_tensor_from_blob(address, as->dims, as->sizes, as->strides, 0, as->dtype,
                                         as->device_type, as->device_index, slot);
}

/* Say whether `tensor` has these sizes (-1: no) and strides (1: yes, 0: only the sizes). */
static int weft_compare(weft_tensor tensor, const weft_value *as)
{
    int64_t *sizes, *strides, dims = -1;
    torch.get_dim(tensor, &dims);
    if (dims != as->dims || torch.get_sizes(tensor, &sizes) || torch.get_strides(tensor, &strides))
        return -1;
    int same = 1, empty = 0;
    for (int64_t d = 0; d < dims; d++) {
        if (sizes[d] != as->sizes[d])
            return -1;
        empty |= sizes[d] == 0;
        same &= strides[d] == as->strides[d] || sizes[d] == 1;
    }
    return same | empty;
}

/* Check a tensor that others made, on that device unless `anywhere`; in other strides than these a
 * copy in `*slot` takes its place (an error if there is no slot). */
static int weft_expect(weft_call *call, weft_tensor *tensor, weft_tensor *slot, const char *what,
                       const weft_value *as, int anywhere)
{
    const char *problem = slot ? NULL : "is updated in place and does not have the strides";
    int32_t dtype = -1, type = -1, index = 0;
    if (*tensor) /* else an operator has returned None that says that it makes a tensor */
        torch.get_dtype(*tensor, &dtype), torch.get_device_type(*tensor, &type);
    if (type > 0) /* there is one CPU */
        torch.get_device_index(*tensor, &index);
    const int same = *tensor ? weft_compare(*tensor, as) : -1;
    const int here = type == as->device_type && index == as->device_index;
    if (dtype != as->dtype || !(here || anywhere))
        problem = "is not a tensor of the dtype and device";
    else if (same < 0)
        problem = "does not have the sizes";
    else if (same)
        return 0;
    if (problem) {
        snprintf(call->message, sizeof call->message, "%s %s it was compiled for", what, problem);
        return 1;
    }
    weft_value alike = *as;
    alike.device_type = type, alike.device_index = index;
    weft_tensor copy = NULL;
    if (weft_copy(&copy, *tensor, &alike)) {
        weft_drop(&copy);
        return 1;
    }
    weft_drop(slot);
    *tensor = *slot = copy;
    return 0;
}

/* No later step needs input k. */
static void weft_release(weft_call *call, int k)
{
    if (call->release)
        call->release(call, k);
}

/* ---- a step that the caller runs: operators without a C function, and their errors ---- */

static int weft_step(weft_call *call, int step, int tensors, const weft_tensor *tensor, int integers,
                     const int64_t *integer, int count, weft_tensor **results)
{
    if (call->step)
        return call->step(call, step, tensors, tensor, integers, integer, count, results);
    snprintf(call->message, sizeof call->message, "libtorch cannot run step %d", step);
    return 1;
}

/* The same for an operator that writes its one result into `out`. */
static int weft_step_into(weft_call *call, int step, int tensors, const weft_tensor *tensor,
                          int integers, const int64_t *integer, weft_tensor out)
{
    weft_tensor made = NULL, *results[] = {&made};
    int failed = weft_step(call, step, tensors, tensor, integers, integer, 1, results);
    failed = failed || torch.copy_(out, made, 0);
    weft_drop(&made);
    return failed;
}
