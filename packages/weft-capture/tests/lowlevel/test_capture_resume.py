"""Resume functions: cutting at every instruction gives what the uncut function gives."""

import types

import corpus
import pytest
from machine import as_function, cut_code, flat, outcome, states
from weft_capture.bytecode import decode, in_prologue, is_resume, live_at, make_resume


def case_id(value):
    return getattr(value, "__name__", str(value))


@pytest.mark.sampled
@pytest.mark.parametrize(("function", "args"), corpus.CASES, ids=case_id)
def test_every_cut(function, args):
    decoded = decode(function.__code__)
    expected = outcome(function, args)
    first = next(i for i, instr in enumerate(decoded.instrs) if instr.opname == "RESUME") + 1
    cuts = 0
    for index, state in enumerate(states(decoded)):
        if state is None or index < first:
            continue
        if live_at(decoded, index) & (state.may - state.must):
            continue  # whether such a variable is passed depends on the path that was taken
        code = cut_code(decoded, index, state.stack, state.must)

        def run(log, *rest, code=code):
            return as_function(code, function)(*flat(function, (log, *rest)))

        assert outcome(run, args) == expected, (index, decoded.instrs[index])
        cuts += 1
    assert cuts > 3


def test_same_place_gives_the_same_code():
    decoded = decode(corpus.loops.__code__)
    index = next(i for i, x in enumerate(decoded.instrs) if x.opname == "FOR_ITER")
    live = live_at(decoded, index)
    assert make_resume(decoded, index, (True,), live) is make_resume(decoded, index, [True], live)


def test_resume_of_a_resume_is_one_of_the_original():
    decoded = decode(corpus.loops.__code__)
    index = next(i for i, x in enumerate(decoded.instrs) if x.opname == "FOR_ITER")
    resume = make_resume(decoded, index, (True,), live_at(decoded, index))
    again = decode(resume.code)
    place = next(i for i, x in enumerate(again.instrs) if x.opname == "FOR_ITER")
    assert make_resume(again, place, (True,), live_at(again, place)) is resume
    assert is_resume(resume.code) and not is_resume(corpus.loops.__code__)
    assert in_prologue(again, 2) and not in_prologue(again, place)
    with pytest.raises(ValueError, match="rebuilds its stack"):
        make_resume(again, 2, (True,))


def test_the_rest_of_a_documented_function_has_no_docstring_to_look_for():
    def documented(x):
        """Text that is the first constant of this code only."""
        return x

    decoded = decode(documented.__code__)
    end = next(i for i, instr in enumerate(decoded.instrs) if instr.opname == "RETURN_VALUE")
    rest = make_resume(decoded, end, (True,), ())
    assert types.FunctionType(rest.code, {})(3) == 3
