"""Answer a question about a checkpoint, for the command line and for Python alike."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from ckptool.commands.options.question import Question
from ckptool.engine.progress import UNWATCHED, Progress

if TYPE_CHECKING:
    from ckptool.commands.verify.findings import VerifyReport
    from ckptool.engine.ranks import Ranks
    from ckptool.storage.url import Location


class Suite(Struct, frozen=True):
    """The findings for one checkpoint, by check; ``asked`` are the checks besides the usual ones.

    ``reasons`` say why it fails beyond that.
    """

    report: VerifyReport
    asked: Collection[str] = ()
    reasons: Sequence[str] = ()


def answer(
    path: Location, question: Question, progress: Progress = UNWATCHED, ranks: Ranks | None = None
) -> VerifyReport:
    """Verify the checkpoint at ``path`` by itself, like another model, or by a manifest.

    Or write its manifest. Several ``ranks`` share the work only if it is verified by itself.
    """
    if (other := question.like.like) is not None:
        from ckptool.commands.verify.compare.like import verify_like

        return verify_like(path, other, question, progress)
    if (target := question.manifest.write_manifest) is not None:
        from ckptool.commands.verify.manifest.build import build_manifest

        return build_manifest(path, target, question, progress)
    if (manifest := question.manifest.manifest) is not None:
        from ckptool.commands.verify.manifest.check import check_manifest

        return check_manifest(path, manifest, question, progress)
    from ckptool.commands.verify.verify import verify

    return verify(path, question.check, progress, ranks)
