"""Texts of rewritten frames: over the corpus of constructs, a text does what the bytecode does."""

import pytest
import weft_capture
from constructs import all_cases
from constructs.engines import weft
from weft_capture.bytecode import Writer
from weft_capture.bytecode.decompile_state import NotExpressible
from weft_capture.output.frame_code import FrameCode, FrameNames

# The interpreter's state of handled exceptions is left unbalanced over a break in a handler, so
# that what is raised there has a context; no Python text does that.
NOT_THE_SAME = {"exceptions.uncaught_chained"}
AT_LEAST = 1250  # code objects, of frames and of entries of inlined calls


@pytest.fixture(scope="module")
def texts():
    """Run the text of every code object that capture writes instead of the code itself."""
    finish, counts = Writer.finish, {"text": 0, "bytecode": 0}

    def finish_from_text(writer):
        code = finish(writer)
        if writer._tail_call is None:  # a function of its own, which the hook does not replace
            return code
        try:
            found = FrameCode.of(code, FrameNames()).compiled()
        except NotExpressible:
            counts["bytecode"] += 1
            return code
        counts["text"] += 1
        return found

    Writer.finish = finish_from_text
    yield counts
    Writer.finish = finish


@pytest.mark.slow
def test_texts_of_the_corpus_do_what_the_bytecode_does(texts):
    cases = all_cases()
    failed = {}
    with weft_capture.settings.patch(raise_internal_errors=True):
        for case in cases:
            verdict = weft(case, fullgraph=False)
            if verdict.status != "pass":
                failed[case.id] = verdict.detail
    assert set(failed) == NOT_THE_SAME, failed
    assert texts["text"] >= AT_LEAST and texts["bytecode"] == 0, texts
    assert len(cases) - len(failed) >= 873
