"""`Break`, which ends a graph, and the table of its reasons.

A `Break` splits the frame at the current instruction. It carries a code from `REASONS`, so that
logs, counters and `fullgraph` errors agree.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """What a break code means.

    Args:
        why: why capture cannot go on.
        remedy: what the user can do.
        raises: an exception is likely here, which shows all variables of its frames.
        expected: no failure of capture: `fullgraph=True` allows it.
    """

    why: str
    remedy: str
    raises: bool = False
    expected: bool = False


REASONS: dict[str, Reason] = {
    # Values that only the running program knows.
    "data-dependent-branch": Reason(
        "the branch depends on the value of a tensor, known only when the program runs",
        "use torch.where, state what holds with torch._check, or accept the break",
    ),
    "data-dependent-value": Reason(
        "a tensor's value is turned into a Python number",
        "keep the value in a tensor, set weft.config.capture_scalar_outputs, or accept the break",
    ),
    "dynamic-output-shape": Reason(
        "the shape of the result depends on the values of a tensor",
        "use torch.where or another operation with a static output shape, "
        "or set weft.config.capture_scalar_outputs",
    ),
    "constant-required": Reason(
        "a C function or an option needs a Python constant, and gets something else",
        "pass a number, a string or a tuple of them, or compute the result before the call",
    ),
    "symbolic-number": Reason(
        "Python needs the value of a number or string that varies between calls",
        "pass it as a constant, or leave this use of it out of the compiled function",
    ),
    # Calls.
    "c-function": Reason(
        "the function or method is written in C, and capture has no rule for it",
        "call it outside of the compiled function; if it takes and returns tensors, "
        "register it with weft.allow_in_graph",
    ),
    "skipped-function": Reason(
        "capture never inlines functions of this module",
        "call it outside of the compiled function, or register it with weft.allow_in_graph",
    ),
    "unsupported-arguments": Reason(
        "capture knows this function, but not with these arguments",
        "use its common form, or call it outside of the compiled function",
    ),
    "cached-function": Reason(
        "a function with functools.cache hands out an object that other code may hold as well",
        "call it before the compiled function and pass its result, or do not change the result",
    ),
    "dynamic-code": Reason(
        "the program compiles, evaluates or imports code while it runs",
        "compile, evaluate or import it once, at the top of the module",
    ),
    "frame-access": Reason(
        "the program looks at stack frames, trace functions or all objects of the interpreter",
        "remove the debugging code, or mark the function that needs it with weft.disable",
    ),
    "recursion": Reason("calls nest too deeply to be inlined", "turn the recursion into a loop"),
    "too-long": Reason(
        "the frame executes very many instructions",
        "compile an inner function instead of the whole loop",
    ),
    # Operations on tensors.
    "operator-error": Reason(
        "the operation raises on tensors of these shapes and types",
        "run the program without weft: if the operation raises there too, fix it; otherwise accept "
        "the break: the operation runs eagerly between two graphs",
        raises=True,
    ),
    "no-fake-kernel": Reason(
        "the operator has no fake implementation, so that its result's shape is unknown",
        "register one with torch.library.register_fake",
        raises=True,
    ),
    "graph-value": Reason(
        "an operation takes or returns an object that a graph cannot hold",
        "pass and return tensors, numbers, strings, dtypes, devices and containers of them",
    ),
    "unsupported-tensor": Reason(
        "capture has no fake tensor for a tensor of this layout or kind",
        "make it dense with to_dense, resolve_conj or resolve_neg before the compiled function",
    ),
    "tensor-subclass": Reason(
        "capture does not know what this tensor subclass does here",
        "give it __tensor_flatten__, __tensor_unflatten__ and __torch_dispatch__, "
        "or pass its inner tensors",
    ),
    "torch-function": Reason(
        "a __torch_function__ handler or a function mode does something that capture cannot follow",
        "make the handler a classmethod that only calls torch functions, "
        "or enter the mode outside of the compiled function",
    ),
    "tensor-storage": Reason(
        "the operation needs or changes the memory of a tensor, not only its values",
        "do it outside of the compiled function, or on a clone",
    ),
    "autograd-state": Reason(
        "the program reads or changes how a tensor takes part in autograd",
        "set requires_grad, .grad and hooks outside of the compiled function",
    ),
    "autograd-mode": Reason(
        "the block changes how autograd saves or checks what is computed in it",
        "enter the block around the call of the compiled function, or accept the break: what is "
        "inside the block is compiled",
    ),
    "inner-backward": Reason(
        "the compiled function computes gradients that reach beyond what it computed itself",
        "call backward or torch.autograd.grad outside of the compiled function",
    ),
    "lazy-module": Reason(
        "the first call of a lazy module makes its parameters",
        "none needed: that call runs eagerly, and the next one is compiled; call the module once "
        "before, to have it compiled at once",
        expected=True,
    ),
    "backward": Reason(
        "compiled autograd is on, which captures the backward pass as a graph of its own",
        "none needed: the code before and after it is compiled; for one graph of the whole step, "
        "turn compiled autograd off",
        expected=True,
    ),
    "higher-order-op": Reason(
        "a function passed to cond, while_loop, checkpoint or the like does more than compute "
        "with its arguments, or their results differ",
        "let it read its arguments only, change nothing, and return tensors of one structure",
    ),
    "function-transform": Reason(
        "capture does not follow this use of torch.func",
        "call the whole transform, such as torch.func.grad(f)(x), in the compiled function",
    ),
    "random-state": Reason(
        "the state of a random number generator is read or set, or numbers are drawn in a way "
        "that capture does not know",
        "seed outside of the compiled function, and draw with torch.rand or random.random",
    ),
    "unrolled": Reason(
        "each step of a recurrent network would become operations of the graph",
        "none needed: it runs as in eager; to compile it all the same, raise unrolled_steps",
    ),
    # Libraries.
    "numpy": Reason(
        "this NumPy call has no equivalent among torch's operations",
        "use the torch function, or call NumPy outside of the compiled function",
    ),
    "collective": Reason(
        "capture does not know this form of a collective, or what is done with its result",
        "use the functions of torch.distributed._functional_collectives, or accept the break",
    ),
    "fully-shard": Reason(
        "the hooks of a fully sharded module do more here than the graph does",
        "none needed: the module is called as in eager, and what is inside of it is compiled",
    ),
    "communication": Reason(
        "other processes wait for it, or for what the program did before it, in its own order",
        "none needed: the code around it is compiled; for one graph, move it to the function's end",
    ),
    "triton-kernel": Reason(
        "a Triton kernel is launched in a way that capture does not know",
        "define the kernel at module level and launch it with kernel[grid](...)",
    ),
    # Python's objects and classes.
    "cannot-rebuild": Reason(
        "generated code cannot create this object again after the graph",
        "create it before the compiled function, or do not use it after a graph break",
    ),
    "object-creation": Reason(
        "capture cannot create or copy an object of this class",
        "create the object outside of the compiled function and pass it in",
    ),
    "class-definition": Reason(
        "capture cannot execute this class statement, or what is done with the new class",
        "define the class at module level",
    ),
    "special-method": Reason(
        "a special method has side effects or is not a plain Python function",
        "define it with def, without side effects",
    ),
    "c-attribute": Reason(
        "the attribute is implemented in C or by a descriptor that capture does not know",
        "read or set it outside of the compiled function",
    ),
    "namespace-dict": Reason(
        "a namespace is used as a dict: __dict__, vars, locals, globals or dir",
        "use getattr, setattr and hasattr",
    ),
    "object-identity": Reason(
        "the result depends on addresses: id, `is` between equal constants, the order of a set",
        "compare with ==, and use a list or dict where the order matters",
    ),
    "dict-key": Reason(
        "a dict or set has a key whose __hash__ or __eq__ capture cannot rely on",
        "use strings, numbers or tuples of them as keys",
    ),
    "container-mutation": Reason(
        "a container changes while C code uses it, or in a way that capture cannot record",
        "build a new container instead of changing this one",
    ),
    "pending-mutation": Reason(
        "C code reads an object that the compiled function has changed, and whose change is made "
        "only after the graph",
        "read the object before it is changed, or change it outside of the compiled function",
    ),
    "string-conversion": Reason(
        "the text of an object depends on tensors, addresses or C code",
        "format the object outside of the compiled function",
    ),
    "builtin-error": Reason(
        "a builtin function or operator raises here, or may raise, with a message from C code",
        "check the operands first; if the exception is meant, accept the break",
        raises=True,
    ),
    "exception-state": Reason(
        "the program uses the traceback or the fields of an exception, which Python sets when it "
        "is raised",
        "use the exception's type and args, and look at its traceback outside",
    ),
    "weak-reference": Reason(
        "whether a weak reference is alive, or when its callback runs, is decided by the "
        "interpreter",
        "hold a plain reference in the compiled function",
    ),
    "finalizer": Reason(
        "an object with a __del__ method is created or released",
        "release it outside of the compiled function, or use a with statement instead of __del__",
    ),
    # Control flow and side effects.
    "context-manager": Reason(
        "a with block is entered or left in an order that capture cannot reproduce",
        "enter and leave it in one function, and create the context manager in the with statement",
    ),
    "generator": Reason(
        "a generator that is still running cannot be carried across this point",
        "turn the generator into a list",
    ),
    "async": Reason(
        "a coroutine or an asynchronous generator is made, which an event loop steps",
        "make it outside of the compiled function, and compile what it calls",
    ),
    "suspends": Reason(
        "a coroutine or generator function waits or yields to code that is not compiled",
        "compile the functions that it calls",
    ),
    "loop": Reason(
        "a loop that contains a graph break goes on: its iterator is advanced eagerly",
        "none needed: the loop's body is compiled; without the break there is one graph",
    ),
    "handler": Reason(
        "an exception raised in eager code is handled; the handler and the rest run eagerly",
        "let the handler only set a variable, and do the work after the try statement",
    ),
    "side-effect": Reason(
        "output, a log record, a warning, a file, a lock or a clock is used at a point where it "
        "cannot move to the start or the end of the graph",
        "move it to the start or the end of the compiled function, or out of it",
    ),
    "warns": Reason(
        "the operation warns, which has to happen in each call",
        "do what the warning says, or accept the break",
    ),
    "uncaught-exception": Reason(
        "the program raises an exception that nothing in it catches",
        "none needed: the exception is raised by the eager instruction",
        raises=True,
        expected=True,
    ),
    "unsupported-opcode": Reason(
        "capture does not execute this bytecode instruction",
        "move the statement out of the compiled function",
    ),
    # Requests and limits.
    "graph-break": Reason("the program asks for a graph break here", "remove the call"),
    "disabled": Reason(
        "the function is marked to run outside of graphs", "remove the disable marker"
    ),
    "skip-frame": Reason("the program asks to run this frame eagerly", "remove the call"),
    "recompile-limit": Reason(
        "the function was compiled as often as the recompile limit allows",
        "see the warning for the failing guards, or raise the limit",
    ),
    "modes": Reason(
        "an active mode of the program sees every operation, which compiled code does not run",
        "enter the mode inside the eager code, or leave it before the compiled function",
    ),
    "builtins": Reason(
        "the program replaced functions of Python or torch on which capture itself relies",
        "none needed: calls are compiled again once the functions are back",
    ),
    "internal": Reason(
        "capture failed; this is a bug in weft",
        "please report it with the program; the frame runs eagerly",
    ),
}
"""Every break code; `docs/breaks.md` has a paragraph about each."""


class Break(Exception):
    """The current instruction cannot be captured.

    Args:
        code: a key of `REASONS`.
        detail: the cause in this program, such as the name of the function.
        restart_step: where a value cannot be rebuilt, the step that should run eagerly instead.
    """

    def __init__(self, code: str, detail: str = "", restart_step: int = -1) -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail
        self.restart_step = restart_step
        self.user_stack: tuple[traceback.FrameSummary, ...] = ()
        self.eager_frame: object = None  # the frame that must run eagerly as a whole

    def bare(self) -> Break:
        """Drop the traceback, whose frames refer to the program's objects; returns itself."""
        self.__context__ = None
        return self.with_traceback(None)


class NeedsSymbols(Exception):
    """A number must be symbolic, but the capture began without symbols: it has to restart."""


class NotConstant(Break):
    """A value is needed as a Python constant, and is none."""

    def __init__(self, what: str, code: str = "constant-required") -> None:
        super().__init__(code, f"{what} where a constant is needed")
        self.what = what

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class BreakRecord:
    """One graph break, as logged, counted and shown by `explain`.

    Args:
        code: a key of `REASONS`.
        detail: the cause in this program.
        user_stack: the user's frames, outermost first.
    """

    code: str
    detail: str
    user_stack: tuple[traceback.FrameSummary, ...]

    @property
    def why(self) -> str:
        """Why capture cannot go on here."""
        return REASONS[self.code].why

    @property
    def remedy(self) -> str:
        """What the user can do about it."""
        return REASONS[self.code].remedy

    @property
    def advice(self) -> str:
        """The remedy, and where the code is explained."""
        return f"{self.remedy}; see docs/breaks.md#{self.code}"

    @property
    def where(self) -> str:
        """The file and line of the innermost user frame."""
        if not self.user_stack:
            return "<unknown>"
        frame = self.user_stack[-1]
        return f"{frame.filename}:{frame.lineno}"

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        stack = "".join(traceback.format_list(list(self.user_stack))).rstrip()
        return (
            f"[{self.code}]{detail} at {self.where}\n  Why: {self.why}\n"
            f"  What to do: {self.advice}\n{stack}"
        )


class BreakAtStep(Exception):
    """Capture has to restart and break at step number `step`.

    Either the step raises an exception that the eager instruction has to raise: it leaves the
    captured frame, where the traceback must be right, or there is a break in its handler, where the
    interpreter must know the exception. Or the step creates a value that a later break cannot
    rebuild.
    """

    def __init__(self, step: int, reason: Break) -> None:
        super().__init__(step)
        self.step = step
        self.reason = reason
