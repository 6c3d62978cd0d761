"""A fixed sample of torch's own operator database, interpreted, against eager."""

import pytest
import torch
from codegen_check import clones, trace
from torch.testing import assert_close
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from weft_codegen.compile import make_program
from weft_codegen.loops.interpret import run_program
from weft_codegen.loops.lower.graph import NoLowering
from weft_codegen.loops.verify import verify_program

# Results that no two calls agree on: uninitialised memory.
UNDEFINED = ("empty", "new_empty", "empty_like", "new_empty_strided", "empty_strided")
SAMPLE = [
    op for op in op_db[::6] if op.name not in UNDEFINED and not op.name.startswith("jiterator")
]


def _flat(op, sample):
    """The sample as a function of its tensors, and the tensors."""
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))

    def fn(*tensors):
        rest = iter(tensors)
        filled = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        value, args, kwargs = pytree.tree_unflatten(filled, spec)
        results = pytree.tree_leaves(op(value, *args, **kwargs))
        return [result for result in results if isinstance(result, torch.Tensor)]

    return fn, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@pytest.mark.every(2)
@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", SAMPLE, ids=lambda op: f"{op.name}{op.variant_test_name}")
def test_operator(op):
    if torch.float32 not in op.supported_dtypes("cpu"):
        pytest.skip("not defined for float32")
    torch.manual_seed(0)
    fn, tensors = _flat(op, next(iter(op.sample_inputs("cpu", torch.float32))))
    if any(t.is_complex() or t.layout is not torch.strided for t in tensors) or not tensors:
        pytest.skip("not a graph of strided real tensors")
    try:
        graph = trace(fn, tensors)
        program = make_program(graph, tensors)
    except (NoLowering, RuntimeError, NotImplementedError) as reason:
        pytest.skip(f"no graph, runs eagerly: {reason}")
    verify_program(program)
    torch.manual_seed(42)  # the database seeds its random operators with 42
    want = fn(*clones(tensors))
    torch.manual_seed(42)
    got = run_program(program, clones(tensors))
    assert len(got) == len(want)
    for result, expected in zip(got, want):
        assert_close(result, expected, equal_nan=True, atol=1e-5, rtol=1e-4)
