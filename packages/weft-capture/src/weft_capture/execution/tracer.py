"""The tracer: the state of one capture. Values and rules get it as `tx`.

It owns the graph, the guards, the undo journal, the record of mutated objects and the stack of
symbolic frames, and offers the operations that values share: calling, wrapping, guarding, raising.
"""

from __future__ import annotations

import operator
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from weft_guards import DynamicPolicy, Guard, GuardSet, WeakIdentity
from weft_guards.payloads import same_constant
from weft_guards.sources import (
    AttrSource,
    CallSource,
    ConstSource,
    InstanceAttrSource,
    ItemSource,
    ProgramSource,
    Source,
)

from weft_capture import config
from weft_capture.breaks import Break
from weft_capture.bytecode import decode
from weft_capture.effects.effects import DeferredCalls, Effects, weakly
from weft_capture.execution import class_body
from weft_capture.execution.frames import Frame
from weft_capture.execution.journal import Journal
from weft_capture.execution.stepping import SteppedFrame, Steps
from weft_capture.functions import super_methods, table
from weft_capture.functions import wrap as wrapping
from weft_capture.functions.generators import make_generator
from weft_capture.functions.language.text import text_of
from weft_capture.functions.language.type_checks import equal
from weft_capture.functions.torch.interception import Overrides
from weft_capture.library_traits import scalar_library
from weft_capture.model import attributes
from weft_capture.model.constant import FRAME_CLASSES, plain_scalar
from weft_capture.model.containers import Container, ListValue, SetValue, TupleValue
from weft_capture.model.dicts import DictValue, DictView, LazyValue
from weft_capture.model.exceptions import ExceptionValue, chain
from weft_capture.model.functions import BoundMethod, FunctionValue, function_value
from weft_capture.model.iterators import DictIterator, ListedIterator, SequenceIterator
from weft_capture.model.protocol import (
    Kwargs,
    MethodOf,
    MutableValue,
    Raised,
    Value,
    set_tracer,
)
from weft_capture.model.proxy import Proxy
from weft_capture.model.scope import instance_dict
from weft_capture.model.slots import leads_to
from weft_capture.model.weakrefs import has_finalizer
from weft_capture.policy.selection import check_inlinable, is_compiled_by_torch
from weft_capture.tensors import inputs, symbolic_scalars
from weft_capture.tensors.graph import GraphBuilder
from weft_capture.tensors.runtime_values import RuntimeValue, origins
from weft_capture.tensors.tensor import TensorValue

_VARYING = frozenset(("CONST", "LEN", "TENSOR", "DICT_KEYS", "KEY_ABSENT", "NONE"))
"""Kinds of guards on values that often differ between calls."""


class Tracer:
    """One capture of one frame.

    Args:
        function: the function whose frame is captured.
        symbolic: whether sizes and ints may become symbolic in this capture.
        policy: decides which ones do; None for none.
        steps: the numbering of steps, with its limit.

    `unstepped` counts the instructions executed in another one's step, or rolled back with one;
    `released_ids` has the ids of objects from outside that may have lost their last reference;
    `library` and `process_bound` record assumptions without a guard (see `capture_cache`).
    """

    def __init__(
        self,
        function: types.FunctionType,
        symbolic: bool,
        policy: DynamicPolicy | None,
        steps: Steps,
    ) -> None:
        set_tracer(self)
        self.function = function
        self.symbolic = symbolic
        self.policy = policy
        self.steps = steps
        self.unstepped = 0
        self.released_ids: set[int] = set()
        self.namespaces: set[int] = set()  # ids of dicts that hold variables
        self.marks_modules = False  # see `region_marks`
        self.fullgraph = False  # a break is an error here
        self.finalizes = False  # whether an object with a `__del__` was met
        self.watched: list[Any] = []  # objects with a `check` at the end of the capture
        self.journal = Journal()
        self.guards = GuardSet()
        self.graph = GraphBuilder(self, symbolic)
        self.effects = Effects(self)
        self.calls = DeferredCalls(self)
        self.frame: Frame | None = None
        self.depth = 0
        self.opaque_depth = 0  # how many of the enclosing functions are one call in the graph
        self.frames: list[Frame] = []  # all frames that ran
        self.values_by_id: dict[int, tuple[Value, Source]] = {}
        self.keep_alive: list[object] = []
        self.open_contexts: list[Any] = []
        self.left_blocks: list[Any] = []  # with the state outside of blocks entered before
        self.transforms: list[Any] = []  # how to leave each functorch level that was entered
        self.gathering = 0  # blocks of `libraries.attention.tensors_as_indices` around the program
        self.overrides = Overrides(self)
        self.no_saved_tensors_hooks = True  # at the call; capture may set some
        self.entry_grad_mode = torch.is_grad_enabled()
        self.in_handler = sys.exception() is not None  # a caller's, outside of the capture
        self.library: dict[tuple[str, str], Any] = {}  # values of globals of libraries
        self.answers: dict[object, Any] = {}  # results of cached functions, in all attempts
        self.rehearsed: dict[object, Value] | None = None  # by cached functions
        self.bucket_bytes = 0  # of the gradients of a DistributedDataParallel module in the graph
        self.process_bound = ""  # why the capture is valid in this process only

    # Operations that are implemented in other modules.
    wrap = wrapping.wrap
    literal = wrapping.literal
    call_builtin = table.call_rule
    apply = table.apply
    check_call = table.raise_real
    text_of = text_of
    is_equal = equal
    instance_dict = instance_dict
    tuple_of = TupleValue
    iterator_over = SequenceIterator
    bound_method = BoundMethod
    base_method = super_methods.BaseMethod
    pregraph_value = symbolic_scalars.pregraph_value
    by_python = symbolic_scalars.by_python
    compare_varying = symbolic_scalars.compare_varying
    dynamic_layout = inputs.dynamic_layout
    dynamic_int = inputs.dynamic_int
    unread_length = inputs.unread_length

    # ---- objects to values

    def const_object(self, obj: Any) -> Value:
        """Return the value of an object that never changes, which capture keeps alive."""
        return self.wrap(obj, ConstSource(obj))

    def force(self, value: Value) -> Value:
        """Return a value that may have been left unread."""
        if not isinstance(value, LazyValue):
            return value
        if value.forced is None:
            assert value.source is not None
            value.forced = self.wrap(value.obj, value.source)
        return value.forced

    def runtime_value(self, source: Source, hint: Any) -> Value:
        """Return the value of a deferred call's result; `hint` is an example of it."""
        if type(hint) is list:
            return ListValue(
                [self.runtime_value(ItemSource(source, i), v) for i, v in enumerate(hint)]
            )
        if type(hint) in (int, float, bool):
            return symbolic_scalars.sym_float(self, source, hint)
        return RuntimeValue(hint, source)

    def dict_iterator(self, of: DictView | DictValue, way: Any = iter) -> Value:
        """Return an iterator over a dict or a view of it, or `reversed` of it."""
        view = of if isinstance(of, DictView) else DictView(of, "keys")
        iterator_class = type(way(getattr(view.owner.cls(), view.view_name)()))
        items = list(way(view.unpack(self)))
        return DictIterator(items, iterator_class, owner=view.owner, view=view.view_name)

    def fresh(self, result: Any) -> Value:
        """Return the value of a pure function's result; an iterator is listed at once."""
        if isinstance(result, Iterator):
            return ListedIterator(list(map(self.literal, result)), type(result))
        if type(result) is tuple:
            return self.tuple_of(list(map(self.fresh, result)))
        return self.literal(result)

    def set_iterator(self, items: SetValue) -> Value:
        """Return an iterator over a set."""
        return DictIterator(items.unpack(self), type(iter({0})), owner=items)

    def check_namespace(self, names: dict[str, Any]) -> None:
        """Record that variables are used by name; break when their dict is used as a dict, too."""
        if id(names) in self.values_by_id:
            raise Break("namespace-dict", "a dict that is also the namespace of an object")
        self.namespaces.add(id(names))

    # ---- guards

    def guard(self, source: Source, kind: str, value: Any) -> None:
        """Add a guard, except on objects that capture keeps alive.

        Raises:
            Break: for the result of a deferred call.
        """
        if self.calls.count and any(origins(source)):
            raise Break("data-dependent-value", "a value that differs in each call is needed here")
        if not isinstance(source, ConstSource):
            known = len(self.guards)
            self.guards.add(source, kind, value, self.user_stack())
            if kind in _VARYING and len(self.guards) > known:
                self.steps.guarded = self.steps.now

    def guard_constant(self, source: Source, obj: Any) -> None:
        """Guard the value of a constant; enum members and the like by identity."""
        if isinstance(source, ConstSource):
            return
        if scalar_library(obj):
            self.guard(source, "TYPE", type(obj))
            source, obj = CallSource(plain_scalar, (source,)), plain_scalar(obj)
        try:
            self.guard(source, "CONST", obj)
        except TypeError:
            self.guard_identity(source, obj)

    def guard_identity(self, source: Source, obj: Any) -> None:
        """Guard that a source gives this object, or an equal one where each read creates one."""
        try:
            self.guard(source, "ID", obj)
        except TypeError:  # no weak reference is possible: the guard keeps it alive
            rebound = isinstance(obj, types.MethodType | types.BuiltinFunctionType)
            self.guard(source, "TYPE", type(obj))
            self.guard_same(operator.eq if rebound else operator.is_, source, obj)

    def guard_same(self, same: Any, source: Source, obj: Any) -> None:
        """Guard that `same(object of the source, obj)` is True."""
        self.guard(CallSource(same, (source, ConstSource(obj))), "CONST", True)

    def guard_keys(self, source: Source, obj: Iterable[Any]) -> None:
        """Guard the keys of a dict, or such a view of them.

        Raises:
            Break: when a key has no stable identity.
        """
        try:
            self.guard(source, "DICT_KEYS", obj)
        except TypeError as error:
            raise Break("dict-key", f"a dict key: {error}") from None

    def guard_set(self, source: Source, obj: Any) -> None:
        """Guard the elements of a set, and their order."""
        if isinstance(source, ConstSource):
            return
        try:
            self.guard(CallSource(tuple, (source,)), "CONST", tuple(obj))
        except TypeError:  # unsortable elements such as classes
            self.guard_same(same_constant, CallSource(tuple, (source,)), tuple(obj))

    def guard_code(self, function: types.FunctionType, source: Source | None) -> None:
        """Guard the `__code__` of an inlined function."""
        if source is None or isinstance(source, ConstSource):
            source = ProgramSource(WeakIdentity(function))
        self.guard(AttrSource(source, "__code__"), "ID", function.__code__)

    def guard_alias(self, first: Source, second: Source, obj: Any) -> None:
        """Guard that two sources give the same object, where they may differ."""
        if isinstance(second, ConstSource):
            first, second = second, first
        fixed = (types.NoneType, types.ModuleType, type)
        if isinstance(first, ConstSource) or issubclass(type(obj), fixed):
            self.guard_identity(second, obj)
        elif first != second:
            self.guard(second, "ALIAS", first)

    def guard_distinct(self, first: Source, second: Source) -> None:
        """Guard that two sources give different objects, where that may change."""
        fixed = isinstance(first, ConstSource) and isinstance(second, ConstSource)
        if not (fixed or any(origins(first)) or any(origins(second))):  # new objects differ
            self.guards.add(weakly(first), "DISTINCT", weakly(second), self.user_stack())

    # ---- the finished capture

    def all_guards(self) -> list[Guard]:
        """Return every guard of the capture, those on symbolic sizes included."""
        self.effects.guard_distinct()
        guards = list(self.guards)
        guards += inputs.write_guards(self.graph.inputs)
        if self.graph.shape_env is not None:
            from weft_guards.shapes import shape_guards  # noqa: PLC0415 - imports sympy

            for entry in self.graph.inputs:
                real, fake = entry.example, entry.node_example
                if not self.policy or not isinstance(real, torch.Tensor):
                    continue
                if isinstance(fake, torch.Tensor):
                    self.policy.check(entry.source, real, fake.shape)
            read = [entry for entry in self.graph.inputs if not any(origins(entry.source))]
            pairs = [(entry.source, entry.node_example) for entry in read]
            guards += shape_guards(self.graph.shape_env, pairs)
        return guards

    # ---- calls

    def trace_body(self, function: Any, args: list[Value], kwargs: Kwargs) -> Value:
        """Inline a Python function, bypassing its rule."""
        inlined = function_value(self, function, ConstSource(function))
        return inlined.tp_call(self, args, kwargs)

    def builtin(self, function: Any, *args: Value) -> Value:
        """Call a builtin or operator through the rule table."""
        return self.call_builtin(function, list(args), {})

    def call_function(
        self, function: FunctionValue, args: list[Value], kwargs: Kwargs, stepped: bool = False
    ) -> Value:
        """Inline a call of a Python function; `stepped` for the CALL of a stepped frame."""
        handler = table.find(function.code)
        result = handler and handler(self, function, args, kwargs)
        if result is not None:
            return result
        if function.obj is not None and is_compiled_by_torch(function.obj):
            original = function.tp_getattro(self, "_torchdynamo_orig_callable")
            return original.tp_call(self, args, kwargs)
        decoded = decode(function.code)
        if self.depth >= config.settings.inline_depth:
            raise Break("recursion", function.code.co_qualname)
        if function.obj is not None:
            check_inlinable(function.obj)
            self.guard_code(function.obj, function.source)
        local_values = function.bind(self, args, kwargs)
        cells = dict(zip(function.code.co_freevars, function.cells, strict=True))
        # A frame on a level of a functorch transform cannot be left and entered again.
        in_one_step = decoded.is_generator or self.transforms or not stepped
        frame_class = Frame if in_one_step else SteppedFrame
        frame = frame_class(self, function, local_values, cells)
        if decoded.is_generator:
            return make_generator(frame, function, args, kwargs)
        return frame.run()

    def run_code(self, function: FunctionValue, names: dict[str, Value]) -> Value:
        """Run a function's code with a mapping of its own as its local variables."""
        return Frame(self, function, names, {}).run()

    def active_frames(self) -> Iterable[Frame]:
        """Return the frames that execute, innermost first."""
        return () if self.frame is None else self.frame.callers()

    def enter_frame(self, frame: Frame) -> None:
        """Make a frame the current one."""
        self.frame = frame
        frame.above = None
        self.frames.append(frame)
        self.depth += 1

    def leave_frame(self, frame: Frame) -> None:
        """Return to the calling frame."""
        self.frame = frame.parent
        self.depth -= 1

    def keyword_arguments(self, mapping: Value) -> Kwargs:
        """Return a mapping as keyword arguments."""
        if not isinstance(mapping, DictValue):
            fresh = DictValue()
            fresh.call_method(self, "update", [mapping], {})
            mapping = fresh
        keywords = {key.as_constant(): value for key, value in mapping.pairs(self)}
        if not all(isinstance(name, str) for name in keywords):
            raise Break("builtin-error", "keyword arguments that are not strings")
        return keywords

    def type_of(self, value: Value) -> Value:
        """Return the class of a value."""
        return self.const_object(value.python_type())

    def raise_(self, cls: type[BaseException], *args: object) -> NoReturn:
        """Raise an exception in the user's program."""
        stated_in = self.frame if cls is TypeError else None
        value = ExceptionValue(cls, [*map(self.literal, args)], stated_in=stated_in)
        raise Raised(chain(self, value))

    def raise_real(self, error: BaseException) -> NoReturn:
        """Raise in the user's program what a folded function raised."""
        if Proxy.__name__ in str(error):
            raise Break("builtin-error", "an error whose message names a placeholder")
        value = ExceptionValue(type(error), [self.literal(arg) for arg in error.args])
        state = getattr(error, "__dict__", None) or {}
        if isinstance(error, ImportError):
            state = {**state, "name": error.name, "path": error.path}
        value.attributes = {name: self.literal(item) for name, item in state.items()}
        raise Raised(chain(self, value))

    # ---- state of the program

    def mutate(self, value: MutableValue, undo: Callable[[], object] | None = None) -> None:
        """Record a change of a value before it happens; `undo` undoes only that change."""
        if self.finalizes and isinstance(value, Container) and has_finalizer(value):
            raise Break("finalizer", "a container that holds objects with a __del__")
        self.effects.change(value)
        self.journal.touch(value, undo)

    def set_grad_mode(self, mode: bool) -> None:
        """Set the grad mode, here and in the graph."""
        before = torch.is_grad_enabled()
        if before is mode:
            return
        if any(isinstance(context, torch.inference_mode) for context in self.open_contexts):
            raise Break("context-manager", "a grad mode inside inference mode")
        torch._C._set_grad_enabled(mode)
        self.journal.on_rollback(lambda: torch._C._set_grad_enabled(before))
        self.graph.node("call_function", torch._C._set_grad_enabled, (mode,), {}, None)

    # ---- attributes (see `attributes`)

    def class_attribute(self, owner: Value, cls: type, name: str) -> Value:
        """Read what an instance without its own dict inherits from its class."""
        if owner.find_method(name) is not None:
            return MethodOf(owner, name)
        mro_entry = attributes.lookup(cls, name)
        if mro_entry is None:
            self.raise_(AttributeError, f"'{cls.__name__}' object has no attribute '{name}'")
        return attributes.bind(self, mro_entry, name, owner, cls)

    def tensor_dict_attribute(self, tensor: TensorValue, name: str) -> Value | None:
        """Read a Python attribute that the user put on an input tensor."""
        entry = self.graph.input_at.get(tensor.node)
        if entry is None or tensor.source is None:
            return None
        instance_dict = getattr(entry.example, "__dict__", {})
        if name in instance_dict:
            return self.wrap(instance_dict[name], InstanceAttrSource(tensor.source, name))
        if not hasattr(torch.Tensor, name):
            self.guard(tensor.source, "ATTR_ABSENT", name)
        return None

    def forget(self) -> None:
        """Release the program's objects: the parts of a capture refer to each other."""
        for value, _ in self.values_by_id.values():
            if isinstance(value, class_body.FrameClass):
                FRAME_CLASSES.pop(value.obj, None)
        for tensor in self.graph.tensors():
            tensor.real = tensor.owner = None
        for watcher in self.watched:
            vars(watcher).clear()  # breaks cycles through weak references
        effects, graph = self.effects, self.graph
        for container in (self.values_by_id, self.keep_alive, effects.changed, effects.globals,
                     effects.keys, self.steps.raised_at, graph.inputs, graph.input_at):  # fmt: skip
            container.clear()
        self.journal.forget()
        for frame in self.frames:
            frame.locals.clear()
            frame.cells.clear()
            frame.stack.clear()
            frame.result = frame.exception = None
        self.frames, self.frame = [], None
        del self.function

    def watch(self, watcher: Any) -> None:
        """Add a check for the end of the capture."""
        self.watched.append(watcher)
        self.journal.on_rollback(lambda: self.watched.remove(watcher))

    def real_id(self, value: Value) -> int:
        """Return the id of the input object of a value; 0 for none."""
        obj = getattr(value, "obj", None)
        if obj is not None or value.source is None:
            return 0 if obj is None else id(obj)
        return next((key for key, (v, _) in self.values_by_id.items() if v is value), 0)

    def leads_to(self, target: Value) -> bool:
        """Say whether a new object is reachable from the frames, and so surely alive."""
        owners = [v for v in self.effects.changed if self.real_id(v) not in self.released_ids]
        pending: list[Value] = []
        for frame in self.active_frames():
            pending += [*frame.locals.values(), *frame.cells.values(), *frame.stack]
        pending += [child for owner in owners for child in owner.tp_traverse()]
        pending += [written for _, written in self.effects.globals.values()]
        return leads_to(pending, target)

    # ---- where the program stands

    def user_stack(self) -> tuple[traceback.FrameSummary, ...]:
        """Return the user's frames, outermost first."""
        return self._stack(self.frame)[0]

    def stack_text(self) -> str:
        """Return the user's frames as a traceback prints them."""
        return self._stack(self.frame)[1]

    def _stack(self, frame: Frame | None) -> tuple[tuple[traceback.FrameSummary, ...], str]:
        if frame is None:
            return (), ""
        above = frame.above = frame.above or self._stack(frame.parent)
        summary, text = frame.location()
        return (*above[0], summary), above[1] + text
