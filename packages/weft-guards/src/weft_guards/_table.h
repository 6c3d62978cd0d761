/* The entries of one code object, as the frame hook asks for them: (func, *flat_locals) -> code.
 *
 * The entry hit last is kept in front. The rows are an immutable tuple that is swapped whole, so a
 * lookup needs no lock. Included by _native.c, which defines Check and run_check().
 */
#ifndef WEFT_GUARDS_TABLE_H
#define WEFT_GUARDS_TABLE_H

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *rows; /* tuple of (check, code, entry) */
    unsigned long long hits, misses;
} Table;

/* Put the row that was hit in front, unless the rows were changed meanwhile. */
static void
move_to_front(Table *self, PyObject *rows, Py_ssize_t index)
{
    PyObject *moved = self->rows == rows ? PyTuple_New(PyTuple_GET_SIZE(rows)) : NULL;
    if (!moved) {
        PyErr_Clear();
        return;
    }
    PyTuple_SET_ITEM(moved, 0, Py_NewRef(PyTuple_GET_ITEM(rows, index)));
    for (Py_ssize_t from = 0, to = 1; from < PyTuple_GET_SIZE(rows); from++)
        if (from != index)
            PyTuple_SET_ITEM(moved, to++, Py_NewRef(PyTuple_GET_ITEM(rows, from)));
    Py_SETREF(self->rows, moved);
}

/* 1 when the check holds, 0 when not, -1 with an exception. */
static int
passes(PyObject *check, PyObject *const *args, Py_ssize_t given)
{
    if (Py_IS_TYPE(check, &CheckType))
        return run_check((Check *)check, args, given);
    PyObject *answer = PyObject_Vectorcall(check, args, given, NULL);
    int holds = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return holds;
}

static PyObject *
table_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *keywords)
{
    Table *self = (Table *)callable;
    PyObject *rows = Py_NewRef(self->rows), *code = Py_None;
    int holds = 0;
    for (Py_ssize_t i = 0; !holds && i < PyTuple_GET_SIZE(rows); i++) {
        PyObject *row = PyTuple_GET_ITEM(rows, i);
        holds = passes(PyTuple_GET_ITEM(row, 0), args, PyVectorcall_NARGS(flags));
        if (holds <= 0)
            continue;
        code = PyTuple_GET_ITEM(row, 1);
        if (i)
            move_to_front(self, rows, i);
    }
    *(holds ? &self->hits : &self->misses) += 1;
    code = holds < 0 ? NULL : Py_NewRef(code);
    Py_DECREF(rows);
    return code;
}

static void
table_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    Py_XDECREF(((Table *)object)->rows);
    Py_TYPE(object)->tp_free(object);
}

static int
table_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(((Table *)object)->rows);
    return 0;
}

static int
table_clear(PyObject *object)
{
    Py_SETREF(((Table *)object)->rows, PyTuple_New(0));
    return 0;
}

static PyObject *
table_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    Table *self = (Table *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->vectorcall = table_call;
    self->rows = PyTuple_New(0);
    return (PyObject *)self;
}

static PyMemberDef table_members[] = {
    {"rows", T_OBJECT_EX, offsetof(Table, rows), 0, "(check, code, entry), the one hit last in front"},
    {"hits", T_ULONGLONG, offsetof(Table, hits), 0, "lookups that found code"},
    {"misses", T_ULONGLONG, offsetof(Table, misses), 0, "lookups that found none"},
    {NULL},
};

static PyTypeObject TableType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "weft_guards._native.Table",
    .tp_doc = "Table(): call it as table(func, *flat_locals) -> code or None",
    .tp_basicsize = sizeof(Table),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Table, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = table_new,
    .tp_dealloc = table_dealloc,
    .tp_traverse = table_traverse,
    .tp_clear = table_clear,
    .tp_members = table_members,
};

#endif
