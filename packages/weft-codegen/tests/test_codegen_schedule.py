"""What fuses with what, and how kernels look."""

import math

import pytest
import torch
import torch.nn.functional as F
from codegen_check import check, externs, launches, program_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from weft_codegen import make_program
from weft_codegen.kernels.emit_c import emit_kernel
from weft_codegen.kernels.plan import MemoryPlan
from weft_codegen.loops.printer import body_text, kernel_text, program_text
from weft_codegen.loops.program import Loop, Reduce, Store, statements
from weft_codegen.loops.schedule import row_column_fusion
from weft_codegen.loops.schedule.fuse import Fusion
from weft_codegen.loops.schedule.tile import CPU_TILE

X = torch.randn(16, 32)
W = torch.rand(32)


def only_kernel(program):
    assert len(program.kernels) == 1
    return next(iter(program.kernels.values()))


def depth(kernel):
    def nest(body):
        return max((1 + nest(s.body) for s in body if isinstance(s, Loop)), default=0)

    return nest(kernel.body)


def test_a_4d_pointwise_chain_is_one_flat_loop():
    program = check(lambda x: (x * 2).relu().exp() + x, torch.randn(2, 3, 4, 5))
    kernel = only_kernel(program)
    assert depth(kernel) == 1
    assert "for i0 in 0..120 parallel" in kernel_text(kernel)


def test_softmax_and_layer_norm_are_one_kernel_each():
    assert launches(check(lambda x: x.softmax(1), X)) == 1
    assert launches(check(lambda x, w: F.layer_norm(x, (32,), w, w), X, W)) == 1


def test_softmax_keeps_its_exponentials_in_a_row_temporary():
    kernel = only_kernel(program_of(lambda x: x.softmax(1), X))
    assert kernel_text(kernel).count("exp(") == 1


def test_pointwise_work_joins_reductions_before_and_after():
    program = check(lambda x, w: (x * w).sum(1).sqrt() + 1, X, W)
    assert launches(program) == 1


def test_column_sums_keep_the_innermost_loop_contiguous():
    kernel = only_kernel(check(lambda x: x.exp().sum(0), X))
    loops = [s for s in statements(kernel.body) if isinstance(s, Loop)]
    innermost = [s for s in loops if not any(isinstance(t, Loop) for t in s.body)]
    assert all(str(s.axis.key) == "i0" for s in innermost)


def test_independent_readers_of_one_input_share_a_kernel():
    assert launches(check(lambda x: (x.exp(), x.sin(), x * 2), X)) == 1


def test_equal_layers_share_one_kernel():
    def layers(x, a, b, w):
        x = F.gelu(x @ a + w)
        return F.gelu(x @ b + w)

    program = check(layers, X, torch.randn(32, 32), torch.randn(32, 32), W, atol=1e-4, rtol=1e-4)
    assert launches(program) == 2
    assert len(program.kernels) == 1


def test_a_kernel_never_waits_for_an_extern_inside_itself():
    def crossing(x, w):
        y = x.exp()
        z = y @ w
        return y + z.sum(1, keepdim=True), z * 2

    program = check(crossing, torch.rand(16, 64), torch.randn(64, 64), atol=1e-3, rtol=1e-4)
    assert externs(program) == ["aten.mm.default"]


def test_views_of_realised_tensors_are_aliases():
    program = program_of(
        lambda x, w: (x.exp().view(4, 4, 32).transpose(0, 1), x.exp() @ w), X, X.t()
    )
    assert "view of" in program_text(program)
    assert launches(program) == 1


def test_without_fusion_every_node_has_its_kernel():
    fused = check(lambda x: x.softmax(1), X)
    apart = check(lambda x: x.softmax(1), X, fuse=False)
    assert launches(fused) < launches(apart)


def test_dead_work_disappears():
    program = check(lambda x: x.max(1)[0], X)
    assert "argmax" not in program_text(program)


def test_concatenation_cuts_the_loop_where_the_pieces_meet():
    program = check(lambda x, y: torch.cat([x, y * 2], 1).exp(), X, X + 1, native=True)
    text = kernel_text(only_kernel(program))
    assert "where" not in text
    assert " if " not in text
    check(lambda x, y: torch.cat([x, y], 1).sum(0), X, X + 1, native=True)
    check(lambda x: torch.cat([x[:, 16:], -x[:, :16]], 1) * x, X, native=True)


def test_parameters_that_may_share_memory_are_not_restrict():
    kernel = only_kernel(program_of(lambda x, y: (x * y, x + 1), X, X))
    assert kernel.in_place
    text = emit_kernel(kernel).text
    for pair in kernel.in_place:
        for name in pair:
            assert f"restrict {name}" not in text


def test_a_sum_of_what_is_stored_does_not_read_it_again():
    W, CLOSE = torch.rand(X.shape[1], 16), {"atol": 1e-3, "rtol": 1e-4}

    def both(x, y):
        made = x * y.sin()
        return made, made.sum(0)

    program = check(both, X, X + 1, native=True)
    assert {source for _, source in only_kernel(program).in_place} == {"a0", "a1"}

    def rereads(x, y):
        made = x * y.sin()
        return made @ W, (made + x).sum(0)

    kernel = next(iter(check(rereads, X, X + 1, native=True, **CLOSE).kernels.values()))
    assert kernel.in_place == (("a2", "a1"),)

    def chain(x, w):
        first = x @ w  # dies in the kernel, which writes its result over it
        made = first * x.sin()
        return made @ w, made.sum(0)

    check(chain, torch.rand(64, 64), torch.rand(64, 64), native=True, **CLOSE)


def test_values_are_computed_just_before_their_use():
    def layers(x, a):
        # Both exponentials could come first; the second belongs after the first product.
        first, second = x.exp(), (x * 2).sin().exp()
        y = first @ a
        return (second @ (a + y)).sum(), second

    inputs = torch.rand(32, 32), torch.rand(32, 32) / 32
    program = check(layers, *inputs, atol=1e-3, rtol=1e-4)
    assert externs(program) == ["aten.mm.default", "aten.mm.default"]
    assert launches(program) <= 3


def test_transposing_copies_run_in_tiles():
    x = torch.randn(300, 500)
    kernel = only_kernel(check(lambda x: x.t().contiguous() * 2, x, native=True))
    assert depth(kernel) == 4
    check(lambda x, y: x.t() + y, x, torch.randn(500, 300), native=True)
    check(lambda x: x.transpose(1, 2).contiguous(), torch.randn(3, 64, 96), native=True)


def test_large_total_is_reduced_in_two_stages():
    x = torch.randn(1024, 128)
    many = {"rtol": 1e-4, "atol": 1e-3}
    program = check(lambda x: (x.sum(), x.amax(), (x > 9).any()), x, native=True, **many)
    outermost = [stmt for kernel in program.kernels.values() for stmt in kernel.body]
    assert any(isinstance(stmt, Loop) and stmt.kind == "parallel" for stmt in outermost)
    assert any(name.endswith("_parts") for name in program.buffers)
    # An axis as long as there are blocks is cut up whole.
    check(lambda x, y: (x * y.t()).sum(), torch.randn(64, 8192), torch.randn(8192, 64), **many)


def test_threads_share_the_rows_of_column_reductions(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)

    def bias_backward(x, g):
        g = torch.where(x > 0, g, 0)
        return g, g.sum(0)

    given = torch.randn(512, 300), torch.randn(512, 300)
    program = check(bias_backward, *given, native=True, rtol=1e-4, atol=1e-4)
    assert launches(program) == 2
    first = next(iter(program.kernels.values())).body[0]
    assert isinstance(first, Loop) and first.kind == "parallel"
    assert first.axis.extent.value == 8  # blocks of 64 rows each


def test_threads_share_columns_of_small_matrices(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    kernel = only_kernel(check(lambda x: x.erf().sum(0), torch.randn(64, 256), native=True))
    (nest,) = kernel.body
    assert isinstance(nest, Loop) and nest.axis.extent.value == 8


def test_one_value_before_a_loop_leaves_it_to_the_threads():
    def backward(x, g):
        g = g / 7
        return (g * x).exp() / g - g * x

    program = check(backward, torch.randn(64, 256), torch.randn(()), native=True)
    last = [stmt for kernel in program.kernels.values() for stmt in kernel.body][-1]
    assert isinstance(last, Loop) and last.kind == "parallel"


def test_rows_of_updates_at_read_places_are_shared_by_threads():
    given = torch.randn(64, 256), torch.randint(256, (64, 256))
    program = check(lambda x, i: torch.zeros_like(x).scatter_add(1, i, x), *given, native=True)
    (update,) = list(program.kernels.values())[-1].body
    assert isinstance(update, Loop) and update.kind == "parallel"
    program = check(lambda x, i: torch.zeros_like(x).scatter_add(0, i // 4, x), *given, native=True)
    (update,) = list(program.kernels.values())[-1].body
    assert isinstance(update, Loop) and update.kind == "serial"


def test_what_a_total_takes_of_each_row_is_computed_once_a_row():
    program = check(lambda x, w: (x.sin() * w[:, None].log()).sum(), torch.randn(64, 32),
                    torch.rand(64) + 1, native=True, rtol=1e-4, atol=1e-4)  # fmt: skip
    inner = [s for s in statements(only_kernel(program).body) if isinstance(s, Loop)][-1]
    assert "log(" not in body_text(inner.body)


def test_small_total_is_one_kernel():
    assert launches(check(lambda x: x.sum(), torch.randn(64, 64))) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool])
def test_turned_tiles(dtype):
    for rows, columns in ((128, 64), (100, 101)):
        x = (torch.randn(rows, columns) * 2).to(dtype)
        program = check(lambda x: x.t().contiguous(), x, native=True)
        (kernel,) = program.kernels.values()
        assert [local.extent.value for local in kernel.locals] == [math.prod(CPU_TILE)]


SQUARE = torch.randn(32, 32)
SMALL_PRODUCTS = {
    "linear": lambda x, w, b: F.linear(x, w, b).relu(),
    "mm": lambda x, w, b: x @ w,
    "two": lambda x, w, b: (x @ w + b).relu() @ w + x,
    "turned": lambda x, w, b: x.t() @ x,
    "strided": lambda x, w, b: x[:, ::2] @ w[::2],
    "attention": lambda x, w, b: (x @ w.t()).softmax(-1) @ w,
    "column bias": lambda x, w, b: torch.addmm(x[:, :1], x, w),
}


@pytest.mark.parametrize("rows", [4, 1])
@pytest.mark.parametrize("name", SMALL_PRODUCTS)
def test_small_products_are_loops(name, rows):
    if rows == 1 and name == "turned":
        pytest.skip("sums of one term")
    inputs = torch.randn(rows, 32), SQUARE, torch.randn(32)
    program = check(SMALL_PRODUCTS[name], *inputs, native=True, rtol=1e-4, atol=1e-4)
    assert not externs(program)


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_few_rows_are_loops_however_large_the_weight(rows):
    x, w, b = torch.randn(rows, 300), torch.randn(500, 300), torch.randn(500)

    def layers(x, w, b):
        return F.layer_norm(F.gelu(F.linear(x, w, b)), (500,)) @ w

    program = check(layers, x, w, b, native=True, rtol=1e-4, atol=1e-4)
    assert externs(program) == ["aten.mm.default"]  # of the weight that is not turned
    # The norm waits for all columns, of which threads share the products.
    first = next(iter(program.kernels.values())).body[0]
    assert first.kind == "parallel" and launches(program) == 2
    assert externs(check(F.linear, torch.randn(5, 300), w, b, rtol=1e-4, atol=1e-4))


def test_small_linear_with_its_activation_is_one_kernel():
    inputs = torch.randn(4, 32), SQUARE, torch.randn(32)
    assert launches(program_of(SMALL_PRODUCTS["linear"], *inputs)) == 1


def test_other_products_go_to_the_library():
    assert externs(check(torch.mm, torch.randn(64, 64), torch.randn(64, 64), rtol=1e-4, atol=1e-4))
    assert externs(check(torch.mm, SQUARE.double(), SQUARE.double()))
    scaled = check(lambda x: torch.addmm(x, x, x, alpha=2), SQUARE, rtol=1e-4, atol=1e-4)
    assert externs(scaled) == ["aten.addmm.default"]


def test_a_value_that_all_readers_can_make_again_is_not_stored():
    def fn(x, g, mean, scale):
        y = (x - mean) * scale * 2 + 1
        return (g * y).sum(1), (g * y).sum(0), g.sum(0)

    inputs = [torch.randn(64, 128), torch.randn(64, 128), torch.randn(64, 1), torch.rand(64, 1)]
    program = check(fn, *inputs)
    assert launches(program) == 2  # rows and columns
    large = [name for name, buffer in program.buffers.items() if buffer.storage.value == 64 * 128]
    assert large == ["in0", "in1"]


@pytest.mark.parametrize(("device", "stored"), [("cuda", 0), ("cpu", 1)])
def test_a_gpu_reads_more_rather_than_store_a_value(device, stored):
    def fn(a, b, w):  # of a layer norm's backward
        y = (a + b) * w
        return [y.sum(0), (y - y.sum(1, keepdim=True)).bfloat16()]

    with FakeTensorMode():
        rows = torch.empty(4096, 768, device=device)
        fakes = [rows, torch.empty_like(rows, dtype=torch.bfloat16), rows.new_empty(768)]
        program = make_program(make_fx(fn)(*fakes), fakes)
    large = [b for name, b in program.buffers.items() if b.storage.value == 4096 * 768]
    assert [b.dtype for b in large].count(torch.float32) == 1 + stored  # one is an input


def test_a_group_whose_values_are_all_made_again_is_gone(monkeypatch):
    def fn(x, g, mean, scale):
        y = (x - mean) * scale
        return (g * y).sum(1), (g * y).sum(0), g.sum(0)

    run = Fusion.run
    monkeypatch.setattr(Fusion, "run", lambda self, **_: run(self, join_groups=False))
    inputs = [torch.randn(64, 128), torch.randn(64, 128), torch.randn(64, 1), torch.rand(64, 1)]
    for kernel in check(fn, *inputs, native=True, rtol=1e-4, atol=1e-4).kernels.values():
        assert any(isinstance(stmt, Store) for stmt in statements(kernel.body))


def test_a_value_that_is_updated_in_memory_is_not_made_again():
    def fn(x, index, value):
        y = (x * 2 + 1).index_put((index,), value, accumulate=True)
        return y.sum(0), y.sum(1)

    index = torch.tensor([0, 5, 5, 63])
    check(fn, torch.randn(64, 128), index, torch.randn(4, 128), rtol=1e-4, atol=1e-4)


def test_a_running_sum_is_not_made_again():
    def fn(x):
        y = x.cumsum(1)
        return y.sum(0), y.sum(1)

    check(fn, torch.randn(64, 128), rtol=1e-4, atol=1e-4)


def test_a_value_that_is_costly_to_make_again_is_stored():
    def fn(x):
        y = x.sin()
        return y.sum(1), y.sum(0)

    program = check(fn, torch.randn(64, 128))
    assert sum(buffer.storage.value == 64 * 128 for buffer in program.buffers.values()) == 2


def test_a_sum_of_products_is_made_in_place():
    def fn(a, b, c):
        return a @ b + b @ c + c @ a

    square = [torch.randn(64, 64) for _ in range(3)]
    program = check(fn, *square, rtol=1e-4, atol=1e-4)
    assert externs(program) == ["aten.mm.default", "aten.addmm.default", "aten.addmm.default"]
    assert len(MemoryPlan(program).over) == 2
    rounded = program_of(fn, *[x.bfloat16() for x in square])
    assert externs(rounded) == ["aten.mm.default"] * 3  # eager rounds each product


def test_a_product_with_another_use_is_added_by_a_loop():
    def fn(a, b):
        product = a @ b
        return product + b @ a, product.sin()

    program = check(fn, *[torch.randn(64, 64) for _ in range(2)], rtol=1e-4, atol=1e-4)
    assert externs(program) == ["aten.mm.default"] * 2


def test_row_and_column_sums_share_a_kernel(monkeypatch):
    monkeypatch.setattr(row_column_fusion, "LARGE", 0)

    def backward(x, g, w, mean, rstd):
        normal = (x - mean) * rstd
        scaled = g * w
        inner = scaled.mean(1, True) + normal * (scaled * normal).mean(1, True)
        return (scaled - inner) * rstd, (g * normal).sum(0), g.sum(0).relu()

    x, g, w = torch.randn(128, 96), torch.randn(128, 96), torch.randn(96)
    args = (x, g, w, x.mean(1, True), 1 / x.std(1, keepdim=True))
    program = check(backward, *args)
    # Rows with the sums of each block, and the blocks added up.
    assert launches(program) == 2
    assert sum(stmt.kind == "parallel" for k in program.kernels.values() for stmt in k.body) == 2
    monkeypatch.setattr(row_column_fusion, "LARGE", 1 << 24)
    assert len(check(backward, *args).buffers) == len(program.buffers) - 2


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_columns_of_what_rows_make(dtype, columns, monkeypatch):
    monkeypatch.setattr(row_column_fusion, "LARGE", 0)

    def fn(x):
        shifted = x - x.amax(1, True)
        return shifted, shifted.sum(0), (shifted * shifted).amax(0)

    x = (torch.randn(3, 64, columns) * 8).to(dtype).flatten(0, 1)
    program = check(fn, x, native=True)
    assert launches(program) == 2
    loops = [stmt for k in program.kernels.values() for stmt in statements(k.body)]
    inside = [stmt.body for stmt in loops if isinstance(stmt, Loop)]
    # The result and both sums of columns are made by one loop.
    assert [sum(isinstance(s, Store | Reduce) for s in body) for body in inside].count(3) == 1


def test_columns_beside_rows_that_are_only_summed(monkeypatch):
    monkeypatch.setattr(row_column_fusion, "LARGE", 0)
    x = torch.randn(192, 600)
    program = check(lambda x: ((x * x).sum(1), x.sum(0)), x, native=True, rtol=1e-4, atol=1e-4)
    assert launches(program) == 2


def test_rows_that_need_the_columns_stay_apart(monkeypatch):
    monkeypatch.setattr(row_column_fusion, "LARGE", 0)
    check(lambda x: ((x - x.mean(0)).softmax(1), x.sum(1)), torch.randn(128, 64))


def test_equal_groups_are_assembled_once(monkeypatch):
    import weft_codegen.loops.schedule as schedule

    seen = []
    assemble = schedule.assemble
    monkeypatch.setattr(
        schedule, "assemble", lambda *args: (seen.append(args[0]), assemble(*args))[1]
    )

    def layers(x, w, *more):
        for _ in range(5):
            x = torch.softmax((x @ w).relu() + x, 1)
        return x, *(torch.softmax((y @ w).relu() - y, 1) for y in more)

    program = check(layers, torch.randn(80, 96), torch.randn(96, 96), torch.randn(80, 96))
    assert launches(program) == 6 and len(program.kernels) == len(seen) == 2


def test_groups_that_store_other_results_are_not_equal():
    def both(x, w):
        first, second = (x @ w).sin() * 2, (x @ w.t()).sin() * 2
        return first.exp(), second, second.exp()

    program = check(both, torch.randn(80, 96), torch.randn(96, 96))
    assert len(program.kernels) == 2


def _running_moments(x, mean, count, var):
    new, spread, n = x.mean(0), x.var(0, unbiased=False), x.shape[0]
    change, total = new - mean, count + n
    mean += change * n / total
    var.copy_((var * count + spread * n + change**2 * count * n / total) / total)
    count.fill_(total)
    return new, (x - mean) / (var + 1e-8).sqrt()


def _row_moments(x, mean, var):
    change = x.sum(1) - mean
    weights = (x - change[:, None]).exp().sum(1)
    var.copy_(var + weights + mean)
    mean.copy_(change)
    return x + weights[:, None]


def test_work_between_sweeps_reads_an_input_before_it_is_written():
    torch.manual_seed(0)
    moments = torch.zeros(3), torch.tensor(0.1), torch.ones(3)
    check(_running_moments, torch.randn(4, 3), *moments, native=True)
    check(_row_moments, torch.randn(3, 40), torch.ones(3), torch.ones(3), native=True)
