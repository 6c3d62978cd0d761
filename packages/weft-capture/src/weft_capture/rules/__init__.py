"""What calls of builtins, library functions and torch functions mean during capture.

How to add a row
----------------
Rules live in a table keyed by the real callable. A row says for which kinds of arguments it holds
and what to do; the first row that fits wins, rows added later are asked first:

    from weft_capture.rules.table import rule, foldable, inline, graph_function

    @rule(len, ListValue)                    # positional kinds; `...` at the end: any further ones
    def _(tx, items):
        return constant(len(items.items))

    @rule(isinstance, Value, Value)          # Value fits everything
    def _(tx, obj, classinfo): ...

    @rule(dict, ..., keywords=True)          # rows with keywords=True also take keyword arguments
    def _(tx, *args, **kwargs): ...

    foldable(math.sqrt, str.join)            # side-effect free: run now when all args are constant
    graph_function(torch.special.gammaln)    # becomes a call_function node (C functions of torch
                                             # do by default)
    inline(functools.reduce, py_reduce)      # trace this Python body in its place

A handler gets the tracer and `Value`s and returns a `Value` (`NONE` for None). It may return
`NotImplemented` to pass to the next row; it raises `Break(code, detail)` (codes: `breaks.REASONS`)
for what cannot be captured and calls `tx.raise_(TypeError, "...")` where Python would raise.

Operators are rows of the functions in `operator`: `a + b` asks `operator.add`; `a += b` asks
`operator.iadd` and then `operator.add`; comparisons ask `operator.lt` and so on; `in` asks
`operator.contains`. Methods of builtin types are rows of the kinds' method tables instead:

    @method(ListValue, "append")             # values.base.method
    def _(tx, self, item):
        tx.mutate(self)                      # before every change of a MutableValue
        self.items.append(item)
        return NONE

Useful on `tx`: `tx.call(value, *args)`, `tx.literal(py_object)` (Python data to values),
`tx.tuple_of(items)`, `tx.iterator_over(items)`, `tx.builtin(fn, *values)` (ask the table),
`value.unpack(tx)` (all items of an iterable), `value.truth(tx)`, `value.is_constant()`,
`value.as_constant()`, `tx.graph.emit("call_function", fn, args, kwargs)`.
"""
