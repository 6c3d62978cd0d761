"""What each bytecode instruction does to a symbolic frame: one handler per opcode.

`table.HANDLERS` maps the opcode names of `weft_capture.bytecode` to functions (frame, instr).
Importing this package fills the table.
"""

import importlib

from weft_capture.opcodes.table import HANDLERS

__all__ = ["HANDLERS"]

for _family in ("variables", "operators", "build", "jumps", "calls", "exceptions"):
    importlib.import_module(f"weft_capture.opcodes.{_family}")
