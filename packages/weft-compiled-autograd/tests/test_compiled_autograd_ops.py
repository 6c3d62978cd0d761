"""Backward functions of many operators, on torch's own samples: captured equals eager."""

import pytest
import torch
import weft_compiled_autograd as ca
from torch.utils._pytree import tree_leaves

methods = pytest.importorskip("torch.testing._internal.common_methods_invocations")

OPS = [
    op
    for op in methods.op_db
    if op.supports_autograd and torch.float32 in op.supported_dtypes("cpu")
][3::16]


def gradients(op, sample):
    torch.manual_seed(0)
    out = op(sample.input, *sample.args, **sample.kwargs)
    out = sample.output_process_fn_grad(out) if sample.output_process_fn_grad else out
    outputs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    given = tree_leaves((sample.input, sample.args, sample.kwargs))
    inputs = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
    loss = sum((t.abs() if t.is_complex() else t).sum() for t in outputs)
    return torch.autograd.grad(loss, inputs, allow_unused=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.formatted_name)
def test_operator(op):
    samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=True))[:2]
    for sample in samples:
        try:
            want = gradients(op, sample)
        except RuntimeError as problem:
            pytest.skip(f"eager cannot: {problem}")
        with ca.enable(lambda gm: gm):
            got = gradients(op, sample)
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, equal_nan=True)
