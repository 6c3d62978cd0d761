"""Code that `Writer` made -> the Python text of a function that does the same.

    decode -> walk every path with a symbolic operand stack -> ast -> tidy -> text

Such code has no loops but those of `await` and `yield from`, so its paths are a tree: a branch is
an `if` whose arms both end, and instructions with a handler stand in a `try`. Operands stay
expressions until something is written that might change them (`State.spill`).
"""

from __future__ import annotations

import ast
from types import CodeType

from .decode import decode
from .decompile_rules import NO_MEANING, RULES, STOP, negated
from .decompile_state import Names, NotExpressible, State, Walk, load
from .instr import Handler, Instr
from .tidy import delete, renumber, store, tidy


def decompile(code: CodeType, names: Names, name: str, tail_call: object = None) -> str:
    """Return the text of a function `name` that does what `code` does.

    Args:
        code: what `Writer.finish` returned.
        names: chooses the names of objects.
        name: the function's.
        tail_call: the object that `code` calls for "return func(*args)".

    Raises:
        NotExpressible: for code that the language has no words for.
    """
    return Decompiler(decode(code), names, tail_call).function(name)


class Decompiler(State):
    """Walks the paths of one code object."""

    def function(self, name: str) -> str:
        """Return the text of the whole function."""
        decoded = self.decoded
        walk = Walk([], set())
        written = walk.out
        args = [self.stored_name(walk, arg) for arg in decoded.flat_args]
        walk.bound.update(args)
        self._temps.difference_update(args)
        self._run(walk, 0, frozenset())
        cells = {self.variable(walk, n) for n in decoded.cells}
        body = tidy(written, self._temps, cells | self.globals)
        renumber(body, self._temps, self._taken)
        outer = [v for n in decoded.freevars if (v := self.variable(walk, n)) in self.stored]
        if outer:
            body.insert(0, ast.Nonlocal(outer))
        if self.globals & self.stored:
            body.insert(0, ast.Global(sorted(self.globals & self.stored)))
        tree = ast.parse(f"def {name}({', '.join(args)}): pass")
        tree.body[0].body = body  # type: ignore[attr-defined]
        return ast.unparse(ast.fix_missing_locations(tree))

    # ---- paths

    def _run(self, walk: Walk, index: int, seen: frozenset[int]) -> None:
        """Write what happens from an instruction on to the end of the path."""
        while index >= 0:
            handler = self._handler(self.decoded.instrs[index])
            if handler is not None:
                index = self._protected(walk, index, handler, seen)
            elif self._forks(index):
                test, taken = self._test(walk, self.decoded.instrs[index])
                index = self._arms(walk, test, taken, index, seen | {index})
            else:
                seen |= {index}
                index = self._step(walk, index, seen)

    def _protected(self, walk: Walk, index: int, handler: Handler, seen: frozenset[int]) -> int:
        """Write instructions with one handler as a `try`; returns where the path goes on."""
        self.spill(walk)
        error = self.fresh("error")
        self._temps.discard(error)
        body, fork = walk.branch(), None
        written_to = body.out
        while index >= 0 and self._handler(self.decoded.instrs[index]) == handler and not fork:
            seen |= {index}
            if self._forks(index):
                test, taken = self._test(body, self.decoded.instrs[index])
                fork = load(self.fresh("test"))
                truth = test if isinstance(test, ast.Compare) else self.named(bool, test)
                self.assign(body, fork.id, truth)
            else:
                index = self._step(body, index, seen)
        if index >= 0 and not fork and self.decoded.instrs[index].opname == "STORE_FAST":
            index = self._step(body, index, seen)  # a store raises nothing
        self.spill(body)
        below = walk.stack[: handler.depth]
        written = {n.id for s in written_to for n in ast.walk(s) if isinstance(n, ast.Name)}
        if any(isinstance(v, ast.Name) and v.id in written & self.stored for v in below):
            raise NotExpressible("an operand that a `try` changes")
        caught = walk.branch()
        caught.error = error
        caught.possible |= body.bound | body.possible
        caught.temps = body.temps | caught.temps
        lasti: list[ast.expr | None] = [ast.Constant(0)] * handler.lasti
        caught.stack = [*below, *lasti, load(error)]
        clause = ast.ExceptHandler(load("BaseException"), error, caught.out)
        self._run(caught, handler.target, seen)
        walk.out.append(ast.Try(written_to or [ast.Pass()], [clause], [], []))
        walk.stack, walk.bound, walk.possible = body.stack, body.bound, body.possible
        walk.temps = body.temps
        return self._arms(walk, fork, taken, index, seen) if fork else index

    def _step(self, walk: Walk, index: int, seen: frozenset[int]) -> int:
        """Write one instruction; returns the index of the next one on this path, -1 at its end."""
        self._left -= 1
        if self._left < 0:
            raise NotExpressible("a loop, or very many paths")
        instr = self.decoded.instrs[index]
        if self._clears(index):
            self._clear(walk, self.variable(walk, self.decoded.instrs[index + 1].argval))
            return index + 3
        if instr.opname == "JUMP":
            assert instr.target is not None
            return instr.target
        if instr.opname == "RETURN_VALUE":
            value = walk.stack.pop()
            self.spill(walk)
            walk.out.append(ast.Return(value))
            return -1
        if instr.opname in ("RERAISE", "RAISE_VARARGS"):
            self._raise(walk, instr)
            return -1
        if instr.opname not in NO_MEANING:
            rule = RULES.get(instr.opname)
            if rule is None:
                raise NotExpressible(instr.opname)
            rule(self, walk, instr)
        return index + 1

    def _forks(self, index: int) -> bool:
        instr = self.decoded.instrs[index]
        return instr.target is not None and instr.opname != "JUMP"

    def _test(self, walk: Walk, instr: Instr) -> tuple[ast.expr, list[ast.expr | None]]:
        """Evaluate the condition of a jump; returns it, and the operands when it jumps."""
        self.spill(walk, but_top=True)
        if instr.opname == "FOR_ITER":
            iterator = walk.stack[-1]
            item, stop = self.fresh("item"), load(self.name(STOP))
            self.assign(walk, item, self.named(next, iterator, stop))
            iterators, walk.stack = walk.stack[:-1], [*walk.stack, load(item)]
            return ast.Compare(load(item), [ast.Is()], [stop]), iterators
        value = self.pop(walk)
        if instr.opname.endswith("NONE"):
            operator = ast.IsNot() if "NOT_NONE" in instr.opname else ast.Is()
            test: ast.expr = ast.Compare(value, [operator], [ast.Constant(None)])
        else:
            test = negated(value) if instr.opname.endswith("FALSE") else value
        return test, [*walk.stack]

    def _arms(
        self, walk: Walk, test: ast.expr, stack: list[ast.expr | None], index: int,
        seen: frozenset[int],
    ) -> int:  # fmt: skip
        """Write the arm of a jump that is taken; returns where the other one begins."""
        target = self.decoded.instrs[index].target
        assert target is not None
        if target in seen:
            raise NotExpressible("a loop")
        taken = walk.branch()
        taken.stack = stack
        arm = taken.out
        self._run(taken, target, seen)
        walk.out.append(ast.If(test, arm or [ast.Pass()], []))
        return index + 1

    def _raise(self, walk: Walk, instr: Instr) -> None:
        count = instr.arg if instr.opname == "RAISE_VARARGS" else 1
        operands = [self.pop(walk) for _ in range(count)][::-1]
        if instr.opname == "RERAISE" and getattr(operands[0], "id", None) == walk.error:
            operands = []
        self.spill(walk)
        walk.out.append(ast.Raise(*operands))

    def _clears(self, index: int) -> bool:
        """Whether `x = None; del x` stands here, which unbinds x, bound or not."""
        first, *rest = self.decoded.instrs[index : index + 3]
        return (
            (first.opname, first.argval) == ("LOAD_CONST", None)
            and [i.opname[: i.opname.find("_")] for i in rest] == ["STORE", "DELETE"]
            and rest[0].argval == rest[1].argval
            and all(i.opname.endswith(("_FAST", "_DEREF")) for i in rest)
        )

    def _clear(self, walk: Walk, name: str) -> None:
        self.stored.add(name)
        if name in walk.bound | walk.possible:
            self.spill(walk, name=name)
        if name in walk.possible - walk.bound:
            walk.out.append(ast.Assign([store(name)], ast.Constant(None)))
        if name in walk.bound | walk.possible:
            walk.out.append(delete(name))
        walk.bound.discard(name)
        walk.possible.discard(name)

    def _handler(self, instr: Instr) -> Handler | None:
        """The handler of an instruction, None for one that only tidies the interpreter up."""
        handler = instr.handler
        if handler is None:
            return None
        first = [i.opname for i in self.decoded.instrs[handler.target : handler.target + 3]]
        return None if first == ["COPY", "POP_EXCEPT", "RERAISE"] else handler
