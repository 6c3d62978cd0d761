"""What capture knows about functions it cannot look inside: builtins, the standard library, torch.

`table` holds the rows and looks a callable up; the other files fill it, one family each:

    operators   +, -, ==, in, ... on every kind of value       (entry points for the opcodes)
    builtins    len, isinstance, zip, sorted, getattr, ...
    operator_module  the operators as functions
    sequences   methods of list, tuple, set, range
    dicts       methods of dict and its views
    tensors     attributes and methods of tensors that are not simply graph nodes
    indexing    items of tensors, where the index is a symbolic int
    torch_rules which of torch's functions become graph nodes, and those answered while capturing
    stdlib      functools, itertools, operator, math, collections, copy, ...

To add a row, write a handler that takes the tracer and the arguments as values:

    @rule(bisect.bisect)
    def _bisect(tx, items, x): ...

A handler returns a value, raises `Break` to decline, or raises the program's exception with
`tx.raise_`. Wrong argument counts become the program's TypeError.
"""
