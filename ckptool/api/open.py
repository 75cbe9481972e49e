"""Open a checkpoint: of any format, from its metadata alone."""

from __future__ import annotations

from typing import Unpack

from ckptool.api.arguments import AnyPath, Keywords, location, with_keywords
from ckptool.api.checkpoint import Checkpoint
from ckptool.api.keywords import OpenKeywords
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.rewrite import RewriteOptions
from ckptool.commands.rewrite import rewrite
from ckptool.errors import Changed


@with_keywords(OpenKeywords)
def open(path: AnyPath, **options: Unpack[OpenKeywords]) -> Checkpoint:
    """Open the checkpoint at ``path``: of any format, from its metadata alone.

    The keywords say how to read it, what to select, and how to rename and cast that.
    Raises NotFound, Unrecognized, Damaged, Hostile, UsageError or Unsupported.
    """
    keywords = Keywords("open", options, OpenKeywords)
    named = location(path)
    opened = open_checkpoint(named, keywords.options(ReadOptions), whole=False)
    catalog = rewrite(opened, keywords.options(RewriteOptions), unread=False).catalog
    return Checkpoint(opened, catalog, named, options)


def reopen(place: str, options: OpenKeywords, version: str) -> Checkpoint:
    """Open a checkpoint as it was opened in another process; Changed if it is another now."""
    checkpoint = open(place, **options)
    if checkpoint.version() != version:
        raise Changed(f"{checkpoint.path}: it was changed since it was opened first")
    return checkpoint


def checkpoint_at(path: AnyPath | Checkpoint, **options: Unpack[OpenKeywords]) -> Checkpoint:
    """Return an open checkpoint as it is, or open that at a path."""
    if not isinstance(path, Checkpoint):
        return open(path, **options)
    if options:
        raise TypeError(f"{next(iter(options))} is for opening a checkpoint: give it to open()")
    return path
