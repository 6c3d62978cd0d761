"""`Writer`: code written with it does what the same Python would."""

import operator
import types

import pytest
from weft_capture.bytecode import AssemblyError, Writer, decode, make_resume


def function(writer, like, closure=None):
    """A callable of the finished code."""
    return types.FunctionType(writer.finish(), like.__globals__, "w", None, closure)


def sample(a, b, *args, k=1, **kw):
    return a


def test_flat_arguments():
    writer = Writer(decode(sample.__code__))
    for name in ("a", "b", "k", "args", "kw"):
        writer.load_local(name)
    writer.build_tuple(5)
    writer.return_()
    written = function(writer, sample)
    assert written(1, 2, 3, (4,), {"z": 5}) == (1, 2, 3, (4,), {"z": 5})
    assert written.__code__.co_posonlyargcount == 5


def test_calls_nest_and_take_keywords():
    writer = Writer(decode(sample.__code__))
    seen = []

    def callee(*args, **kwargs):
        seen.append((args, kwargs))
        return callee if not args else sum(args)

    writer.begin_call()
    writer.begin_call()  # the callable is itself the result of a call
    writer.load_const(callee)
    writer.call(0)
    writer.load_local("a")
    writer.begin_call()
    writer.load_const(types.SimpleNamespace(inner=callee))
    writer.load_attr("inner")
    writer.load_const(10)
    writer.load_const(20)
    writer.call(2)
    writer.load_const(5)
    writer.call(3, ("key",))
    writer.return_()
    assert function(writer, sample)(1, 0, 0, (), {}) == 31
    assert seen == [((), {}), ((10, 20), {}), ((1, 30), {"key": 5})]


def test_methods_and_containers():
    writer = Writer(decode(sample.__code__))
    writer.begin_call()
    writer.load_const("{}-{x}")
    writer.load_attr("format")
    writer.load_const(1)
    writer.load_const(2)
    writer.call(2, ("x",))
    writer.begin_call()
    writer.load_const(dict)
    writer.load_const("k")
    writer.load_local("a")
    writer.build_map(1)
    writer.call(1)
    writer.load_const([1, 2, 3])
    writer.load_const(1)
    writer.load_const(None)
    writer.build_slice(2)
    writer.binary_subscr()
    writer.build_tuple(3)
    writer.return_()
    assert function(writer, sample)(7, 0, 0, (), {}) == ("1-2", {"k": 7}, [2, 3])


def test_jumps_forward_and_backward():
    writer = Writer(decode(sample.__code__))
    top, done = writer.label(), writer.label()
    writer.load_const(0)
    writer.store_local("total")
    writer.mark(top)
    writer.begin_call()
    writer.load_const(operator.add)
    writer.load_local("total")
    writer.load_local("a")
    writer.call(2)
    writer.store_local("total")
    writer.begin_call()
    writer.load_const(operator.le)
    writer.load_local("total")
    writer.load_const(20)
    writer.call(2)
    writer.pop_jump_if_false(done)
    writer.load_local("b")
    writer.pop_jump_if_false(done)
    writer.jump(top)
    writer.mark(done)
    writer.load_local("total")
    writer.return_()
    written = function(writer, sample)
    assert written(6, 1, 0, (), {}) == 24
    assert written(6, None, 0, (), {}) == 6


def test_stack_moves():
    writer = Writer(decode(sample.__code__))
    for value in "abcd":
        writer.load_const(value)
    writer.swap(3)
    writer.swap(2)
    writer.build_tuple(4)
    writer.return_()
    assert function(writer, sample)(0, 0, 0, (), {}) == ("a", "d", "b", "c")


def test_long_code_needs_extended_arguments():
    writer = Writer(decode(sample.__code__))
    end = writer.label()
    writer.load_local("a")
    writer.pop_jump_if_false(end)
    for value in range(400):
        writer.load_const(object() if value % 2 else value)
        writer.store_local(f"v{value}")
    writer.load_local("v398")
    writer.return_()
    writer.mark(end)
    writer.load_const("skipped")
    writer.return_()
    written = function(writer, sample)
    assert (written(1, 0, 0, (), {}), written(0, 0, 0, (), {})) == (398, "skipped")


def make_closure(start):
    def outer(step):
        count = start

        def inner():
            nonlocal count
            count += step
            return count + start

        return inner

    return outer


def test_cells_and_free_variables():
    outer = make_closure(100)
    inner_code = next(c for c in outer.__code__.co_consts if isinstance(c, types.CodeType))
    writer = Writer(decode(outer.__code__))
    writer.begin_call()
    writer.load_const(operator.add)
    writer.load_cell("start")
    writer.load_const(1)
    writer.call(2)
    writer.store_local("count")
    writer.make_function(inner_code)
    writer.return_()
    inner = function(writer, outer, outer.__closure__)(5)
    assert (inner(), inner()) == (206, 211)


def guarded(log, value):
    for item in (1, 2, 0, 4):
        try:
            value = value + 10 // item
        except ZeroDivisionError as error:
            log.append(str(error))
        log.append(value)
    return value


def test_original_instruction_runs_in_its_handler():
    decoded = decode(guarded.__code__)
    index = next(
        i for i, x in enumerate(decoded.instrs) if x.opname == "BINARY_OP" and x.argval == "//"
    )
    resume = make_resume(decoded, index + 1, (True, True, True), ("log", "value"))
    writer = Writer(decoded)
    writer.load_const(iter(()))
    writer.load_local("value")
    writer.load_const(10)
    writer.load_local("item_in")
    writer.original(index)
    writer.call_resume(resume)
    with pytest.raises(UnboundLocalError, match="item_in"):
        function(writer, guarded)([], 1)

    for divisor, expected in ((5, 3), (0, 1)):
        writer = Writer(decoded)
        writer.load_const(iter(()))
        writer.load_local("value")
        writer.load_const(10)
        writer.load_const(divisor)
        writer.original(index)
        writer.call_resume(resume)
        log: list = []
        assert function(writer, guarded)(log, 1) == expected
        assert log[-1] == expected
        assert (len(log) == 2) == (divisor == 0)


def test_bad_programs_are_refused():
    writer = Writer(decode(sample.__code__))
    writer.pop()
    writer.return_()
    with pytest.raises(AssemblyError, match="more than the stack holds"):
        writer.finish()
    writer = Writer(decode(sample.__code__))
    writer.begin_call()
    writer.load_const(print)
    with pytest.raises(ValueError, match="takes 2 arguments, 0 were pushed"):
        writer.call(2)
    writer = Writer(decode(sample.__code__))
    writer.jump(writer.label())
    with pytest.raises(AssemblyError, match="never placed"):
        writer.finish()


def looping(items, out):
    for item in items:
        out.append(item)
    return out


def test_original_for_iter_branches():
    decoded = decode(looping.__code__)
    index = next(i for i, x in enumerate(decoded.instrs) if x.opname == "FOR_ITER")
    target = decoded.instrs[index].target
    writer = Writer(decoded)
    done = writer.label()
    writer.load_local("items")
    writer.original(index, done)
    writer.call_resume(make_resume(decoded, index + 1, (True, True), ("out",)))
    writer.mark(done)
    writer.call_resume(make_resume(decoded, target, (), ("out",)))
    written = function(writer, looping)
    assert written(iter([1, 2, 3]), []) == [1, 2, 3]
    assert written(iter([]), [0]) == [0]
