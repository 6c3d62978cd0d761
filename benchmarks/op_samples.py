"""One sample of torch's operator database through weft_aot and weft_codegen, against eager."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from weft_aot import JointGraph, trace_joint
from weft_codegen.compile import make_program
from weft_codegen.config import settings
from weft_codegen.kernels import compile_program
from weft_codegen.kernels.triton.triton_expr import NoTritonForm
from weft_codegen.loops.interpret import run_program
from weft_codegen.loops.lower.decompose import decompositions
from weft_codegen.loops.lower.graph import NoLowering
from weft_codegen.loops.program import Extern, Program
from weft_core.errors import Unsupported
from weft_core.fake import fake_mode, make_shape_env, to_fake

warnings.simplefilter("ignore")
torch_version = torch.__version__
# Uninitialised memory, and what needs another device.
LEFT_OUT = {"empty", "new_empty", "empty_like", "new_empty_strided", "empty_strided",
            "empty_permuted", "jiterator_unary", "jiterator_binary",
            "jiterator_binary_return_by_ref", "jiterator_2inputs_2outputs",
            "jiterator_4inputs_with_extra_args"}  # fmt: skip


def _name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


DATABASE = {_name(op): op for op in op_db if op.name not in LEFT_OUT}

Function = Callable[..., list[torch.Tensor]]
Sample = tuple[Function, list[torch.Tensor]]
# (relative, absolute) by dtype; what differs more is measured against float64.
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.float64: (1e-7, 1e-7),
             torch.bfloat16: (2e-2, 1e-2), torch.float16: (2e-3, 1e-3)}  # fmt: skip


def list_cases() -> Iterator[dict[str, Any]]:
    """Every operator with the dtypes that it takes."""
    for name, op in DATABASE.items():
        yield {"op": name, "dtypes": [str(d)[6:] for d in op.supported_dtypes("cpu")]}


def run_case(op: str, dtype: str, mode: str, most: int | None) -> Iterator[dict[str, Any]]:
    """Run the samples of an operator; {kind, why, externs} for each (for each graph, if native).

    Args:
        most: how many samples at most; None for all.
    """
    device = "cuda" if mode == "cuda" else "cpu"
    samples = list(samples_of(DATABASE[op], getattr(torch, dtype), most, device))
    if mode in ("static", "dynamic"):
        for fn, tensors in samples:
            yield _run(fn, tensors, dynamic=mode == "dynamic", native=False)
        return
    whole = _run(*_together(samples), dynamic=False, native=True) if samples else None
    if whole is not None and (whole["kind"] in ("lowered", "extern") or len(samples) == 1):
        yield whole
    elif whole is not None:
        # To see which of them it is; and random operators seed the generator at each call.
        for fn, tensors in samples:
            yield _run(fn, tensors, dynamic=False, native=True)


def samples_of(op: Any, dtype: torch.dtype, most: int | None, device: str) -> Iterator[Sample]:
    """Samples as functions of their tensors, those that eager runs."""
    if dtype not in op.supported_dtypes(device):
        return
    differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes(device)
    torch.manual_seed(0)
    made = 0
    for sample in op.sample_inputs(device, dtype, requires_grad=differentiable):
        fn, tensors = _flat(op, sample)
        plain = all(t.layout is torch.strided and type(t) is torch.Tensor for t in tensors)
        if tensors and plain:
            yield fn, tensors
            made += 1
            if made == most:
                return


def _flat(op: Any, sample: Any) -> Sample:
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))

    def fn(*tensors: torch.Tensor) -> list[torch.Tensor]:
        rest = iter(tensors)
        filled = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        value, args, kwargs = pytree.tree_unflatten(filled, spec)
        results = pytree.tree_leaves(op(value, *args, **kwargs))
        # A copy, so that results are values of the graph and not views that the wrapper rebuilds.
        return [result.clone() for result in results if isinstance(result, torch.Tensor)]

    return fn, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _together(samples: list[Sample]) -> Sample:
    """Several samples as one function."""

    def fn(*tensors: torch.Tensor) -> list[torch.Tensor]:
        rest = iter(tensors)
        results: list[torch.Tensor] = []
        for one, own in samples:
            results += one(*[next(rest) for _ in own])
        return results

    return fn, [tensor for _, own in samples for tensor in own]


def _run(
    fn: Function, tensors: list[torch.Tensor], *, dynamic: bool, native: bool
) -> dict[str, Any]:
    """One graph: what became of it, and what is wrong with its results."""
    try:
        want = _eager(fn, tensors)
    except Exception as reason:
        return {"kind": "skipped", "why": _text(reason)}
    try:
        joint, program = _program(fn, tensors, dynamic)
    except (NoLowering, Unsupported, NotImplementedError) as reason:
        return {"kind": "break", "why": _text(reason)}
    except Exception as reason:
        kind = "break" if _before_codegen(reason) else "wrong"
        return {"kind": kind, "why": _text(reason)}
    calls = (s for s in program.steps if isinstance(s, Extern) and s.when is None)
    externs = sorted({str(step.op) for step in calls})
    try:
        execute = _compiled(program) if native else lambda *args: run_program(program, args)
        why = _compare(fn, tensors, want, joint, execute)
    except NoTritonForm as reason:
        return {"kind": "break", "why": _text(reason)}
    except Exception as reason:
        why = _text(reason)
    kind = "wrong" if why else "extern" if externs else "lowered"
    return {"kind": kind, "why": why, "externs": [e.removeprefix("aten.") for e in externs]}


def _compiled(program: Program) -> Callable[..., list[Any]]:
    if any(buffer.device.type == "cuda" for buffer in program.buffers.values()):
        from weft_codegen.kernels.triton.launch import compile_program as on_gpu  # noqa: PLC0415

        return on_gpu(program)
    return compile_program(program)


def _text(reason: Exception) -> str:
    return f"{type(reason).__name__}: {str(reason).splitlines()[0] if str(reason) else ''}"[:200]


def _before_codegen(reason: Exception) -> bool:
    """Whether an exception comes from tracing: the capture stage would have run that eagerly."""
    trace = reason.__traceback__
    while trace is not None:
        if "weft_codegen" in trace.tb_frame.f_code.co_filename:
            return "decompose" in trace.tb_frame.f_code.co_filename
        trace = trace.tb_next
    return True


def _program(
    fn: Function, tensors: list[torch.Tensor], dynamic: bool
) -> tuple[JointGraph, Program]:
    joint, fakes = traced(fn, tensors, decompositions(), dynamic)
    with settings.patch(verify_ir=True):
        return joint, make_program(joint.module, fakes)


def traced(
    fn: Function, tensors: list[torch.Tensor], table: dict[Any, Any], dynamic: bool = False
) -> tuple[JointGraph, list[Any]]:
    """The joint graph of a function for tensors like these, and its fake inputs."""
    mode = fake_mode(make_shape_env() if dynamic else None)
    fakes: list[Any] = []
    for position, tensor in enumerate(tensors):
        dims = [dim for dim, n in enumerate(tensor.shape) if n > 1] if dynamic else None
        fakes.append(to_fake(mode, tensor, dynamic_dims=dims, source_name=f"in{position}"))
    torch.manual_seed(42)
    return trace_joint(fn, fakes, table), fakes


def _eager(fn: Function, tensors: list[torch.Tensor]) -> tuple[list[Any], list[Any], list[Any]]:
    """(results, gradients, inputs afterwards) of eager; gradients of sums weighted as _tangent."""
    given = _clones(tensors)
    torch.manual_seed(42)
    results = fn(*given)
    wanted = [t for t in given if t.requires_grad]
    seeded = [r for r in results if r.requires_grad]
    gradients: list[Any] = []
    if wanted and seeded:
        weights = [_tangent(r) for r in seeded]
        gradients = list(torch.autograd.grad(seeded, wanted, weights, allow_unused=True))
    return [r.detach() for r in results], gradients, [t.detach() for t in given]


def _clones(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies with the same layout and requires_grad."""
    copies = []
    for tensor in tensors:
        dims = list(zip(tensor.shape, tensor.stride(), strict=True))
        copy = tensor.detach().clone()
        # Where elements share memory, copying them one by one would write it more than once.
        if tensor.numel() and all(stride > 0 or extent == 1 for extent, stride in dims):
            memory = copy.new_zeros(1 + sum((extent - 1) * stride for extent, stride in dims))
            copy = memory.as_strided(tensor.shape, tensor.stride()).copy_(copy)
        copies.append(copy.requires_grad_(tensor.requires_grad))
    return copies


def _tangent(result: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(result.numel())
    weights = torch.rand(result.shape, generator=generator, dtype=torch.float64) + 0.5
    laid_out = torch.empty_like(result, requires_grad=False)
    return laid_out.copy_(weights)


def _compare(
    fn: Function, tensors: list[torch.Tensor], want: tuple[list[Any], list[Any], list[Any]],
    joint: JointGraph, execute: Callable[..., list[Any]],
) -> str:  # fmt: skip
    """What differs from eager, "" if nothing does."""
    results, gradients, after = want
    places = [plan.source for plan in joint.plans]
    by_value = {place.index: r for place, r in zip(places, results, strict=True) if place}
    given = _clones(tensors)
    torch.manual_seed(42)
    with torch.no_grad():
        flat = execute(*given, *(_tangent(by_value[k]) for k in joint.tangents))
    values, got_gradients = flat[: joint.num_values], flat[joint.num_values :]
    pairs = [(values[place.index], r) for place, r in zip(places, results, strict=True) if place]
    pairs += [(g.detach(), w) for g, w in zip(given, after, strict=True)]
    made = dict(zip(joint.gradients, got_gradients, strict=True))
    inputs = [k for k, t in enumerate(tensors) if t.requires_grad]
    pairs += [(made.get(k), g) for k, g in zip(inputs, gradients, strict=bool(gradients))]
    differences = [_difference(got, expected) for got, expected in pairs]
    if not any(differences):
        return ""
    with contextlib.suppress(Exception):
        exact, exact_gradients, _ = _eager(fn, [_double(t) for t in tensors])
        references = [*exact, *(None for _ in after), *exact_gradients]
        differences = [
            d and _worse_than_eager(d, got, expected, exact)
            for d, (got, expected), exact in zip(differences, pairs, references, strict=True)
        ]
    return next((d for d in differences if d), "")


def _double(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.detach().double() if tensor.is_floating_point() else tensor.detach()
    return wide.requires_grad_(tensor.requires_grad)


def _difference(got: Any, want: Any) -> str:
    if got is None or want is None:
        zero = want is None and (got is None or not got.any())
        return "" if zero else f"{'no ' if got is None else ''}gradient, eager has another"
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"{got.dtype} {tuple(got.shape)}, eager {want.dtype} {tuple(want.shape)}"
    if want.numel():
        dims = zip(want.shape, got.stride(), want.stride(), strict=True)
        other = any(extent > 1 and ours != eagers for extent, ours, eagers in dims)
        # A gradient that eager leaves as a view with gaps (a real part, a slice) comes out dense.
        if other and torch.ops.aten.is_non_overlapping_and_dense(want):
            return f"strides {got.stride()}, eager {want.stride()}"
    relative, absolute = TOLERANCE.get(want.dtype, (0, 0))
    if want.is_complex():
        relative, absolute = TOLERANCE[torch.float32]
    if torch.allclose(got, want, rtol=relative, atol=absolute, equal_nan=True):
        return ""
    wide = torch.complex128 if want.is_complex() else torch.float64
    return f"values, by up to {float((got.to(wide) - want.to(wide)).abs().max()):.3g}"


def _worse_than_eager(text: str, got: torch.Tensor, want: torch.Tensor, exact: Any) -> str:
    """`text`, unless the values are as close to float64's as eager's are."""
    if exact is None or not text.startswith("values") or not want.is_floating_point():
        return text
    if not torch.equal(got.isnan(), want.isnan()) or not torch.equal(got.isinf(), want.isinf()):
        return text
    finite = want.isfinite()
    exact = exact.double()[finite]
    ours, eagers = ((t.double()[finite] - exact).abs() for t in (got, want))
    scale = exact.abs().max() * torch.finfo(want.dtype).eps
    return "" if bool(ours.max() <= 2 * eagers.max() + 4 * scale) else text
