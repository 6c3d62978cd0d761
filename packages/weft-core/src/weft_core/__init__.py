"""The ground under every weft package: errors, events, settings, cache folder, fakes, tracing.

What two packages need is here. The interface is the modules without a leading underscore, which
docs/architecture/core.md lists. Nothing is imported here, so that importing one module costs only
that module; `fake` and `tracing` need parts of torch that the others do not.
"""

import sys

if "t" in getattr(sys, "abiflags", ""):
    raise ImportError(
        "weft does not run on free-threaded builds of CPython yet: use the standard build"
    )
