"""The bytecode and frame layers need no torch: without torch, import them around the package."""

import importlib.util
import sys
import types
from pathlib import Path

if importlib.util.find_spec("torch") is None:
    package = types.ModuleType("weft_capture")
    source = Path(__file__).parents[2] / "src" / "weft_capture"
    package.__path__ = [str(source)]
    sys.modules["weft_capture"] = package
