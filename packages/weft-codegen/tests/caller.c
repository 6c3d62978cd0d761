/* Calls a generated library from C: caller LIBTORCH LIBRARY prints what its outputs hold.  Element k
 * of each input is the cosine of k. */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "weft.h"

static int64_t elements(const weft_value *value)
{
    int64_t count = 1;
    for (int d = 0; d < value->dims; d++)
        count *= value->sizes[d];
    return count;
}

int main(int argc, char **argv)
{
    void *torch = dlopen(argv[1], RTLD_NOW), *library = dlopen(argv[2], RTLD_NOW);
    if (argc != 3 || !torch || !library)
        return fprintf(stderr, "%s\n", dlerror()), 1;
    int32_t (*from_blob)(void *, int64_t, const int64_t *, const int64_t *, int64_t, int32_t, int32_t,
                         int32_t, weft_tensor *) =
        dlsym(torch, "aoti_torch_create_tensor_from_blob");
    int32_t (*get_data)(weft_tensor, void **) = dlsym(torch, "aoti_torch_get_data_ptr");
    int32_t (*delete)(weft_tensor) = dlsym(torch, "aoti_torch_delete_tensor_object");
    const weft_description *about = dlsym(library, "weft_program");
    __typeof__(weft_load) *load = dlsym(library, "weft_load");
    __typeof__(weft_run) *run = dlsym(library, "weft_run");

    const char *missing = load(dlsym, torch);
    if (missing || about->abi != WEFT_ABI)
        return fprintf(stderr, "no %s\n", missing), 1;
    weft_tensor in[about->input_count], out[about->output_count];
    int64_t integers[about->input_count + about->output_count];
    for (int k = 0; k < about->input_count; k++) {
        const weft_value *value = &about->inputs[k];
        const int64_t count = elements(value);
        float *data = malloc(count * sizeof *data);
        for (int64_t i = 0; i < count; i++)
            data[i] = (float)cos((double)i);
        from_blob(data, value->dims, value->sizes, value->strides, 0, value->dtype,
                  value->device_type, value->device_index, &in[k]);
    }
    weft_call call = {0};
    if (run(&call, in, out, integers))
        return fprintf(stderr, "%s\n", call.message), 2;
    for (int k = 0; k < about->output_count; k++) {
        float *data = NULL;
        get_data(out[k], (void **)&data);
        for (int64_t i = 0; i < elements(&about->outputs[k]); i++)
            printf("%.9g%c", data[i], i + 1 < elements(&about->outputs[k]) ? ' ' : '\n');
        delete (out[k]);
    }
    return 0;
}
