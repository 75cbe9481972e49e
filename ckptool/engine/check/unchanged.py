"""Whether a checkpoint is still the one that was listed before it was read."""

from __future__ import annotations

from ckptool.core.catalog import Catalog
from ckptool.storage.file_status import changed
from ckptool.storage.local import Files


def require_unchanged(catalog: Catalog, source: Files) -> None:
    """Raise Changed where a file of the catalog was written, replaced or removed since."""
    files = source.changed([*catalog.files, *catalog.companions])
    if files:
        raise changed(files).within(source.root)
