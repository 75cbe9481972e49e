"""A rank as the elastic agent starts it: ``python -m ckptool.commands.bench TASK EVENTS``.

What libraries spawn does not import this module anew, so that their processes start fast.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from ckptool.commands.bench.worker.rank import run_started_rank

    run_started_rank(*sys.argv[1:])
