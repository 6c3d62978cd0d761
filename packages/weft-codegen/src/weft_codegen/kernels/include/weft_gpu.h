/* What a program needs whose kernels run on a GPU. */

static void *weft_stream(int32_t device)
{
    void *stream = NULL;
    if (torch.get_current_cuda_stream)
        torch.get_current_cuda_stream(device, &stream);
    return stream;
}

/* Make `device` the current one until its result is restored. */
static void *weft_set_device(int32_t device)
{
    void *guard = NULL;
    if (torch.create_cuda_guard)
        torch.create_cuda_guard(device, &guard);
    return guard;
}

static void weft_restore_device(void *guard)
{
    if (guard)
        torch.delete_cuda_guard(guard);
}

/* Launch kernel k, in the variant for buffers that are aligned or in the one for any others. */
static int weft_launch(weft_call *call, int k, int aligned, void *stream, int64_t programs,
                       void **arguments)
{
    if (call->launch)
        return call->launch(call, k, aligned, stream, programs, arguments);
    snprintf(call->message, sizeof call->message, "the caller launches no kernels");
    return 1;
}
