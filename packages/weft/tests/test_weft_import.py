"""What `import weft` loads, and that every public name exists."""

import subprocess
import sys

import pytest
import weft


@pytest.mark.slow
def test_import_loads_no_stage():
    code = (
        "import torch, sys; before = set(sys.modules); import weft; "
        "new = set(sys.modules) - before; "
        "print([n for n in new if n.startswith(('weft_c', 'weft_g', 'weft_a', 'sympy')) "
        "and not n.startswith('weft_core')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there():
    assert [name for name in weft.__all__ if not hasattr(weft, name)] == []
    assert set(weft.__all__) <= set(dir(weft))
