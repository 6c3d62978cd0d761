"""A small zoo of models that nobody tuned weft for; `ZOO` lists them.

Each case makes a module (or function) and its inputs from a seed, in any dtype, so that float32
results of eager and of weft can both be judged against float64.
"""

from models.case import Case
from models.handwritten import HANDWRITTEN
from models.patterns import PATTERNS
from models.pretrained import TRANSFORMERS

CASES = (*TRANSFORMERS, *HANDWRITTEN, *PATTERNS)
ZOO: dict[str, Case] = {case.name: case for case in CASES}

__all__ = ["ZOO", "Case"]
