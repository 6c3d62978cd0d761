/* The C interface of a library that weft has generated from a program.
 *
 * A library knows nothing of Python.  What it needs from outside are functions of libtorch's stable C
 * interface (torch/csrc/inductor/aoti_torch/c/shim.h), which `weft_load` looks up, and those of a
 * weft_call.  To use one: open it, call `weft_load(dlsym, libtorch)` once, where libtorch is what
 * dlopen returns for libtorch_cpu.so (or libtorch_cuda.so), then `weft_run` once a call, from any
 * thread.
 */
#ifndef WEFT_H
#define WEFT_H

#include <stdint.h>

#pragma GCC visibility push(default)

/* A tensor is an at::Tensor*, which libtorch calls AtenTensorHandle. */
typedef void *weft_tensor;

enum { WEFT_ABI = 2 };
enum { WEFT_NONE, WEFT_TENSOR, WEFT_INTEGER };

/* An input, output or constant: nothing (an input that is not read), a tensor or an integer. */
typedef struct {
    const char *name;
    int32_t type;
    int32_t dtype;                      /* c10::ScalarType */
    int32_t device_type, device_index;  /* c10::DeviceType */
    int32_t dims;
    const int64_t *sizes, *strides;     /* -1 where only a call knows it */
} weft_value;

typedef struct {
    int32_t abi; /* WEFT_ABI */
    int32_t device_type, device_index; /* where the kernels run */
    int32_t input_count, output_count, constant_count;
    const weft_value *inputs, *outputs, *constants;
} weft_description;

/* What the caller gives to a call.  Functions return 0 for success. */
typedef struct weft_call weft_call;
struct weft_call {
    const weft_tensor *constants;
    /* Run an operator for which libtorch has no C function, or whose C function failed.  The tensors
     * that it returns go to `*results[k]` as new handles, unless `results[k]` is NULL. */
    int (*step)(weft_call *call, int step, int tensors, const weft_tensor *tensor, int integers,
                const int64_t *integer, int count, weft_tensor **results);
    /* Input k is not needed any more.  NULL: inputs stay. */
    void (*release)(weft_call *call, int k);
    /* Launch kernel k of a GPU, in the variant for aligned buffers or in the one for any. */
    int (*launch)(weft_call *call, int k, int aligned, void *stream, int64_t programs,
                  void **arguments);
    /* Step k of the program begins.  NULL: nobody listens. */
    void (*begin)(weft_call *call, int k);
    int32_t outside;   /* the failure is an access outside of a buffer */
    char message[256]; /* what failed, where weft_run says so; it may be empty */
};

extern const weft_description weft_program;

/* Look up functions of libtorch; returns the name of one that is missing, or NULL.  `find` is dlsym,
 * or a function like it. */
const char *weft_load(void *(*find)(void *library, const char *name), void *library);

/* Run the program.  The caller owns the tensors in `out` when it succeeds, and those in `in` always.
 * `integers` holds one element for each input, and receives one for each output. */
int weft_run(weft_call *call, weft_tensor *in, weft_tensor *out, int64_t *integers);

#pragma GCC visibility pop

#endif
