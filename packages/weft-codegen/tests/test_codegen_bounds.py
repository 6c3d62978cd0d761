"""The setting `check_bounds`: accesses outside of a buffer raise."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from weft_codegen import compile_graph
from weft_codegen.config import settings
from weft_codegen.kernels.load import OutOfBounds
from weft_codegen.loops.lower.lowering import LOWERINGS

pytestmark = pytest.mark.cc


def _compiled(function, *inputs):
    with settings.patch(check_bounds=True):
        return compile_graph(make_fx(function)(*inputs), list(inputs))


def test_programs_inside_their_buffers_run():
    x = torch.arange(12.0).view(3, 4)
    functions = [lambda x: [x.t() + 1], lambda x: [x.softmax(-1)], lambda x: [x[1:, ::2].sum(0)]]
    for function in functions:
        torch.testing.assert_close(_compiled(function, x)(x), function(x))


def test_a_load_past_the_end_names_kernel_buffer_and_index(monkeypatch):
    def wrong(call, x, dims):
        return call.lazy(lambda place: x.at([place[0] + 5]))

    _compiled(lambda x: [x * 2], torch.ones(1))  # the table is filled at the first compile
    monkeypatch.setitem(LOWERINGS, "aten.flip", wrong)
    x = torch.arange(12.0)
    compiled = _compiled(lambda x: [x.flip(0) * 2], x)
    with pytest.raises(OutOfBounds, match=r"accesses 1 elements of \w+ from 12 on, which has 12"):
        compiled(x)
