/* What code took from the globals of a library's module: functions found under names.
 *
 * Up to 3.13 a dict has a version that changes with every change of it. From 3.14 on a watcher counts
 * the changes of all such dicts. As long as that number is the one last seen, nothing is compared;
 * when it differs, Python looks the names up again.
 */
#ifndef WEFT_GUARDS_NAMESPACES_H
#define WEFT_GUARDS_NAMESPACES_H

#include <Python.h>
#include <stdint.h>

#if PY_VERSION_HEX < 0x030E0000

static inline uint64_t
namespace_version(PyObject *dict)
{
    return ((PyDictObject *)dict)->ma_version_tag;
}

static int
watch_namespace(PyObject *dict)
{
    return 0;
}

#else

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

#endif

/* Whether the dict of a use is the version last seen. */
static inline int
same_namespace(PyObject *use, uint64_t version)
{
    return version && namespace_version(PyTuple_GET_ITEM(use, 0)) == version;
}

/* `use` is a tuple (dict, test); the test is a Python function that looks the names up again. */
static int
test_namespace(PyObject *use, uint64_t *version)
{
    if (same_namespace(use, *version))
        return 1;
    uint64_t now = namespace_version(PyTuple_GET_ITEM(use, 0));
    PyObject *answer = PyObject_CallNoArgs(PyTuple_GET_ITEM(use, 1));
    int same = answer == Py_True;
    if (same)
        *version = now;
    Py_XDECREF(answer);
    return same;
}

#endif
