/* Launches compiled kernels of a GPU: each is a Python function of (stream, programs, *buffers,
 * *sizes) that hands the driver the buffers' addresses.  The driver is looked up, not linked. */
static struct {
    int (*launch)(void *, int, int, int, int, int, int, int, void *, void **, void **);
    int (*retain)(void **, int);
    int (*make_current)(void *);
} weft_driver;

static int weft_submit(const weft_kernel *k, void *stream, int programs, void **values)
{
    enum { NO_CONTEXT = 201 };
    for (void *context = NULL;;) {
        const int status = weft_driver.launch(k->function, programs, 1, 1, k->threads, 1, 1, k->shared,
                                              stream, values, NULL);
        /* A thread that has only used memory of the allocator's cache so far is in no context. */
        if (status != NO_CONTEXT || context || weft_driver.retain(&context, k->device) ||
            weft_driver.make_current(context))
            return status;
    }
}

static PyObject *weft_launch(PyObject *self, PyObject *const *args, int64_t n)
{
    const weft_kernel *const kernel = PyCapsule_GetPointer(self, weft_kernel_name);
    const int count = kernel->buffers + kernel->sizes;
    /* After the arguments come addresses of Triton's scratch memory, which these kernels lack. */
    void *value[count + 2], *place[count + 2];
    if (n != count + 2)
        return PyErr_Format(PyExc_TypeError, "a kernel takes %d arguments, got %d", count + 2, (int)n);
    for (int k = 0; k < count + 2; k++) {
        value[k] = k < kernel->buffers || k >= count ? NULL : (void *)PyLong_AsLongLong(args[k + 2]);
        place[k] = &value[k];
        if (k < kernel->buffers &&
            torch.get_data_ptr((char *)args[k + 2] + kernel->handle_offset, &value[k]))
            return PyErr_Format(PyExc_RuntimeError, "argument %d of a kernel has no memory", k);
    }
    void *const stream = (void *)PyLong_AsLongLong(args[0]);
    const int64_t programs = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    int status = (int)programs != programs;
    if (!status && programs > 0) {
        void *const thread = PyEval_SaveThread(); /* the queue may be full */
        status = weft_submit(kernel, stream, programs, place);
        PyEval_RestoreThread(thread);
    }
    if (status)
        return PyErr_Format(PyExc_RuntimeError, "CUDA error %d in a kernel's launch", status);
    Py_IncRef((PyObject *)&_Py_NoneStruct);
    return (PyObject *)&_Py_NoneStruct;
}

static void weft_free_kernel(PyObject *capsule)
{
    free(PyCapsule_GetPointer(capsule, weft_kernel_name));
}

#define WEFT_EXPORT __attribute__((visibility("default")))

/* Look up libtorch's functions; the name of a missing one, or NULL. */
WEFT_EXPORT const char *weft_load(const char *torch_cpu, const char *torch_python,
                                  const char *torch_device)
{
    return weft_link(torch_cpu, torch_python, torch_device, &(weft_symbol){NULL});
}

/* A new Python function that launches `function`, which is loaded for as long as `owner` lives;
 * NULL without a driver. */
WEFT_EXPORT PyObject *weft_new_kernel(const char *driver, void *function, int threads, int shared,
                                      int buffers, int sizes, int device, int64_t handle_offset,
                                      PyObject *owner)
{
    static PyMethodDef method = {"launch", weft_launch, METH_FASTCALL, NULL};
    void *library = dlopen(driver, RTLD_LAZY);
    if (!library)
        return PyErr_Format(PyExc_RuntimeError, "%s is no CUDA driver", driver);
    *(void **)&weft_driver.launch = dlsym(library, "cuLaunchKernel");
    *(void **)&weft_driver.retain = dlsym(library, "cuDevicePrimaryCtxRetain");
    *(void **)&weft_driver.make_current = dlsym(library, "cuCtxSetCurrent");
    weft_kernel *kernel = calloc(1, sizeof *kernel);
    *kernel = (weft_kernel){function, threads, shared, buffers, sizes, device, handle_offset,
                            weft_submit};
    PyObject *capsule = PyCapsule_New(kernel, weft_kernel_name, weft_free_kernel);
    PyObject *made = PyCFunction_NewEx(&method, capsule, owner);
    Py_DecRef(capsule);
    return made;
}
