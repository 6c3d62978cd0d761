"""A fixed sample of operators from torch's own operator database, forward and backward."""

from __future__ import annotations

import pytest
import torch
from aot_helpers import Graphs, function_graph
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from weft_aot import aot_compile

NAMES = """
    abs add addmm amax atan2 baddbmm bmm cat clamp cos cumsum div einsum exp expand eye
    flatten gather index_add index_select kron layer_norm lerp linalg.vector_norm log_softmax
    logsumexp masked_fill matmul max_binary maximum mean min_reduction_with_dim mm
    mul narrow nn.functional.avg_pool2d nn.functional.batch_norm nn.functional.conv2d
    nn.functional.cross_entropy nn.functional.embedding nn.functional.gelu
    nn.functional.group_norm nn.functional.interpolate nn.functional.layer_norm
    nn.functional.linear nn.functional.max_pool2d nn.functional.mse_loss
    nn.functional.scaled_dot_product_attention nn.functional.silu norm permute pow prod
    repeat reshape roll scatter select sigmoid softmax sort split squeeze stack std sum t take
    tanh topk transpose tril unfold var where
""".split()
OPS = {op.name: op for op in op_db if op.name in NAMES}


def first_sample(op):
    return next(iter(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)))


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(OPS))
def test_operator(name):
    op = OPS[name]
    sample = first_sample(op)
    flat, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
    places = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)]

    def fn(*tensors):
        values = list(flat)
        for place, tensor in zip(places, tensors):
            values[place] = tensor
        args, kwargs = pytree.tree_unflatten(values, spec)
        leaves = pytree.tree_leaves(op.op(*args, **kwargs))
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    def outcome(call):
        tensors = [flat[i].detach().clone().requires_grad_(flat[i].requires_grad) for i in places]
        torch.manual_seed(0)
        results = call(*tensors)
        wanted = [r for r in results if r.requires_grad]
        if wanted:
            sum(r.sin().sum() for r in wanted).backward()
        return list(results), [tensor.grad for tensor in tensors]

    tensors = [flat[i] for i in places]
    compiled = aot_compile(function_graph(fn, len(places)), tensors, fw_compiler=Graphs())
    torch.testing.assert_close(outcome(compiled), outcome(fn))
