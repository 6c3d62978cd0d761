/* The state of torch that GLOBAL_STATE guards, in seven words read without Python.
 *
 * The dispatch key sets of the thread stand for autocast on any device, inference mode, dispatch
 * modes and functorch's transforms. They lie in a thread-local variable of libc10, whose address
 * each thread looks up once. abi.py hands over the addresses, and validates what is read.
 */
#ifndef WEFT_GUARDS_STATE_H
#define WEFT_GUARDS_STATE_H

#include <Python.h>
#include <stdint.h>
#include <string.h>

#ifndef _WIN32
#include <dlfcn.h>
#endif

#define STATE_WORDS 7

static struct {
    void *library;     /* handle of libc10, for dlsym */
    const char *keys;  /* name of the thread-local pair of key sets */
    int8_t (*default_dtype)(void);
    uint8_t (*deterministic)(void *);
    void *context;
    int64_t (*function_modes)(void);
    int32_t (*function_disabled)(void);
    int64_t (*dispatch_modes)(void);
    uint8_t (*grad_mode)(void);
} torch_state;

static PyObject *
configure_state(PyObject *module, PyObject *args)
{
    unsigned long long library, a, b, c, d, e, f, g;
    const char *keys;
    if (!PyArg_ParseTuple(args, "KsKKKKKKK", &library, &keys, &a, &b, &c, &d, &e, &f, &g))
        return NULL;
    torch_state.library = (void *)(uintptr_t)library;
    torch_state.keys = strdup(keys);
    torch_state.default_dtype = (int8_t (*)(void))(uintptr_t)a;
    torch_state.deterministic = (uint8_t (*)(void *))(uintptr_t)b;
    torch_state.context = ((void *(*)(void))(uintptr_t)c)();
    torch_state.function_modes = (int64_t (*)(void))(uintptr_t)d;
    torch_state.function_disabled = (int32_t (*)(void))(uintptr_t)e;
    torch_state.dispatch_modes = (int64_t (*)(void))(uintptr_t)f;
    torch_state.grad_mode = (uint8_t (*)(void))(uintptr_t)g;
    Py_RETURN_NONE;
}

static const int64_t *
thread_keys(void)
{
#ifdef _WIN32
    return NULL;
#else
    static __thread const int64_t *keys;
    if (!keys && torch_state.library)
        keys = dlsym(torch_state.library, torch_state.keys);
    return keys;
#endif
}

/* 0 when the state cannot be read. */
static int
read_state(int64_t words[STATE_WORDS])
{
    const int64_t *keys = thread_keys();
    if (!keys)
        return 0;
    words[0] = keys[0]; /* included */
    words[1] = keys[1]; /* excluded */
    words[2] = torch_state.default_dtype();
    words[3] = torch_state.deterministic(torch_state.context);
    words[4] = torch_state.function_modes();
    words[5] = torch_state.function_disabled();
    words[6] = torch_state.dispatch_modes();
    return 1;
}

static PyObject *
state_words(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    int64_t words[STATE_WORDS];
    if (!read_state(words))
        return Py_NewRef(Py_None);
    return PyBytes_FromStringAndSize((char *)words, sizeof words);
}

static int
test_state_words(PyObject *wanted)
{
    int64_t words[STATE_WORDS];
    return read_state(words) && memcmp(words, PyBytes_AS_STRING(wanted), sizeof words) == 0;
}

#endif
