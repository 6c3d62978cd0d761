/* Guards as a small register program: fetch a value, test it, next.
 *
 * `Check(program, n_args, residual)` is called like a compiled check of `check.py`:
 * check(func, *flat_locals) -> bool. The program is a tuple of (code, a, n, object) rows that
 * `native.py` assembles; every fetch fills the next register, `a` names the register that is read.
 * A test that fails, or a read that raises, ends the run with False. What has no instruction here
 * is tested by `residual`, a Python check that runs last. Where int64 is too small for a size, the
 * whole check is left to `target`, its Python form.
 * `Check(program, n_args, registers, target)` runs reads only, and calls target with registers.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stdint.h>
#include <string.h>

#include "_memo.h"
#include "_ops.h"

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *program, *residual; /* of a caller, the registers to call with */
    PyObject *target;             /* of a caller, what it calls; of a check, its Python form or NULL */
    Py_ssize_t n_args, n_ops, n_registers, n_amounts;
    Op *ops;
    Memo memo;
} Check;

/* ---- running */

/* Run the whole program, and remember how to run less of it. Returns 1 when all guards hold, else 0,
 * or UNSURE; `results` gets new references to the registers to return, where it is given. */
static int
run_program(Check *self, PyObject *const *args, PyObject **results)
{
    PyObject *small[ON_STACK], **registers = small;
    int64_t amounts[MAX_AMOUNTS];
    Py_ssize_t filled = 0;
    int passed = self->program != NULL; /* NULL once the garbage collector took it apart */
    if (self->n_registers > ON_STACK &&
        !(registers = PyMem_Malloc(self->n_registers * sizeof *registers))) {
        PyErr_NoMemory();
        return -1;
    }
    for (Op *op = self->ops, *end = op + self->n_ops; passed == 1 && op < end; op++) {
        PyObject *base = READS_REGISTER(op) ? registers[op->a] : NULL;
        PyObject **other = OTHER(op, registers);
        if (IS_FETCH(op)) {
            PyObject *value = fetch(op, args, base, other ? *other : NULL);
            if ((passed = value != NULL))
                registers[filled++] = value;
        }
        else
            passed = test(op, base, other ? *other : NULL, amounts);
    }
    for (Py_ssize_t i = 0; passed == 1 && results && i < PyTuple_GET_SIZE(self->residual); i++)
        results[i] = Py_NewRef(registers[PyLong_AsSsize_t(PyTuple_GET_ITEM(self->residual, i))]);
    if (passed == 1)
        remember(&self->memo, self->ops, self->n_ops, self->n_registers, registers);
    while (filled)
        Py_DECREF(registers[--filled]);
    if (registers != small)
        PyMem_Free(registers);
    return passed;
}

/* Run a check: 1 when all guards hold, 0 when not, -1 with an exception. `args` has the function in
 * front. */
static int
run_check(Check *self, PyObject *const *args, Py_ssize_t given)
{
    if (given != self->n_args + 1) {
        PyErr_Format(PyExc_TypeError, "check takes a function and %zd values", self->n_args);
        return -1;
    }
    int passed = run_memo(&self->memo, args, NULL, NULL);
    if (passed == STALE)
        passed = run_program(self, args, NULL);
    if (!passed)
        PyErr_Clear();
    PyObject *rest = passed == UNSURE ? self->target : self->residual;
    if (passed <= 0 || rest == Py_None)
        return passed;
    PyObject *answer = PyObject_Vectorcall(rest, args, given, NULL);
    passed = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return passed;
}

static PyObject *
check_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *keywords)
{
    if (keywords && PyTuple_GET_SIZE(keywords))
        return PyErr_Format(PyExc_TypeError, "a check takes no keyword arguments");
    int passed = run_check((Check *)callable, args, PyVectorcall_NARGS(flags));
    return passed < 0 ? NULL : PyBool_FromLong(passed);
}

/* caller(func, *roots) -> target(*registers asked for). Raises what a read raises. */
static PyObject *
caller_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *keywords)
{
    Check *self = (Check *)callable;
    if (PyVectorcall_NARGS(flags) != self->n_args + 1 || !self->program)
        return PyErr_Format(PyExc_TypeError, "caller takes a function and %zd values", self->n_args);
    PyObject *small[ON_STACK + 1], **room = small, *result = NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(self->residual);
    if (count > ON_STACK && !(room = PyMem_Malloc((count + 1) * sizeof *room)))
        return PyErr_NoMemory();
    PyObject **results = room + 1, *target = Py_NewRef(self->target); /* a free place in front */
    int passed = run_memo(&self->memo, args, self->residual, results);
    if (passed == STALE)
        passed = run_program(self, args, results);
    if (passed > 0) {
        result = PyObject_Vectorcall(target, results, count | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
        for (Py_ssize_t i = 0; i < count; i++)
            Py_DECREF(results[i]);
    }
    else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_LookupError, "an input of compiled code is gone");
    if (room != small)
        PyMem_Free(room);
    Py_DECREF(target);
    return result;
}

/* ---- building */

/* Whether a row on amounts reads those of tensors tested before, and amounts read before. */
static int
is_on_amounts(Check *self, const Op *op)
{
    if (op->code == OP_SHAPE || op->code == OP_INT)
        return op->code == OP_INT || is_condition(op->object, self->n_amounts);
    const Op *one = self->ops;
    while (one < op && (one->code != OP_TENSOR || one->a != op->a))
        one++;
    return one < op && op->n >= 0 && op->n < one->tensor->dim;
}

/* Read one row; registers that it names must be filled by then, so that running needs no checks. */
static int
read_op(Check *self, PyObject *row, Op *op)
{
    if (!PyTuple_Check(row)) {
        PyErr_SetString(PyExc_TypeError, "a program is a tuple of tuples");
        return -1;
    }
    if (!PyArg_ParseTuple(row, "innO", &op->code, &op->a, &op->n, &op->object))
        return -1;
    if (op->code < 0 || op->code >= N_INSTRUCTIONS ||
        (READS_REGISTER(op) && (op->a < 0 || op->a >= self->n_registers)) ||
        (OTHER(op, self->ops) && (op->n < 0 || op->n >= self->n_registers)) ||
        (op->code == OP_ARG && (op->n < 0 || op->n >= self->n_args)) ||
        (op->code == OP_STATE && (!PyBytes_Check(op->object) ||
                                  PyBytes_GET_SIZE(op->object) != STATE_WORDS * sizeof(int64_t))) ||
        ((op->code == OP_SHAPE || IS_AMOUNT(op)) && !is_on_amounts(self, op)) ||
        (IS_AMOUNT(op) && (self->n_amounts == MAX_AMOUNTS || !self->target ||
                           PyTuple_Check(self->residual))) ||
        (op->code == OP_GRAD && !torch_state.grad_mode) ||
        (op->code == OP_KEYS && !PyTuple_Check(op->object)) ||
        (op->code == OP_CLASS && (!PyTuple_Check(op->object) || PyTuple_GET_SIZE(op->object) != 3)) ||
        (op->code == OP_NAMESPACE &&
         (!PyTuple_Check(op->object) || PyTuple_GET_SIZE(op->object) != 2 ||
          !PyDict_Check(PyTuple_GET_ITEM(op->object, 0)))) ||
        ((op->code == OP_CELL || op->code == OP_INDEX) && op->n < 0)) {
        PyErr_Format(PyExc_ValueError, "not an instruction: %R", row);
        return -1;
    }
    if (op->code == OP_TENSOR && !(op->tensor = new_tensor(op->object)))
        return -1;
    if (op->code == OP_NAMESPACE && watch_namespace(PyTuple_GET_ITEM(op->object, 0)))
        return -1;
    if (op->code == OP_CLASS)
        op->version = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(op->object, 1));
    if (IS_FETCH(op))
        self->n_registers++;
    if (IS_AMOUNT(op))
        op->amount = self->n_amounts++;
    return 0;
}

static void
check_dealloc(PyObject *object)
{
    Check *self = (Check *)object;
    PyObject_GC_UnTrack(object);
    for (Py_ssize_t i = 0; self->ops && i < self->n_ops; i++)
        PyMem_Free(self->ops[i].tensor);
    forget_memo(&self->memo);
    PyMem_Free(self->ops);
    Py_XDECREF(self->program);
    Py_XDECREF(self->residual);
    Py_XDECREF(self->target);
    Py_TYPE(object)->tp_free(object);
}

static int
check_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(((Check *)object)->program);
    Py_VISIT(((Check *)object)->residual);
    Py_VISIT(((Check *)object)->target);
    return 0;
}

static int
check_clear(PyObject *object)
{
    forget_memo(&((Check *)object)->memo);
    Py_CLEAR(((Check *)object)->program); /* from now on it answers False */
    Py_CLEAR(((Check *)object)->residual);
    Py_CLEAR(((Check *)object)->target);
    return 0;
}

static PyObject *
check_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *program, *residual, *target = NULL;
    Py_ssize_t n_args;
    if (!PyArg_ParseTuple(args, "O!nO|O", &PyTuple_Type, &program, &n_args, &residual, &target))
        return NULL;
    Check *self = (Check *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->vectorcall = PyTuple_Check(residual) ? caller_call : check_call;
    self->program = Py_NewRef(program);
    self->residual = Py_NewRef(residual);
    self->target = Py_XNewRef(target);
    self->n_args = n_args;
    Py_ssize_t count = PyTuple_GET_SIZE(program);
    if (!(self->ops = PyMem_Calloc(count ? count : 1, sizeof(Op))))
        PyErr_NoMemory();
    while (self->ops && self->n_ops < count &&
           !read_op(self, PyTuple_GET_ITEM(program, self->n_ops), &self->ops[self->n_ops]))
        self->n_ops++;
    if (!PyErr_Occurred())
        return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static PyMemberDef check_members[] = {
    {"program", T_OBJECT, offsetof(Check, program), READONLY, "the rows"},
    {"residual", T_OBJECT, offsetof(Check, residual), READONLY, "the Python check run last"},
    {NULL},
};

static PyTypeObject CheckType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "weft_guards._native.Check",
    .tp_doc = "Check(program, n_args, residual[, target]): see the top of _native.c",
    .tp_basicsize = sizeof(Check),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Check, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = check_new,
    .tp_dealloc = check_dealloc,
    .tp_traverse = check_traverse,
    .tp_clear = check_clear,
    .tp_members = check_members,
};

#include "_table.h"

static PyMethodDef methods[] = {
    {"configure", configure, METH_VARARGS, "Say how to read tensors; see abi.py."},
    {"describe", describe, METH_O, "Read a tensor the way checks do."},
    {"class_version", class_version, METH_O, "The version of a class; 0 where it has none."},
    {"configure_state", configure_state, METH_VARARGS, "Say how to read torch's state; see abi.py."},
    {"state_words", state_words, METH_NOARGS, "Read torch's state as bytes; None if unknown."},
    {NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods};

#define ADD_CODE(name) || PyModule_AddIntConstant(module, #name, OP_##name)

PyMODINIT_FUNC
PyInit__native(void)
{
    int ready = !PyType_Ready(&CheckType) && !PyType_Ready(&TableType);
    PyObject *module = ready ? PyModule_Create(&definition) : NULL;
    if (module && (PyModule_AddObjectRef(module, "Check", (PyObject *)&CheckType) ||
                   PyModule_AddObjectRef(module, "Table", (PyObject *)&TableType) ||
                   PyModule_AddStringConstant(module, "words", WORD_NAMES)
                       INSTRUCTIONS(ADD_CODE)))
        Py_CLEAR(module);
    return module;
}
