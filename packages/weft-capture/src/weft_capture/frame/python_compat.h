/* Everything in the frame hook that differs between CPython 3.11, 3.12, 3.13 and 3.14.
 *
 * code_get_extra, ...             the code object's extra slots, under their names of the day
 * frame_code(f), frame_func(f)   borrowed; func is NULL when the frame has no function object
 * frame_slots(f)                 the variables; at entry the arguments come first, as plain values.
 *                                From 3.14 on a Slot is a tagged reference, which may be borrowed.
 * slot_value(s), clear_slot(&s)  what a slot holds, borrowed, or NULL; let go of it
 * finish_frame(ts, f, result)    end a frame that was never run. 3.11: the caller clears it.
 *                                From 3.12 on the evaluator must: clear the variables, then let the
 *                                default evaluator run `return result` (or raise) in this frame.
 */
#ifndef WEFT_FRAME_PYTHON_COMPAT_H
#define WEFT_FRAME_PYTHON_COMPAT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define Py_BUILD_CORE
#undef _PyGC_FINALIZED /* the internal headers define it again */
#include "internal/pycore_frame.h"
#include "internal/pycore_gc.h"
#if PY_VERSION_HEX >= 0x030E0000
#include "internal/pycore_interpframe.h"
#endif
#undef Py_BUILD_CORE

typedef struct _PyInterpreterFrame Frame;

#if PY_VERSION_HEX >= 0x030C0000
#define code_get_extra PyUnstable_Code_GetExtra
#define code_set_extra PyUnstable_Code_SetExtra
#define request_code_extra PyUnstable_Eval_RequestCodeExtraIndex
#else
#define code_get_extra _PyCode_GetExtra
#define code_set_extra _PyCode_SetExtra
#define request_code_extra _PyEval_RequestCodeExtraIndex
#endif

#if PY_VERSION_HEX >= 0x030E0000
#define frame_code(f) ((PyCodeObject *)PyStackRef_AsPyObjectBorrow((f)->f_executable))
#define frame_func_slot(f) PyStackRef_AsPyObjectBorrow((f)->f_funcobj)
#elif PY_VERSION_HEX >= 0x030D0000
#define frame_code(f) ((PyCodeObject *)(f)->f_executable)
#define frame_func_slot(f) ((f)->f_funcobj)
#elif PY_VERSION_HEX >= 0x030C0000
#define frame_code(f) ((f)->f_code)
#define frame_func_slot(f) ((f)->f_funcobj)
#else
#define frame_code(f) ((f)->f_code)
#define frame_func_slot(f) ((PyObject *)(f)->f_func)
#endif

static inline PyFunctionObject *
frame_func(Frame *frame)
{
    PyObject *func = frame_func_slot(frame);
    return func != NULL && PyFunction_Check(func) ? (PyFunctionObject *)func : NULL;
}

#define frame_slots(f) ((f)->localsplus)

#if PY_VERSION_HEX >= 0x030E0000

typedef _PyStackRef Slot;

static inline PyObject *
slot_value(Slot slot)
{
    return PyStackRef_IsNull(slot) ? NULL : PyStackRef_AsPyObjectBorrow(slot);
}

#define clear_slot(slot) PyStackRef_CLEAR(*(slot))
#define new_slot(object) ((object) == NULL ? PyStackRef_NULL : PyStackRef_FromPyObjectSteal(object))

#else

typedef PyObject *Slot;

#define slot_value(slot) (slot)
#define clear_slot(slot) Py_CLEAR(*(slot))
#define new_slot(object) (object)

#endif

#if PY_VERSION_HEX < 0x030C0000

static inline int prepare_finish(void) { return 0; }

static inline PyObject *
finish_frame(PyThreadState *tstate, Frame *frame, PyObject *result)
{
    return result;
}

#else

/* Code of `return <slot 0>` without RESUME, so that neither tracing nor the pending-call check sees
 * it; made when a hook is first turned on. */
static PyCodeObject *return_code = NULL;
#define RETURN_CODE \
    "(lambda code: code.replace(co_code=code.co_code[2:]))((lambda value: value).__code__)"

static inline int
prepare_finish(void)
{
    PyObject *names = return_code == NULL ? PyDict_New() : NULL;
    if (names != NULL) {
        return_code = (PyCodeObject *)PyRun_String(RETURN_CODE, Py_eval_input, names, names);
        Py_DECREF(names);
    }
    return return_code == NULL ? -1 : 0;
}

static PyObject *
finish_frame(PyThreadState *tstate, Frame *frame, PyObject *result)
{
    PyCodeObject *code = frame_code(frame);
    /* Clearing can run destructors, hence any code, which must not lose the pending exception. */
    PyObject *raised = result == NULL ? PyErr_GetRaisedException() : NULL;
    for (int i = 0; i < code->co_nlocalsplus; i++) {
        clear_slot(&frame->localsplus[i]);
    }
    frame->localsplus[0] = new_slot(result);
#if PY_VERSION_HEX >= 0x030E0000
    _PyStackRef executable = frame->f_executable;
    frame->f_executable = PyStackRef_FromPyObjectNew((PyObject *)return_code);
    frame->instr_ptr = _PyCode_CODE(return_code);
    frame->stackpointer = frame->localsplus + return_code->co_nlocalsplus;
    PyStackRef_CLOSE(executable);
#else
    Py_INCREF(return_code);
#if PY_VERSION_HEX >= 0x030D0000
    frame->f_executable = (PyObject *)return_code;
    frame->instr_ptr = _PyCode_CODE(return_code);
#else
    frame->f_code = return_code;
    frame->prev_instr = _PyCode_CODE(return_code) - 1;
#endif
    frame->stacktop = return_code->co_nlocalsplus;
    Py_DECREF(code);
#endif
    PyThreadState_EnterTracing(tstate);
    if (raised != NULL) {
        PyErr_SetRaisedException(raised);
    }
    PyObject *value = _PyEval_EvalFrameDefault(tstate, frame, raised != NULL);
    PyThreadState_LeaveTracing(tstate);
    return value;
}

#endif
#endif
