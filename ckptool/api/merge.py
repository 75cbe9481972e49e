"""Merge checkpoints, and prove later what a recipe made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from ckptool.api.arguments import AnyPath, Keywords, location, with_keywords
from ckptool.api.commands import OnProgress
from ckptool.api.keywords import CompareKeywords, MergeKeywords
from ckptool.commands.merge import MergeReport, prepare_merge
from ckptool.commands.options.merge import MergeOptions
from ckptool.commands.options.question import Question
from ckptool.engine.progress import Progress
from ckptool.engine.ranks import join_ranks

if TYPE_CHECKING:
    from ckptool.commands.verify.compare.against import AgainstReport


@with_keywords(MergeKeywords)
def merge(
    target: AnyPath,
    *sources: AnyPath,
    progress: OnProgress | None = None,
    **options: Unpack[MergeKeywords],
) -> MergeReport:
    """Write at ``target`` what is computed of the tensors of ``sources``, complete or not at all.

    ``average=True``, ``ema=0.9``, ``add``, ``minus``, ``take`` or a ``recipe`` say what. Raises as
    ``convert`` does.
    """
    parsed = Keywords("merge", options, MergeKeywords).options(MergeOptions)
    places = [location(source) for source in sources]
    with join_ranks() as group:
        with group.together():
            planned = prepare_merge(places, location(target), parsed)
        if parsed.convert.transfer.dry_run:
            return planned.with_costs()
        return planned.run(Progress(progress), group)


@with_keywords(CompareKeywords)
def verify_merge(
    path: AnyPath,
    recipe: AnyPath,
    *,
    progress: OnProgress | None = None,
    **options: Unpack[CompareKeywords],
) -> AgainstReport:
    """Compare a merged checkpoint with what its recipe computes of the sources.

    Same as ``ckptool verify PATH --recipe FILE``; the report is true if they are equal.
    """
    from ckptool.commands.merge.against import against_recipe

    question = Keywords("verify_merge", options, CompareKeywords).options(Question)
    return against_recipe(Path(recipe), location(path), question, Progress(progress))
