"""What can be asked of a checkpoint or a run: one question at a time, with what belongs to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptool.commands.options.question import Question
from ckptool.commands.options.rewrite import RewriteOptions
from ckptool.commands.options.verify import (
    CompareOptions,
    LikeOptions,
    ManifestOptions,
    VerifyOptions,
)
from ckptool.errors import UsageError

OTHER = Path("other")
CAST = CompareOptions(cast=True)
DEQUANTIZED = RewriteOptions(dequantize=True)
UNCHANGED = LikeOptions(expect_equal=("embed",))


@pytest.mark.parametrize(
    ("question", "asked", "checks"),
    [
        (Question(), [], ()),
        (Question(VerifyOptions(quick=True)), [], ()),
        (Question(against=OTHER, comparison=CAST), ["--against"], ("comparison",)),
        (Question(like=LikeOptions(OTHER), rewrite=DEQUANTIZED), ["--like"], ("comparison",)),
        (Question(manifest=ManifestOptions(manifest=OTHER)), ["--manifest"], ("manifest",)),
        (Question(latest_good=True, every=True), ["--latest-good or --all"], ()),
        (Question(salvage=OTHER), ["--salvage"], ()),
        (Question(VerifyOptions(workers=2), salvage=OTHER), ["--salvage"], ()),
        (Question(salvage=OTHER, manifest=ManifestOptions(overwrite=True)), ["--salvage"], ()),
    ],
)
def test_what_is_asked(question: Question, asked: list[str], checks: tuple[str, ...]) -> None:
    question.require_possible()
    assert question.asked == asked
    assert question.checks == checks


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (Question(against=OTHER, salvage=OTHER), "--against and --salvage: one at a time"),
        (Question(every=True, codes=True), "--latest-good or --all and --codes: one at a time"),
        (Question(VerifyOptions(sample=0.5), OTHER), "--against compares every byte"),
        (Question(VerifyOptions(allow_nonfinite=True)), "--allow-nonfinite is for runs"),
        (Question(VerifyOptions(quick=True, sample=0.5)), "--quick and --sample: one at a time"),
        (Question(VerifyOptions(seed=3)), "--seed selects what --sample reads: it needs --sample"),
        (Question(VerifyOptions(strict=True), salvage=OTHER), "--strict: not with --salvage"),
        (
            Question(manifest=ManifestOptions(overwrite=True)),
            "--overwrite replaces a manifest or what",
        ),
        (
            Question(manifest=ManifestOptions(manifest=OTHER, overwrite=True)),
            "(?s)neither is written.*it needs --write-manifest FILE",
        ),
        (Question(comparison=CAST), "--cast says what to compare: it needs --against OTHER"),
        (Question(rewrite=DEQUANTIZED), "--dequantize says what to compare"),
        (Question(against=OTHER, like=UNCHANGED), "--expect-equal says .* needs --like OTHER"),
    ],
)
def test_what_cannot_be_asked(question: Question, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        question.require_possible()
