"""Options and modes: the tables, and what wrong names and values say."""

from dataclasses import fields

import pytest
import torch
import weft
from weft import options
from weft_codegen.config import Options


def test_every_mode_sets_known_options():
    for mode, chosen in weft.list_mode_options().items():
        parsed = options.parse_options(mode, None)
        assert (parsed.options.as_dict(), parsed.guard_filter) == (chosen, None)


def test_options_have_defaults_and_words():
    assert weft.list_options()["epilogue_fusion"][0] is True
    assert all(words for _, words in weft.list_options().values())


@pytest.mark.parametrize(
    ("mode", "chosen", "message"),
    [
        ("max-autotun", None, "no mode 'max-autotun'; did you mean 'max-autotune'"),
        (None, {"epilog_fusion": True}, "did you mean 'epilogue_fusion'"),
        (None, {"max_autotune": "yes"}, "max_autotune takes bool, not 'yes'"),
        ("default", {}, "not both"),
    ],
)
def test_wrong_names_and_values(mode, chosen, message):
    with pytest.raises(weft.InvalidOption, match=message):
        options.parse_options(mode, chosen)


def test_codegen_knows_the_same_options_with_the_same_defaults():
    defaults = {name: default for name, (default, _) in weft.list_options().items()}
    assert Options.parse(defaults) == Options()
    assert len(defaults) == len(fields(Options))


def test_dashes_are_underscores():
    assert options.parse_options(None, {"max-autotune": True}).options.max_autotune


def test_a_backend_of_the_users_gets_options_by_their_names():
    seen = []

    def backend(gm, inputs, **keywords):
        seen.append(keywords)
        return gm.forward

    chosen = {"triton.cudagraphs": True, "epilogue_fusion": True}
    weft.compile(lambda x: x + 1, backend=backend, options=chosen)(torch.ones(2))
    weft.compile(lambda x: x + 2, backend=backend)(torch.ones(2))
    assert seen == [{"options": chosen}, {}]
