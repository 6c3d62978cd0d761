"""Rules for functions that capture cannot inline: builtins, the standard library, torch.

`table` holds the rows and looks a callable up; the other files fill it, one family each. A row is
a handler under `@rule(bisect.bisect)` that takes the tracer and the arguments as values. It returns
a value, raises `Break` to decline, or raises the program's exception with `tx.raise_`.
"""
