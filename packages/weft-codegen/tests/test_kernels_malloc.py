"""Memory that a step frees stays with the process, so that no page is faulted in twice."""

import os
import subprocess
import sys

import pytest

glibc = pytest.mark.skipif(sys.platform != "linux", reason="thresholds of glibc")

PROGRAM = """
import ctypes, sys, torch
from weft_codegen.config import settings
from weft_codegen.kernels.malloc import keep_freed_memory

class Mallinfo(ctypes.Structure):  # mallinfo2(3)
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost")]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Mallinfo

settings.keep_freed_memory = int(sys.argv[1])
done = keep_freed_memory()
before = mallinfo().hblkhd
saved = torch.empty(4 << 20)
mapped = mallinfo().hblkhd - before
del saved
print(int(done), mapped, mallinfo().fordblks)
"""


def run(size: int, **environment: str) -> tuple[bool, int, int]:
    """Whether the thresholds were set; the bytes mapped for a tensor of 16 MiB, and kept after."""
    plain = {k: v for k, v in os.environ.items() if "MALLOC" not in k and k != "GLIBC_TUNABLES"}
    command = [sys.executable, "-c", PROGRAM, str(size)]
    ended = subprocess.run(
        command, env=plain | environment, capture_output=True, text=True, check=True
    )
    done, mapped, kept = map(int, ended.stdout.split())
    return bool(done), mapped, kept


@pytest.mark.slow
@glibc
def test_a_large_tensor_is_of_the_heap_and_stays_there():
    done, mapped, kept = run(128 << 20)
    assert done
    assert mapped == 0
    assert kept >= 16 << 20


@pytest.mark.slow
@glibc
def test_without_the_setting_it_is_mapped_and_given_back():
    done, mapped, kept = run(0)
    assert not done
    assert mapped >= 16 << 20
    assert kept < 16 << 20


@pytest.mark.slow
@glibc
def test_the_users_thresholds_stay():
    done, mapped, _ = run(128 << 20, MALLOC_MMAP_THRESHOLD_="1000000")
    assert not done
    assert mapped >= 16 << 20
