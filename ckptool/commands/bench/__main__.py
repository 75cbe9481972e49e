"""A rank as ``launch`` starts it: ``python -m ckptool.commands.bench``.

What libraries spawn does not import this module anew, so that their processes start fast.
"""

from __future__ import annotations

if __name__ == "__main__":
    from ckptool.commands.bench.worker.rank import run_started_rank

    run_started_rank()
