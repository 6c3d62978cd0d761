"""Run every test of checks in both forms, Python and C (where the extension was built)."""

import pytest
from weft_guards.abi import extension
from weft_guards.config import settings

FORMS = [False, True] if extension() else [False]


@pytest.fixture(autouse=True, params=FORMS, ids=lambda native: "c" if native else "python")
def form(request):
    with settings.patch(native_checks=request.param):
        yield "c" if request.param else "python"
