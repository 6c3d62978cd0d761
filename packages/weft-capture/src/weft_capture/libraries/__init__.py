"""What is known by name of libraries beside torch and the standard library, and of parts of torch.

A module here has the rules of one library. What capture asks before it loads rules, or without one,
is in the tables of `library_traits`, which are filled below.
"""

from weft_capture import library_traits as traits
from weft_capture.libraries.numpy_scalars import SCALARS

traits.EAGER_PACKAGES.add("numpy")
traits.ARRAY_CLASSES["numpy"] = "ndarray"
traits.SCALAR_LIBRARIES["numpy"] = SCALARS

traits.IMMUTABLE_PACKAGES.add("triton")
traits.UNGUARDED_PACKAGES.add("triton")
traits.LAUNCHER_MODULES.add("triton.runtime.")

traits.DEBUGGER_MODULES.add("pydevd")
traits.LOG_HANDLER_MODULES.add("_pytest.logging")
traits.COUNTED_HASHES.add("unittest.mock")
