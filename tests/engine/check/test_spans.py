"""Spans of files as they are read."""

from __future__ import annotations

from ckptool.engine.check.spans import ByteSpan, span_jobs
from ckptool.engine.read.containers import runs_of


def test_one_file_is_read_after_the_other_whatever_the_tensors_order() -> None:
    places = [("a", 90), ("b", 70), ("a", 10), ("b", 0)]
    spans = [ByteSpan(file, at, 15, None, "") for file, at in places]
    jobs = span_jobs(spans, {}, 10)
    runs = [run for job in jobs for of_job in job.runs for run in runs_of(of_job(1), set())]
    expected = [("a", 10), ("a", 20), ("a", 90), ("a", 100), ("b", 0), ("b", 10), ("b", 70)]
    assert [run[:2] for run in runs] == [*expected, ("b", 80)]
