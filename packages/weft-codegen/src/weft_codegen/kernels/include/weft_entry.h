/* The way in from Python.  Included after weft_run, with the program's interface as macros:
 * WEFT_INPUTS and WEFT_OUTPUTS count, WEFT_INPUT_KINDS and WEFT_OUTPUT_KINDS hold one letter each:
 * t tensor, i integer, - ignored (None for an output).  The arguments may come as one list, from which
 * the program then takes each tensor after its last use.
 */
static PyObject *weft_entry(PyObject *self, PyObject *const *args, int64_t n)
{
    weft_program *const program = PyCapsule_GetPointer(self, weft_capsule_name);
    weft_call call = {program};
    weft_tensor in[WEFT_INPUTS + 1], out[WEFT_OUTPUTS + 1] = {NULL};
    int64_t sizes[WEFT_INPUTS + WEFT_OUTPUTS + 1];
    PyObject *items[WEFT_INPUTS + 1];
    if (n == 1 && weft_is_list(args[0])) {
        call.owned = args[0];
        n = PyList_Size(call.owned);
        for (int k = 0; k < n && k < WEFT_INPUTS; k++)
            items[k] = PyList_GetItem(call.owned, k);
        args = items;
    }
    if (n != WEFT_INPUTS)
        return PyErr_Format(PyExc_TypeError, "compiled graph takes %d arguments, got %d",
                            WEFT_INPUTS, (int)n);
    for (int k = 0; k < WEFT_INPUTS; k++) {
        if (WEFT_INPUT_KINDS[k] == 't') {
            if (weft_argument(program, args[k], k, &in[k]))
                return NULL;
        } else if (WEFT_INPUT_KINDS[k] == 'i') {
            sizes[k] = PyLong_AsLongLong(args[k]);
            if (sizes[k] == -1 && PyErr_Occurred())
                return NULL;
        }
    }
    PyObject *guard = NULL, *none = (PyObject *)&_Py_NoneStruct;
    if (weft_casts(program)) {
        guard = PyObject_CallFunction(program->python, "iOO", -1, none, none);
        if (!guard)
            return NULL;
    }
    call.thread = PyEval_SaveThread();
    const int failed = weft_run(&call, in, out, sizes);
    PyEval_RestoreThread(call.thread);
    if (guard)
        Py_DecRef(guard);
    if (!failed)
        return weft_outputs(WEFT_OUTPUTS, out, sizes, WEFT_OUTPUT_KINDS);
    for (int k = 0; k < WEFT_OUTPUTS; k++)
        weft_drop(&out[k]);
    return weft_failure(&call);
}

#define WEFT_EXPORT __attribute__((visibility("default")))

/* Look up libtorch's functions; the name of a missing one, or NULL. */
WEFT_EXPORT const char *weft_load(const char *torch_cpu, const char *torch_python,
                                  const char *torch_device)
{
    return weft_link(torch_cpu, torch_python, torch_device, symbols);
}

/* A new Python function that runs the program with these constants and so many GPU kernels. */
WEFT_EXPORT PyObject *weft_new(PyObject *python, PyObject *constants, PyObject *tensor_types,
                               int64_t handle_offset, int kernels)
{
    static PyMethodDef method = {"compiled_graph", weft_entry, METH_FASTCALL, NULL};
    return weft_make_function(&method, python, constants, tensor_types, handle_offset, kernels);
}
