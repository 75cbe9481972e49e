"""Which strategy of ``ckptool bench`` runs with which torch, on CPU ranks (tried with one and two).

``clean``: it saves what was there at the call, or once staged where the library wants that awaited.
``own``: the same, with a stager for each save, as torch's serves one only. ``DIRTY``: it stages
device memory alone. ``no``: it cannot run here; the benchmark says why. torch_checkpointing 0.1.1
and nvidia-resiliency-ext 0.4.1.
"""

from __future__ import annotations

TABLE = """
                                   2.9    2.11   2.13   2.15
torch-save                         clean  clean  clean  clean
dcp-sync                           clean  clean  clean  clean
dcp-async-thread/default           clean  clean  clean  clean
dcp-async-thread/default+cached    clean  clean  clean  clean
dcp-async-thread/pinned            clean  own    clean  clean
dcp-async-thread/pinned+cached     clean  own    clean  clean
dcp-async-thread/async             clean  own    clean  clean
dcp-async-thread/async+cached      clean  own    clean  clean
dcp-async-process/default          clean  clean  clean  clean
dcp-async-process/default+cached   clean  clean  clean  clean
dcp-async-process/pinned           clean  own    clean  clean
dcp-async-process/pinned+cached    clean  own    clean  clean
dcp-async-process/async            clean  own    clean  clean
dcp-async-process/async+cached     clean  own    clean  clean
experimental-sync                  clean  clean  clean  clean
experimental-async                 clean  clean  clean  clean
torch-checkpointing/direct         no     no     no     no
torch-checkpointing/buffered       clean  clean  clean  clean
nvrx/persistent+multi-process      DIRTY  DIRTY  DIRTY  DIRTY
nvrx/persistent+one-process        DIRTY  DIRTY  DIRTY  DIRTY
nvrx/persistent+multi-thread       no     no     no     no
nvrx/worker-a-save+multi-process   no     no     no     no
nvrx/worker-a-save+multi-thread    no     no     no     no
"""

HEAD, *ROWS = (line.split() for line in TABLE.strip().splitlines())
CELLS = {
    (name, torch): cell for name, *cells in ROWS for torch, cell in zip(HEAD, cells, strict=True)
}
NAMES = [name for name, *_ in ROWS]
