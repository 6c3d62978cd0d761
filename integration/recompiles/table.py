"""The table of programs, and how a program gets into it."""

from collections.abc import Callable
from typing import Any

Compile = Callable[..., Any]
Program = Callable[[Compile, int], list[Any]]
PROGRAMS: dict[str, tuple[Program, int]] = {}


def pattern(graphs: int) -> Callable[[Program], Program]:
    """Register a program with the number of graphs that it may take at most."""

    def register(program: Program) -> Program:
        PROGRAMS[program.__name__] = (program, graphs)
        return program

    return register
