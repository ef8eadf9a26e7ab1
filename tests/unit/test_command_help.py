"""Test that ``--help`` of the commands explains each option and shows its default."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from distributed_training import join_command, network_command
from distributed_training.config.loader import parser_of
from distributed_training.config.schema import schema

pytestmark = pytest.mark.timeout(60)


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parser and its commands' parsers."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from commands(command)


PARSERS = [
    parser
    for parent in (
        network_command.build_parser(),
        join_command.build_parser(),
        parser_of(schema("validator")),
    )
    for parser in commands(parent)
]


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.prog)
def test_help_explains_each_option_in_plain_text(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            assert action.help, action.dest
    assert "``" not in parser.format_help()


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.prog)
def test_help_shows_the_default_of_each_option_that_has_one(
    parser: argparse.ArgumentParser,
) -> None:
    for action in parser._actions:
        default = action.default
        if isinstance(default, int | float | str) and default not in (False, argparse.SUPPRESS):
            assert f"[{default}]" in str(action.help), action.dest
