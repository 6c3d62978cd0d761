"""Versions of torch that weft was not made for."""

from __future__ import annotations

import warnings

import pytest
import torch
from weft_capture.torch_compat import NEWEST_TORCH, check_torch, fits


@pytest.mark.parametrize(
    ("version", "told"),
    [("2.11.0", 0), ("2.15.3+cpu", 0), ("2.16.0a0+git1", 1), ("3.0.0", 1)],
)
def test_a_newer_torch_is_told_once(version, told):
    check_torch.cache_clear()
    with warnings.catch_warnings(record=True) as caught:  # tests make notices warnings
        warnings.simplefilter("always")
        check_torch(version)
        check_torch(version)
    assert len(caught) == told
    assert all(version in str(warning.message) for warning in caught)


def test_the_newest_torch_is_not_behind_this_one():
    assert tuple(map(int, torch.__version__.split(".")[:2])) <= NEWEST_TORCH


def test_what_does_not_fit_is_switched_off_with_one_line():
    text = "^a part is switched off: not made for torch .*nothing_of_that_name"
    with pytest.warns(UserWarning, match=text) as caught, fits("a part is"):
        torch.nothing_of_that_name  # noqa: B018
    assert len(caught) == 1
