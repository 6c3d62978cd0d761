"""What a user sees when something is wrong: names, exceptions, compilers, cache files."""

import logging
import subprocess
import sys
import textwrap
import traceback

import pytest
import torch
import weft


def in_fresh_process(code, **environment):
    import os

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(
    ("arguments", "error", "guess"),
    [
        ({"backend": "indcutor"}, weft.InvalidBackend, "inductor"),
        ({"mode": "max-autotun"}, weft.InvalidMode, "max-autotune"),
        ({"options": {"epilog_fusion": True}}, weft.InvalidOption, "epilogue_fusion"),
    ],
)
def test_unknown_names_suggest_the_nearest(arguments, error, guess):
    with pytest.raises(error, match=guess):
        weft.compile(lambda x: x, **arguments)


def test_the_users_exception_and_traceback():
    def inner(x, n):
        if n > 2:
            raise LookupError(f"no {n}")
        return x + n

    def outer(x, n):
        return inner(x * 2, n)

    compiled = weft.compile(outer)
    compiled(torch.ones(2), 1)
    with pytest.raises(LookupError, match="no 3") as caught:
        compiled(torch.ones(2), 3)
    names = [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert names[-2:] == ["outer", "inner"]


@pytest.mark.parametrize("function", [lambda x: x.max(), lambda x: x.min(1), torch.amax])
def test_the_extreme_of_nothing_is_refused_as_in_eager(function):
    x = torch.empty(3, 0)
    with pytest.raises((RuntimeError, IndexError)) as expected:
        function(x)
    with pytest.raises(expected.type) as caught:
        weft.compile(function)(x)
    assert str(caught.value) == str(expected.value)


def test_an_op_that_raises_raises_as_in_eager():
    def step(x, y):
        return x @ y

    with pytest.raises(RuntimeError) as want:
        step(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(RuntimeError) as got:
        weft.compile(step)(torch.ones(2, 3), torch.ones(2, 3))
    assert str(got.value) == str(want.value)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.nn.functional.linear(x, x.double()),
        lambda x: torch.nn.functional.layer_norm(x, (3,), x[0].double()),
        lambda x: torch.nn.functional.cross_entropy(x, torch.zeros(3).int()),
        lambda x: torch.index_put(x, (torch.tensor([1]),), x.half()),
        lambda x: x.long().softmax(0),
    ],
)
def test_dtypes_are_refused_as_in_eager_behind_what_was_written(function):
    def step(x, log):
        log.append(x.add_(1).sum())
        return function(x)

    with pytest.raises(RuntimeError) as want:
        step(torch.ones(3, 3), [])
    x, log = torch.ones(3, 3), []
    with pytest.raises(RuntimeError) as got:
        weft.compile(step)(x, log)
    assert str(got.value) == str(want.value)
    assert x.sum() == log[0] == 18


def test_comparisons_of_numbers_that_vary_are_bools():
    def step(x, n):
        return (n + 1 > 1, x.shape[0] > 2, n == 3), x + n

    compiled = weft.compile(step, dynamic=True)
    for n in range(5):
        assert str(compiled(torch.ones(n), n)) == str(step(torch.ones(n), n))


def test_fullgraph_turns_a_break_into_an_error():
    def step(x):
        if x.sum() > 0:
            return x + 1
        return x - 1

    with pytest.raises(weft.Unsupported, match="data-dependent") as caught:
        weft.compile(step, fullgraph=True)(torch.ones(2))
    assert "test_integration_bad_input.py" in str(caught.value)


def test_a_failing_backend_names_the_users_line():
    def bad(gm, inputs):
        raise ZeroDivisionError("broken backend")

    def step(x):
        return x + 1

    with pytest.raises(weft.BackendCompilerError, match="broken backend") as caught:
        weft.compile(step, backend=bad)(torch.ones(2))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "test_integration_bad_input.py" in caught.value.user_line


@pytest.mark.filterwarnings("ignore")
def test_on_compile_error_eager(caplog):
    def bad(gm, inputs):
        raise ZeroDivisionError("broken backend")

    compiled = weft.compile(lambda x: x + 1, backend=bad)
    with weft.config.patch(on_compile_error="eager"), caplog.at_level(logging.WARNING, "weft"):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert sum("broken backend" in record.message for record in caplog.records) == 1


STEP = """
    import torch, weft
    @weft.compile
    def step(x):
        return (x * 2).relu().sum(-1)
    x = torch.randn(8, 16)
    torch.testing.assert_close(step(x), (x * 2).relu().sum(-1))
"""


def test_no_c_compiler_means_eager_and_a_message(tmp_path):
    environment = {"CC": "", "PATH": str(tmp_path), "WEFT_CACHE_DIR": str(tmp_path / "cache")}
    done = in_fresh_process(STEP, **environment)
    assert "apt install gcc" in done.stderr


def test_a_damaged_cache_is_compiled_again(tmp_path):
    in_fresh_process(STEP, WEFT_CACHE_DIR=str(tmp_path))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    for path in files:
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] + b"garbage")
    in_fresh_process(STEP, WEFT_CACHE_DIR=str(tmp_path))


def test_nothing_of_torchs_own_compiler_is_loaded(tmp_path):
    done = in_fresh_process(
        """
        import sys, torch, weft
        brought = set(sys.modules)  # torch loads torch._functorch._aot_autograd.utils itself
        model = weft.compile(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()))
        for size in (2, 2, 3, 4):  # not with torch.optim, which loads torch._dynamo itself
            model(torch.randn(size, 8)).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        with weft.config.patch(compiled_autograd=True):
            model(torch.randn(2, 8)).sum().backward()
        stages = ("torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd",
                  "torch._functorch._aot_autograd", "torch._functorch.partitioners",
                  "torch._functorch.compilers", "torch._functorch.config")
        print([name for name in set(sys.modules) - brought if name.startswith(stages)])
        """,
        WEFT_CACHE_DIR=str(tmp_path),
    )
    assert done.stdout.strip() == "[]"


def test_stock_torch_compile_can_use_the_code_generator(tmp_path):
    done = in_fresh_process(
        """
        import sys, torch
        f = torch.compile(lambda x: (x * 2).relu().sum(-1), backend="weft")
        x = torch.randn(8, 16)
        torch.testing.assert_close(f(x), (x * 2).relu().sum(-1))
        print(sorted(name for name in sys.modules if name.startswith("weft") and "." not in name))
        """,
        WEFT_CACHE_DIR=str(tmp_path),
    )
    assert done.stdout.strip() == "['weft_codegen', 'weft_core']"


def a_file(folder):
    (folder / "cache").write_text("")


def read_only(folder):
    (folder / "cache").symlink_to("/proc/self")


def no_home(folder):
    return {"WEFT_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": "/proc/nowhere"}


LIMITED = """
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
"""


@pytest.mark.parametrize("spoil", [a_file, read_only, no_home])
def test_a_cache_folder_that_cannot_be_used_costs_one_message(spoil, tmp_path):
    own = {"WEFT_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    own |= spoil(tmp_path) or {}
    done = in_fresh_process(STEP + "    print(weft.counters['codegen']['kernels'])", **own)
    assert int(done.stdout) > 0
    assert done.stderr.count("cannot be used") == 1 and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("weft-*"))


@pytest.mark.every(2)
@pytest.mark.parametrize("size", [0, 100, 3000, 9000])
def test_files_that_may_not_grow_mean_eager_and_a_message(size, tmp_path):
    own = {"WEFT_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    done = in_fresh_process(STEP.replace("    x = ", LIMITED.format(size=size) + "    x = "), **own)
    assert "What to do" in done.stderr and "Traceback" not in done.stderr


def test_a_cache_without_its_key_is_made_again(tmp_path):
    in_fresh_process(STEP, WEFT_CACHE_DIR=str(tmp_path))
    (tmp_path / "key").unlink()
    done = in_fresh_process(STEP, WEFT_CACHE_DIR=str(tmp_path))
    assert done.stderr.count("damaged") == 1
