"""Products of int8, exact however they are computed."""

import pytest
import torch
from codegen_check import check, externs


def scaled(a, b, scale):
    return torch._int_mm(a, b.t()).float() * scale


def operands(rows, length, columns, extreme=False):
    torch.manual_seed(0)
    draw = torch.full if extreme else lambda size, low: torch.randint(low, 128, size)
    sizes = (rows, length), (columns, length)
    return [*(draw(size, -128).to(torch.int8) for size in sizes), torch.rand(columns)]


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
def test_few_rows_are_loops_of_integers(rows, extreme):
    program = check(scaled, *operands(rows, 96, 64, extreme), native=True, rtol=0, atol=0)
    assert not externs(program)


@pytest.mark.parametrize("length", [8, 1024, 1025, 3000])
@pytest.mark.parametrize("extreme", [False, True])
def test_more_rows_are_exact_products_of_floats(length, extreme, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    program = check(scaled, *operands(20, length, 24, extreme), rtol=0, atol=0)
    assert "aten._int_mm.default" not in externs(program)


def test_cpus_with_products_of_int8_keep_the_operator(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    program = check(scaled, *operands(20, 64, 24), rtol=0, atol=0)
    assert externs(program) == ["aten._int_mm.default"]


def test_what_eager_refuses_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    a, b, _ = operands(20, 64, 24)
    with pytest.raises(Exception, match=r"int8|Int8|Char|dtype"):
        check(lambda a, b: torch._int_mm(a, b), a.int(), b.t().int())
