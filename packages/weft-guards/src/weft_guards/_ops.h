/* The instruction set of checks: reads that fill the next register, and tests. */
#ifndef WEFT_GUARDS_OPS_H
#define WEFT_GUARDS_OPS_H

#include <Python.h>

#include "_shape_vm.h"
#include "_classes.h"
#include "_memory.h"
#include "_namespaces.h"
#include "_state.h"
#include "_tensor.h"

/* Rows of this table are the instruction set; native.py reads the names from the module. */
#define INSTRUCTIONS(X)                                                                          \
    X(ARG)       /* next = argument n */                                                         \
    X(CONST)     /* next = object */                                                             \
    X(GLOBALS)   /* next = the function's globals */                                             \
    X(CELL)      /* next = contents of the function's n-th cell */                               \
    X(REF)       /* next = object(), a weak reference */                                         \
    X(DICT)      /* next = instance dict of a */                                                 \
    X(ITEM)      /* next = a[object] */                                                          \
    X(INDEX)     /* next = a[n] */                                                               \
    X(ITEM_OF)   /* next = a[register n]; object is Tensor.__hash__ */                           \
    X(ATTR)      /* next = a.object */                                                           \
    X(CODE)      /* next = code of the function a */                                             \
    X(TYPEOF)    /* next = type(a) */                                                            \
    X(IS)        /* a is object */                                                               \
    X(IS_REF)    /* a is object(), a weak reference */                                           \
    X(IS_REG)    /* a is register n */                                                           \
    X(IS_NOT)    /* a is not register n */                                                       \
    X(TYPE)      /* type(a) is object */                                                         \
    X(TYPE_REF)  /* type(a) is object(), a weak reference */                                     \
    X(EQUAL)     /* same type and equal; object is an int, str, bytes or ordinary float */       \
    X(LENGTH)    /* len(a) == n */                                                               \
    X(KEYS)      /* list(a) == object: exact str and int, types too, and weak references */      \
    X(NOT_IN)    /* object not in a */                                                           \
    X(STATE)     /* torch's state is object, the bytes of state_words(); reads no register */    \
    X(GRAD)      /* grad mode is n; reads no register */                                         \
    X(CLASS)     /* names of a class mean what object says; reads no register */                 \
    X(NAMESPACE) /* names of a module mean what object says; reads no register */                \
    X(SHAPE)     /* amounts are as the code object says (see _shape_vm.h); reads no register */   \
    X(MEMORY)    /* n tensors are to follow; reads no register */                                \
    X(WRITES)    /* tensor a is written, and shares memory with none before */                   \
    X(READS)     /* tensor a shares memory with none that is written */                          \
    X(SIZE)      /* next amount = size n of tensor a */                                          \
    X(STRIDE)    /* next amount = stride n of tensor a */                                        \
    X(INT)       /* next amount = int a */                                                       \
    X(TENSOR)    /* a is the tensor that object describes */

#define AS_ENUM(name) OP_##name,
enum { INSTRUCTIONS(AS_ENUM) N_INSTRUCTIONS };

typedef struct {
    int code;
    Py_ssize_t a, n;
    PyObject *object; /* borrowed from the program tuple */
    Tensor *tensor;
    uint64_t version; /* of the class or dict, when it was last compared */
    Py_ssize_t amount;    /* the amount that it reads */
} Op;

#define IS_FETCH(op) ((op)->code <= OP_TYPEOF)
#define IS_AMOUNT(op) ((op)->code >= OP_SIZE && (op)->code <= OP_INT)
#define READS_OTHER(op) \
    ((op)->code == OP_IS_REG || (op)->code == OP_IS_NOT || (op)->code == OP_ITEM_OF)
#define OTHER(op, from) (READS_OTHER(op) ? &(from)[(op)->n] : NULL)
/* Roots read the arguments; tests of state and classes read nothing. */
#define READS_REGISTER(op) \
    ((op)->code > OP_REF && ((op)->code < OP_STATE || (op)->code > OP_MEMORY))

/* A dict that nobody has asked for yet is not made: the merging of partials can tell. */
static PyObject *
instance_dict(PyObject *value)
{
    if (PyType_Check(value))
        return PyObject_GetAttrString(value, "__dict__");
    int managed = PyType_HasFeature(Py_TYPE(value), Py_TPFLAGS_MANAGED_DICT);
    PyObject **slot = managed ? NULL : _PyObject_GetDictPtr(value);
    return slot && !*slot ? PyDict_New() : PyObject_GenericGetDict(value, NULL);
}

/* Whether value[key] is a dict's own; a defaultdict's is, but for making what it misses. */
static int
reads_as_dict(PyObject *value)
{
    return PyDict_Check(value) && Py_TYPE(value)->tp_as_mapping->mp_subscript ==
                                      PyDict_Type.tp_as_mapping->mp_subscript;
}

static PyObject *
item(PyObject *value, PyObject *key)
{
    if (reads_as_dict(value))
        return Py_XNewRef(PyDict_GetItemWithError(value, key));
    return PyObject_GetItem(value, key);
}

/* Whether a key is a tensor that hashes as torch's do, by its address: no Python needs to run. */
static int
hashes_by_address(PyObject *key, PyObject *torch_hash)
{
    static PyObject *name;
    if (!name && !(name = PyUnicode_InternFromString("__hash__")))
        return 0;
    return _PyType_Lookup(Py_TYPE(key), name) == torch_hash;
}

static PyObject *
item_of(PyObject *value, PyObject *key, PyObject *torch_hash)
{
    if (reads_as_dict(value) && hashes_by_address(key, torch_hash))
        return Py_XNewRef(_PyDict_GetItem_KnownHash(value, key, (Py_hash_t)key));
    return item(value, key);
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

/* `known` is an exact str or int, so comparing runs no user code, or a weak reference. */
static int
same_key(PyObject *key, PyObject *known)
{
    if (PyWeakref_CheckRef(known))
        return is_referent(key, known);
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

/* New reference to what an instruction reads, from `base` where it reads a register; or NULL.
 * `other` is register n of ITEM_OF. */
static PyObject *
fetch(const Op *op, PyObject *const *args, PyObject *base, PyObject *other)
{
    switch (op->code) {
    case OP_ARG: return Py_NewRef(args[1 + op->n]);
    case OP_CONST: return Py_NewRef(op->object);
    case OP_GLOBALS:
        return PyFunction_Check(args[0]) ? Py_NewRef(PyFunction_GET_GLOBALS(args[0])) : NULL;
    case OP_CELL: return cell_contents(args[0], op->n);
    case OP_REF: return referent(op->object);
    case OP_DICT: return instance_dict(base);
    case OP_ITEM: return item(base, op->object);
    case OP_INDEX: return item_at(base, op->n);
    case OP_ITEM_OF: return item_of(base, other, op->object);
    case OP_ATTR: return PyObject_GetAttr(base, op->object);
    case OP_CODE: return PyFunction_Check(base) ? Py_NewRef(PyFunction_GET_CODE(base)) : NULL;
    default: return Py_NewRef((PyObject *)Py_TYPE(base)); /* OP_TYPEOF */
    }
}

/* Run a test on `value` (NULL where it reads no register): 1, 0 or UNSURE. `other` is register n of
 * IS_REG and IS_NOT; `amounts` are those read so far. */
static int
test(Op *op, PyObject *value, PyObject *other, int64_t *amounts)
{
    switch (op->code) {
    case OP_IS: return value == op->object;
    case OP_IS_REF: return is_referent(value, op->object);
    case OP_IS_REG: return value == other;
    case OP_IS_NOT: return value != other;
    case OP_TYPE: return (PyObject *)Py_TYPE(value) == op->object;
    case OP_TYPE_REF: return is_referent((PyObject *)Py_TYPE(value), op->object);
    case OP_EQUAL:
        return Py_IS_TYPE(value, Py_TYPE(op->object)) &&
               PyObject_RichCompareBool(value, op->object, Py_EQ) == 1;
    case OP_LENGTH: return PyObject_Size(value) == op->n;
    case OP_KEYS: return same_keys(value, op->object);
    case OP_NOT_IN:
        return (PyDict_CheckExact(value) ? PyDict_Contains(value, op->object)
                                         : PySequence_Contains(value, op->object)) == 0;
    case OP_STATE: return test_state_words(op->object);
    case OP_GRAD: return torch_state.grad_mode() == op->n;
    case OP_CLASS: return test_class(op->object, &op->version);
    case OP_NAMESPACE: return test_namespace(op->object, &op->version);
    case OP_SHAPE: return test_shape(op->object, amounts);
    case OP_MEMORY: return begin_memory(op->n);
    case OP_WRITES: case OP_READS: return note_storage(value, op->code == OP_WRITES);
    case OP_SIZE: return read_extent(torch_abi.sizes, value, op->n, &amounts[op->amount]);
    case OP_STRIDE: return read_extent(torch_abi.strides, value, op->n, &amounts[op->amount]);
    case OP_INT: return read_int(value, &amounts[op->amount]);
    default: return test_tensor(op->tensor, value); /* OP_TENSOR */
    }
}

#endif
