"""Where the ranks meet, and the store that they save to.

The ranks as processes that watch: how they agree, without a process group of their own.

A group would start threads, which no fork survives. They meet at the store that the elastic agent
keeps; where there is none, rank 0 keeps it.

A folder of a store to save to: tried first, measured, and removed with all that was begun.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from ckptool.errors import NotFound, TransferError, Unsupported, UsageError
from ckptool.storage.retry import Denied
from ckptool.storage.store import SCHEMES
from ckptool.storage.url import Location, RemotePath

_TIMEOUT = timedelta(hours=12)
_LOOK = 0.003


class Meeting:
    """What the watching processes of all ranks say to one another."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        self._store = self._connect(serve=not _agent_keeps_it() and self.rank == 0)
        self._number = 0

    def _connect(self, *, serve: bool) -> Any:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(host, port, None, serve, timeout=_TIMEOUT, wait_for_workers=False)
        return PrefixStore("ckptool-bench", store)

    def gather(self, value: Any) -> list[Any]:
        """What every rank passed, in the order of ranks; values that JSON holds."""
        self._number += 1
        keys = [f"gather-{self._number}-{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], json.dumps(value))
        return [json.loads(self._await(key)) for key in keys]

    def _await(self, key: str) -> bytes:
        """What a key holds once it is there. The store's own waiting hears no signal."""
        while not self._has(key):
            time.sleep(_LOOK)
        found: bytes = self._store.get(key)
        return found

    def failing(self, job: str) -> Callable[[], str | None]:
        """A question: has another rank failed at this job?"""
        key = f"failed-{job}"
        return lambda: f"rank {self._store.get(key).decode()} failed" if self._has(key) else None

    def fail(self, job: str) -> None:
        """Let the others know that this rank failed at the job."""
        self._store.set(f"failed-{job}", str(self.rank))

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def begin_group(self, job: str, backend: str, timeout: float) -> None:
        """Within a child: start the process group of this job's processes.

        ``timeout``: seconds after which what its ranks say to one another fails.
        """
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore

        store = PrefixStore(job, self._connect(serve=False))
        dist.init_process_group(
            backend,
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout),
        )


def _agent_keeps_it() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


_PIECE = 16 << 20


def require_savable(out: RemotePath, *, abort: bool) -> None:
    """Unsupported for a store that ranks cannot write to or share, UsageError for an ``abort``."""
    if abort:
        raise UsageError(
            "--abort looks for what is left on disk; --out is a URL", hint="--out with a folder"
        )
    if out.store.scheme in SCHEMES:
        raise Unsupported(f"{out}: cannot be written to: the web is only read")
    if out.store.scheme == "memory":
        raise Unsupported(f"{out}: every rank is a process, and has a memory:// of its own")


@contextmanager
def emptied(place: RemotePath) -> Iterator[RemotePath]:
    """A folder that can be written and removed, and is removed at the end.

    Raises Unsupported before anything is measured, TransferError where something stays.
    """
    try:
        (place / "probe").write_bytes(b"ckptool")
        remove_uploaded(place)
    except NotFound as error:
        message = f"{place.parent}: cannot be written to: {error.message}"
        raise Unsupported(message, hint=error.hint) from None
    try:
        yield place
    finally:
        remove_uploaded(place)


def remove_uploaded(place: RemotePath) -> None:
    """Remove a folder, and the parts of files that were not finished; TransferError if it stays."""
    store, inside = place.store, f"{place.key}/"
    store.fs.invalidate_cache()
    with suppress(NotFound):
        store.ask(str(place), lambda: store.fs.rm(place.key, recursive=True))
    store.abort_uploads(place.key, lambda key: key.startswith(inside))
    if listed(place):
        raise TransferError(
            f"{place}: cannot be removed", hint="remove it by the store's own tools"
        )


def listed(place: RemotePath) -> dict[str, int]:
    """The bytes of every file below, as the store lists them now."""
    try:
        found = place.store.find(place.key, str(place))
    except Denied:
        raise
    except NotFound:
        return {}
    return {name: info.nbytes for name, info in found.items()}


def clients(place: RemotePath) -> tuple[str, ...]:
    """The packages that speak with the store: fsspec, and the one that knows it."""
    return tuple(dict.fromkeys(("fsspec", type(place.store.fs).__module__.partition(".")[0])))


def named(place: Location) -> Path | str:
    """A place as strategies take it: a path, or a URL."""
    return place if isinstance(place, Path) else place.url


def upload(data: memoryview, file: RemotePath) -> None:
    """Write a file as fsspec does by itself, in order, until the store has it."""
    with file.store.fs.open(file.key, "wb") as stream:
        for start in range(0, len(data), _PIECE):
            stream.write(data[start : start + _PIECE])
