"""A short run of each search of integration/stress, in a process of its own: two of them fork."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHORT = {
    "threads": ("--threads", "3", "--minutes", "0.1"),
    "kills": ("--times", "5"),
    "faults": ("--faults", "file_in_its_place", "swapped_entries"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", SHORT)
def test_nothing_is_lost(what):
    command = [sys.executable, "-W", "ignore", "-m", "integration.stress", what, *SHORT[what]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " 0 failures" in done.stdout
