"""``--help``: options say what they are without being given."""

import argparse

import pytest

from tools.planner.__main__ import main, parser_of

NOTHING = (None, False, "", [], argparse.SUPPRESS)


def with_defaults(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Options that mean something when they are not given."""
    return [action for action in parser._actions if action.option_strings and action.default not in NOTHING]


def test_every_option_of_emit_shows_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["emit", "--help"])
    shown = "".join(capsys.readouterr().out.split())  # lines are broken at hyphens too
    found = with_defaults(parser_of("emit"))
    assert {"--out", "--lr", "--train-iters", "--time-limit"} <= {action.option_strings[-1] for action in found}
    for action in found:
        assert f"(default{action.default}" in shown, action.option_strings
        assert "(default %(default)s" in (action.help or ""), action.option_strings
