"""NumPy's generators: made and drawn from before the graph, in the program's order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft_guards.sources import Source

from weft_capture.breaks import Break
from weft_capture.functions.table import rule
from weft_capture.functions.torch.randomness import draw
from weft_capture.functions.wrap import EXACT
from weft_capture.libraries.numpy import np
from weft_capture.model.constant import NONE
from weft_capture.model.protocol import Tracer, Value, method_of_each

_DRAWS = (
    "random", "integers", "uniform", "normal", "standard_normal", "exponential", "beta", "gamma",
    "binomial", "poisson", "choice", "permutation",
)  # fmt: skip


@dataclass(eq=False)
class NumpyGenerator(Value):
    """A `numpy.random.Generator`, whose draws are deferred calls."""

    source: Source

    def python_type(self) -> type:
        return np.random.Generator  # type: ignore[no-any-return]


@method_of_each(NumpyGenerator, *_DRAWS)
def _draws(name: str, tx: Tracer, self: NumpyGenerator, /, *args: Value, **kwargs: Value) -> Value:
    return draw(tx, self, name, args, kwargs, np.random.default_rng)


if np is not None:

    def _wrap(tx: Tracer, obj: Any, source: Source) -> Value:
        tx.guard(source, "TYPE", np.random.Generator)
        return NumpyGenerator(source)

    EXACT[np.random.Generator] = _wrap

    @rule(np.random.default_rng)
    def _make(tx: Tracer, seed: Value = NONE) -> Value:
        if isinstance(seed, NumpyGenerator):
            return seed
        if not seed.is_constant() or not isinstance(seed.as_constant(), int | None):
            raise Break("random-state", "a generator of NumPy with another seed than an int")
        return NumpyGenerator(tx.calls.add(np.random.default_rng, seed, early=True))
