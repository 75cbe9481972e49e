"""The ranks as processes that watch: how they agree, without a process group of their own.

A group would start threads, which no fork survives. They meet at the store that the elastic agent
keeps; where there is none, rank 0 keeps it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_PATIENCE = timedelta(hours=12)
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
        store = TCPStore(host, port, None, serve, timeout=_PATIENCE, wait_for_workers=False)
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

    def begin_group(self, job: str, backend: str, patience: float) -> None:
        """Within a child: start the process group of this job's processes.

        ``patience``: seconds after which what its ranks say to one another fails.
        """
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore

        store = PrefixStore(job, self._connect(serve=False))
        dist.init_process_group(
            backend,
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=patience),
        )


def _agent_keeps_it() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
