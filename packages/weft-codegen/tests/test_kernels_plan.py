"""The memory plan: live buffers never overlap, dead memory is reused, views keep roots alive."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_programs import F32, buffer, pointwise, program
from weft_codegen.kernels.plan import LARGE, Allocation, MemoryPlan
from weft_codegen.loops.expr import apply, constant, load
from weft_codegen.loops.index import axis, size
from weft_codegen.loops.program import Alias, Kernel, Launch, Program


def _double(count: int = 16) -> Kernel:
    where = axis("i0", count)
    value = apply("mul", load("a0", where, F32), constant(2.0, F32))
    return pointwise(value, count, {"a0": F32})


def _chain(sizes: list[int], reads: list[int]) -> Program:
    """Buffer k+1 is made from buffer reads[k] <= k; the last is the output."""
    buffers = [buffer(f"b{k}", extent) for k, extent in enumerate([16, *sizes])]
    steps = [Launch("pointwise", (f"b{r}", f"b{k + 1}")) for k, r in enumerate(reads)]
    return program(buffers, ["b0"], steps, [f"b{len(sizes)}"], _double())


@st.composite
def _chains(draw: st.DrawFn) -> Program:
    count = draw(st.integers(1, 12))
    sizes = [draw(st.integers(1, 200)) for _ in range(count)]
    return _chain(sizes, [draw(st.integers(0, k)) for k in range(count)])


@given(_chains())
@settings(max_examples=60, deadline=None)
def test_live_buffers_do_not_overlap(made: Program) -> None:
    plan = MemoryPlan(made)
    scratch = [name for name, place in plan.allocation.items() if place is Allocation.SCRATCH]
    first = {step.buffers[1]: k for k, step in enumerate(made.steps) if isinstance(step, Launch)}
    for a in scratch:
        for b in scratch:
            if a < b and first[a] <= plan.last[b] and first[b] <= plan.last[a]:
                low, high = sorted((a, b), key=lambda name: plan.offset[name])
                end = plan.offset[low] + made.buffers[low].bytes.value
                assert end <= plan.offset[high]
    assert all(plan.offset[name] % 64 == 0 for name in scratch)


def test_a_chain_needs_two_buffers() -> None:
    plan = MemoryPlan(_chain([1024] * 10, list(range(10))))
    assert plan.fixed == 2 * 4096
    assert plan.allocation["b10"] is Allocation.OWNED


def test_a_kernel_may_write_over_an_input_that_dies() -> None:
    made = _chain([1024] * 10, list(range(10)))
    kernel = replace(made.kernels["pointwise"], in_place=(("out", "a0"),))
    made = replace(made, kernels={"pointwise": kernel})
    assert MemoryPlan(made).fixed == 4096


def test_a_view_keeps_its_root_alive() -> None:
    buffers = [buffer(name, 64) for name in ("x", "a", "b", "view", "y")]
    steps = [
        Launch("pointwise", ("x", "a")),
        Alias("view", "a"),
        Launch("pointwise", ("x", "b")),
        Launch("pointwise", ("view", "y")),
    ]
    plan = MemoryPlan(program(buffers, ["x"], steps, ["y", "b"], _double()))
    assert plan.root["view"] == "a"
    assert plan.last["a"] == 3
    assert plan.allocation["b"] is Allocation.OWNED


def test_large_temporaries_and_those_of_unknown_size_are_tensors() -> None:
    for extent in (LARGE // 4, size("s0")):
        buffers = [buffer(f"b{k}", extent) for k in range(4)]
        steps = [Launch("pointwise", (f"b{k}", f"b{k + 1}")) for k in range(3)]
        made = program(buffers, ["b0"], steps, ["b3"], _double(), sizes=("s0",))
        plan = MemoryPlan(made)
        assert plan.fixed == 0 and not plan.over
        assert [plan.allocation[f"b{k}"] for k in (1, 2)] == [Allocation.OWNED] * 2
        assert [plan.last[f"b{k}"] for k in (1, 2)] == [1, 2]


def test_a_tensor_takes_the_memory_of_one_that_dies_but_not_that_of_an_input() -> None:
    made = _chain([LARGE] * 4, [0, 1, 1, 3])
    kernel = replace(made.kernels["pointwise"], in_place=(("out", "a0"),))
    made = replace(made, kernels={"pointwise": kernel})
    # b1 dies where b3 is made of it, b3 where the output b4 is.
    assert MemoryPlan(made).over == {"b3": "b1", "b4": "b3"}
