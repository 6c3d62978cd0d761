/* Frame-evaluation hook: run replacement code for chosen Python functions.
 *
 * While a thread is inside run(on_miss, ...), every Python frame that it starts comes through
 * hook_eval(); what happens to it lies in its code object's extra slot. The package's docstring
 * says what the functions do, docs/architecture/capture-frame.md why.
 */
#include "tail_calls.h"

typedef struct {
    int skip;         /* its frames run as they are; INSIDE: and so does what they call */
    PyObject *lookup; /* strong, or NULL */
    PyObject *owner;  /* the on_miss for whose runs the lookup is; borrowed, only compared */
} CodeState;

static Py_ssize_t extra_index = -1;
static int active_threads = 0; /* guarded by the GIL */
static _PyFrameEvalFunction previous_eval = NULL;

/* ---- per-code state ---- */

static void
free_state(void *extra)
{
    CodeState *state = extra;
    if (state != NULL) {
        Py_XDECREF(state->lookup);
        PyMem_Free(state);
    }
}

static inline CodeState *
get_state(PyCodeObject *code)
{
    void *extra = NULL;
    if (code_get_extra((PyObject *)code, extra_index, &extra) < 0) {
        PyErr_Clear();
    }
    return extra;
}

static PyObject *
set_state(PyObject *code, int skip, PyObject *lookup, PyObject *owner)
{
    if (!PyCode_Check(code)) {
        return PyErr_Format(PyExc_TypeError, "expected a code object, got %.100s",
                            Py_TYPE(code)->tp_name);
    }
    CodeState *state = get_state((PyCodeObject *)code);
    if (state == NULL) {
        state = PyMem_Calloc(1, sizeof(CodeState));
        if (state == NULL) {
            return PyErr_NoMemory();
        }
        if (code_set_extra(code, extra_index, state) < 0) {
            PyMem_Free(state);
            return NULL;
        }
    }
    state->skip = skip;
    state->owner = owner;
    Py_XSETREF(state->lookup, Py_XNewRef(lookup));
    Py_RETURN_NONE;
}

/* ---- evaluation ---- */

#define INSIDE 2

static inline PyObject *
eval_default(PyThreadState *tstate, Frame *frame, int throwing)
{
    /* A hook that was put over ours and stays when ours is put over it leads back to ours. */
    static _Thread_local Frame *passed_on = NULL;
    if (previous_eval == NULL || hook.deciding || passed_on == frame) {
        return _PyEval_EvalFrameDefault(tstate, frame, throwing);
    }
    Frame *before = passed_on;
    passed_on = frame;
    PyObject *result = previous_eval(tstate, frame, throwing);
    passed_on = before;
    return result;
}

static PyObject *
eval_skipped(PyThreadState *tstate, Frame *frame, CodeState *state)
{
    PyObject *on_miss = hook.on_miss; /* the run that set it keeps it alive */
    hook.on_miss = state != NULL && state->skip == INSIDE ? NULL : on_miss;
    PyObject *result = eval_default(tstate, frame, 0);
    hook.on_miss = on_miss;
    return result;
}

static inline Py_ssize_t
flat_count(PyCodeObject *code)
{
    return code->co_argcount + code->co_kwonlyargcount + !!(code->co_flags & CO_VARARGS)
           + !!(code->co_flags & CO_VARKEYWORDS);
}

static int
check_replacement(PyObject *found, PyFunctionObject *func, Py_ssize_t count)
{
    if (!PyCode_Check(found)) {
        PyErr_Format(PyExc_TypeError, "a lookup must return a code object or None, not %.100s",
                     Py_TYPE(found)->tp_name);
        return -1;
    }
    PyCodeObject *code = (PyCodeObject *)found;
    Py_ssize_t cells = func->func_closure == NULL ? 0 : PyTuple_GET_SIZE(func->func_closure);
    if (code->co_argcount != count || code->co_kwonlyargcount || code->co_nfreevars != cells
        || (code->co_flags & (CO_VARARGS | CO_VARKEYWORDS))) {
        PyErr_Format(PyExc_ValueError,
                     "replacement code of %U takes %d arguments and %d cells; "
                     "the frame has %zd and %zd",
                     code->co_qualname, code->co_argcount, code->co_nfreevars, count, cells);
        return -1;
    }
    return 0;
}

/* Call `found` with the frame's flat arguments, which it takes over from `slots`; `args` has func in
 * front. */
static PyObject *
run_replacement(PyObject *found, PyFunctionObject *func, PyObject **args, Py_ssize_t count,
                Slot *slots)
{
    if (check_replacement(found, func, count) < 0) {
        return NULL;
    }
    PyFunctionObject *run = (PyFunctionObject *)PyFunction_New(found, func->func_globals);
    if (run == NULL) {
        return NULL;
    }
    if (func->func_closure != NULL) {
        run->func_closure = Py_NewRef(func->func_closure);
    }
    if (run->func_builtins != func->func_builtins) {
        Py_SETREF(run->func_builtins, Py_NewRef(func->func_builtins));
    }
    hook.held_slots = slots;
    hook.held_count = count;
    hook.replacement = (PyCodeObject *)found;
    PyObject *result = PyObject_Vectorcall((PyObject *)run, args + 1,
                                           count | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    hook.replacement = NULL;
    hook.held_slots = NULL;
    Py_DECREF(run);
    return result;
}

/* What runs in place of the frame: a new reference to a code object or None, NULL on error. */
static PyObject *
find_replacement(PyObject *on_miss, PyObject *lookup, PyCodeObject *code, PyObject **args,
                 Py_ssize_t count)
{
    hook.on_miss = NULL;
    hook.deciding = 1;
    PyObject *found = NULL;
    if (lookup != NULL) {
        Py_INCREF(lookup);
        found = PyObject_Vectorcall(lookup, args, 1 + count, NULL);
        Py_DECREF(lookup);
        if (found != Py_None) {
            goto done; /* a hit or an error */
        }
        Py_DECREF(found);
        found = NULL;
    }
    PyObject *flat = PyTuple_New(count);
    if (flat != NULL) {
        for (Py_ssize_t i = 0; i < count; i++) {
            PyTuple_SET_ITEM(flat, i, Py_NewRef(args[1 + i]));
        }
        PyObject *call[3] = {args[0], (PyObject *)code, flat};
        found = PyObject_Vectorcall(on_miss, call, 3, NULL);
        Py_DECREF(flat);
    }
done:
    hook.on_miss = on_miss;
    hook.deciding = 0;
    if (found == NULL && PyErr_ExceptionMatches(PyExc_RecursionError)) {
        PyErr_Clear(); /* no room to look: the program's own frame may have enough, or raises it */
        return Py_NewRef(Py_None);
    }
    return found;
}

#define SMALL 16

/* Returns 1 when the frame is to run as it is; else *result is the frame's outcome. */
static int
intercept(Frame *frame, PyCodeObject *code, CodeState *state, int is_tail, PyObject **result)
{
    PyFunctionObject *func = frame_func(frame);
    if (func == NULL) {
        return 1;
    }
    Py_ssize_t count = flat_count(code);
    PyObject *small[SMALL + 1];
    PyObject **args = small;
    if (count > SMALL) {
        args = PyMem_Malloc((count + 1) * sizeof(PyObject *));
        if (args == NULL) {
            PyErr_NoMemory();
            *result = NULL;
            return 0;
        }
    }
    /* The frame keeps func and the arguments alive: it is not started, nobody can change it. */
    args[0] = (PyObject *)func;
    for (Py_ssize_t i = 0; i < count; i++) {
        args[1 + i] = slot_value(frame_slots(frame)[i]);
    }
    int ours = state != NULL && (state->owner == NULL || state->owner == hook.on_miss);
    PyObject *lookup = ours ? state->lookup : NULL;
    PyObject *found = find_replacement(hook.on_miss, lookup, code, args, count);
    int as_it_is = found == Py_None;
    if (!as_it_is) {
        *result = found == NULL ? NULL : run_replacement(found, func, args, count, frame_slots(frame));
        if (!is_tail) {
            *result = follow_tail_calls(*result);
        }
    }
    Py_XDECREF(found);
    if (args != small) {
        PyMem_Free(args);
    }
    return as_it_is;
}

#define SUSPENDS (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR)
#define FUNCTION_FLAGS (CO_OPTIMIZED | CO_NEWLOCALS)

static PyObject *
hook_eval(PyThreadState *tstate, Frame *frame, int throwing)
{
    if (hook.on_miss == NULL || throwing) {
        return eval_default(tstate, frame, throwing);
    }
    PyCodeObject *code = frame_code(frame);
    if (hook.replacement == code) {
        hook.replacement = NULL;
        release_held();
        return eval_default(tstate, frame, throwing);
    }
    int is_tail = hook.tail == code;
    hook.tail = NULL;
    if (is_tail) {
        release_held();
    }
    if (_PyInterpreterState_GetEvalFrameFunc(tstate->interp) != hook_eval) {
        return eval_default(tstate, frame, throwing); /* its frames: what called it runs eagerly */
    }
    int is_direct = hook.direct == code && frame->owner != FRAME_OWNED_BY_GENERATOR;
    hook.direct = NULL;
    CodeState *state = get_state(code);
    /* A frame of a tracer or profiler, or one after the program called a debugger. */
    int shown = tstate->tracing > hook.tracing || (tstate->c_tracefunc != NULL && !hook.traced);
    if (shown || (state != NULL && state->skip) || (!is_direct && code->co_flags & SUSPENDS)
        || (code->co_flags & FUNCTION_FLAGS) != FUNCTION_FLAGS) {
        return eval_skipped(tstate, frame, state);
    }
    PyObject *result = NULL;
    int as_it_is = intercept(frame, code, state, is_tail, &result);
    if (as_it_is) {
        return eval_skipped(tstate, frame, get_state(code));
    }
    return finish_frame(tstate, frame, result);
}

/* ---- activation ---- */

static void
install(void)
{
    if (active_threads++ == 0) {
        PyInterpreterState *interp = PyInterpreterState_Get();
        _PyFrameEvalFunction now = _PyInterpreterState_GetEvalFrameFunc(interp);
        if (now == hook_eval) {
            return; /* another hook was put over ours and removed late */
        }
        previous_eval = now == _PyEval_EvalFrameDefault ? NULL : now;
        _PyInterpreterState_SetEvalFrameFunc(interp, hook_eval);
    }
}

static void
uninstall(void)
{
    if (--active_threads == 0) {
        PyInterpreterState *interp = PyInterpreterState_Get();
        if (_PyInterpreterState_GetEvalFrameFunc(interp) == hook_eval) {
            _PyInterpreterState_SetEvalFrameFunc(
                interp, previous_eval != NULL ? previous_eval : _PyEval_EvalFrameDefault);
        }
    }
}

static PyObject *
run(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    if (nargs < 2) {
        PyErr_SetString(PyExc_TypeError, "run(on_miss, func, *args, **kwargs)");
        return NULL;
    }
    ThreadHook before = hook;
    if (args[0] != Py_None && prepare_finish() < 0) {
        return NULL;
    }
    PyObject *func = args[1];
    if (PyMethod_Check(func)) {
        func = PyMethod_GET_FUNCTION(func);
    }
    PyThreadState *tstate = PyThreadState_Get();
    int inner = before.on_miss != NULL && tstate->tracing == before.tracing;
    int traced = inner ? before.traced : tstate->c_tracefunc != NULL;
    PyObject *on_miss = args[0] == Py_None ? NULL : Py_NewRef(args[0]);
    hook = (ThreadHook){.on_miss = on_miss, .traced = traced, .tracing = tstate->tracing};
    if (PyFunction_Check(func)) {
        hook.direct = (PyCodeObject *)PyFunction_GET_CODE(func);
    }
    int installs = hook.on_miss != NULL && before.on_miss == NULL;
    if (installs) {
        install();
    }
    PyObject *result = PyObject_Vectorcall(args[1], args + 2,
                                           (nargs - 2) | PY_VECTORCALL_ARGUMENTS_OFFSET, kwnames);
    if (installs) {
        uninstall();
    }
    hook = before;
    Py_XDECREF(on_miss);
    return result;
}

/* ---- module ---- */

static PyObject *
set_lookup(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs < 2 || nargs > 3 || !PyCallable_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "set_lookup(code, lookup[, on_miss])");
        return NULL;
    }
    return set_state(args[0], 0, args[1], nargs == 3 ? args[2] : NULL);
}

static PyObject *
skip(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs < 1 || nargs > 2) {
        PyErr_SetString(PyExc_TypeError, "skip(code[, inside])");
        return NULL;
    }
    return set_state(args[0], nargs == 2 && args[1] == Py_True ? INSIDE : 1, NULL, NULL);
}

static PyObject *
forget(PyObject *module, PyObject *code)
{
    return set_state(code, 0, NULL, NULL);
}

static PyObject *
current(PyObject *module, PyObject *unused)
{
    return Py_NewRef(hook.on_miss == NULL ? Py_None : hook.on_miss);
}

static PyObject *
is_active(PyObject *module, PyObject *unused)
{
    return PyBool_FromLong(hook.on_miss != NULL);
}

static PyObject *
has_dict(PyObject *Py_UNUSED(self), PyObject *obj)
{
    if (PyType_Check(obj) || PyType_HasFeature(Py_TYPE(obj), Py_TPFLAGS_MANAGED_DICT))
        Py_RETURN_TRUE;
    PyObject **slot = _PyObject_GetDictPtr(obj);
    return PyBool_FromLong(slot && *slot);
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL | METH_KEYWORDS,
     "run(on_miss, func, *args, **kwargs): call func with the hook on; with on_miss None, off."},
    {"set_lookup", (PyCFunction)(void (*)(void))set_lookup, METH_FASTCALL,
     "set_lookup(code, lookup[, on_miss]): frames of code ask lookup(func, *flat_args), "
     "with on_miss given only in runs with that on_miss."},
    {"skip", (PyCFunction)(void (*)(void))skip, METH_FASTCALL,
     "skip(code[, inside]): frames of code run as they are; with True, what they call too."},
    {"forget", forget, METH_O, "forget(code): make code unknown again."},
    {"current", current, METH_NOARGS, "current() -> the on_miss of this thread's run, or None."},
    {"is_active", is_active, METH_NOARGS, "is_active() -> whether the hook is on in this thread."},
    {"tail_call", (PyCFunction)(void (*)(void))tail_call, METH_FASTCALL,
     "tail_call(func, *args): what a replacement returns to end with func(*args)."},
    {"has_dict", has_dict, METH_O, "has_dict(obj): whether obj has a dict, without making one."},
    {"enter", enter, METH_O, "enter([func, *args]): call func; the list is emptied."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_hook", "Frame-evaluation hook; see weft_capture.frame.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit__hook(void)
{
    if (PyType_Ready(&TailCallType) < 0) {
        return NULL;
    }
    extra_index = request_code_extra(free_state);
    if (extra_index < 0) {
        PyErr_SetString(PyExc_ImportError, "CPython has no free code-extra slot for the frame hook");
        return NULL;
    }
    return PyModule_Create(&definition);
}
