"""What verify reports of whole files that were lost, exchanged, left over, or are older.

A table in ``ckptool/docs/verify.md`` says it, with a row per format; here it is measured.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from attack_files import KINDS, mutations, said_in_docs
from conftest import case
from format_tables import AGAIN, FIXTURES
from test_verify_mutation import noise, read, reported_beyond

MOST = 2
"""Mutations of a kind, of each fixture."""
MUST_BE_NAMED = ("left over", "stray")
"""What is to be reported even where it changes nothing that is read."""


def seen(name: str, tmp_path: Path) -> dict[str, set[str]]:
    """Of each kind of mutation whether verify reported it: ``yes``, ``no``, or ``harmless``."""
    source = case(name).path
    truth, usual = read(source), noise(source)
    found: dict[str, set[str]] = {}
    for mutation in mutations(source, MOST):
        folder = tmp_path / "mutated"
        shutil.copytree(source, folder)
        mutation.change(folder)
        if reported_beyond(folder, usual):
            answer = "yes"
        elif read(folder) != truth or mutation.kind in MUST_BE_NAMED:
            answer = "no"
        else:
            answer = "harmless"
        found.setdefault(mutation.kind, set()).add(answer)
        shutil.rmtree(folder)
    return found


def in_a_word(answers: set[str]) -> str:
    if len(answers) > 1:
        answers = answers - {"harmless"}
    return "-" if not answers else "some" if len(answers) > 1 else next(iter(answers))


def measured(name: str, tmp_path: Path) -> dict[str, str]:
    """What verify sees of each kind of mutation in all checkpoints of a format."""
    found: dict[str, set[str]] = {}
    for fixture in FIXTURES[name]:
        for kind, answers in seen(fixture, tmp_path).items():
            found.setdefault(kind, set()).update(answers)
    return {kind: in_a_word(found.get(kind, set())) for kind in KINDS}


def test_the_table_has_every_format() -> None:
    assert said_in_docs().keys() == FIXTURES.keys(), AGAIN


@pytest.mark.parametrize("name", FIXTURES)
def test_what_verify_sees_is_what_the_docs_say(name: str, tmp_path: Path) -> None:
    assert measured(name, tmp_path) == said_in_docs()[name], AGAIN
