"""When collectives start and are waited for, and which are joined, without other processes."""

import pytest
import torch
from codegen_check import program_of
from torch.fx.experimental.proxy_tensor import make_fx
from weft_codegen.collective_buckets import join_collectives
from weft_codegen.config import settings
from weft_codegen.kernels.plan import Allocation, MemoryPlan
from weft_codegen.loops.program import Extern, Launch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="no distributed")
ops = torch.ops._c10d_functional
SIZE = 64


def gather(x):
    return ops.all_gather_into_tensor(x, 2, "0")


def order(program):
    """Names of the steps; kernels are called by what they write."""
    names = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "reduce"}
    found = []
    for step in program.steps:
        if isinstance(step, Extern):
            name = step.op._schema.name.split("::")[1]
            found.append(names.get(name, name))
        elif isinstance(step, Launch):
            found.append("kernel")
    return found


@pytest.fixture(autouse=True)
def group():
    """A process group that sends nothing, for the shapes of collectives."""
    import torch.distributed._functional_collectives  # noqa: PLC0415 - their fake kernels
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    with settings.patch(collective_bucket=0):
        yield
    torch.distributed.destroy_process_group()


def test_the_next_gather_runs_while_a_gathered_tensor_is_used():
    def forward(x, first, second, third):
        for part in (first, second, third):
            x = x @ ops.wait_tensor(gather(part))
        return x

    parts = [torch.randn(SIZE // 2, SIZE) for _ in range(3)]
    found = order(program_of(forward, torch.randn(SIZE, SIZE), *parts))
    assert found == [
        *("gather", "wait_tensor", "gather", "mm"),
        *("wait_tensor", "gather", "mm", "wait_tensor", "mm"),
    ]


def test_a_reduction_is_waited_for_at_the_end_and_a_gather_passes_it():
    def backward(x, first, second):
        a = x @ ops.wait_tensor(gather(first))
        reduced = ops.wait_tensor(ops.reduce_scatter_tensor(a, "avg", 2, "0"))
        b = x.t() @ ops.wait_tensor(gather(second))
        return reduced, b.cos() @ b

    parts = [torch.randn(SIZE // 2, SIZE) for _ in range(2)]
    found = order(program_of(backward, torch.randn(SIZE, SIZE), *parts))
    assert found[:5] == ["gather", "wait_tensor", "gather", "mm", "reduce"]
    assert found[-1] == "wait_tensor" and found.count("mm") == 3


def test_what_prepares_a_gather_moves_with_it():
    def forward(x, first, second):
        x = x @ ops.wait_tensor(gather(first.to(torch.float32)))
        return x.sin() @ ops.wait_tensor(gather(second.to(torch.float32)))

    parts = [torch.randn(SIZE // 2, SIZE, dtype=torch.float64) for _ in range(2)]
    found = order(program_of(forward, torch.randn(SIZE, SIZE), *parts))
    assert found.index("mm") > max(i for i, name in enumerate(found) if name == "gather")


def test_what_is_sent_is_not_written_before_the_wait():
    def step(x):
        total = ops.wait_tensor(ops.all_reduce(x, "sum", "0"))
        kept = total * 2
        x.add_(1)
        return kept

    steps = program_of(step, torch.randn(SIZE)).steps
    waits = [i for i, s in enumerate(steps) if isinstance(s, Extern) and "wait" in str(s.op)]
    writes = [i for i, s in enumerate(steps) if isinstance(s, Launch)]
    assert waits[0] < max(writes)


def test_a_reduction_starts_as_soon_as_its_input_is_there():
    def step(x, y):
        sent = x @ x
        other = y @ y
        return other @ y, ops.wait_tensor(ops.all_reduce(sent, "sum", "0"))

    found = order(program_of(step, torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)))
    assert found == ["mm", "all_reduce", "mm", "mm", "wait_tensor"]


def test_memory_that_a_collective_may_read_later_is_not_used_again():
    def backward(x):
        return ops.wait_tensor(ops.all_reduce(x.sin(), "sum", "0")), (x.cos() @ x).exp() @ x

    program = program_of(backward, torch.randn(8, 8))
    plan = MemoryPlan(program)
    sent = next(s for s in program.steps if isinstance(s, Extern) and "all_reduce" in str(s.op))
    assert plan.allocation[plan.root[sent.args[0].name]] is Allocation.OWNED
    assert plan.root[sent.args[0].name] not in plan.over.values()


def reduce(x, op="sum"):
    return ops.wait_tensor(ops.all_reduce(x, op, "0"))


def joined(function, *inputs, limit=1 << 20, every=True):
    """Names of operators before and after collectives are joined."""
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    found = []
    for graph in (gm.graph, join_collectives(gm, limit, every).graph):
        graph.lint()
        calls = [node for node in graph.nodes if node.op == "call_function"]
        found.append([getattr(call.target, "_opname", "getitem") for call in calls])
    return found


def test_collectives_that_need_each_other_are_not_joined():
    def step(x, y):
        a = reduce(x)
        c = reduce(a, "max")
        d = reduce(y, "max")
        return a, c, d, reduce(d), reduce(y)  # of the sums the last two can go with the first

    before, after = joined(step, torch.randn(4), torch.randn(3))
    assert (before.count("all_reduce"), after.count("all_reduce")) == (5, 3)


def test_joining_stops_at_the_limit_and_at_dtypes():
    def step(*inputs):
        return [reduce(x * 2) for x in inputs]

    inputs = [torch.randn(4), torch.randn(4), torch.randn(4), torch.zeros(4, dtype=torch.int64)]
    for limit, count in ((0, 4), (15, 4), (32, 3), (48, 2)):
        _, after = joined(step, *inputs, limit=limit)
        assert after.count("all_reduce") == count, limit


def test_random_numbers_are_drawn_in_their_order():
    def step(x, y):
        a = reduce(x.sin())
        first = torch.rand_like(x) * a
        second = torch.randint_like(y, 9)
        return first, second, reduce(y + second)

    _, after = joined(step, torch.randn(4), torch.randn(3))
    assert after.count("all_reduce") == 1
    assert after.index("rand_like") < after.index("randint_like")


def test_only_gathers_of_inputs_are_joined_unasked():
    def step(x, y):
        a, b = ops.wait_tensor(gather(x.to(torch.float64))), ops.wait_tensor(gather(y.double()))
        return a, b, ops.wait_tensor(gather(y.double().sin())), reduce(x), reduce(y)

    _, after = joined(step, torch.randn(4), torch.randn(3), every=False)
    assert after.count("all_gather_into_tensor") == after.count("all_reduce") == 2


def test_a_list_of_small_tensors_is_sent_as_one():
    def step(x, y):
        sent = ops.reduce_scatter_tensor_coalesced([x, y], "avg", 2, "0")
        return [ops.wait_tensor(one) for one in sent]

    before, after = joined(step, torch.randn(4, 3), torch.randn(2))
    assert "reduce_scatter_tensor_coalesced" in before
    assert "reduce_scatter_tensor_coalesced" not in after and "reduce_scatter_tensor" in after
