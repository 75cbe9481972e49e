"""Jobs that threads share: all are done, or the first error is raised."""

from __future__ import annotations

import os
import signal
import time

import pytest

from ckptool.engine.threads import share_jobs


class Worker:
    def close(self) -> None:
        """Nothing is held."""


def test_every_job_is_done_once() -> None:
    done: list[int] = []
    share_jobs(iter(range(100)), 4, Worker, lambda worker, job: done.append(job))
    assert sorted(done) == list(range(100))


def test_a_worker_that_cannot_be_made_is_an_error() -> None:
    def start() -> Worker:
        raise OSError("no memory")

    with pytest.raises(OSError, match="no memory"):
        share_jobs(iter(range(3)), 2, start, lambda worker, job: None)


def test_the_first_error_stops_all() -> None:
    done: list[int] = []

    def work(worker: Worker, job: int) -> None:
        if job == 5:
            raise ValueError(job)
        done.append(job)

    with pytest.raises(ValueError, match="5"):
        share_jobs(iter(range(10_000)), 1, Worker, work)
    assert done == [0, 1, 2, 3, 4]


def test_an_interruption_is_raised_once_all_threads_stand() -> None:
    ended = []

    def work(worker: Worker, job: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        ended.append(job)

    with pytest.raises(KeyboardInterrupt):
        share_jobs(iter([1]), 1, Worker, work)
    assert ended == [1]
