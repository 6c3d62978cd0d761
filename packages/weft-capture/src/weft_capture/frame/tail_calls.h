/* Tail calls of replacements: a function runs once the frame that asked for it has ended, and holds
 * its arguments alone. The state of a thread's hook is here, for it says which frame comes next.
 */
#ifndef WEFT_FRAME_TAIL_CALLS_H
#define WEFT_FRAME_TAIL_CALLS_H

#include "python_compat.h"

typedef struct {
    PyObject *on_miss;     /* borrowed from run()'s caller; NULL: the hook is off */
    PyCodeObject *replacement; /* the next frame of this code is a replacement: run it as it is */
    PyCodeObject *tail;    /* the next frame of this code hands its tail calls to its caller */
    PyObject **held;       /* its arguments, to let go of once that frame holds them itself */
    Slot *held_slots;      /* the same, where another frame holds them */
    Py_ssize_t held_count;
    PyCodeObject *direct;  /* the next frame of this code is what run() was asked to call */
    int deciding;          /* a lookup or on_miss runs: no other hook sees their frames */
    int traced;            /* sys.settrace was on when the outermost run() began */
    int tracing;           /* how many tracers were at work when run() began */
} ThreadHook;

static _Thread_local ThreadHook hook = {0};

/* A tuple (func, *args) that a replacement returns; its arguments are taken out when func begins. */
static PyTypeObject TailCallType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "weft_capture.frame._hook.TailCall",
    .tp_base = &PyTuple_Type,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
};

static PyObject *
tail_call(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs < 1 || !PyFunction_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "tail_call(func, *args) needs a Python function");
        return NULL;
    }
    PyObject *self = TailCallType.tp_alloc(&TailCallType, nargs);
    for (Py_ssize_t i = 0; self != NULL && i < nargs; i++) {
        PyTuple_SET_ITEM(self, i, Py_NewRef(args[i]));
    }
    return self;
}

/* Let go of the arguments of the frame that begins: `del x` in it must end the life of x. A tail
 * call keeps None in their places, because tracers and profilers have seen it as a result. */
static inline void
release_held(void)
{
    PyObject **held = hook.held;
    Slot *slots = hook.held_slots;
    hook.held = NULL;
    hook.held_slots = NULL;
    for (Py_ssize_t i = 0; i < hook.held_count; i++) { /* never the last references */
        if (held != NULL) {
            Py_XSETREF(held[i], Py_NewRef(Py_None));
        }
        if (slots != NULL) {
            clear_slot(&slots[i]);
        }
    }
}

/* Run tail calls until a result that is none comes back. Steals `result`. */
static PyObject *
follow_tail_calls(PyObject *result)
{
    while (result != NULL && Py_TYPE(result) == &TailCallType) {
        PyObject *call = result, **items = ((PyTupleObject *)call)->ob_item, *func = items[0];
        hook.tail = (PyCodeObject *)((PyFunctionObject *)func)->func_code;
        hook.held = items + 1;
        hook.held_count = Py_SIZE(call) - 1;
        result = PyObject_Vectorcall(func, items + 1,
                                     (Py_SIZE(call) - 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
        hook.tail = NULL;
        hook.held = NULL;
        Py_DECREF(call);
    }
    return result;
}

/* Call [func, *args] and empty the list, so that the callee alone holds its arguments. */
static PyObject *
enter(PyObject *module, PyObject *call)
{
    if (!PyList_Check(call)) {
        PyErr_SetString(PyExc_TypeError, "enter([func, *args]) needs a list");
        return NULL;
    }
    PyObject *tail = tail_call(module, ((PyListObject *)call)->ob_item, PyList_GET_SIZE(call));
    if (tail == NULL || PyList_SetSlice(call, 0, PyList_GET_SIZE(call), NULL) < 0) {
        Py_XDECREF(tail);
        return NULL;
    }
    return follow_tail_calls(tail);
}

#endif
