/* What code took from the globals of a library's module: functions found under names.
 *
 * As long as the version of the dict is the one last seen, nothing is compared; when it differs,
 * Python looks the names up again.
 */
#ifndef WEFT_GUARDS_NAMESPACES_H
#define WEFT_GUARDS_NAMESPACES_H

#include "python_compat.h"

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
