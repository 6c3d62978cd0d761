"""What each bytecode instruction does to a symbolic frame: one handler per opcode.

`table.HANDLERS` maps the opcode names of `weft_capture.bytecode` to functions (frame, instr).
Importing this package fills the table.
"""

from weft_capture.opcodes import build, calls, exceptions, jumps, operators, variables
from weft_capture.opcodes.table import HANDLERS

__all__ = ["HANDLERS", "build", "calls", "exceptions", "jumps", "operators", "variables"]
