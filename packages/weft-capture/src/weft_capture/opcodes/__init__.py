"""What each bytecode instruction does to a symbolic frame: one handler per opcode.

`dispatch.HANDLERS` maps the opcode names of `weft_capture.bytecode` to functions (frame, instr).
Importing this package fills the table.
"""

import importlib

from weft_capture.opcodes.dispatch import HANDLERS

__all__ = ["HANDLERS"]

for _family in ("variables", "operator_opcodes", "build", "jumps"):
    importlib.import_module(f"weft_capture.opcodes.{_family}")
