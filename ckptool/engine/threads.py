"""Share jobs among a few threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Protocol, TypeVar


class Closeable(Protocol):
    """What a thread owns and gives back at its end."""

    def close(self) -> None:
        """Give back what is held."""


Worker = TypeVar("Worker", bound=Closeable)
Job = TypeVar("Job")


def share_jobs(
    jobs: Iterator[Job],
    count: int,
    start: Callable[[], Worker],
    work: Callable[[Worker, Job], None],
) -> None:
    """Do all jobs on ``count`` threads, each with a worker of its own that ``start`` makes.

    The first error stops all, also an interruption of the caller, and is raised when all stand.
    """
    lock = threading.Lock()
    errors: list[BaseException] = []

    def loop() -> None:
        try:
            with closing(start()) as worker:
                while not errors:
                    with lock:
                        job = next(jobs, None)
                    if job is None:
                        return
                    work(worker, job)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=loop, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:
        errors.append(error)
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
