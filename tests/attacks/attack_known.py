"""Attacks that still succeed, as test function -> rows.

Take a row out once it is repaired: rows of ``KNOWN`` must fail (xfail is strict), rows of ``HANGS``
are not run, for they take all of their time or memory.
"""

from __future__ import annotations

KNOWN: dict[str, list[str]] = {}

HANGS: dict[str, list[str]] = {
    "test_data_pkl_of_a_zip": [
        "bomb: one big list under 20,000 names",
    ],
    "test_data_pkl_that_is_nothing_else": [
        "bomb: one big list under 20,000 names",
    ],
    "test_dtensor": [
        "expanded copies of 2**50 that differ",
    ],
    "test_files_of_two_ranks": [
        "bomb: one big list under 20,000 names",
    ],
    "test_legacy_object": [
        "bomb: one big list under 20,000 names",
    ],
}
