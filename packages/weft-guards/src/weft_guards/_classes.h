/* What code took from a class: names found in it or its bases, and names found nowhere.
 *
 * A class has a version that changes with every change of it or of a base, and that is never used
 * again; as long as it is the one last seen, nothing is compared. When it differs, every name is
 * looked up again, so that a change of anything else only costs that once.
 */
#ifndef WEFT_GUARDS_CLASSES_H
#define WEFT_GUARDS_CLASSES_H

#include <Python.h>

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

/* Borrowed or NULL; runs no user code, and gives the class a version. */
static PyObject *
class_lookup(PyObject *cls, PyObject *name)
{
    return _PyType_Lookup((PyTypeObject *)cls, name);
}

static unsigned int
class_version_of(PyObject *cls)
{
    PyObject *name = PyUnicode_InternFromString("__class__");
    if (name) {
        class_lookup(cls, name);
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

/* `wanted` is None (found nowhere), a weak reference, or a tuple that holds the object itself. */
static int
is_as_wanted(PyObject *found, PyObject *wanted)
{
    if (wanted == Py_None || !found)
        return wanted == Py_None && !found;
    if (PyTuple_Check(wanted))
        return found == PyTuple_GET_ITEM(wanted, 0);
    return is_referent(found, wanted);
}

/* `uses` is a tuple (class reference, first version, ((name, wanted), ...)); the names are None
 * where only the version can tell. */
static int
test_class(PyObject *uses, unsigned int *version)
{
    PyObject *cls = referent(PyTuple_GET_ITEM(uses, 0)), *names = PyTuple_GET_ITEM(uses, 2);
    if (!cls)
        return 0;
    unsigned int now = ((PyTypeObject *)cls)->tp_version_tag;
    int same = now != 0 && now == *version;
    if (!same && names != Py_None) {
        same = 1;
        for (Py_ssize_t i = 0; same && i < PyTuple_GET_SIZE(names); i++) {
            PyObject *row = PyTuple_GET_ITEM(names, i);
            PyObject *found = class_lookup(cls, PyTuple_GET_ITEM(row, 0));
            same = is_as_wanted(found, PyTuple_GET_ITEM(row, 1));
        }
        if (same)
            *version = ((PyTypeObject *)cls)->tp_version_tag;
    }
    Py_DECREF(cls);
    return same;
}

static int
is_class_use(PyObject *uses)
{
    if (!PyTuple_Check(uses) || PyTuple_GET_SIZE(uses) != 3 ||
        !PyLong_Check(PyTuple_GET_ITEM(uses, 1)))
        return 0;
    PyObject *names = PyTuple_GET_ITEM(uses, 2);
    if (names == Py_None)
        return 1;
    int fits = PyTuple_Check(names);
    for (Py_ssize_t i = 0; fits && i < PyTuple_GET_SIZE(names); i++) {
        PyObject *row = PyTuple_GET_ITEM(names, i);
        fits = PyTuple_Check(row) && PyTuple_GET_SIZE(row) == 2 &&
               PyUnicode_CheckExact(PyTuple_GET_ITEM(row, 0));
    }
    return fits;
}

#endif
