"""Break codes: each is used by the sources, and each that they use is in the table."""

import ast
from pathlib import Path

import weft_capture

SOURCES = [
    ast.parse(path.read_text())
    for path in Path(weft_capture.__file__).parent.rglob("*.py")
    if path.name != "breaks.py"
]
NODES = [node for tree in SOURCES for node in ast.walk(tree)]


def test_every_break_code_is_in_the_table():
    calls = [node for node in NODES if isinstance(node, ast.Call) and node.args]
    first = [call.args[0] for call in calls if ast.unparse(call.func) in ("Break", "decline")]
    used = {code.value for code in first if isinstance(code, ast.Constant)}
    assert len(used) > 40
    assert used <= set(weft_capture.REASONS)


def test_every_code_of_the_table_is_used():
    texts = {node.value for node in NODES if isinstance(node, ast.Constant)}
    assert set(weft_capture.REASONS) - texts - {"constant-required"} == set()


def test_every_reason_tells_why_and_what_to_do():
    for reason in weft_capture.REASONS.values():
        assert reason.why and reason.remedy
