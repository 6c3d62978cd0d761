/* Tensors as a check sees them: through libtorch's exported C functions and two offsets, all given
 * once by `configure`. abi.py finds them, and uses checks in C only after it validated what
 * `describe` reads against live tensors.
 */
#ifndef WEFT_GUARDS_TENSOR_H
#define WEFT_GUARDS_TENSOR_H

#include <Python.h>
#include <stdint.h>
#include <string.h>

#define ANY INT64_MIN /* a size or stride that may be anything */
#define MAX_METADATA 160
#define INLINE_DIMS 5 /* up to here, sizes and strides lie in the TensorImpl itself */

typedef struct {
    PyTypeObject *cls;
    PyObject *requires_grad; /* True or False */
    uint64_t keys;
    int32_t dtype, device_index;
    int64_t dim;
    int64_t *sizes, *strides; /* one allocation, sizes first */
} Tensor;

/* What the metadata of one tensor looked like when it passed a test. */
typedef struct {
    void *impl;
    char bytes[MAX_METADATA];
} Metadata;

typedef int32_t (*get_i32)(void *, int32_t *);
typedef int32_t (*get_i64)(void *, int64_t *);
typedef int32_t (*get_ptr)(void *, int64_t **);
typedef _Bool (*get_flag)(void *);

static struct {
    Py_ssize_t handle_offset; /* at::Tensor inside the Python object */
    Py_ssize_t keys_offset;   /* dispatch key set inside the TensorImpl */
    get_i32 dtype, device_index;
    get_i64 dim;
    get_ptr sizes, strides;
    getter requires_grad;
    void *requires_grad_closure;
    Py_ssize_t metadata_offset; /* sizes, strides, dtype, device and keys, in one stretch... */
    size_t metadata_size;       /* ...that ends with the keys; 0: not known */
    get_flag impl_requires_grad; /* of a TensorImpl */
    PyTypeObject *tensor_type;  /* base class of all tensors */
    Py_ssize_t storage_offset;  /* of the storage in a TensorImpl */
} torch_abi;

static PyObject *
configure(PyObject *module, PyObject *args)
{
    Py_ssize_t handle, keys, storage, metadata;
    unsigned long long impl_grad, dtype, device_index, dim, sizes, strides;
    PyObject *descriptor;
    if (!PyArg_ParseTuple(args, "nnnnKO!KKKKK", &handle, &keys, &storage, &metadata, &impl_grad,
                          &PyGetSetDescr_Type, &descriptor, &dtype, &device_index, &dim, &sizes,
                          &strides))
        return NULL;
    PyGetSetDef *definition = ((PyGetSetDescrObject *)descriptor)->d_getset;
    torch_abi.handle_offset = handle;
    torch_abi.keys_offset = keys;
    torch_abi.storage_offset = storage;
    torch_abi.metadata_offset = metadata;
    torch_abi.metadata_size = metadata && keys + 8 - metadata <= MAX_METADATA ? keys + 8 - metadata : 0;
    torch_abi.impl_requires_grad = (get_flag)(uintptr_t)impl_grad;
    torch_abi.tensor_type = PyDescr_TYPE(descriptor);
    torch_abi.dtype = (get_i32)(uintptr_t)dtype;
    torch_abi.device_index = (get_i32)(uintptr_t)device_index;
    torch_abi.dim = (get_i64)(uintptr_t)dim;
    torch_abi.sizes = (get_ptr)(uintptr_t)sizes;
    torch_abi.strides = (get_ptr)(uintptr_t)strides;
    torch_abi.requires_grad = definition->get;
    torch_abi.requires_grad_closure = definition->closure;
    Py_RETURN_NONE;
}

static uint64_t
keys_of(void *handle)
{
    uint64_t keys;
    memcpy(&keys, *(char **)handle + torch_abi.keys_offset, sizeof keys);
    return keys;
}

static int
same_extents(get_ptr read, void *handle, const int64_t *wanted, int64_t dim)
{
    int64_t *now;
    if (read(handle, &now))
        return 0;
    for (int64_t i = 0; i < dim; i++)
        if (wanted[i] != ANY && wanted[i] != now[i])
            return 0;
    return 1;
}

/* The type is tested first: only then is there a tensor at the offset. The key set comes second:
 * it rules out layouts whose sizes or strides cannot be read. */
static int
test_tensor(const Tensor *want, PyObject *value)
{
    if (Py_TYPE(value) != want->cls)
        return 0;
    void *handle = (char *)value + torch_abi.handle_offset;
    int32_t small;
    int64_t dim;
    if (keys_of(handle) != want->keys)
        return 0;
    if (torch_abi.dim(handle, &dim) || dim != want->dim)
        return 0;
    if (!same_extents(torch_abi.sizes, handle, want->sizes, dim))
        return 0;
    if (torch_abi.dtype(handle, &small) || small != want->dtype)
        return 0;
    if (torch_abi.device_index(handle, &small) || small != want->device_index)
        return 0;
    if (!same_extents(torch_abi.strides, handle, want->strides, dim))
        return 0;
    PyObject *grad = torch_abi.requires_grad(value, torch_abi.requires_grad_closure);
    int same = grad == want->requires_grad;
    Py_XDECREF(grad);
    return same;
}

/* Remember a tensor that passed its test; 0 when its metadata cannot be compared in one go. */
static int
keep_metadata(const Tensor *want, PyObject *value, Metadata *kept)
{
    if (!torch_abi.metadata_size || want->dim > INLINE_DIMS)
        return 0;
    kept->impl = *(void **)((char *)value + torch_abi.handle_offset);
    memcpy(kept->bytes, (char *)kept->impl + torch_abi.metadata_offset, torch_abi.metadata_size);
    return 1;
}

/* Test a tensor again. Other bytes need not mean a difference that matters, so the test decides. */
static int
test_tensor_again(const Tensor *want, PyObject *value, const Metadata *kept)
{
    char *impl = *(char **)((char *)value + torch_abi.handle_offset);
    if (Py_TYPE(value) != want->cls || impl != kept->impl ||
        memcmp(kept->bytes, impl + torch_abi.metadata_offset, torch_abi.metadata_size))
        return test_tensor(want, value);
    return torch_abi.impl_requires_grad(impl) == (want->requires_grad == Py_True);
}

/* describe(tensor) -> (dtype number, device index, dispatch keys, sizes), to validate and to learn
 * libtorch's numbers of dtypes. */
static PyObject *
describe(PyObject *module, PyObject *value)
{
    void *handle = (char *)value + torch_abi.handle_offset;
    int32_t dtype, device_index;
    int64_t dim, *sizes;
    if (!torch_abi.dtype || torch_abi.dtype(handle, &dtype) ||
        torch_abi.device_index(handle, &device_index) || torch_abi.dim(handle, &dim) ||
        torch_abi.sizes(handle, &sizes)) {
        PyErr_SetString(PyExc_RuntimeError, "cannot read this tensor");
        return NULL;
    }
    PyObject *shape = PyTuple_New(dim);
    for (int64_t i = 0; shape && i < dim; i++) {
        PyObject *size = PyLong_FromLongLong(sizes[i]);
        if (!size)
            Py_CLEAR(shape);
        else
            PyTuple_SET_ITEM(shape, i, size);
    }
    return shape ? Py_BuildValue("iiKN", dtype, device_index, keys_of(handle), shape) : NULL;
}

/* ---- building */

static int
read_extents(PyObject *values, int64_t *out)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); i++) {
        PyObject *value = PyTuple_GET_ITEM(values, i);
        out[i] = value == Py_None ? ANY : PyLong_AsLongLong(value);
        if (out[i] == -1 && PyErr_Occurred())
            return -1;
    }
    return 0;
}

static Tensor *
new_tensor(PyObject *description)
{
    PyObject *cls, *grad, *sizes, *strides;
    unsigned long long keys;
    int dtype, device_index;
    if (!torch_abi.dtype) {
        PyErr_SetString(PyExc_RuntimeError, "configure was not called");
        return NULL;
    }
    if (!PyArg_ParseTuple(description, "O!iiKO!O!O!", &PyType_Type, &cls, &dtype, &device_index,
                          &keys, &PyBool_Type, &grad, &PyTuple_Type, &sizes, &PyTuple_Type,
                          &strides))
        return NULL;
    Py_ssize_t dim = PyTuple_GET_SIZE(sizes);
    Tensor *tensor = PyMem_Calloc(1, sizeof *tensor + 2 * dim * sizeof(int64_t));
    if (!tensor)
        return (Tensor *)PyErr_NoMemory();
    *tensor = (Tensor){(PyTypeObject *)cls, grad, keys, dtype, device_index, dim,
                       (int64_t *)(tensor + 1), (int64_t *)(tensor + 1) + dim};
    if (PyTuple_GET_SIZE(strides) != dim)
        PyErr_SetString(PyExc_ValueError, "sizes and strides differ in number");
    else if (!read_extents(sizes, tensor->sizes) && !read_extents(strides, tensor->strides))
        return tensor;
    PyMem_Free(tensor);
    return NULL;
}

#endif
