/* What a program needs whose kernels run on a GPU. */

static void *weft_stream(void)
{
    void *stream = NULL;
    if (torch.get_current_cuda_stream)
        torch.get_current_cuda_stream(weft_device[1], &stream);
    return stream;
}

/* Launch kernel k, in the variant for buffers that are aligned or in the one for any others; Python
 * is asked for it the first time. */
static int weft_launch(weft_call *call, int k, int aligned, void *stream, int64_t programs,
                       void **values)
{
    weft_kernel **const place = &call->program->kernels[2 * k + aligned];
    if (programs <= 0)
        return 0;
    if (!*place) {
        PyEval_RestoreThread(call->thread);
        PyObject *none = (PyObject *)&_Py_NoneStruct;
        PyObject *python = call->program->python;
        PyObject *made = PyObject_CallFunction(python, "iOO", -2 - (2 * k + aligned), none, none);
        PyObject *capsule = made ? PyCFunction_GetSelf(made) : NULL;
        if (capsule)
            *place = PyCapsule_GetPointer(capsule, weft_kernel_name);
        if (made)
            Py_DecRef(made);
        call->thread = PyEval_SaveThread();
        if (!*place)
            return 1;
    }
    int status = (int)programs != programs;
    status = status ? status : (*place)->submit(*place, stream, (int)programs, values);
    if (status)
        snprintf(call->message, sizeof call->message, "CUDA error %d in a kernel's launch", status);
    return status;
}
