/* Whether tensors that are written share memory with any other: MEMORY, then WRITES and READS.
 *
 * MEMORY empties a table of storages; WRITES enters a storage and fails when it is there already;
 * READS fails when a written tensor has its storage. The rows of one guard follow each other, and
 * nothing between them gives up the GIL, so one table serves all.
 */
#ifndef WEFT_GUARDS_MEMORY_H
#define WEFT_GUARDS_MEMORY_H

#include "_tensor.h"

static struct {
    uintptr_t *places; /* 0: free */
    size_t room, mask; /* powers of two, at most half full */
} storages;

static int
begin_memory(Py_ssize_t tensors)
{
    size_t needed = 16;
    while (needed < 2 * (size_t)tensors)
        needed *= 2;
    if (needed > storages.room) {
        uintptr_t *places = PyMem_RawRealloc(storages.places, needed * sizeof *places);
        if (!places)
            return 0;
        storages.places = places;
        storages.room = needed;
    }
    storages.mask = needed - 1;
    memset(storages.places, 0, needed * sizeof *storages.places);
    return 1;
}

/* 1 when no written tensor before had this one's storage. */
static int
note_storage(PyObject *value, int written)
{
    uintptr_t storage;
    if (!PyObject_TypeCheck(value, torch_abi.tensor_type))
        return 0;
    char *impl = *(char **)((char *)value + torch_abi.handle_offset);
    memcpy(&storage, impl + torch_abi.storage_offset, sizeof storage);
    if (!storage)
        return 1;
    size_t place = (storage >> 4) * 0x9E3779B97F4A7C15u >> 20 & storages.mask;
    for (; storages.places[place]; place = (place + 1) & storages.mask)
        if (storages.places[place] == storage)
            return 0;
    if (written)
        storages.places[place] = storage;
    return 1;
}

#endif
