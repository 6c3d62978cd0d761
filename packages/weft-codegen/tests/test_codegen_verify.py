"""The verifier notices broken kernels."""

from dataclasses import replace

import pytest
import torch
from weft_codegen.loops.expr import Local, apply, constant, load, read
from weft_codegen.loops.index import ONE, ZERO, as_axis, axis
from weft_codegen.loops.program import Kernel, Loop, Param, Reduce, Set, Store
from weft_codegen.loops.verify import InvalidProgram, verify_kernel

ROW = axis("i0", 8)
F32 = torch.float32
VALUE = load("a0", ROW, F32)
TOTAL = Local("t0", F32, ONE)
PARAMS = (Param("a0", F32, False), Param("a1", F32, True))
GOOD = Kernel("k", PARAMS, (), (), (Loop(as_axis(ROW), (Store("a1", ROW, VALUE),), "parallel"),))


def broken(body, **changes):
    return replace(GOOD, body=body, **changes)


def test_a_good_kernel_passes():
    verify_kernel(GOOD)


@pytest.mark.parametrize(
    ("kernel", "rule"),
    [
        (broken((Store("a1", ROW, VALUE),)), "not bound"),
        (broken((Store("a2", ZERO, constant(0, F32)),)), "unknown a2"),
        (broken((Store("a0", ZERO, constant(0, F32)),)), "not marked written"),
        (broken((Store("a1", ZERO, constant(0, torch.int64)),)), "store of"),
        (broken((Store("a1", ZERO, read(TOTAL, ZERO)),), locals=(TOTAL,)), "read before set"),
        (broken((Reduce("sum", (TOTAL,), ZERO, (constant(0, F32),)),), locals=(TOTAL,)), "reduced"),
        (broken((Set(TOTAL, ZERO, constant(0, F32)),)), "undeclared"),
        (
            broken((Store("a1", ZERO, constant(0, F32)), Store("a1", ZERO, load("a1", ZERO, F32)))),
            "after a store",
        ),
        (
            broken((Loop(as_axis(ROW), (Loop(as_axis(ROW), ()),)),)),
            "bound twice",
        ),
        (
            broken((Loop(as_axis(ROW), (Loop(as_axis(axis("i1", 4)), (), "parallel"),)),)),
            "inside a serial",
        ),
    ],
)
def test_each_rule(kernel, rule):
    with pytest.raises(InvalidProgram, match=rule):
        verify_kernel(kernel)


def test_operand_types_are_checked_when_an_expression_is_made():
    with pytest.raises(ValueError, match="differ"):
        apply("add", VALUE, constant(1, torch.float64))
    with pytest.raises(ValueError, match="operands"):
        apply("add", VALUE)
