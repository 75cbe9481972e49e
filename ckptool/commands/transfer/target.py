"""What a command writes to: a place apart from what it reads, and the files that it gets."""

from __future__ import annotations

from itertools import product

from ckptool.commands.model.links import require_own_files
from ckptool.commands.open import OpenedCheckpoint
from ckptool.commands.rewrite import RewriteResult
from ckptool.core.layout import Layout
from ckptool.errors import Unsupported, UsageError
from ckptool.formats.base import Format, Request
from ckptool.storage.commit_note import side_name
from ckptool.storage.place import on_disk
from ckptool.storage.url import Location, may_contain


def require_apart(opened: OpenedCheckpoint, target: Location) -> None:
    """Raise UsageError if the target is inside the source, or contains it; side files count."""
    for source, place in product(_with_side(opened.path), _with_side(target)):
        try:
            is_apart = not (may_contain(source, place) or may_contain(place, source))
        except (OSError, RuntimeError) as error:
            raise Unsupported(f"{place}: cannot be followed: {error}") from None
        if not is_apart:
            raise UsageError(
                f"{place}: target and source {source} must not contain one another",
                hint="name a target beside the source, not in it",
            )


def _with_side(place: Location) -> list[Location]:
    """Return a file with its side file, whether that exists or not; any other place alone."""
    side = side_name(place.name)
    return [place] if side is None else [place, place.with_name(side)]


def resolve_target(target: Location) -> Location:
    """Resolve ``.`` and ``..`` to the folder's own name, beside which others can be put.

    Raises UsageError if it has none, such as the root of a disk.
    """
    path = on_disk(target)
    if path is None or path.name not in ("", ".."):
        return target
    path = path.resolve()
    if not path.name:
        raise UsageError(f"{path}: is the root folder", hint="name a folder below it")
    return path


def lay_out(
    opened: OpenedCheckpoint, rewritten: RewriteResult, writer: Format, request: Request
) -> Layout:
    """Lay out what a checkpoint was rewritten to.

    The other files of a model are a subject of their own, which is imported if there are any.
    """
    catalog, how = rewritten.catalog, rewritten.options
    needs_files = how.map.assets is not None or how.selection.peft_adapter
    if needs_files or catalog.companions or writer.loading.is_model_folder:
        from ckptool.commands.model.folder import lay_out_folder, lay_out_for_mesh

        lay_out_all = lay_out_folder if request.placed is None else lay_out_for_mesh
        return lay_out_all(opened, rewritten, writer, request)
    layout = writer.lay_out(catalog, request)
    require_own_files(opened.source, layout.files)
    return layout
