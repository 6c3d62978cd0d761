"""What weft packages share: errors, events, settings, cache folder, fake tensors, tracing.

Only what two packages need is here. The interface is the modules without a leading underscore
(docs/architecture/core.md lists them). Nothing is imported here, so that importing one module costs
only that module; `fake` and `tracing` need parts of torch that the others do not.
"""

import sys

if "t" in getattr(sys, "abiflags", ""):
    raise ImportError(
        "weft does not run on free-threaded builds of CPython yet: use the standard build"
    )
