"""An error in capture itself fails each test; a test about such errors sets the option to False."""

import importlib.util

import pytest

pytest.register_assert_rewrite("capture_check", "mode_programs")


@pytest.fixture(autouse=True)
def raise_internal_errors():
    if importlib.util.find_spec("torch") is None:  # tests of the bytecode layer run without it
        yield
        return
    from weft_capture.config import settings

    with settings.patch(raise_internal_errors=True):
        yield
