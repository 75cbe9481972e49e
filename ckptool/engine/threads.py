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
    stop: threading.Event | None = None,
) -> None:
    """Do all jobs on ``count`` threads, each with a worker of its own that ``start`` makes.

    The first error stops all, also an interruption of the caller, and is raised when all stand.
    Jobs that are long look whether ``stop`` is set.
    """
    stop = stop or threading.Event()
    lock = threading.Lock()
    errors: list[BaseException] = []

    def loop(stands: threading.Event) -> None:
        try:
            with closing(start()) as worker:
                while not stop.is_set():
                    with lock:
                        job = next(jobs, None)
                    if job is None:
                        return
                    work(worker, job)
        except BaseException as error:
            errors.append(error)
            stop.set()
        finally:
            stands.set()

    ends = [threading.Event() for _ in range(count)]
    threads = [threading.Thread(target=loop, args=(stands,), daemon=True) for stands in ends]
    try:
        for thread in threads:
            thread.start()
        for stands in ends:
            stands.wait()
    except BaseException as error:
        errors.append(error)
        stop.set()
        # An interrupted Thread.join takes a running thread for ended.
        for thread, stands in zip(threads, ends, strict=True):
            if thread.is_alive():
                stands.wait()
    if errors:
        raise errors[0]
