/* A kernel of a GPU, which a LoadedProgram launches through the driver.  Part of _entry.c. */

/* A loaded kernel, and what launches it. */
typedef struct {
    PyObject_HEAD
    void *function;
    int threads, shared, device;
    PyObject *owner; /* keeps `function` loaded */
    /* of the driver */
    int (*launch)(void *, int, int, int, int, int, int, int, void *, void **, void **);
    int (*retain)(void **, int);
    int (*make_current)(void *);
} Kernel;

static int
submit(const Kernel *k, void *stream, int64_t programs, void **arguments)
{
    enum { TOO_MANY = 1, NO_CONTEXT = 201 };
    if ((int)programs != programs)
        return TOO_MANY;
    for (void *context = NULL;;) {
        const int status = k->launch(k->function, (int)programs, 1, 1, k->threads, 1, 1, k->shared,
                                     stream, arguments, NULL);
        /* A thread that has only used memory of the allocator's cache so far is in no context. */
        if (status != NO_CONTEXT || context || k->retain(&context, k->device) ||
            k->make_current(context))
            return status;
    }
}

static void
free_kernel(PyObject *self)
{
    Py_XDECREF(((Kernel *)self)->owner);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *
new_kernel(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    const char *driver;
    void *function, *library;
    PyObject *owner;
    int threads, shared, device;
    if (!PyArg_ParseTuple(args, "sO&iiiO", &driver, as_pointer, &function, &threads, &shared,
                          &device, &owner))
        return NULL;
    if (!(library = dlopen(driver, RTLD_LAZY)))
        return PyErr_Format(PyExc_RuntimeError, "%s is no CUDA driver", driver);
    Kernel *kernel = (Kernel *)type->tp_alloc(type, 0);
    if (!kernel)
        return NULL;
    kernel->function = function;
    kernel->threads = threads;
    kernel->shared = shared;
    kernel->device = device;
    kernel->owner = Py_NewRef(owner);
    *(void **)&kernel->launch = dlsym(library, "cuLaunchKernel");
    *(void **)&kernel->retain = dlsym(library, "cuDevicePrimaryCtxRetain");
    *(void **)&kernel->make_current = dlsym(library, "cuCtxSetCurrent");
    return (PyObject *)kernel;
}

static PyTypeObject KernelType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "weft_codegen.kernels._entry.Kernel",
    .tp_basicsize = sizeof(Kernel),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = new_kernel,
    .tp_dealloc = free_kernel,
};
