"""Files to be copied that are links: followed within their folder, or to the Hub cache's blobs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from shlex import quote

from ckptool.core.layout import FileLayout, Verbatim
from ckptool.core.text import list_some
from ckptool.errors import Unsupported
from ckptool.storage.files import Files
from ckptool.storage.local import LocalSource

_SNAPSHOT = re.compile(r"(.*/(?:models|datasets|spaces)--[^/]+)/snapshots/[^/]+")
"""Where huggingface_hub (1.0) has a revision: its files are links to ``blobs`` beside."""
_MOST_SHOWN = 6


def require_own_files(source: Files, files: Iterable[FileLayout]) -> None:
    """Raise Unsupported if files of a source that would be copied are links out of its folder."""
    if isinstance(source, LocalSource):
        parts = (part for file in files for part in file.decisive)
        copied = (part.file for part in parts if isinstance(part, Verbatim))
        require_own(Path(source.root), (file for file in copied if not os.path.isabs(file)))


def require_own(folder: Path, names: Iterable[str]) -> None:
    """Raise Unsupported, with their names, if files below a folder are links out of it.

    A model's repository may have links, and they may lead to what is nobody else's business.
    """
    root = os.path.realpath(folder)
    snapshot = _SNAPSHOT.match(f"{root}/")
    homes = (f"{root}/", f"{snapshot[1]}/blobs/") if snapshot else (f"{root}/",)
    places = {name: os.path.realpath(folder / name) for name in names}
    foreign = {name: real for name, real in places.items() if not real.startswith(homes)}
    if not foreign:
        return
    name, real = next(iter(foreign.items()))
    links = list_some([f"{name} (to {real})" for name, real in foreign.items()], _MOST_SHOWN)
    raise Unsupported(
        f"{folder}: not copied, as links lead out of this folder: {links}",
        hint="replace a link that you trust by what it leads to:"
        f" cp --remove-destination {quote(real)} {quote(str(folder / name))}",
    )
