"""Move a checkpoint into another layout, for all writing commands alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.open import OpenedCheckpoint
from ckptool.commands.options.target import TransferOptions
from ckptool.commands.transfer.estimate import Estimate, estimate
from ckptool.commands.transfer.overwrite import own_files, require_unmixed
from ckptool.commands.transfer.plan_digest import plan_digest
from ckptool.commands.transfer.report import Part, TransferReport, standing_note
from ckptool.core.casts import RangeCounts, beyond_notes
from ckptool.core.planning.plan import Plan
from ckptool.engine.check.replicas import copied_files, differing_replicas
from ckptool.engine.checksum import RecordCheck
from ckptool.engine.progress import UNWATCHED, Progress
from ckptool.engine.ranks import Ranks
from ckptool.engine.read.sums import ReadSums
from ckptool.engine.read.tiles import require_unchanged
from ckptool.engine.share import Share
from ckptool.engine.write.disk_target import DiskTarget, was_to_replace
from ckptool.engine.write.parts import note_cut
from ckptool.engine.write.room import room_left
from ckptool.engine.write.run import fetched_ahead, workers_within_budget
from ckptool.engine.write.stage import FINISH, WHOLE, Stage, StageOptions, part_role
from ckptool.engine.write.work import Work
from ckptool.errors import (
    Changed,
    CkptoolError,
    Committed,
    NotVerified,
    Problem,
    SourceError,
    TransferError,
    Unsupported,
    UsageError,
    damaged,
    failure_of,
)
from ckptool.storage.commit_note import staging_folder
from ckptool.storage.place import by_place, on_disk
from ckptool.storage.virtual.memory import MemoryFiles

if TYPE_CHECKING:
    from ckptool.core.layout import Layout
    from ckptool.engine.write.store_target import StoreTarget
    from ckptool.storage.url import Location, RemotePath


def stage_at(target: Location, layout: Layout, options: StageOptions) -> Stage:
    """Return the stage that makes the output of a target: all of it, a part, or the end."""

    def in_store(path: RemotePath) -> StoreTarget:
        from ckptool.engine.write.store_target import StoreTarget

        return StoreTarget(path, layout, options)

    output = by_place(target, lambda path: DiskTarget(path, layout, options), in_store)
    return Stage(output, layout, options)


def _is_finished_by(stage: Stage, ranks: Ranks) -> bool:
    """Finish what an earlier run was killed in; return whether nothing is left to do.

    The first rank does so, then the first of each other node, whose disk may be another.
    """
    with ranks.together():
        first = ranks.rank == 0 and stage.target.finish_earlier()
    with ranks.together():
        if ranks.rank > 0 and ranks.local_rank == 0:
            stage.target.finish_earlier()
    return ranks.gather(first)[0] and all(ranks.gather(stage.target.path.exists()))


AnyReport = TypeVar("AnyReport")

_SAVES_AGAIN = "what was written is kept until the next save to the same place, which starts over"
_CLEANS = "the next command that writes there removes what is left of this run"
_FINISHED = "all was written by an earlier run, whose commit was interrupted; it is now finished"


class Transfer(Struct, Generic[AnyReport], frozen=True):
    """A transfer that is planned and checked, but not begun, with the report of the plan.

    ``decided`` is what options and maps decide beyond the layout; a run can only be resumed with an
    equal one.
    """

    opened: OpenedCheckpoint
    plan: Plan
    target: Location
    options: TransferOptions
    report: AnyReport
    decided: object = None

    @property
    def nbytes(self) -> int:
        """Bytes that progress counts: written, and with ``verify`` read from both sides."""
        part: Part | None = getattr(self.report, "part", None)
        written = self.plan.layout.nbytes
        compared = self.plan.compared_bytes if self.options.verify else 0
        if self.options.finish:
            return 0
        if part is not None:
            compared = compared * part.nbytes // max(1, written)
            written = part.nbytes
        return written + compared

    def obstacle(self) -> str | None:
        """Return why a run would be refused by the target as it is now; None if it would not be.

        Stores are not asked.
        """
        if on_disk(self.target) is None:
            return None
        try:
            options = self._stage_options()
            stage_at(self.target, self.plan.layout, options).require_possible()
        except Unsupported as error:
            return f"{error.message}; {error.hint}" if error.hint else error.message
        return None

    def estimate(self) -> Estimate | None:
        """Estimate how long ``run`` takes, by about a second of reading the source."""
        if self.options.finish or not isinstance(self.report, TransferReport):
            return None
        files, workers = self.plan.catalog.files, self.options.run.workers
        return estimate(self.report, self.opened.source, files, workers)

    def with_costs(self) -> AnyReport:
        """Return the report of the plan with the costs that are computed for a dry run alone."""
        return self.report

    def require_possible(self, ranks: Ranks) -> None:
        """Raise Unsupported if these ``ranks`` cannot do what was requested; any can transfer."""

    def run(self, progress: Progress = UNWATCHED, ranks: Ranks | None = None) -> AnyReport:
        """Find the target free, and write there, shared with ``ranks``; return the report."""
        ranks = ranks or Ranks()
        return self.run_on(self.open_stage(ranks), progress, ranks)

    def open_stage(self, ranks: Ranks) -> Stage | None:
        """Create the stage of this rank; None if an earlier run wrote all that is requested.

        Raises Damaged if replicas differ or files of ranks are identical, Unsupported if these
        ranks cannot do what was requested, their plans differ, or the target is taken.
        """
        self.require_possible(ranks)
        if ranks.size > 1 and self.options.part is not None:
            raise UsageError("--part: torchrun shares the work among its ranks by itself")
        with ranks.together():
            plan = plan_digest(self.plan, self.opened.source, self.decided)
            options = self._stage_options(plan)
        if len(set(ranks.gather((plan, options.source)))) > 1:
            raise Unsupported("ranks see different sources or made different plans")
        stage = stage_at(self.target, self.plan.layout, options)
        if _is_finished_by(stage, ranks):
            return None
        with ranks.together():
            if ranks.rank == 0:
                stage.require_possible()
        with ranks.together():
            self._require_equal_replicas(ranks)
        return stage

    def run_on(self, stage: Stage | None, progress: Progress, ranks: Ranks) -> AnyReport:
        """Write the layout on an open stage, all of it or nothing, shared with ``ranks``.

        Returns the report, with notes on how it was put in place. Raises Damaged if the source
        contradicts itself, Changed if it is not the one that was planned for, TransferError if
        writing fails or the output is not as planned.
        """
        progress.begin(self.nbytes)
        if stage is None:
            return self._written((_FINISHED,), whole=True)
        try:
            return self._written(self._fill(stage, progress, ranks))
        except (KeyboardInterrupt, SystemExit) as error:
            for note in self._left(stage):
                error.add_note(note)
            raise

    def _fill(self, stage: Stage, progress: Progress, ranks: Ranks) -> tuple[str, ...]:
        """Write, prove and commit; discard what failed, or say how it is continued."""
        try:
            return self._write_unchanged(stage, progress, ranks)
        except (NotVerified, Changed) as error:
            stage.discard(resumed=True)
            if (remains := stage.target.remains()) is not None:
                error.add_hint(remains)
            raise
        except Committed:
            raise
        except (OSError, TransferError) as error:
            raise self._failure(error, stage) from error
        except CkptoolError as error:
            stage.discard()
            if (remains := stage.target.remains()) is not None:
                error.add_hint(remains)
            raise
        finally:
            stage.target.close()

    def _written(self, notes: Iterable[str], *, whole: bool = False) -> AnyReport:
        """Return the report of what was now written: a part, or the ``whole``."""
        report: Any = self.report
        more: dict[str, Any] = {}
        if isinstance(report, TransferReport):
            part = report.part
            done = {} if part is None else {"part": replace(part, done=True)}
            more = done | ({"written": True} if whole or part is None else {})
        return replace(report, notes=(*report.notes, *notes), **more)  # type: ignore[no-any-return]

    def _failure(self, error: OSError | TransferError, stage: Stage) -> TransferError:
        """Return the error with the target's path and, if that helps, a hint at ``--resume``."""
        head, path = f"{self.target}: ", on_disk(self.target)
        cause = error if isinstance(error, OSError) else error.__cause__
        room = "" if path is None else room_left(path.parent, cause)
        if isinstance(error, OSError):
            error = failure_of(error, head)
        message = Problem(head + error.message.removeprefix(head) + room, error.message.code)
        hints = (error.hint, self._next_step(stage), stage.target.remains())
        return TransferError(message, hint="; ".join(filter(None, hints)) or None)

    def _left(self, stage: Stage) -> list[str]:
        """Return what an interrupted run leaves: the target if it is in place, or the next step."""
        if stage.is_committed():
            return [self.standing, *([_CLEANS] if stage.target.is_partial() else [])]
        return [
            note for note in (self._next_step(stage), stage.target.remains()) if note is not None
        ]

    @property
    def standing(self) -> str:
        """What stands once all is written, even if the command is interrupted from then on."""
        return standing_note(self.opened.path, self.target, self.options)

    def _next_step(self, stage: Stage) -> str | None:
        """Return how to continue a run that ended midway; a save from memory starts over."""
        step = stage.next_step()
        return _SAVES_AGAIN if step and self._is_in_memory else step

    @property
    def _is_in_memory(self) -> bool:
        """Whether the source is memory, which nothing tells of changes: only reading it again."""
        return isinstance(self.opened.source, MemoryFiles)

    def _require_equal_replicas(self, ranks: Ranks) -> None:
        share = self.options.part or Share(ranks.rank, ranks.size)
        entries = [] if self.options.finish else self.plan.entries[share.position :: share.size]
        problems = differing_replicas(entries, self.opened.source)
        if problems:
            raise damaged(
                problems, subject="the replicas", hint="use --drop NAME to exclude a tensor"
            )
        if share.position == 0 and not self.options.finish:
            copies = list(copied_files(self.plan.catalog, self.opened.source))
            if copies:
                raise damaged(copies, subject="the ranks' files")

    def _write_unchanged(self, stage: Stage, progress: Progress, ranks: Ranks) -> tuple[str, ...]:
        """Write; raise Changed if apparent damage is a source that was changed."""
        try:
            return self._write(stage, progress, ranks)
        except (SourceError, NotVerified):
            require_unchanged(self.plan.catalog, self.opened.source)
            raise

    def _write(self, stage: Stage, progress: Progress, ranks: Ranks) -> tuple[str, ...]:
        node = ranks.begin(stage)
        with ranks.together():
            stage.target.join(ranks.rank)
        share = self.options.part or node.share
        numbers = stage.takes(self._files_of(share))
        records, sums = RecordCheck(shared=not share.is_all), ReadSums()
        noted = sums if self.options.verify and not self._is_in_memory else None
        with ranks.together():
            self._move(stage, progress, numbers, records, noted)
        notes = ranks.gather(note_cut(records))
        stage.noted += chain.from_iterable(notes[rank] for rank in node.ranks)
        remarks: list[str] = []
        if self.options.verify:
            with ranks.together():
                beyond = self._verify(stage, progress, numbers, sums)
            remarks += beyond_notes(sum(ranks.gather(beyond), Counter()))
        with ranks.together():
            require_unchanged(self.plan.catalog, self.opened.source)
        with ranks.together():
            if node.leads and (remark := self._commit(stage, progress, node.share)) is not None:
                remarks.append(remark)
        if node.places > 1:
            remarks.append(
                f"{self.target} is on {node.places} disks, one per node, each with a full copy"
            )
        return tuple(remarks)

    def before_commit(self) -> None:
        """Prepare the commit, once everything is written."""

    def _files_of(self, share: Share) -> list[int]:
        """Return the indices of a share's files in the layout."""
        return share.files(self.plan.layout)

    def _move(
        self,
        stage: Stage,
        progress: Progress,
        numbers: Collection[int],
        records: RecordCheck,
        sums: ReadSums | None = None,
    ) -> None:
        run, source = self.options.run, self.opened.source
        stage.target.write(Work(self.plan, source, run, numbers, records, progress, sums))

    def _commit(self, stage: Stage, progress: Progress, share: Share) -> str | None:
        """Put the output in place, of which this process wrote a share; or mark a part as done."""
        if self.options.part is not None:
            return stage.commit()
        if self.options.verify and (self.options.finish or not share.is_all):
            from ckptool.engine.check.complete import require_complete

            require_complete(self.plan)
        if stage.noted:
            source = self.opened.source
            stage.require_joined(source, workers_within_budget(self.plan, self.options.run, source))
        if stage.target.last_files:
            self._move(stage, progress, stage.target.last_files, RecordCheck())
            if self.options.verify:
                self._verify(stage, progress, stage.target.last_files, ReadSums())
        target = on_disk(self.target) if self.plan.layout.folder else None
        if target is not None and target.is_dir():
            require_unmixed(target, staging_folder(target), stage.options.own or ())
        self.before_commit()
        return stage.commit()

    def _stage_options(self, plan: str = "") -> StageOptions:
        """Return what the stage must know; a dry run needs no digest of the ``plan``."""
        self.options.require_one_way()
        source, catalog, path = self.opened.source, self.plan.catalog, on_disk(self.target)
        read = [*catalog.files, *catalog.companions]
        how, overwrite = self.options, self.options.overwrite
        if how.resume and path is not None:
            overwrite = was_to_replace(path)
        role = FINISH if how.finish else WHOLE if how.part is None else part_role(how.part)
        return StageOptions(
            plan,
            source.fingerprint(read),
            source_state=source.fingerprint(read, exact=True),
            overwrite=overwrite,
            resume=how.resume or role != WHOLE,
            fsync=how.run.fsync,
            verify=how.verify,
            find_own=lambda: (
                own_files(self.target, self.plan.layout, source) if overwrite else None
            ),
            role=role,
        )

    def _verify(
        self, stage: Stage, progress: Progress, numbers: Sequence[int], sums: ReadSums
    ) -> RangeCounts:
        """Compare the files in place with what they should be; count values that casts lose.

        ``sums`` are of what was read to write them: without any both sides are read.
        """
        if not numbers:
            return Counter()
        from ckptool.engine.check.written import require_written

        source, output = self.opened.source, stage.target.written
        workers = workers_within_budget(self.plan, self.options.run, source, output)
        output.keep(fetched_ahead(output, self.options.run))
        sides, last_files = (source, output), stage.target.last_files
        how = workers, progress
        return require_written(self.plan, numbers, sides, how, sums, later=last_files).counts
