"""Stage results as files: `WEFT_DUMP=folder` makes every stage write what it made, numbered.

    000-aot.joint.py   001-aot.forward.py   002-codegen.graph.py   003-codegen.loops.txt   ...

Graphs are Python files that run by themselves, on inputs like those that they were made for.
"""

from __future__ import annotations

import itertools
import operator
import os
from pathlib import Path
from typing import Any

import torch
from torch import fx

from weft_core.events import notify
from weft_core.symnodes import hint

HEADER = """\
import operator

import torch
from torch import device, inf, nan

"""
# Constants up to this many elements are written out; larger ones are zeros of the same layout.
_WRITTEN_OUT = 64


class Dump:
    """A folder that takes numbered files; a number that exists already is left alone."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._numbers = itertools.count()

    def write(self, name: str, text: str) -> Path:
        """Write `text` as `<number>-<name>`, and return where; what cannot be written is told."""
        for number in self._numbers:
            path = self.folder / f"{number:03}-{name}"
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with path.open("x") as out:
                    out.write(text)
            except FileExistsError:
                if path.exists():
                    continue
                notify(f"[dump] {self.folder} is not written to: it is no folder")
            except OSError as error:
                notify(f"[dump] {self.folder} is not written to: {error.strerror or error}")
            return path
        raise AssertionError("unreachable")


_open: dict[str, Dump] = {}


def environment_dump() -> Dump | None:
    """The Dump that `WEFT_DUMP` names, None when it is not set."""
    folder = os.environ.get("WEFT_DUMP")
    return _open.setdefault(folder, Dump(folder)) if folder else None


def dump_graph(name: str, gm: fx.GraphModule) -> None:
    """Write a graph as `<number>-<name>.py` if `WEFT_DUMP` is set."""
    dump = environment_dump()
    if dump is not None:
        dump.write(f"{name}.py", graph_script(gm))


def graph_script(gm: fx.GraphModule, header: str = HEADER, call: str = "module(*inputs)") -> str:
    """A graph as a Python program that runs it.

    Inputs are random numbers (zeros for integers) with the layout of the placeholders' fakes;
    symbolic sizes take the values they had when the graph was traced. `header` are the program's
    imports, `call` is what it prints.
    """
    text = gm.print_readable(print_output=False).split("class ", 1)[1].split("(", 1)[1].strip()
    lines = ["    module = Graph()"]
    for attribute in dict.fromkeys(str(n.target) for n in gm.graph.find_nodes(op="get_attr")):
        value = operator.attrgetter(attribute)(gm)
        lines.append(f"    module.{attribute} = {_example(value, exact=True)}")
    lines.append("    inputs = [")
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val", node.meta.get("example_value"))
        lines.append(f"        {_example(value)},  # {node.name}")
    lines += ["    ]", f"    print({call})"]
    main = 'if __name__ == "__main__":\n    torch.manual_seed(0)\n' + "\n".join(lines)
    return f"{header}\nclass Graph({text}\n\n\n{main}\n"


def _example(value: Any, exact: bool = False) -> str:
    """Python text that makes a value like `value` (with `exact`: the same, if it is small)."""
    if isinstance(value, torch.SymInt):
        return str(hint(value))
    if not isinstance(value, torch.Tensor):
        return repr(value) if isinstance(value, int | float | bool) else "None"
    if exact and value.numel() <= _WRITTEN_OUT and type(value) is torch.Tensor:
        return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
    sizes, strides = (tuple(map(hint, dims)) for dims in (value.shape, value.stride()))
    where = f", device={str(value.device)!r}" if value.device.type != "cpu" else ""
    made = f"torch.empty_strided({sizes}, {strides}, dtype={value.dtype}{where})"
    if not value.is_floating_point():
        return f"{made}.zero_()"
    return f"{made}.uniform_()" + (".requires_grad_()" if value.requires_grad else "")
