"""Output appears whole or not at all: staged beside the target, synced, renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from ckptool.core.layout import Layout
from ckptool.core.plan import Plan
from ckptool.engine.journal import Journal
from ckptool.engine.run import RunOptions, run
from ckptool.engine.sources import Files, LocalSource
from ckptool.errors import CannotDo

RESUME_HINT = "the finished files are kept; the same command with --resume continues"


@dataclass(frozen=True, slots=True)
class StageOptions:
    """``overwrite`` replaces an existing target at the end; ``resume`` continues a partial one.

    ``plan`` and ``source`` are the digests that a resumed run must share with the first;
    ``replaceable`` says that what stands at the target is a checkpoint.
    """

    plan: str
    source: str
    overwrite: bool = False
    resume: bool = False
    fsync: bool = True
    replaceable: bool = False


class Stage:
    """A hidden folder beside the target, and journals of what is finished in it.

    One process makes it (``begin``); others that write into it ``join``. Each keeps a journal of
    its own. Only ``commit`` touches the target: no file is ``held`` back for the end.
    """

    held: tuple[int, ...] = ()

    def __init__(self, target: Path, layout: Layout, options: StageOptions) -> None:
        self.target = target
        self.folder = target.parent / f".{target.name}.partial"
        self._layout = layout
        self._options = options
        self.journal = Journal(None)
        self._is_new = False
        self._first = Journal(None)

    def begin(self) -> None:
        """Make the folder, or with ``resume`` take the one an earlier run left.

        Raises CannotDo where the target exists, does not fit, or there is nothing to resume.
        """
        self.require_possible()
        if self._options.resume:
            if not self.folder.is_dir() or not self._journals():
                raise CannotDo(f"{self.target}: there is no partial output to resume")
            return
        try:
            first = self._journal_path(0)
            self._first = Journal.start(first, self._options.plan, self._options.source)
            self._is_new = True
            shutil.rmtree(self.folder, ignore_errors=True)
            for path in self._journals():
                if path != first:
                    path.unlink()
            self.folder.mkdir()
        except OSError as error:
            raise CannotDo(
                f"{self.target.parent}: cannot be written to: {error.strerror}"
            ) from None

    def require_possible(self) -> None:
        """CannotDo where the target exists and may not be replaced, or does not fit."""
        expected = self.outputs()
        self._refuse_existing(expected[-1:] if self._options.resume else expected)
        if not self._options.resume:
            self._require_space()

    def join(self, rank: int = 0) -> None:
        """Open this rank's journal, after ``begin``."""
        path, options = self._journal_path(rank), self._options
        if rank == 0 and self._is_new:
            self.journal = self._first
        elif options.resume:
            others = self._journals()
            self.journal = Journal.resume(path, options.plan, options.source, others)
        else:
            self.journal = Journal.start(path, options.plan, options.source)

    def write(
        self,
        plan: Plan,
        source: Files,
        options: RunOptions,
        progress: Callable[[int], None],
        numbers: Collection[int],
    ) -> None:
        """Write files of the plan, those of ``numbers``."""
        run(plan, source, self.folder, options, progress, numbers=numbers, journal=self.journal)

    @property
    def written(self) -> LocalSource:
        """The files that are staged, to be read back."""
        return LocalSource(self.folder, {})

    def mark(self, token: str) -> None:
        """Leave a mark that whoever shares this disk can see."""
        self._mark.write_text(token)

    def is_marked(self, token: str) -> bool:
        """Whether the mark is seen here."""
        return self._mark.is_file() and self._mark.read_text() == token

    @property
    def _mark(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.journal.mark")

    def commit(self) -> None:
        """Make the staged files the target; the file that commits comes last."""
        expected = self.outputs()
        self._refuse_existing(expected[-1:] if self._options.resume else expected)
        if self._options.fsync:
            for path, _, _ in os.walk(self.folder):
                _sync_folder(Path(path))
        if self._layout.folder:
            _swap_folder(self.folder, self.target)
        else:
            self._side_file.unlink(missing_ok=True)
            for file in self._layout.files:
                os.replace(self.folder / file.path, self.target.parent / file.path)
            self.folder.rmdir()
        if self._options.fsync:
            _sync_folder(self.target.parent)
        self._forget()

    def discard(self, *, resumed: bool = False) -> None:
        """Remove what this process staged; an output that it resumed only where that is asked."""
        self.journal.close()
        if not self._is_new and not resumed:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self._forget()

    def outputs(self) -> list[Path]:
        """What will stand at the end: the target folder, or the target file and those beside it."""
        if self._layout.folder:
            return [self.target]
        files = [self.target.parent / file.path for file in self._layout.files]
        return files if self._side_file in files else [self._side_file, *files]

    @property
    def _side_file(self) -> Path:
        """What an earlier conversion may have put beside a single file, to be read with it."""
        name = self.target.name.removesuffix(".safetensors")
        return self.target.with_name(f"{name}.extra.pt")

    def _journal_path(self, rank: int) -> Path:
        return self.folder.with_name(f"{self.folder.name}.journal.{rank}")

    def _journals(self) -> list[Path]:
        found = self.folder.parent.glob(f"{_glob_escape(self.folder.name)}.journal.[0-9]*")
        return sorted(found)

    def _forget(self) -> None:
        for path in self._journals():
            path.unlink(missing_ok=True)
        self._mark.unlink(missing_ok=True)
        self.journal.close()
        self._first.close()

    def _refuse_existing(self, paths: list[Path]) -> None:
        there = [str(path) for path in paths if path.exists() or path.is_symlink()]
        if there and not self._options.overwrite:
            raise CannotDo(
                f"{', '.join(there)} exists already",
                hint="--overwrite replaces it once all is written",
            )

        for path in there:
            self._require_replaceable(Path(path))

    def _require_replaceable(self, path: Path) -> None:
        """--overwrite replaces a file by a file, and a folder only where a checkpoint is in it."""
        if path.is_dir() != self._layout.folder:
            kinds = ("a folder", "a file") if path.is_dir() else ("a file", "a folder")
            raise CannotDo(f"{path}: is {kinds[0]}, and {kinds[1]} would be written")
        if path.is_dir() and any(path.iterdir()) and not self._options.replaceable:
            raise CannotDo(f"{path}: is no checkpoint, and is not replaced")

    def _require_space(self) -> None:
        folder, needed = self.target.parent, self._layout.nbytes
        if not folder.is_dir():
            raise CannotDo(f"{folder}: no such folder to write into", hint=f"mkdir -p {folder}")
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise CannotDo(f"{folder}: {needed:,} bytes are needed, {free:,} are free")


def _glob_escape(name: str) -> str:
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def _swap_folder(folder: Path, target: Path) -> None:
    if not target.exists():
        os.rename(folder, target)
        return
    import tempfile

    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.old-", dir=target.parent))
    os.rename(target, aside / "replaced")
    try:
        os.rename(folder, target)
    except BaseException:
        os.rename(aside / "replaced", target)
        aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
