"""Whether a checkpoint is what a recipe of ``merge`` computes of its sources."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from ckptool.commands.merge import open_merged
from ckptool.commands.merge.recipe import read_recipe
from ckptool.commands.options.merge import ExpressionOptions
from ckptool.commands.options.question import Question
from ckptool.commands.options.rewrite import RewriteOptions
from ckptool.commands.verify.compare.against import AgainstReport, Comparison, Side, other_side
from ckptool.commands.verify.findings import SIDES
from ckptool.engine.progress import UNWATCHED, Progress
from ckptool.storage.url import Location


def against_recipe(
    recipe: Path, merged: Location, question: Question, progress: Progress = UNWATCHED
) -> AgainstReport:
    """Compare what a recipe computes with the checkpoint that was merged by it.

    Of the rewriting each source of the recipe gets all but the casts, which the result gets. Raises
    as ``against`` and ``merge`` do.
    """
    merge = read_recipe((), ExpressionOptions(recipe=recipe), proves=True)
    uncast = replace(question.rewrite, casts=None)
    opened = open_merged(merge, question.check.read, uncast).opened
    sides = Side(SIDES[0], recipe, lambda: opened), other_side(merged, question)
    of_result = replace(question, rewrite=RewriteOptions(casts=question.rewrite.casts))
    return Comparison(sides, of_result).run(progress)
