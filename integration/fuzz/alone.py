"""A failing program as a file that runs with plain `python file.py`."""

from __future__ import annotations

from pathlib import Path

from .program import Program, Verdict

_HERE = Path(__file__).parent
_COPIED = ("inputs.py", "outcomes.py", "compare.py")
_MAIN = """
# ---- both runs

import ast
import sys
from unittest import mock

import torch.nn.functional as F
import weft

torch.set_default_device(DEVICE)

def arguments(call, space):
    tree = ast.parse(call)
    last = tree.body.pop()
    exec(compile(tree, "<call>", "exec"), space)
    return eval(compile(ast.Expression(last.value), "<call>", "eval"), space)


def outcomes(wrap):
    sys.modules["program"] = types.ModuleType("program")
    space = vars(sys.modules["program"])
    space.update(torch=torch, F=F, **Makers().names())
    exec(compile(SOURCE, __file__, "exec"), space)
    function, state = wrap(space["f"]), space.get("state")
    try:
        return [observe(function, arguments(call, space), ORDER, state) for call in CALLS]
    finally:
        mock.patch.stopall()


eager = outcomes(lambda f: f)
weft_outcomes = outcomes(lambda f: weft.compile(f, backend=BACKEND, dynamic=DYNAMIC))
found = [
    (number, kind, text)
    for number, pair in enumerate(zip(eager, weft_outcomes))
    for kind, text in differences(*pair)
]
for number, kind, text in found:
    print(f"call {number}: {kind}\\n    {text}")
print("differs" if found else "as eager")
raise SystemExit(bool(found))
"""


def write(
    path: Path, program: Program, verdict: Verdict, backend: str, origin: str, device: str = "cpu"
) -> None:
    """Write the file; its docstring says what was seen."""
    detail = verdict.detail.replace("\\", "\\\\").replace('"""', "'''")
    head = f'"""{origin}: {verdict.kind}\n\n{detail}\n"""\n\n'
    calls = "".join(f"    {call!r},\n" for call in program.calls)
    source = program.source.replace("\\", "\\\\").replace("'''", "\\'\\'\\'")
    text = f"SOURCE = '''\\\n{source}'''\nCALLS = (\n{calls})\n"
    text += f"ORDER, DYNAMIC, BACKEND = {program.order}, {program.dynamic}, {backend!r}\n"
    text += f"DEVICE = {device!r}\n"
    copies = "".join(f"\n# ---- {name}\n\n{(_HERE / name).read_text()}" for name in _COPIED)
    path.write_text(head + text + copies + _MAIN)
