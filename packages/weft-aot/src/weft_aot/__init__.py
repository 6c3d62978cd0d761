"""Ahead-of-time autograd: trace forward and backward together, cut, compile each, run as one.

    from weft_aot import trace_joint, partition, aot_compile

`records.py` holds what passes between the steps; `joint.py` traces, `partition/` cuts, `runtime.py`
puts the autograd function around the compiled pair, `api.py` runs the steps in order.
"""

from weft_aot.api import aot_compile, run_op_by_op
from weft_aot.config import settings
from weft_aot.joint import trace_joint
from weft_aot.partition import MemoryPolicy, Policy, SavingPolicy, partition
from weft_aot.records import JointGraph, OutputPlan, Partition, SavedValue

__all__ = [
    "JointGraph",
    "MemoryPolicy",
    "OutputPlan",
    "Partition",
    "Policy",
    "SavedValue",
    "SavingPolicy",
    "aot_compile",
    "partition",
    "run_op_by_op",
    "settings",
    "trace_joint",
]
__version__ = "0.1.0"
