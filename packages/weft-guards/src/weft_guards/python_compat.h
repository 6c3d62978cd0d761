/* Everything in guards that differs between CPython 3.11, 3.12, 3.13 and 3.14.
 *
 * referent(ref)              what a weak reference refers to, a new reference, or NULL
 * version_of(dict)           a number that changes with every change of the dict. 3.14 has none.
 * version_tells(dict)        whether it does: from 3.13 on not where an instance keeps the items,
 *                            which then changes them past the version
 * namespace_version(dict)    such a number for the globals of a module; from 3.14 on it counts the
 *                            changes of all watched dicts
 * watch_namespace(dict)      to be called before; 0 or -1 with an error
 */
#ifndef WEFT_GUARDS_PYTHON_COMPAT_H
#define WEFT_GUARDS_PYTHON_COMPAT_H

#include <Python.h>
#include <stdint.h>

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

#if PY_VERSION_HEX >= 0x030E0000

#define version_of(dict) ((uint64_t)0)
#define version_tells(dict) 0

static uint64_t namespace_changes = 1;
static int namespace_watcher = -1;

static int
note_change(PyDict_WatchEvent event, PyObject *dict, PyObject *key, PyObject *value)
{
    namespace_changes++;
    return 0;
}

static inline uint64_t
namespace_version(PyObject *dict)
{
    return namespace_watcher < 0 ? 0 : namespace_changes;
}

static int
watch_namespace(PyObject *dict)
{
    if (namespace_watcher < 0 && (namespace_watcher = PyDict_AddWatcher(note_change)) < 0) {
        PyErr_Clear(); /* all are taken: names are looked up at each run */
        return 0;
    }
    return PyDict_Watch(namespace_watcher, dict);
}

#else

static inline uint64_t
version_of(PyObject *dict)
{
    return ((PyDictObject *)dict)->ma_version_tag;
}

#if PY_VERSION_HEX >= 0x030D0000
#define version_tells(dict) (((PyDictObject *)(dict))->ma_values == NULL)
#else
#define version_tells(dict) 1
#endif

#define namespace_version version_of
#define watch_namespace(dict) 0

#endif

#endif
