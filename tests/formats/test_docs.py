"""The docs list exactly the formats in the registry."""

from __future__ import annotations

from format_tables import AGAIN, FORMATS_DOC, listed_formats, rows_of


def test_formats_md_has_every_format_and_what_writes_it() -> None:
    rows = rows_of(FORMATS_DOC)
    assert rows.pop("") == ["what it is", "read", "written by", "notes"]
    assert rows == listed_formats(), AGAIN
