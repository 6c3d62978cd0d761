"""Programs whose values differ from call to call end with few graphs (see `recompiles`)."""

import functools

import pytest
import torch
import weft
from recompiles import PROGRAMS, sizes, varying

CALLS = 12
SIZES = [name for name, (program, _) in PROGRAMS.items() if program.__module__ == sizes.__name__]


def same(found, expected):
    """Compare results, tensors among them in lists, tuples and dicts."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected) and len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            same(*pair)
    elif isinstance(expected, dict):
        same(list(found.items()), list(expected.items()))
    else:
        assert type(found) is type(expected) and found == expected


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_takes_few_graphs(name):
    program, most = PROGRAMS[name]
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    expected = program(lambda function: function, CALLS)
    same(program(functools.partial(weft.compile, backend=backend), CALLS), expected)
    assert len(graphs) <= most
    assert weft.counters["guards"]["recompile_limit"] == 0


@pytest.mark.every(2)
@pytest.mark.parametrize("name", SIZES)
def test_generated_code_takes_sizes_and_strides_that_vary(name):
    program, most = PROGRAMS[name]
    expected = program(lambda function: function, CALLS)
    same(program(weft.compile, CALLS), expected)
    assert weft.counters["stats"]["unique_graphs"] <= most


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", varying.KINDS)
def test_values_that_vary_do_not_make_graphs_grow(kind):
    for program in varying.rotated(kind):
        weft.reset()
        graphs = []

        def backend(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        expected = varying.run(*program, lambda function: function, CALLS)
        compiler = functools.partial(weft.compile, backend=backend, recompile_limit=CALLS)
        assert varying.run(*program, compiler, CALLS) == expected, program
        few = len(graphs) <= varying.MOST
        assert few or varying.decides(kind, program[2]), (program, len(graphs))
