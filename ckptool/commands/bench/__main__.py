"""A rank as started by ``launch``: ``python -m ckptool.commands.bench``.

Processes spawned by libraries do not import this module again, so that they start fast.
"""

from __future__ import annotations

if __name__ == "__main__":
    from ckptool.commands.bench.worker.rank import run_started_rank

    run_started_rank()
