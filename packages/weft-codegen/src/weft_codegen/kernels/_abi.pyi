from typing import Any

ffi: Any
"""cffi's form of include/weft.h, which setup.py writes."""
