"""How the ranks of a benchmark agree: a store for those that watch, a process group for a job."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil

LOOPBACK = "127.0.0.1"
_MEETING_TIMEOUT = timedelta(hours=12)
_POLL = 0.003


class Meeting:
    """Messages between the watching processes of all ranks, without a process group.

    A group would start threads, which do not survive a fork. They meet at a store kept by the
    process that started them, or else by rank 0. What they say there is data, and names no code.
    """

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        self._is_local = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
        self._address = LOOPBACK if self._is_local else os.environ["MASTER_ADDR"]
        self._port = int(os.environ["MASTER_PORT"])
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun's own store, which need not be on loopback
            self._address = os.environ["MASTER_ADDR"]
        elif self.rank == 0:
            # on loopback, unless there are ranks on other machines
            self._served = (
                serve(self._port)
                if self._is_local
                else connect(self._address, self._port, is_master=True)
            )
        self._store = self._connect()
        self._number = 0

    def _connect(self) -> Any:
        from torch._C._distributed_c10d import PrefixStore

        return PrefixStore("ckptool-bench", connect(self._address, self._port))

    def gather(self, value: Any) -> list[Any]:
        """Return what every rank passed, in rank order; values must be valid JSON."""
        self._number += 1
        keys = [f"gather-{self._number}-{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], json.dumps(value))
        return [json.loads(self._await(key)) for key in keys]

    def _await(self, key: str) -> bytes:
        """Return the value of a key once it exists. The store's own wait ignores signals."""
        while not self._has(key):
            time.sleep(_POLL)
        value: bytes = self._store.get(key)
        return value

    def failing(self, job: str) -> Callable[[], str | None]:
        """Return a function that returns another rank that failed at this job, if any."""
        key = f"failed-{job}"
        return lambda: f"rank {self._store.get(key).decode()} failed" if self._has(key) else None

    def fail(self, job: str) -> None:
        """Tell the others that this rank failed at the job."""
        self._store.set(f"failed-{job}", str(self.rank))

    def counter(self, job: str) -> Callable[[int], int]:
        """Return a function that adds to a number of this job, which all ranks share."""
        return lambda number: int(self._store.add(f"count-{job}", number))

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def begin_group(self, job: str, backend: str, timeout: float) -> None:
        """Start, within a child, the process group of this job's processes.

        ``timeout``: seconds after which communication of its ranks fails. On one machine the group
        and what libraries start beside it listen on loopback alone.
        """
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore

        store = self._connect()
        if self._is_local:
            store = self._begin_store(job, store)
        dist.init_process_group(
            backend,
            store=PrefixStore(job, store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout),
        )

    def _begin_store(self, job: str, meeting: Any) -> Any:
        """Return a store for one job, on loopback; DCP's processes meet there as well.

        Otherwise each of them serves one on all interfaces (torch 2.9 to 2.13).
        """
        key = f"port-{job}"
        if self.rank == 0:
            store = serve(0)
            meeting.set(key, str(store.port))
        else:
            store = connect(LOOPBACK, int(meeting.get(key)))
        interface = _loopback_interface()
        os.environ |= {
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(store.port),
            "DCP_USE_PREFIX_STORE": "1",
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": f"={interface}",
        }
        return store


def serve(port: int) -> Any:
    """Serve torch's store on loopback; 0 stands for a port that is free."""
    return serve_on(listen(port))


def listen(port: int = 0) -> socket.socket:
    """Listen on loopback. torch's store by itself would listen on all interfaces."""
    return socket.create_server((LOOPBACK, port))


def serve_on(listening: socket.socket) -> Any:
    """Serve torch's store where ``listening`` does, which it takes."""
    port, descriptor = listening.getsockname()[1], listening.detach()
    return connect(LOOPBACK, port, is_master=True, master_listen_fd=descriptor)


def connect(host: str, port: int, **options: Any) -> Any:
    """Return torch's store at an address."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(host, port, timeout=_MEETING_TIMEOUT, wait_for_workers=False, **options)


def _loopback_interface() -> str:
    addresses: dict[str, list[Any]] = psutil.net_if_addrs()
    return next(name for name, at in addresses.items() if LOOPBACK in {a.address for a in at})
