/* What code took from a class: names found in it or its bases, and names found nowhere.
 *
 * A class has a version that changes with every change of it or of a base, and that is never used
 * again; as long as it is the one last seen, nothing is compared. When it differs, Python looks
 * every name up again, so that a change of anything else only costs that once.
 */
#ifndef WEFT_GUARDS_CLASSES_H
#define WEFT_GUARDS_CLASSES_H

#include "python_compat.h"

static int
is_referent(PyObject *value, PyObject *reference)
{
    PyObject *target = referent(reference);
    int same = target == value;
    Py_XDECREF(target);
    return same;
}

/* Looking anything up gives a class a version. */
static unsigned int
class_version_of(PyObject *cls)
{
    PyObject *name = PyUnicode_InternFromString("__class__");
    if (name) {
        _PyType_Lookup((PyTypeObject *)cls, name);
        Py_DECREF(name);
    }
    return ((PyTypeObject *)cls)->tp_version_tag;
}

static PyObject *
class_version(PyObject *module, PyObject *cls)
{
    if (!PyType_Check(cls))
        return PyErr_Format(PyExc_TypeError, "class_version takes a class");
    return PyLong_FromUnsignedLong(class_version_of(cls));
}

/* Whether the class that a weak reference gives is the version last seen. */
static int
same_version(PyObject *reference, uint64_t version)
{
    PyObject *cls = referent(reference);
    int same = cls && version && ((PyTypeObject *)cls)->tp_version_tag == version;
    Py_XDECREF(cls);
    return same;
}

/* `use` is a tuple (class reference, first version, test); the test is None where only the version
 * can tell, else a Python function that looks the names up again. */
static int
test_class(PyObject *use, uint64_t *version)
{
    PyObject *test = PyTuple_GET_ITEM(use, 2);
    if (same_version(PyTuple_GET_ITEM(use, 0), *version))
        return 1;
    PyObject *cls = test == Py_None ? NULL : referent(PyTuple_GET_ITEM(use, 0));
    PyObject *answer = cls ? PyObject_CallOneArg(test, cls) : NULL;
    int same = answer == Py_True;
    if (same)
        *version = class_version_of(cls);
    Py_XDECREF(answer);
    Py_XDECREF(cls);
    return same;
}

#endif
