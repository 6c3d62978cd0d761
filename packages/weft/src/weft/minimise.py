"""The smallest graph that fails as a given one does, and a script that shows it.

    outputs -> operators -> shapes -> dtypes -> values, again until nothing more goes

A move makes another graph with other inputs; it stays where the test still fails.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from weft_core.errors import user_frame

_WRITTEN_OUT = 64  # elements of an input that a script lists
_CALLS = ("call_function", "call_method", "call_module")


@dataclass(frozen=True)
class Candidate:
    """A graph and inputs of it: tensors and numbers, one a placeholder."""

    graph: fx.GraphModule
    inputs: tuple[Any, ...]

    @property
    def calls(self) -> list[fx.Node]:
        """The operations."""
        return [node for node in self.graph.graph.nodes if node.op in _CALLS]

    @property
    def size(self) -> tuple[int, int]:
        """What is to become small: operations, then elements of the inputs."""
        tensors = [value for value in self.inputs if isinstance(value, torch.Tensor)]
        return len(self.calls), sum(t.numel() for t in tensors)

    def fresh_inputs(self) -> list[Any]:
        """Copies of the inputs, with their layouts."""
        return [copy_of(value) for value in self.inputs]


Fails = Callable[[Candidate], str]
"""What a candidate does wrong, in the words of `judge.difference`; an empty text for nothing."""


def copy_of(value: Any) -> Any:
    """Return a tensor with the same contents and layout, a leaf; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    source = value.detach()
    for dim, stride in enumerate(value.stride()):
        if stride == 0 and value.shape[dim] > 1:  # an expanded dimension
            source = source.narrow(dim, 0, 1)
    found = torch.empty_strided(
        source.shape, source.stride(), dtype=value.dtype, device=value.device
    )
    try:
        found.copy_(source)
    except RuntimeError:  # elements overlap in another way
        found = source.clone()
    return found.expand(value.shape).detach().requires_grad_(value.requires_grad)


def minimise(candidate: Candidate, fails: Fails, most: int = 400) -> Candidate:
    """Return a smaller candidate that fails, too.

    Args:
        candidate: one that fails.
        fails: the test. What it raises counts as nothing wrong, and so should another failure
            than the first one's.
        most: how many tests at most.
    """
    left = itertools.count(most, -1)

    def test(smaller: Candidate) -> str:
        try:
            return fails(smaller)
        except Exception:
            return ""

    candidate = _first_wrong(candidate, test)
    changed = True
    while changed:
        changed = False
        for moves in (_single_outputs, _cut, _bypassed, _shrunk, _plainer):
            progress = True
            while progress:
                progress = False
                for smaller in moves(candidate):
                    if next(left) <= 0:
                        return candidate
                    if test(smaller):
                        candidate, changed, progress = smaller, True, True
                        break
    return candidate


def first(most: int, fails: Callable[[int], object]) -> int:
    """The least number from 1 to `most` for which a test fails, which fails for `most`."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(middle) else (middle, high)
    return high


def _first_wrong(candidate: Candidate, test: Fails) -> Candidate:
    """The first operation that fails as an output: all up to some are outputs at once."""
    values = _Values(candidate).values
    nodes = [node for node in candidate.calls if isinstance(values[node], torch.Tensor)]
    nodes = [node for node in nodes if _is_judged(node)]
    text = test(rebuild(candidate, nodes, {})) if nodes else ""
    if not text:
        return candidate
    told = re.match(r"result (\d+): ", text)
    if told is not None:
        count = int(told[1]) + 1
    else:
        count = first(len(nodes), lambda n: test(rebuild(candidate, nodes[:n], {})))
    alone = rebuild(candidate, nodes[count - 1 : count], {})
    few = rebuild(candidate, nodes[:count], {})
    return alone if test(alone) else few if test(few) else candidate


def _is_judged(node: fx.Node) -> bool:
    """Whether a result may be compared: not an empty tensor's, nor what changes earlier results."""
    return re.search(r"empty|_$|_\.", str(node.target)) is None


# ---- moves


def rebuild(candidate: Candidate, outputs: Iterable[fx.Node], cut: dict[fx.Node, Any]) -> Candidate:
    """Return the part of a graph that computes some nodes, with values in the place of others."""
    outputs = list(outputs)
    needed, waiting = set[fx.Node](), list(outputs)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += [] if node in cut else node.all_input_nodes
    graph, env, inputs = fx.Graph(), dict[fx.Node, fx.Node](), list[Any]()
    given = iter(candidate.inputs)
    for node in candidate.graph.graph.nodes:
        value = next(given) if node.op == "placeholder" else None
        if node not in needed:
            continue
        if node.op == "placeholder" or node in cut:
            env[node] = graph.placeholder(node.name)
            inputs.append(cut.get(node, value))
        elif node.op != "output":
            env[node] = graph.node_copy(node, env.__getitem__)
    for node in graph.nodes:
        node.meta = {k: v for k, v in node.meta.items() if k == "stack_trace"}
    graph.output(tuple(env[node] for node in outputs))
    return Candidate(fx.GraphModule(candidate.graph, graph), tuple(inputs))


def _output_nodes(candidate: Candidate) -> list[fx.Node]:
    (last,) = candidate.graph.graph.find_nodes(op="output")
    leaves = pytree.tree_leaves(last.args[0])
    return list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, fx.Node)))


class _Values(fx.Interpreter):
    """Every node's value in an eager run."""

    def __init__(self, candidate: Candidate) -> None:
        super().__init__(candidate.graph)
        self.values: dict[fx.Node, Any] = {}
        self.run(*candidate.fresh_inputs())

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        # Some operators lay their result out otherwise than their fake kernel.
        view = target is torch.ops.aten.view.default
        return super().call_function(
            torch.ops.aten.reshape.default if view else target, args, kwargs
        )

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.values[n] = copy_of(result) if isinstance(result, torch.Tensor) else result
        return result


def _single_outputs(candidate: Candidate) -> Iterator[Candidate]:
    """One node as the only output: the first of the operations that fails, if one does."""
    if _output_nodes(candidate) == candidate.calls[-1:] and len(candidate.calls) == 1:
        return
    yield from (rebuild(candidate, [n], {}) for n in candidate.calls[:-1] if _is_judged(n))
    outputs = _output_nodes(candidate)
    if len(outputs) > 1:
        yield from (rebuild(candidate, [node], {}) for node in outputs)


def _cut(candidate: Candidate) -> Iterator[Candidate]:
    """With the values of some operations as inputs: of many first, then of one."""
    values = _Values(candidate).values
    outputs = _output_nodes(candidate)
    inner = [n for n in candidate.calls if n not in outputs and isinstance(values[n], torch.Tensor)]
    for size in (len(inner), len(inner) // 2, len(inner) // 4, 1):
        for start in range(0, len(inner), size) if size else ():
            # The latest first, which leaves the fewest operations.
            chosen = inner[max(0, len(inner) - start - size) : len(inner) - start]
            yield rebuild(candidate, outputs, {node: values[node].detach() for node in chosen})


def _bypassed(candidate: Candidate) -> Iterator[Candidate]:
    """With an operand in the place of an operation of the same shape and dtype."""
    values = _Values(candidate).values
    for node in candidate.calls:
        for operand in node.all_input_nodes:
            a, b = values[node], values[operand]
            if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
                continue
            if (a.shape, a.dtype) != (b.shape, b.dtype) or not node.users:
                continue
            smaller = rebuild(candidate, _output_nodes(candidate), {})
            by_name = {n.name: n for n in smaller.graph.graph.nodes}
            if node.name in by_name and operand.name in by_name:
                by_name[node.name].replace_all_uses_with(by_name[operand.name])
                yield rebuild(smaller, _output_nodes(smaller), {})


def _shrunk(candidate: Candidate) -> Iterator[Candidate]:
    """With a size of the inputs and of the arguments made smaller everywhere."""
    tensors = [value for value in candidate.inputs if isinstance(value, torch.Tensor)]
    sizes = sorted({size for t in tensors for size in t.shape if size > 1}, reverse=True)
    for size, new in ((s, n) for s in sizes for n in (1, 2, s // 2) if 0 < n < s):
        yield Candidate(
            _with_sizes(candidate.graph, size, new),
            tuple(_narrowed(value, size, new) for value in candidate.inputs),
        )

    for place, value in enumerate(candidate.inputs):
        if isinstance(value, torch.Tensor):
            for dim in (d for d, size in enumerate(value.shape) if size > 1):
                smaller = value.detach().narrow(dim, 0, 1).contiguous()
                yield _with_input(candidate, place, smaller.requires_grad_(value.requires_grad))


def _narrowed(value: Any, size: int, new: int) -> Any:
    if not isinstance(value, torch.Tensor) or size not in value.shape:
        return value
    smaller = value.detach()
    for dim, length in enumerate(value.shape):
        smaller = smaller.narrow(dim, 0, new) if length == size else smaller
    return smaller.contiguous().requires_grad_(value.requires_grad)


def _with_sizes(graph: fx.GraphModule, size: int, new: int) -> fx.GraphModule:
    """A copy of a graph whose lists of sizes have another one."""

    def changed(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)([new if type(v) is int and v == size else v for v in value])
        return value

    copied = fx.GraphModule(graph, fx.Graph())
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        env[node] = made = copied.graph.node_copy(node, env.__getitem__)
        if node.op in _CALLS:
            made.args = tuple(map(changed, made.args))
    copied.recompile()
    return copied


def _plainer(candidate: Candidate) -> Iterator[Candidate]:
    """With plainer inputs: float32, contiguous, without gradients, random from a seed."""
    for place, value in enumerate(candidate.inputs):
        if not isinstance(value, torch.Tensor):
            continue
        plainer: list[torch.Tensor] = []
        if value.requires_grad:
            plainer.append(copy_of(value).detach())
        if value.is_floating_point() and value.dtype != torch.float32:
            plainer.append(value.detach().float().requires_grad_(value.requires_grad))
        if not value.is_contiguous():
            plainer.append(value.detach().contiguous().requires_grad_(value.requires_grad))
        if value.is_floating_point() and not torch.equal(value, _random(value)):
            plainer.append(_random(value))
        yield from (_with_input(candidate, place, smaller) for smaller in plainer)


def _with_input(candidate: Candidate, place: int, value: torch.Tensor) -> Candidate:
    inputs = (*candidate.inputs[:place], value, *candidate.inputs[place + 1 :])
    return Candidate(candidate.graph, inputs)


def _random(value: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(value.shape, generator=generator).to(value.dtype).to(value.device)
    return numbers.requires_grad_(value.requires_grad)


# ---- the script


def script(candidate: Candidate, about: str, call: str) -> str:
    """Return a program of torch calls alone that runs a candidate eagerly and compiled.

    Args:
        candidate: what it runs.
        about: its first comment.
        call: an expression that compiles `f`.
    """
    nodes = list(candidate.graph.graph.nodes)
    body = [f"    {line}" for node in nodes for line in _line(node)]
    names = ", ".join(node.name for node in nodes if node.op == "placeholder")
    inputs = [f"    {text_of_input(value)}," for value in candidate.inputs]
    return "\n".join(
        [
            *(f"# {line}" for line in about.splitlines()),
            "import torch", "from torch import device, inf, nan", "", "import weft", "", "",
            f"def f({names}):", *body, "", "",
            "inputs = [", *inputs, "]",
            "expected = f(*inputs)",
            f"result = {call}(*inputs)",
            "torch.testing.assert_close(result, expected)",
            "",
        ]
    )  # fmt: skip


def _line(node: fx.Node) -> Iterator[str]:
    if node.op == "placeholder":
        return
    if node.op == "output":
        yield f"return {_argument(node.args[0])}"
        return
    arguments = [_argument(a) for a in node.args]
    arguments += [f"{name}={_argument(a)}" for name, a in node.kwargs.items()]
    if node.op == "call_method":
        text = f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
    elif node.op == "get_attr":
        text = f"None  # an attribute {node.target}"
    elif node.target is operator.getitem:
        text = f"{arguments[0]}[{arguments[1]}]"
    else:
        text = f"{target_name(node)}({', '.join(arguments)})"
    line = ":".join(user_frame(node.meta.get("stack_trace"))[:2])
    yield f"{node.name} = {text}" + (f"  # {line}" if line else "")


def target_name(node: fx.Node) -> str:
    """The name under which a program calls what a node calls."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target}"
    if isinstance(target, str):
        return f"torch.Tensor.{target}"
    module = getattr(target, "__module__", None) or "torch"
    name = getattr(target, "__name__", str(target))
    module = {"_operator": "torch.utils._pytree.operator"}.get(module, module)
    for place in ("torch.nn.functional", "torch"):
        if getattr(torch.nn.functional if "nn" in place else torch, name, None) is target:
            return f"{place}.{name}"
    return f"{module}.{name}"


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, list | tuple):
        inner = ", ".join(map(_argument, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if inner else "()"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k!r}: {_argument(v)}' for k, v in value.items())}}}"
    return repr(value)


def text_of_input(value: Any) -> str:
    """Return an expression for an input of a script."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    where = f", device={str(value.device)!r}" if value.device.type != "cpu" else ""
    gradient = ".requires_grad_()" if value.requires_grad else ""
    if value.numel() <= _WRITTEN_OUT:
        return f"torch.tensor({value.tolist()}, dtype={value.dtype}{where}){gradient}"
    made = f"torch.randn({tuple(value.shape)}, generator=torch.Generator().manual_seed(0))"
    return f"{made}.to({value.dtype}){gradient}"
