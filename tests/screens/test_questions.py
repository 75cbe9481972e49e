"""The command that a person types first answers the question: ``questions.txt`` has the screens.

``pytest tests/screens --rewrite-screens`` writes what they say now.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from conftest import Ended, run_command
from questions import QUESTIONS, Question, write_more
from scenes import prepare
from test_screens import a_machine, lines_of

GOLDEN = Path(__file__).with_name("questions.txt")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How the command of each question ends."""
    folder = tmp_path_factory.mktemp("place")
    write_more(folder)
    prepare(folder, [question.command for question in QUESTIONS])
    with a_machine(80):
        return {
            question.command: run_command(*shlex.split(question.command), cwd=folder, terminal=True)
            for question in QUESTIONS
        }


def test_questions(answers: dict[str, Ended], request: pytest.FixtureRequest) -> None:
    lines = []
    for question in QUESTIONS:
        lines += [f"## {question.asks}", "", f"$ ckptool {question.command}"]
        lines += [*lines_of(answers[question.command]), ""]
    found = "\n".join(lines)
    if request.config.getoption("rewrite_screens"):
        GOLDEN.write_text(found)
    assert found == GOLDEN.read_text()


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.asks)
def test_the_first_command_answers_a_question(
    question: Question, answers: dict[str, Ended]
) -> None:
    done = answers[question.command]
    assert question.answer in done.stdout
    assert "error:" not in done.stderr
    assert done.code in (0, 1)


def test_there_are_at_least_thirty() -> None:
    assert len({question.command for question in QUESTIONS}) == len(QUESTIONS) >= 30
