"""Break codes: every code that the sources raise is explained in the table."""

import re
from pathlib import Path

import weft_capture

SOURCES = Path(weft_capture.__file__).parent.rglob("*.py")


def test_every_break_code_is_in_the_table():
    used = {
        code
        for path in SOURCES
        for code in re.findall(r'(?:Break\(|lost_record\(code,)\s*"([a-z-]+)"', path.read_text())
    }
    assert used
    assert used <= set(weft_capture.REASONS)


def test_every_reason_tells_why_and_what_to_do():
    for reason in weft_capture.REASONS.values():
        assert reason.why and reason.remedy
