"""The frame-evaluation hook: replacement code for chosen functions, per thread.

    run(on_miss, func, *args, **kwargs)   call func with the hook on (off with on_miss None)
    set_lookup(code, lookup)              lookup(func, *flat_args) -> code object or None;
                                          with a third argument on_miss, in its runs only
    skip(code), forget(code)              never intercept / ask again; skip(code, True): nor
                                          what is called from there
    is_active()                           whether the hook is on in this thread
    tail_call(func, *args)                a replacement returns it to end with func(*args)
    enter([func, *args])                  call func, which then alone holds its arguments

flat_args are the frame's arguments in co_varnames order: positional, keyword-only, the *args
tuple, the **kwargs dict. On a code object without state, or when its lookup returns None,
on_miss(func, code, flat_args_tuple) gives the code to run or None to run the frame as it is; it
should call set_lookup or skip, or it is asked again at the next call. A replacement takes the flat
arguments as positionals and has the function's free variables. Lookups, on_miss and what they call
are not intercepted. Generators and coroutines never are.
"""

from __future__ import annotations

from ._hook import enter, forget, is_active, run, set_lookup, skip, tail_call

__all__ = ["enter", "forget", "is_active", "run", "set_lookup", "skip", "tail_call"]
