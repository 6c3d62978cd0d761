"""Texts of rewritten frames: what they look like, that they run, and what makes them."""

import linecache
import subprocess
import sys
import textwrap

import pytest
import torch
import weft_capture
from weft_capture.bytecode.decompile import decompile
from weft_capture.bytecode.decompile_state import NotExpressible
from weft_capture.output.frame_code import FrameCode, FrameNames, show_code
from weft_core import events
from weft_core.errors import InvalidArgument


def run_graph(graph, inputs):
    return graph.forward


def branches(a, b):
    x = a / (a.abs() + 1)
    if b.sum() < 0:
        b = b * -1
    return x * b


@pytest.fixture
def compiled():
    optimised = weft_capture.capture(branches, run_graph)
    yield optimised
    optimised._weft_capture.forget()


def test_a_frame_with_a_break_reads_like_a_function(compiled, capsys):
    compiled(torch.ones(3), -torch.ones(3))
    capsys.readouterr()
    text = show_code(compiled)
    assert capsys.readouterr().out == text
    line = branches.__code__.co_firstlineno
    frame = text[text.index("def branches(") :].partition("\n\n")[0]
    assert frame == textwrap.dedent(
        f"""\
        def branches(a, b):
            try:
                graph_result = __compiled_0(a, b)
            except BaseException as error:
                if __if_raised(error, Exception, True) is not None:
                    raise error
                return __original_branches(a, b)
            x = graph_result[0]
            value = graph_result[1]
            del graph_result
            if not value:
                return __resume_at_{line + 4}(b, x)
            return __resume_at_{line + 3}(b, x)"""
    )
    assert f"# -> {line + 3:4} |         b = b * -1\n" in text
    assert f"def __resume_at_{line + 3}(b, x):" in text
    assert f"<resume at {line + 4}> ({__file__}:{line}): runs as it is" in text  # not yet reached
    assert "L['a'] is a Tensor float32[3]" in text and "# __compiled_0: a compiled graph" in text
    compile(text, "listing", "exec")


def test_a_listing_shows_each_entry_and_nothing_before_the_first_call(compiled):
    assert show_code(compiled) == "# Nothing is compiled yet for branches.\n"
    for size in (3, 4):
        compiled(torch.ones(size), torch.ones(size))
    text = show_code(compiled)
    assert text.count("def branches(a, b):") == 2 and ", entry 2 of 2\n" in text


def test_a_function_that_is_not_compiled_is_refused():
    with pytest.raises(InvalidArgument, match="show_code takes what"):
        show_code(branches)


def test_a_text_runs_by_itself(compiled):
    a, b = torch.ones(3), -torch.ones(3)
    compiled(a, b)
    (entry,) = compiled._weft_capture.caches[branches.__code__].entries
    names = FrameNames()
    frame = FrameCode.of(entry.code, names)
    resumed = []
    namespace = dict(names.objects)
    for name in names.functions:
        namespace[name] = lambda *args, name=name: resumed.append((name, args))
    exec(frame.source, namespace)
    namespace["branches"](a, b)
    ((name, (second, first)),) = resumed
    assert name == f"__resume_at_{branches.__code__.co_firstlineno + 3}"
    assert second is b and torch.equal(first, a / 2)


def test_a_debugger_steps_through_the_text(tmp_path):
    lines = []

    def trace(frame, event, arg):
        if frame.f_code.co_filename.startswith(str(tmp_path)):
            lines.append(linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip())
        return trace

    def with_cells(x):
        n = 0

        def add(k):
            nonlocal n
            n += k

        add(1)
        torch._C._get_tracing_state()
        add(2)
        weft_capture.graph_break()
        return x + n

    with weft_capture.settings.patch(debug_code=str(tmp_path)):
        optimised = weft_capture.capture(with_cells, run_graph)
        result = optimised(torch.ones(2))
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            again = optimised(torch.ones(2))
        finally:
            sys.settrace(before)
    assert torch.equal(result, torch.full((2,), 4.0)) and torch.equal(result, again)
    assert any(line.startswith("return __resume_at_") for line in lines)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".py", ".py"]
    optimised._weft_capture.forget()


def test_the_log_artifact_shows_the_text(compiled, caplog):
    events.set_logs(frame_code=True)
    try:
        compiled(torch.ones(3), torch.ones(3))
    finally:
        events.set_logs(frame_code=False)
    (first, *_) = [r.getMessage() for r in caplog.records if r.name.endswith("frame_code")]
    assert first.startswith("rewritten code of branches (") and "\ndef branches(a, b):\n" in first


def test_what_the_language_has_no_words_for_is_said():
    def loop(x):
        while x:
            x = x - 1

    with pytest.raises(NotExpressible, match="a loop"):
        decompile(loop.__code__, FrameNames(), "loop")


@pytest.mark.parametrize("args", [(1, 2), (3, 0, 5, 6)])
def test_expressions_keep_their_meaning(args):
    # No try whose end is shared, no lambda: what capture writes has neither.
    def plain(a, b, rest, key):
        c = [a, b, {a: b, "key": key}, (a,), {b}]
        c[1:2] = [a < b, a in c, a is not b, not a, -a, ~b]
        del c[0]
        x, (y, z) = a, (b, key)
        c[0] = a
        c[0] += b
        return f"{a!r} and {b:>{a}}", c, max(c[:1], default=rest), dict(x=x, y=y), z

    names = FrameNames()
    text = decompile(plain.__code__, names, "plain")
    namespace = dict(names.objects)
    exec(text, namespace)
    assert namespace["plain"](*args[:2], args[2:], "k") == plain(*args[:2], args[2:], "k")


def test_nothing_of_it_is_loaded_unless_asked_for():
    code = (
        "import sys, torch, weft_capture\n"
        "weft_capture.capture(torch.sin, lambda graph, inputs: graph.forward)(torch.ones(2))\n"
        "print([n for n in sys.modules if 'decompile' in n or 'frame_code' in n])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
