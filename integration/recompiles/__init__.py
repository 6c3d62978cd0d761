"""Programs whose values differ from call to call, to count how many graphs they take.

Each is a function that gets `compile` (weft's, torch's, or one that returns what it gets) and a
number of calls, and returns what the program computed. `python benchmarks/recompiles.py` counts
the graphs of weft and of torch.compile; `test_integration_recompiles.py` holds weft to its count.
"""

from recompiles import containers, functions, numbers, objects, sizes, varying
from recompiles.table import PROGRAMS

__all__ = ["PROGRAMS", "containers", "functions", "numbers", "objects", "sizes", "varying"]
