/* A check of guards as a small register program: fetch a value, test it, next.
 *
 * `Check(program, n_args, residual)` is called like a compiled check of `check.py`:
 * check(func, *flat_locals) -> bool. The program is a tuple of (code, a, n, object) rows that
 * `native.py` assembles; every fetch fills the next register, `a` names the register that is read.
 * A test that fails, or a read that raises, ends the run with False. What has no instruction here
 * is tested by `residual`, a Python check that runs last.
 *
 * How tensors are read is in _tensor.h, how torch's state is in _state.h.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stdint.h>
#include <string.h>

#include "_state.h"
#include "_tensor.h"

/* Rows of this table are the instruction set; native.py reads the names from the module. */
#define INSTRUCTIONS(X)                                                                          \
    X(ARG)       /* next = argument n */                                                         \
    X(CONST)     /* next = object */                                                             \
    X(GLOBALS)   /* next = the function's globals */                                             \
    X(CELL)      /* next = contents of the function's n-th cell */                               \
    X(DICT)      /* next = instance dict of a */                                                 \
    X(ITEM)      /* next = a[object] */                                                          \
    X(INDEX)     /* next = a[n] */                                                               \
    X(ATTR)      /* next = a.object */                                                           \
    X(TYPEOF)    /* next = type(a) */                                                            \
    X(IS)        /* a is object */                                                               \
    X(IS_REF)    /* a is object(), a weak reference */                                           \
    X(IS_REG)    /* a is register n */                                                           \
    X(TYPE)      /* type(a) is object */                                                         \
    X(TYPE_REF)  /* type(a) is object(), a weak reference */                                     \
    X(NOT_NONE)  /* a is not None */                                                             \
    X(EQUAL)     /* same type and equal; object is an int, str, bytes or ordinary float */       \
    X(LENGTH)    /* len(a) == n */                                                               \
    X(KEYS)      /* list(a) == object, a tuple of exact str and int; types too */                \
    X(NOT_IN)    /* object not in a */                                                           \
    X(CALL)      /* object[0]() == object[1]; reads no register */                               \
    X(STATE)     /* torch's state is object, the bytes of state_words(); reads no register */    \
    X(GRAD)      /* grad mode is n; reads no register */                                         \
    X(TENSOR)    /* a is the tensor that object describes */

#define AS_ENUM(name) OP_##name,
enum { INSTRUCTIONS(AS_ENUM) N_INSTRUCTIONS };

typedef struct {
    int code;
    Py_ssize_t a, n;
    PyObject *object; /* borrowed from the program tuple */
    Tensor *tensor;
} Op;

/* Roots read the arguments; tests of torch's state read nothing. */
#define READS_REGISTER(op) \
    ((op)->code > OP_CELL && ((op)->code < OP_CALL || (op)->code > OP_GRAD))

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *program, *residual;
    Py_ssize_t n_args, n_ops, n_registers;
    Op *ops;
} Check;

/* ---- running */

static PyObject *
referent(PyObject *reference)
{
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *target;
    return PyWeakref_GetRef(reference, &target) == 1 ? target : NULL;
#else
    PyObject *target = PyWeakref_GetObject(reference);
    return target && target != Py_None ? Py_NewRef(target) : NULL;
#endif
}

static int
is_referent(PyObject *value, PyObject *reference)
{
    PyObject *target = referent(reference);
    int same = target == value;
    Py_XDECREF(target);
    return same;
}

static PyObject *
instance_dict(PyObject *value)
{
    return PyType_Check(value) ? PyObject_GetAttrString(value, "__dict__")
                               : PyObject_GenericGetDict(value, NULL);
}

static PyObject *
item(PyObject *value, PyObject *key)
{
    if (PyDict_CheckExact(value))
        return Py_XNewRef(PyDict_GetItemWithError(value, key));
    return PyObject_GetItem(value, key);
}

static PyObject *
item_at(PyObject *value, Py_ssize_t index)
{
    if (PyList_CheckExact(value))
        return index < PyList_GET_SIZE(value) ? Py_NewRef(PyList_GET_ITEM(value, index)) : NULL;
    if (PyTuple_CheckExact(value))
        return index < PyTuple_GET_SIZE(value) ? Py_NewRef(PyTuple_GET_ITEM(value, index)) : NULL;
    PyObject *key = PyLong_FromSsize_t(index);
    PyObject *result = key ? item(value, key) : NULL;
    Py_XDECREF(key);
    return result;
}

static PyObject *
cell_contents(PyObject *func, Py_ssize_t index)
{
    PyObject *closure = PyFunction_Check(func) ? PyFunction_GET_CLOSURE(func) : NULL;
    if (!closure || index >= PyTuple_GET_SIZE(closure))
        return NULL;
    return PyCell_Get(PyTuple_GET_ITEM(closure, index));
}

/* `known` is an exact str or int, so comparing runs no user code. */
static int
same_key(PyObject *key, PyObject *known)
{
    return key == known ||
           (Py_IS_TYPE(key, Py_TYPE(known)) && PyObject_RichCompareBool(key, known, Py_EQ) == 1);
}

static int
same_keys(PyObject *value, PyObject *keys)
{
    Py_ssize_t count = PyTuple_GET_SIZE(keys), position = 0, index = 0;
    PyObject *key;
    if (PyDict_CheckExact(value)) {
        if (PyDict_GET_SIZE(value) != count)
            return 0;
        while (PyDict_Next(value, &position, &key, NULL))
            if (!same_key(key, PyTuple_GET_ITEM(keys, index++)))
                return 0;
        return 1;
    }
    PyObject *listed = PySequence_List(value); /* subclasses may keep an order of their own */
    int same = listed && PyList_GET_SIZE(listed) == count;
    for (; same && index < count; index++)
        same = same_key(PyList_GET_ITEM(listed, index), PyTuple_GET_ITEM(keys, index));
    Py_XDECREF(listed);
    return same;
}

static int
test_call(PyObject *pair)
{
    PyObject *now = PyObject_CallNoArgs(PyTuple_GET_ITEM(pair, 0));
    int same = now && PyObject_RichCompareBool(now, PyTuple_GET_ITEM(pair, 1), Py_EQ) == 1;
    Py_XDECREF(now);
    return same;
}

static PyObject *
fetch(const Op *op, PyObject *const *args, PyObject **registers)
{
    switch (op->code) {
    case OP_ARG: return Py_NewRef(args[1 + op->n]);
    case OP_CONST: return Py_NewRef(op->object);
    case OP_GLOBALS:
        return PyFunction_Check(args[0]) ? Py_NewRef(PyFunction_GET_GLOBALS(args[0])) : NULL;
    case OP_CELL: return cell_contents(args[0], op->n);
    case OP_DICT: return instance_dict(registers[op->a]);
    case OP_ITEM: return item(registers[op->a], op->object);
    case OP_INDEX: return item_at(registers[op->a], op->n);
    case OP_ATTR: return PyObject_GetAttr(registers[op->a], op->object);
    default: return Py_NewRef((PyObject *)Py_TYPE(registers[op->a])); /* OP_TYPEOF */
    }
}

static int
test(const Op *op, PyObject **registers)
{
    PyObject *value = READS_REGISTER(op) ? registers[op->a] : NULL;
    switch (op->code) {
    case OP_IS: return value == op->object;
    case OP_IS_REF: return is_referent(value, op->object);
    case OP_IS_REG: return value == registers[op->n];
    case OP_TYPE: return (PyObject *)Py_TYPE(value) == op->object;
    case OP_TYPE_REF: return is_referent((PyObject *)Py_TYPE(value), op->object);
    case OP_NOT_NONE: return value != Py_None;
    case OP_EQUAL:
        return Py_IS_TYPE(value, Py_TYPE(op->object)) &&
               PyObject_RichCompareBool(value, op->object, Py_EQ) == 1;
    case OP_LENGTH: return PyObject_Size(value) == op->n;
    case OP_KEYS: return same_keys(value, op->object);
    case OP_NOT_IN:
        return (PyDict_CheckExact(value) ? PyDict_Contains(value, op->object)
                                         : PySequence_Contains(value, op->object)) == 0;
    case OP_CALL: return test_call(op->object);
    case OP_STATE: return test_state_words(op->object);
    case OP_GRAD: return torch_state.grad_mode() == op->n;
    default: return test_tensor(op->tensor, value); /* OP_TENSOR */
    }
}

#define ON_STACK 256

static PyObject *
check_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *keywords)
{
    Check *self = (Check *)callable;
    PyObject *small[ON_STACK], **registers = small;
    Py_ssize_t filled = 0, given = PyVectorcall_NARGS(flags);
    int passed = self->program != NULL; /* NULL once the garbage collector took it apart */
    if (given != self->n_args + 1 || (keywords && PyTuple_GET_SIZE(keywords))) {
        PyErr_Format(PyExc_TypeError, "check takes a function and %zd values", self->n_args);
        return NULL;
    }
    if (self->n_registers > ON_STACK &&
        !(registers = PyMem_Malloc(self->n_registers * sizeof *registers)))
        return PyErr_NoMemory();
    for (const Op *op = self->ops, *end = op + self->n_ops; passed && op < end; op++) {
        if (op->code <= OP_TYPEOF) {
            PyObject *value = fetch(op, args, registers);
            if ((passed = value != NULL))
                registers[filled++] = value;
        }
        else
            passed = test(op, registers);
    }
    while (filled)
        Py_DECREF(registers[--filled]);
    if (registers != small)
        PyMem_Free(registers);
    if (!passed) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    if (self->residual == Py_None)
        Py_RETURN_TRUE;
    return PyObject_Vectorcall(self->residual, args, flags, NULL);
}

/* ---- building */

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
        (op->code == OP_IS_REG && (op->n < 0 || op->n >= self->n_registers)) ||
        (op->code == OP_ARG && (op->n < 0 || op->n >= self->n_args)) ||
        (op->code == OP_CALL && (!PyTuple_Check(op->object) || PyTuple_GET_SIZE(op->object) != 2)) ||
        (op->code == OP_STATE && (!PyBytes_Check(op->object) ||
                                  PyBytes_GET_SIZE(op->object) != STATE_WORDS * sizeof(int64_t))) ||
        (op->code == OP_GRAD && !torch_state.grad_mode) ||
        (op->code == OP_KEYS && !PyTuple_Check(op->object)) ||
        ((op->code == OP_CELL || op->code == OP_INDEX) && op->n < 0)) {
        PyErr_Format(PyExc_ValueError, "not an instruction: %R", row);
        return -1;
    }
    if (op->code == OP_TENSOR && !(op->tensor = new_tensor(op->object)))
        return -1;
    if (op->code <= OP_TYPEOF)
        self->n_registers++;
    return 0;
}

static void
check_dealloc(PyObject *object)
{
    Check *self = (Check *)object;
    PyObject_GC_UnTrack(object);
    for (Py_ssize_t i = 0; self->ops && i < self->n_ops; i++)
        PyMem_Free(self->ops[i].tensor);
    PyMem_Free(self->ops);
    Py_XDECREF(self->program);
    Py_XDECREF(self->residual);
    Py_TYPE(object)->tp_free(object);
}

static int
check_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(((Check *)object)->program);
    Py_VISIT(((Check *)object)->residual);
    return 0;
}

static int
check_clear(PyObject *object)
{
    Py_CLEAR(((Check *)object)->program); /* from now on it answers False */
    Py_CLEAR(((Check *)object)->residual);
    return 0;
}

static PyObject *
check_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *program, *residual;
    Py_ssize_t n_args;
    if (!PyArg_ParseTuple(args, "O!nO", &PyTuple_Type, &program, &n_args, &residual))
        return NULL;
    Check *self = (Check *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->vectorcall = check_call;
    self->program = Py_NewRef(program);
    self->residual = Py_NewRef(residual);
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
    .tp_doc = "Check(program, n_args, residual): call it as check(func, *flat_locals) -> bool",
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

static PyMethodDef methods[] = {
    {"configure", configure, METH_VARARGS, "Say how to read tensors; see abi.py."},
    {"describe", describe, METH_O, "Read a tensor the way checks do."},
    {"configure_state", configure_state, METH_VARARGS, "Say how to read torch's state; see abi.py."},
    {"state_words", state_words, METH_NOARGS, "Read torch's state as bytes; None if unknown."},
    {NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods};

#define ADD_CODE(name) || PyModule_AddIntConstant(module, #name, OP_##name)

PyMODINIT_FUNC
PyInit__native(void)
{
    PyObject *module = PyType_Ready(&CheckType) ? NULL : PyModule_Create(&definition);
    if (module && (PyModule_AddObjectRef(module, "Check", (PyObject *)&CheckType)
                       INSTRUCTIONS(ADD_CODE)))
        Py_CLEAR(module);
    return module;
}
