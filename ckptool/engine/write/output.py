"""What a transfer asks of the place that it writes to, on a disk or in a store."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from ckptool.core.plan import Plan
from ckptool.engine.options import RunOptions
from ckptool.engine.write.journal import Journal
from ckptool.storage.local import Files


class Output(Protocol):
    """Where a transfer writes, so that it appears whole or not at all.

    One process begins it; others that write into it join. ``held`` are the layout's files that
    are written last of all, by one process, for they make it a checkpoint.
    """

    held: tuple[int, ...]
    journal: Journal

    def finish_earlier(self) -> bool:
        """Finish what an earlier run was killed in, as far as no data is missing for it.

        Whether ``resume`` has nothing left to do: the very output that it would write stands.
        """

    def stands(self) -> bool:
        """Whether something stands at the target."""

    def begin(self) -> None:
        """Make the place, or with ``resume`` take what an earlier run left; else Unsupported."""

    def require_possible(self) -> None:
        """Unsupported where ``begin`` would refuse what stands at the target."""

    def join(self, rank: int = 0) -> None:
        """Take part as this rank, after ``begin``."""

    def mark(self, token: str) -> None:
        """Leave a mark for the other ranks."""

    def is_marked(self, token: str) -> bool:
        """Whether the mark is seen here: the ranks write into one place."""

    @property
    def written(self) -> Files:
        """What was written, to be read back."""

    def write(
        self,
        plan: Plan,
        source: Files,
        options: RunOptions,
        progress: Callable[[int], None],
        numbers: Collection[int],
    ) -> None:
        """Write files of the plan, those of ``numbers``."""

    def commit(self) -> str | None:
        """Make what was written the target; a remark where that was not one step."""

    def is_partial(self) -> bool:
        """Whether there is something that a run with ``resume`` continues."""

    def discard(self, *, resumed: bool = False) -> None:
        """Remove what was written; an output that was resumed only where that is asked."""
