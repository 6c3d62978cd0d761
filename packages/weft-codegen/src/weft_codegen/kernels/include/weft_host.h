/* What the generated host function builds on: libtorch's C functions, memory, Python.
 *
 * Nothing is linked: libtorch's functions are looked up once when the program is loaded (in the
 * library that Python has loaded already), and Python's come from the process.  Both are declared
 * by hand, because their headers would take longer to parse than the program takes to compile.
 *
 * A weft_tensor is an at::Tensor*.  Functions return 0 for success.
 */
#include "weft_base.h"

#define NULL ((void *)0)
#define RTLD_LAZY 1
#define RTLD_NOLOAD 4

/* The run function is long and straight: optimising it costs much time and saves none. */
#ifdef __clang__
#define WEFT_RUN __attribute__((optnone)) static
#else
#define WEFT_RUN __attribute__((optimize(0))) static
#endif

void *dlopen(const char *path, int mode);
void *dlsym(void *library, const char *name);
void *calloc(size_t count, size_t size);
int snprintf(char *text, size_t size, const char *format, ...);

/* ---- Python's stable C interface ---- */

typedef struct weft_object PyObject;
typedef struct {
    const char *name;
    void *function;
    int flags;
    const char *doc;
} PyMethodDef;

#define METH_FASTCALL 0x0080

extern PyObject *PyExc_AssertionError, *PyExc_RuntimeError, *PyExc_TypeError, *PyExc_ValueError;
extern char _Py_NoneStruct, PyList_Type;
PyObject *PyCapsule_New(void *pointer, const char *name, void (*destructor)(PyObject *));
void *PyCapsule_GetPointer(PyObject *capsule, const char *name);
PyObject *PyCFunction_NewEx(PyMethodDef *method, PyObject *self, PyObject *module);
PyObject *PyCFunction_GetSelf(PyObject *function);
PyObject *PyErr_Occurred(void);
PyObject *PyErr_Format(PyObject *kind, const char *format, ...);
void *PyEval_SaveThread(void);
void PyEval_RestoreThread(void *thread);
PyObject *PyList_New(int64_t size);
int64_t PyList_Size(PyObject *list);
PyObject *PyList_GetItem(PyObject *list, int64_t position);
int PyList_SetItem(PyObject *list, int64_t position, PyObject *item);
PyObject *PyLong_FromLongLong(long long value);
long long PyLong_AsLongLong(PyObject *number);
int PyObject_IsTrue(PyObject *object);
PyObject *PyObject_CallFunction(PyObject *function, const char *format, ...);
PyObject *PyTuple_GetItem(PyObject *tuple, int64_t position);
int64_t PyTuple_Size(PyObject *tuple);
int PyType_IsSubtype(PyObject *kind, PyObject *base);
void Py_IncRef(PyObject *object);
void Py_DecRef(PyObject *object);

/* ---- libtorch ---- */

typedef void *weft_tensor;
typedef const int64_t *weft_dims;

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
    _Bool (*autocast_is_enabled)(int8_t device);
    int32_t (*get_current_cuda_stream)(int32_t device, void **stream);
    PyObject *(*wrap)(weft_tensor);
} torch;

weft_team_t weft_team;

/* Type and index of the device that the program runs on: a CPU, unless it says otherwise. */
static const int32_t weft_device[2];

/* A function of libtorch that only this program needs. */
typedef struct {
    const char *name;
    void *address;
} weft_symbol;

/* Call symbol number k, or fail where this libtorch lacks it: then the step runs in Python. */
#define WEFT_CALL(k, function, ...)                                                              \
    (!symbols[k].address ? -1 : ((int (*)())symbols[k].address)(__VA_ARGS__))

/* Look up everything; the name of what is missing, or NULL.  `extras` may stay unresolved: the
 * program then calls Python instead.  `torch_device` is libtorch's part for another device. */
static const char *weft_link(const char *torch_cpu, const char *torch_python,
                             const char *torch_device, weft_symbol *extras)
{
    void *cpu = dlopen(torch_cpu, RTLD_LAZY | RTLD_NOLOAD);
    void *python = dlopen(torch_python, RTLD_LAZY | RTLD_NOLOAD);
    if (!cpu || !python)
        return "libtorch";
#define X(name, parameters)                                                                      \
    if (!(*(void **)&torch.name = dlsym(cpu, "aoti_torch_" #name)))                              \
        return "aoti_torch_" #name;
    WEFT_TORCH(X)
#undef X
    *(void **)&torch.grad_mode_is_enabled = dlsym(cpu, "aoti_torch_grad_mode_is_enabled");
    *(void **)&torch.grad_mode_set_enabled = dlsym(cpu, "aoti_torch_grad_mode_set_enabled");
    const char *autocast = "_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE";
    *(void **)&torch.autocast_is_enabled = dlsym(cpu, autocast);
    /* THPVariable_Wrap(const at::TensorBase &), and by value (the same call) before 2.12. */
    *(void **)&torch.wrap = dlsym(python, "_Z16THPVariable_WrapRKN2at10TensorBaseE");
    if (!torch.wrap)
        *(void **)&torch.wrap = dlsym(python, "_Z16THPVariable_WrapN2at10TensorBaseE");
    if (!torch.wrap)
        return "THPVariable_Wrap";
    void *device = dlopen(torch_device, RTLD_LAZY | RTLD_NOLOAD);
    if (!device)
        return torch_device;
    *(void **)&torch.get_current_cuda_stream = dlsym(device, "aoti_torch_get_current_cuda_stream");
    for (; extras->name; extras++)
        extras->address = dlsym(device, extras->name);
    /* dlsym also searches what libtorch links to: this is torch's own OpenMP runtime. */
    *(void **)&weft_team.max_threads = dlsym(cpu, "omp_get_max_threads");
    *(void **)&weft_team.num_threads = dlsym(cpu, "omp_get_num_threads");
    *(void **)&weft_team.thread_num = dlsym(cpu, "omp_get_thread_num");
    *(void **)&weft_team.in_parallel = dlsym(cpu, "omp_in_parallel");
    if (weft_team.max_threads && weft_team.in_parallel)
        *(void **)&weft_team.parallel = dlsym(cpu, "GOMP_parallel");
    return NULL;
}

/* ---- one call ---- */

/* A kernel of a GPU, and what launches it. */
typedef struct weft_kernel {
    void *function;
    int threads, shared, buffers, sizes, device;
    int64_t handle_offset;
    int (*submit)(const struct weft_kernel *, void *stream, int programs, void **values);
} weft_kernel;

static const char weft_kernel_name[] = "weft kernel";

/* A loaded program: `python` runs a step in Python, `tensor_types` are the plain tensor classes,
 * `handle_offset` is where a Python tensor keeps its at::Tensor, `kernels` are those that a GPU has
 * been given. */
typedef struct {
    PyObject *python;
    PyObject *tensor_types;
    PyObject *constants;
    int64_t handle_offset;
    weft_kernel **kernels;
} weft_program;

typedef struct {
    weft_program *program;
    void *thread;
    PyObject *owned; /* the list of arguments, if the call may drop them; or NULL */
    _Bool outside;   /* an access was, see weft_bounds.h */
    char message[256];
} weft_call;

static weft_tensor weft_handle(weft_program *program, PyObject *tensor)
{
    return (char *)tensor + program->handle_offset;
}

static void weft_drop(weft_tensor *slot)
{
    if (*slot)
        torch.delete_tensor_object(*slot);
    *slot = NULL;
}

/* No later step needs argument k. */
static void weft_forget(weft_call *call, int k)
{
    if (!call->owned)
        return;
    PyEval_RestoreThread(call->thread);
    Py_IncRef((PyObject *)&_Py_NoneStruct);
    PyList_SetItem(call->owned, k, (PyObject *)&_Py_NoneStruct);
    call->thread = PyEval_SaveThread();
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

static int weft_empty(weft_tensor *slot, int64_t dims, weft_dims sizes, weft_dims strides,
                      int32_t dtype)
{
    return torch.empty_strided(dims, sizes, strides, dtype, weft_device[0], weft_device[1], slot);
}

/* Say whether `tensor` has these sizes (-1: no) and strides (1: yes, 0: only the sizes). */
static int weft_compare(weft_tensor tensor, int64_t dims, weft_dims sizes, weft_dims strides)
{
    int64_t *actual, *steps, rank = -1;
    torch.get_dim(tensor, &rank);
    if (rank != dims || torch.get_sizes(tensor, &actual) || torch.get_strides(tensor, &steps))
        return -1;
    int same = 1, empty = 0;
    for (int64_t d = 0; d < dims; d++) {
        if (actual[d] != sizes[d])
            return -1;
        empty |= sizes[d] == 0;
        same &= steps[d] == strides[d] || sizes[d] == 1;
    }
    return same | empty;
}

/* Check a tensor that others made, on the program's device unless `anywhere`; in other strides than
 * these a copy in `*slot` takes its place (an error if there is no slot). */
static int weft_expect(weft_call *call, weft_tensor *tensor, weft_tensor *slot, const char *what,
                       int64_t dims, weft_dims sizes, weft_dims strides, int32_t dtype, int anywhere)
{
    const char *problem = slot ? NULL : "is updated in place and does not have the strides";
    int32_t actual = -1, device = -1, index = -1;
    if (*tensor) /* else an operator has returned None that says that it makes a tensor */
        torch.get_dtype(*tensor, &actual), torch.get_device_type(*tensor, &device);
    if (device > 0) /* there is one CPU */
        torch.get_device_index(*tensor, &index), device = index == weft_device[1] ? device : -1;
    int same = *tensor ? weft_compare(*tensor, dims, sizes, strides) : -1;
    if (actual != dtype || (device != weft_device[0] && !anywhere))
        problem = "is not a tensor of the dtype and device";
    else if (same < 0)
        problem = "does not have the sizes";
    else if (same)
        return 0;
    if (problem) {
        snprintf(call->message, sizeof call->message, "%s %s it was compiled for", what, problem);
        return 1;
    }
    weft_tensor copy = NULL;
    if (weft_empty(&copy, dims, sizes, strides, dtype) || torch.copy_(copy, *tensor, 0)) {
        weft_drop(&copy);
        return 1;
    }
    weft_drop(slot);
    *tensor = *slot = copy;
    return 0;
}

/* ---- a step in Python: for operators without a C function, and for their exceptions ---- */

static int weft_results(weft_call *call, PyObject *returned, int count, weft_tensor **results)
{
    for (int k = 0; k < count; k++) {
        PyObject *item = PyTuple_GetItem(returned, k);
        if (!item)
            return 1;
        if (!results[k] || (char *)item == &_Py_NoneStruct)
            continue;
        weft_drop(results[k]);
        if (torch.new_tensor_handle(weft_handle(call->program, item), results[k]))
            return 1;
    }
    return 0;
}

/* Run step `step` with these tensors and ints; tensors it returns go to `results`. */
static int weft_python(weft_call *call, int step, int tensors, weft_tensor *tensor, int ints,
                       const int64_t *integer, int count, weft_tensor **results)
{
    PyEval_RestoreThread(call->thread);
    PyObject *list = PyList_New(tensors), *numbers = PyList_New(ints);
    for (int k = 0; k < tensors; k++)
        PyList_SetItem(list, k, torch.wrap(tensor[k]));
    for (int k = 0; k < ints; k++)
        PyList_SetItem(numbers, k, PyLong_FromLongLong(integer[k]));
    PyObject *python = call->program->python;
    PyObject *returned = PyObject_CallFunction(python, "iOO", step, list, numbers);
    int failed = !returned || weft_results(call, returned, count, results);
    Py_DecRef(list);
    Py_DecRef(numbers);
    if (returned)
        Py_DecRef(returned);
    call->thread = PyEval_SaveThread();
    return failed;
}

/* The same for an operator that writes its one result into `out`. */
static int weft_python_into(weft_call *call, int step, int tensors, weft_tensor *tensor, int ints,
                            const int64_t *integer, weft_tensor out)
{
    weft_tensor made = NULL, *results[] = {&made};
    int failed = weft_python(call, step, tensors, tensor, ints, integer, 1, results);
    failed = failed || torch.copy_(out, made, 0);
    weft_drop(&made);
    return failed;
}

/* ---- entry from Python ---- */

static int weft_is_tensor(weft_program *program, PyObject *object)
{
    PyObject *kind = ((PyObject **)object)[1];
    for (int64_t k = PyTuple_Size(program->tensor_types); --k > 0;)
        if (kind == PyTuple_GetItem(program->tensor_types, k))
            return 1;
    /* A subclass that computes as a plain tensor does: the first item can tell. */
    PyObject *answer = PyObject_CallFunction(PyTuple_GetItem(program->tensor_types, 0), "O", kind);
    int plain = answer && PyObject_IsTrue(answer);
    if (answer)
        Py_DecRef(answer);
    return plain;
}

static int weft_is_list(PyObject *object)
{
    return ((PyObject **)object)[1] == (PyObject *)&PyList_Type;
}

static const char weft_capsule_name[] = "weft program";

static void weft_free_program(PyObject *capsule)
{
    weft_program *program = PyCapsule_GetPointer(capsule, weft_capsule_name);
    Py_DecRef(program->python);
    Py_DecRef(program->tensor_types);
    Py_DecRef(program->constants);
    free(program->kernels);
    free(program);
}

static PyObject *weft_make_function(PyMethodDef *method, PyObject *python, PyObject *constants,
                                    PyObject *tensor_types, int64_t offset, int kernels)
{
    weft_program *program = calloc(1, sizeof *program);
    weft_kernel **places = kernels ? calloc(2 * kernels, sizeof *places) : NULL;
    *program = (weft_program){python, tensor_types, constants, offset, places};
    Py_IncRef(python);
    Py_IncRef(tensor_types);
    Py_IncRef(constants);
    PyObject *capsule = PyCapsule_New(program, weft_capsule_name, weft_free_program);
    PyObject *function = capsule ? PyCFunction_NewEx(method, capsule, NULL) : NULL;
    if (capsule)
        Py_DecRef(capsule);
    return function;
}

static int weft_argument(weft_program *program, PyObject *object, int position, weft_tensor *slot)
{
    if (!weft_is_tensor(program, object)) {
        PyErr_Format(PyExc_TypeError, "compiled graph: argument %d is not a plain tensor",
                     position);
        return 1;
    }
    *slot = weft_handle(program, object);
    return 0;
}

/* Whether operators run that autocast, where it is on (or unknown), would make cast once more. */
static int weft_casts(weft_program *program)
{
    return program->python != (PyObject *)&_Py_NoneStruct &&
           (!torch.autocast_is_enabled || torch.autocast_is_enabled(weft_device[0]));
}

/* A list of `count` outputs: tensors are stolen from `out`, sizes come from `integers`. */
static PyObject *weft_outputs(int count, weft_tensor *out, const int64_t *integers,
                              const char *kinds)
{
    PyObject *list = PyList_New(count);
    for (int k = 0; list && k < count; k++) {
        PyObject *item = (PyObject *)&_Py_NoneStruct;
        if (kinds[k] == 't')
            item = torch.wrap(out[k]);
        else if (kinds[k] == 'i')
            item = PyLong_FromLongLong(integers[k]);
        else
            Py_IncRef(item);
        PyList_SetItem(list, k, item);
        weft_drop(&out[k]);
    }
    return list;
}

static PyObject *weft_failure(weft_call *call)
{
    if (!PyErr_Occurred())
        PyErr_Format(call->outside ? PyExc_AssertionError : PyExc_RuntimeError, "compiled graph: %s",
                     call->message[0] ? call->message : "a libtorch call failed");
    return NULL;
}
