/* What a program needs whose kernels run on a GPU. */

static void *weft_stream(int32_t device)
{
    void *stream = NULL;
    if (torch.get_current_cuda_stream)
        torch.get_current_cuda_stream(device, &stream);
    return stream;
}
