"""The table of versions: what a cell says of one run, and of several."""

from integration.versions import folders, summary

FIRST = """commit aaaa1111 2026-01-01
packages/weft/tests/test_a.py::test_one[1 > 0] PASSED [ 10%]
packages/weft/tests/test_a.py::test_two FAILED [ 20%]
packages/weft/tests/test_a.py::test_three SKIPPED (no) [ 30%]
ERROR packages/weft-aot/tests/test_b.py
packages/weft-core/tests/test_c.py::test_four PASSED [ 10%]
packages/weft-core/tests/test_c.py::test_five
packages/weft-core/tests::ended-with-139 ERROR
"""
SECOND = """commit bbbb2222 2026-01-02
packages/weft/tests/test_a.py::test_two PASSED [ 50%]
packages/weft-aot/tests/test_b.py::test_six PASSED [100%]
packages/weft-core/tests/test_c.py::test_four PASSED [ 50%]
packages/weft-core/tests/test_c.py::test_five PASSED [100%]
"""
PRESENT = {"weft", "weft-aot", "weft-core"}
ABSENT = ", ".join(one for one in (name.split("/")[1] for name in folders()) if one not in PRESENT)


def test_one_run():
    cell, bad = summary([FIRST])
    assert cell == (
        f"2 passed, 1 failed, 2 error, 1 skipped (at aaaa1111, 2026-01-01; not run: {ABSENT})"
    )
    assert bad == [
        "packages/weft-aot/tests/test_b.py",
        "packages/weft-core/tests::ended-with-139",
        "packages/weft/tests/test_a.py::test_two",
    ]


def test_a_later_run_replaces_outcomes_and_crashes():
    cell, bad = summary([FIRST, SECOND])
    assert cell == (
        "5 passed, 1 skipped (at aaaa1111, 2026-01-01; at bbbb2222, 2026-01-02, 2 of them again; "
        f"not run: {ABSENT})"
    )
    assert not bad
