/* The way from Python into generated libraries (include/weft.h), which know nothing of Python.
 *
 * A LoadedProgram is called with the inputs of weft_run, or with one list of them, from which it
 * takes each large tensor after its last use.  Tensors' handles are read out of the Python objects,
 * and the interpreter lock is released while the program runs.  A Kernel is one of a GPU.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stddef.h>
#include <structmember.h>
#include "include/weft.h"

/* ---- torch: what `configure` has looked up ---- */

static struct {
    PyObject *(*wrap)(weft_tensor);
    int32_t (*new_tensor_handle)(weft_tensor, weft_tensor *);
    int32_t (*delete_tensor_object)(weft_tensor);
    _Bool (*autocast_is_enabled)(int8_t device); /* NULL: unknown */
    _Bool (*has_callbacks)(void);                /* whether a profiler is on; NULL: unknown */
    Py_ssize_t handle_offset;                    /* of the at::Tensor in a Python tensor */
    PyObject *classes;     /* a tuple of classes: Tensor first, then those that compute as it does */
    PyObject *is_plain;    /* tells whether another class does */
    PyObject *no_autocast; /* disables autocast until its result is dropped */
} torch;

/* A converter of PyArg_ParseTuple: an address that Python has as an int. */
static int
as_pointer(PyObject *address, void *result)
{
    *(void **)result = PyLong_AsVoidPtr(address);
    return !PyErr_Occurred();
}

static PyObject *
configure(PyObject *module, PyObject *args)
{
    PyObject *classes, *is_plain, *no_autocast;
    if (!PyArg_ParseTuple(args, "O&O&O&O&O&nO!OO", as_pointer, &torch.wrap, as_pointer,
                          &torch.new_tensor_handle, as_pointer, &torch.delete_tensor_object,
                          as_pointer, &torch.autocast_is_enabled, as_pointer,
                          &torch.has_callbacks, &torch.handle_offset, &PyTuple_Type, &classes,
                          &is_plain, &no_autocast))
        return NULL;
    Py_XSETREF(torch.classes, Py_NewRef(classes));
    Py_XSETREF(torch.is_plain, Py_NewRef(is_plain));
    Py_XSETREF(torch.no_autocast, Py_NewRef(no_autocast));
    Py_RETURN_NONE;
}

static weft_tensor
handle_of(PyObject *tensor)
{
    return (char *)tensor + torch.handle_offset;
}

static void
drop(weft_tensor *slot)
{
    if (*slot)
        torch.delete_tensor_object(*slot);
    *slot = NULL;
}

/* Whether `object` is a tensor that computes as a plain one does; -1 with an error set. */
static int
is_plain_tensor(PyObject *object)
{
    PyObject *cls = (PyObject *)Py_TYPE(object);
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(torch.classes); k++)
        if (cls == PyTuple_GET_ITEM(torch.classes, k))
            return 1;
    if (!PyObject_TypeCheck(object, (PyTypeObject *)PyTuple_GET_ITEM(torch.classes, 0)))
        return 0;
    PyObject *answer = PyObject_CallOneArg(torch.is_plain, cls);
    int plain = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return plain;
}

#include "_gpu_kernel.h"

/* ---- programs ---- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    int (*run)(weft_call *, weft_tensor *, weft_tensor *, int64_t *);
    const weft_description *description;
    PyObject *library;     /* keeps `run` loaded */
    PyObject *steps;       /* a dict: number of a step -> function of (tensors, integers) */
    PyObject *constants;   /* a tuple of tensors, */
    weft_tensor *constant; /* and their handles */
    PyObject *kernels;     /* a tuple of functions of `aligned` that return a Kernel, */
    Kernel **loaded;       /* and what they have returned */
    PyObject *listener;    /* told of steps: (step, state) -> state; or NULL */
    char always;           /* not only while a profiler is on */
} LoadedProgram;

typedef struct {
    weft_call call; /* first: the program's functions get a pointer to it */
    LoadedProgram *program;
    PyThreadState *thread;
    PyObject *owned; /* the list of arguments, if the call may drop them; or NULL */
    PyObject *listener, *state;
} Call;

enum { BEGINS = -2, ENDS = -1 }; /* for listeners: the whole program */

/* Tell the listener; an exception that is on its way stays. */
static void
tell(Call *self, int step)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *state = PyObject_CallFunction(self->listener, "iO", step, self->state);
    if (!state)
        PyErr_WriteUnraisable(self->listener);
    else
        Py_SETREF(self->state, state);
    PyErr_Restore(type, value, traceback);
}

static void
begin(weft_call *call, int step)
{
    Call *self = (Call *)call;
    PyEval_RestoreThread(self->thread);
    tell(self, step);
    self->thread = PyEval_SaveThread();
}

static void
release(weft_call *call, int k)
{
    Call *self = (Call *)call;
    PyEval_RestoreThread(self->thread);
    if (PyList_SetItem(self->owned, k, Py_NewRef(Py_None)))
        PyErr_Clear(); /* somebody has changed the list */
    self->thread = PyEval_SaveThread();
}

/* Give the tensors that a step has returned to the program. */
static int
take_results(PyObject *returned, int count, weft_tensor **results)
{
    PyTypeObject *cls = (PyTypeObject *)PyTuple_GET_ITEM(torch.classes, 0);
    if (!PyTuple_Check(returned) || PyTuple_GET_SIZE(returned) < count) {
        PyErr_SetString(PyExc_TypeError, "a step returned something else than its results");
        return 1;
    }
    for (int k = 0; k < count; k++) {
        PyObject *item = PyTuple_GET_ITEM(returned, k);
        if (!results[k] || !PyObject_TypeCheck(item, cls))
            continue;
        drop(results[k]);
        if (torch.new_tensor_handle(handle_of(item), results[k]))
            return 1;
    }
    return 0;
}

static int
run_step(weft_call *call, int step, int tensors, const weft_tensor *tensor, int integers,
         const int64_t *integer, int count, weft_tensor **results)
{
    Call *self = (Call *)call;
    PyEval_RestoreThread(self->thread);
    PyObject *list = PyList_New(tensors), *numbers = PyList_New(integers);
    for (int k = 0; list && k < tensors; k++)
        PyList_SET_ITEM(list, k, torch.wrap(tensor[k]));
    for (int k = 0; numbers && k < integers; k++)
        PyList_SET_ITEM(numbers, k, PyLong_FromLongLong(integer[k]));
    PyObject *position = PyLong_FromLong(step), *returned = NULL;
    PyObject *function = position ? PyObject_GetItem(self->program->steps, position) : NULL;
    if (list && numbers && function && !PyErr_Occurred())
        returned = PyObject_CallFunctionObjArgs(function, list, numbers, NULL);
    const int failed = !returned || take_results(returned, count, results);
    Py_XDECREF(position);
    Py_XDECREF(function);
    Py_XDECREF(list);
    Py_XDECREF(numbers);
    Py_XDECREF(returned);
    self->thread = PyEval_SaveThread();
    return failed;
}

/* The kernel `2 * k + aligned`, from Python when it is first needed; NULL with an error set. */
static Kernel *
load_kernel(LoadedProgram *program, int k, int aligned)
{
    PyObject *load = PyTuple_GetItem(program->kernels, k);
    PyObject *kernel = load ? PyObject_CallOneArg(load, aligned ? Py_True : Py_False) : NULL;
    if (kernel && !Py_IS_TYPE(kernel, &KernelType)) {
        PyErr_SetString(PyExc_TypeError, "not a kernel");
        Py_CLEAR(kernel);
    }
    Kernel **slot = &program->loaded[2 * k + aligned];
    if (*slot) /* another thread was faster */
        Py_XDECREF(kernel);
    else
        *slot = (Kernel *)kernel;
    return *slot;
}

static int
launch(weft_call *call, int k, int aligned, void *stream, int64_t programs, void **arguments)
{
    Call *self = (Call *)call;
    Kernel *kernel = self->program->loaded[2 * k + aligned];
    if (programs <= 0)
        return 0;
    if (!kernel) {
        PyEval_RestoreThread(self->thread);
        kernel = load_kernel(self->program, k, aligned);
        self->thread = PyEval_SaveThread();
        if (!kernel)
            return 1;
    }
    const int status = submit(kernel, stream, programs, arguments);
    if (status)
        snprintf(call->message, sizeof call->message, "CUDA error %d in a kernel's launch", status);
    return status;
}

/* A list of the outputs, whose tensors it takes. */
static PyObject *
outputs_of(const weft_description *description, weft_tensor *out, const int64_t *integers)
{
    PyObject *list = PyList_New(description->output_count);
    for (int k = 0; k < description->output_count; k++) {
        PyObject *item;
        if (description->outputs[k].type == WEFT_TENSOR)
            item = torch.wrap(out[k]);
        else if (description->outputs[k].type == WEFT_INTEGER)
            item = PyLong_FromLongLong(integers[k]);
        else
            item = Py_NewRef(Py_None);
        drop(&out[k]);
        if (!item)
            Py_CLEAR(list);
        if (list)
            PyList_SET_ITEM(list, k, item);
        else
            Py_XDECREF(item);
    }
    return list;
}

static PyObject *
failure(const weft_call *call)
{
    if (PyErr_Occurred())
        return NULL;
    return PyErr_Format(call->outside ? PyExc_AssertionError : PyExc_RuntimeError,
                        "compiled graph: %s",
                        call->message[0] ? call->message : "a libtorch call failed");
}

/* Read the inputs; 0 for success. */
static int
read_inputs(const weft_description *description, PyObject *const *args, weft_tensor *in,
            int64_t *integers)
{
    for (int k = 0; k < description->input_count; k++) {
        if (description->inputs[k].type == WEFT_TENSOR) {
            const int plain = is_plain_tensor(args[k]);
            if (plain == 0)
                PyErr_Format(PyExc_TypeError, "compiled graph: argument %d is not a plain tensor", k);
            if (plain <= 0)
                return 1;
            in[k] = handle_of(args[k]);
        } else if (description->inputs[k].type == WEFT_INTEGER) {
            integers[k] = PyLong_AsLongLong(args[k]);
            if (integers[k] == -1 && PyErr_Occurred())
                return 1;
        }
    }
    return 0;
}

/* Whether operators run that autocast, where it is on (or unknown), would make cast once more. */
static int
needs_autocast_off(const LoadedProgram *program)
{
    enum { CPU = 0 }; /* of c10::DeviceType; programs of a GPU have operators of the CPU too */
    return PyDict_GET_SIZE(program->steps) > 0 &&
           (!torch.autocast_is_enabled || torch.autocast_is_enabled(CPU) ||
            torch.autocast_is_enabled((int8_t)program->description->device_type));
}

static PyObject *
call_program(PyObject *function, PyObject *const *args, size_t nargsf, PyObject *names)
{
    LoadedProgram *const program = (LoadedProgram *)function;
    const weft_description *const description = program->description;
    const int inputs = description->input_count, outputs = description->output_count;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    Call self;
    self.program = program;
    self.owned = n == 1 && PyList_CheckExact(args[0]) ? args[0] : NULL;
    PyObject *items[inputs + 1];
    if (self.owned) {
        n = PyList_GET_SIZE(self.owned);
        for (Py_ssize_t k = 0; k < n && k < inputs; k++)
            items[k] = PyList_GET_ITEM(self.owned, k);
        args = items;
    }
    if (n != inputs || (names && PyTuple_GET_SIZE(names)))
        return PyErr_Format(PyExc_TypeError, "compiled graph takes %d arguments, got %zd", inputs, n);
    weft_tensor in[inputs + 1], out[outputs + 1];
    int64_t integers[(inputs > outputs ? inputs : outputs) + 1];
    if (read_inputs(description, args, in, integers))
        return NULL;
    PyObject *guard = NULL;
    if (needs_autocast_off(program) && !(guard = PyObject_CallNoArgs(torch.no_autocast)))
        return NULL;
    for (int k = 0; k < outputs; k++)
        out[k] = NULL;
    self.call.constants = program->constant;
    self.call.step = run_step;
    self.call.release = self.owned ? release : NULL;
    self.call.launch = launch;
    self.call.outside = 0;
    self.call.message[0] = 0;
    const int heard = program->listener &&
                      (program->always || (torch.has_callbacks && torch.has_callbacks()));
    self.call.begin = heard ? begin : NULL;
    if (heard) {
        self.listener = Py_NewRef(program->listener);
        self.state = Py_NewRef(Py_None);
        tell(&self, BEGINS);
    }
    self.thread = PyEval_SaveThread();
    const int failed = program->run(&self.call, in, out, integers);
    PyEval_RestoreThread(self.thread);
    if (heard) {
        tell(&self, ENDS);
        Py_DECREF(self.listener);
        Py_DECREF(self.state);
    }
    Py_XDECREF(guard);
    if (!failed)
        return outputs_of(description, out, integers);
    for (int k = 0; k < outputs; k++)
        drop(&out[k]);
    return failure(&self.call);
}

static void
free_program(PyObject *self)
{
    LoadedProgram *program = (LoadedProgram *)self;
    for (Py_ssize_t k = 0; program->loaded && k < 2 * PyTuple_GET_SIZE(program->kernels); k++)
        Py_XDECREF(program->loaded[k]);
    PyMem_Free(program->loaded);
    PyMem_Free(program->constant);
    Py_XDECREF(program->steps);
    Py_XDECREF(program->constants);
    Py_XDECREF(program->kernels);
    Py_XDECREF(program->listener);
    Py_XDECREF(program->library); /* last: it unloads the code */
    Py_TYPE(self)->tp_free(self);
}

/* Let the library look up what it needs of libtorch; 0 for success. */
static int
load_library(const char *(*load)(void *(*)(void *, const char *), void *), const char *torch_library)
{
    void *library = dlopen(torch_library, RTLD_LAZY | RTLD_NOLOAD);
    const char *missing = library ? load(dlsym, library) : torch_library;
    if (missing)
        PyErr_SetString(PyExc_LookupError, missing);
    return missing != NULL;
}

static PyObject *
new_program(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *library, *steps, *constants, *kernels;
    int (*run)(weft_call *, weft_tensor *, weft_tensor *, int64_t *);
    const char *(*load)(void *(*)(void *, const char *), void *), *torch_library;
    const weft_description *description;
    if (!PyArg_ParseTuple(args, "OO&O&O&sO!O!O!", &library, as_pointer, &run, as_pointer, &load,
                          as_pointer, &description, &torch_library, &PyDict_Type, &steps,
                          &PyTuple_Type, &constants, &PyTuple_Type, &kernels) ||
        load_library(load, torch_library))
        return NULL;
    LoadedProgram *program = (LoadedProgram *)type->tp_alloc(type, 0);
    if (!program)
        return NULL;
    program->vectorcall = call_program;
    program->run = run;
    program->description = description;
    program->library = Py_NewRef(library);
    program->steps = Py_NewRef(steps);
    program->constants = Py_NewRef(constants);
    program->kernels = Py_NewRef(kernels);
    const Py_ssize_t count = PyTuple_GET_SIZE(constants);
    program->constant = PyMem_Calloc(count + 1, sizeof(weft_tensor));
    program->loaded = PyMem_Calloc(2 * PyTuple_GET_SIZE(kernels) + 1, sizeof(Kernel *));
    if (!program->constant || !program->loaded || description->abi != WEFT_ABI ||
        description->constant_count != count) {
        PyErr_SetString(PyExc_ValueError, "a library of another version, or other constants");
        Py_DECREF(program);
        return NULL;
    }
    for (Py_ssize_t k = 0; k < count; k++)
        program->constant[k] = handle_of(PyTuple_GET_ITEM(constants, k));
    return (PyObject *)program;
}

static PyMemberDef program_members[] = {
    {"listener", T_OBJECT, offsetof(LoadedProgram, listener), 0, NULL},
    {"always", T_BOOL, offsetof(LoadedProgram, always), 0, NULL},
    {NULL},
};

static PyTypeObject LoadedProgramType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "weft_codegen.kernels._entry.LoadedProgram",
    .tp_basicsize = sizeof(LoadedProgram),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(LoadedProgram, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = new_program,
    .tp_members = program_members,
    .tp_dealloc = free_program,
};

static PyMethodDef methods[] = {{"configure", configure, METH_VARARGS, NULL}, {NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_entry", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC
PyInit__entry(void)
{
    int ready = !PyType_Ready(&KernelType) && !PyType_Ready(&LoadedProgramType);
    PyObject *module = ready ? PyModule_Create(&definition) : NULL;
    if (module && (PyModule_AddObjectRef(module, "Kernel", (PyObject *)&KernelType) ||
                   PyModule_AddObjectRef(module, "LoadedProgram", (PyObject *)&LoadedProgramType)))
        Py_CLEAR(module);
    return module;
}
