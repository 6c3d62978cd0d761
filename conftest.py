"""Tests run what was compiled, and the same examples each time.

No graph is measured against eager (see weft_codegen/measure.py), and no process learns from
another which sizes vary.
"""

import gc
import importlib.util
import logging
import os
import sys
import warnings
from collections import Counter

import pytest


class _AsWarnings(logging.Handler):
    """Makes an error of what weft tells of frames that run eagerly, where no test expects it."""

    def emit(self, record):
        text = record.getMessage()
        if not text.startswith("a graph runs without being compiled"):  # what many tests are about
            warnings.warn(text, stacklevel=2)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test that is marked `sampled`, all cases but every tenth are slow; of one that is marked
    `every(n)`, all but every n-th are exhaustive."""
    cases = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if item.get_closest_marker("sampled") and cases[name] % 10:
            item.add_marker(pytest.mark.slow)
        every = item.get_closest_marker("every")
        if every and cases[name] % every.args[0]:
            item.add_marker(pytest.mark.exhaustive)
        cases[name] += 1


def pytest_collection_finish():
    """Keep what was imported and collected out of each garbage collection: it stays to the end."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _nothing_told_yet():
    """What one test was told, the next is told again."""
    events = sys.modules.get("weft_core.events")
    if events is not None:
        events.notified.clear()


logging.getLogger("weft.notices").addHandler(_AsWarnings())
os.environ.setdefault("WEFT_MEASURE", "0")
os.environ.setdefault("WEFT_PGO", "0")

if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    settings.register_profile("repeatable", derandomize=True)
    settings.load_profile("repeatable")
