"""Output in a store, which has no rename: the committing file is written last, and removed first.

A store has no locks either: a note there names the process that writes an unfinished output.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress

from ckptool.core.layout import Data, Layout, ScatteredData
from ckptool.core.text import list_some
from ckptool.engine.run_options import StageOptions
from ckptool.engine.write.existing import (
    already_in_store,
    charged_note,
    not_known,
    not_replaced,
    require_no_conflict,
)
from ckptool.engine.write.joined import Joining
from ckptool.engine.write.journal import NO_JOURNAL, require_same_run
from ckptool.engine.write.schemas import ObjectMark, PartNote, StoreNote, Writer, json_of
from ckptool.engine.write.stage import RESUME_HINT
from ckptool.engine.write.work import Work
from ckptool.engine.write.writer import (
    describe_writer,
    part_note,
    part_notes,
    read_note,
    require_left,
    require_writable,
    this_writer,
)
from ckptool.errors import CkptoolError, Denied, NoAnswer, NotFound, TransferError, Unsupported
from ckptool.storage.clients.unfinished_uploads import abort_uploads
from ckptool.storage.commit_note import UNFINISHED, side_name
from ckptool.storage.multipart import hidden_name
from ckptool.storage.remote import RemoteSource
from ckptool.storage.store import ObjectInfo
from ckptool.storage.url import RemotePath

_MARKS = (".metadata", ".json", ".pkl", "latest", "meta.pt")


class RemoteStage(Joining):
    """The target itself, and a small object that names the run and the writer of its output.

    The object is in a folder, where all its readers see it, and beside a single file. A file of a
    store appears once it is complete, so existing ones of the right size are finished. One process
    writes the ``last_files`` last, which makes it a checkpoint; none if that one holds tensors.
    """

    journal = NO_JOURNAL

    def __init__(self, target: RemotePath, layout: Layout, options: StageOptions) -> None:
        self.target = target
        self.folder = target if layout.folder else target.parent
        self._layout = layout
        self._options = options
        self._store = target.store
        beside = target.with_name(f".{target.name}.partial.journal")
        self._note = self._claim = target / UNFINISHED if layout.folder else beside
        self._claim_kind: type[StoreNote | PartNote] = StoreNote
        self._part_notes: Mapping[int, PartNote] = {}
        self._names = [file.path for file in layout.files]
        self._is_new = self._ends = False
        self._writer: Writer | None = None
        self._finished: frozenset[str] = frozenset()
        self._noted: frozenset[str] = frozenset()
        self._old: frozenset[str] = frozenset()
        self._existing: dict[str, ObjectInfo] = {}
        self._sent: Mapping[str, ObjectMark] = {}
        """The sizes and versions of files that this writer was done with before."""
        self._read_back: dict[str, ObjectInfo] = {}
        last = len(layout.files) - 1
        tensors = any(isinstance(part, Data | ScatteredData) for part in layout.files[last].parts)
        self.last_files: tuple[int, ...] = () if tensors else (last,)

    def finish_earlier(self) -> bool:
        """Return False: the rest of a killed run in a store is resumed or replaced."""
        return False

    def stands(self) -> bool:
        """Return whether there is something at the target."""
        return bool(self._list_existing())

    def begin(self) -> None:
        """Note the owner of the output and clear the place, or with ``resume`` take it over.

        The note names the old files until they are removed: a resumed run removes them first, as
        one of the size of a new file would pass for it. Raises Unsupported if the target exists,
        cannot be written to, or is not to be resumed.
        """
        self.require_possible()
        self._require_removal()
        self._abort_old_uploads()
        self._require_left(read_note(self._note, StoreNote))
        self._write_note()
        if not self._options.resume:
            self._require_unchanged()
            self._is_new = True
        if self._old and not self._replaces_one_file(self._existing):
            self._remove(self._old & self._existing.keys())
            self._require_mine()
            self._old = frozenset()
            self._write_note()

    def require_possible(self) -> None:
        """Raise Unsupported if what is there must not be replaced, or nothing can be resumed."""
        require_writable(self.target)
        self._existing = existing = self._list_existing()
        note = read_note(self._note, StoreNote)
        self._require_left(note)
        if self._options.resume:
            if note is None:
                raise Unsupported(f"{self.target}: there is no partial output to resume")
            expected = {"source": self._options.source, "plan": self._options.plan}
            require_same_run(str(self._note), note, expected)
        self._take_noted(note)
        others = [name for name in existing if name not in self._old]
        if self._options.resume or not others:
            return
        if not self._options.overwrite:
            removes = not self._replaces_one_file(existing)
            raise already_in_store(self.target, others, removes=removes)
        self._require_replaceable(others, begun=note is not None)

    def _take_noted(self, note: StoreNote | None) -> None:
        """Take those noted files for an unfinished run's that are known without the note.

        They are this run's too, or a checkpoint's that may be replaced. Raises Unsupported if one
        that would have to go is neither: anybody may have written the note.
        """
        names = [] if note is None else note.old if self._options.resume else note.noted
        self._noted = frozenset([*names, *map(hidden_name, names)])
        there = self._noted & self._existing.keys()
        known = {*self._names, *map(hidden_name, self._names), side_name(self.target.name)}
        if there - known and (self._options.resume or self._options.overwrite):
            known |= frozenset(self._options.own() or ())
            if unknown := sorted(there - known):
                raise not_known(self._note, self.folder, unknown)
        self._old = there & known
        self._noted &= known

    def _require_replaceable(self, existing: Collection[str], *, begun: bool) -> None:
        """Raise Unsupported if something that is not a checkpoint's would be replaced.

        Once it is ``begun`` the old checkpoint may be gone, and others' files stay.
        """
        own = frozenset(self._options.own() or ())
        foreign = [] if self._layout.folder else sorted(frozenset(existing) - own)
        if foreign and not begun:
            raise not_replaced(self.folder / foreign[0], self.target)
        if not own and not begun:
            raise not_replaced(self.target, self.target)
        self._old |= own & frozenset(existing)
        names = {file.path for file in self._layout.files}
        require_no_conflict(self.target, sorted(names & frozenset(existing) - self._old))

    def join(self, rank: int = 0) -> None:
        """Read who began, and what an earlier run finished, after ``begin``."""
        if self._writer is None:
            self._writer = self._read_writer()
        if self._options.resume:
            existing, sizes = self._list_existing(side=False), self._sizes()
            same = {n: i for n, i in existing.items() if sizes.get(n) == i.nbytes}
            done = {n for n, i in same.items() if i[:2] == self._sent.get(n, i[:2])}
            self._finished = frozenset(done - {self._layout.files[-1].path})

    def mark(self, token: str) -> None:
        """Do nothing: all ranks see one store."""

    def is_marked(self, token: str) -> bool:
        """Return True: all ranks see one store."""
        return True

    @property
    def written(self) -> RemoteSource:
        """The files that were written, to be read back in the version that is there now."""
        sizes = self._sizes()
        now = {n: info for n, info in self._list_existing(side=False).items() if n in sizes}
        self._read_back = now | self._read_back
        return RemoteSource(self.folder, self._read_back)

    def _sizes(self) -> dict[str, int]:
        return {file.path: file.nbytes for file in self._layout.files}

    def _require_whole(self, names: Iterable[str]) -> dict[str, ObjectInfo]:
        """Return files as they are there now; TransferError if one is not as it was written.

        That means another size, or another version than the one that was read back.
        """
        existing, sizes = self._list_existing(side=False), self._sizes()
        here = {name: existing[name] for name in names if name in existing}
        wrong = [
            name
            for name in names
            if name not in here
            or here[name].nbytes != sizes[name]
            or here[name].version != self._read_back.get(name, here[name]).version
        ]
        if wrong:
            raise TransferError(
                f"{self.target}: missing, or changed since written: {list_some(wrong)}"
            )
        return here

    def write(self, work: Work) -> None:
        """Write files of the plan."""
        from ckptool.engine.write.send import send

        self._require_mine()
        if work.numbers and set(work.numbers) <= set(self.last_files):
            self._require_whole([file.path for file in self._layout.files[:-1]])
        for number in work.numbers:
            self._read_back.pop(self._layout.files[number].path, None)
        send(work, self.folder, self._finished, self.joined)

    def takes(self, numbers: Iterable[int]) -> list[int]:
        """Return those of the files of a share that are written before the commit."""
        return [number for number in numbers if number not in self.last_files]

    def commit(self) -> None:
        """Remove the note: nothing is partial any more.

        TransferError if a file is not as it was; what makes a checkpoint of the others is then
        removed, unless it is another's.
        """
        self._require_mine()
        try:
            self._require_whole(self._sizes())
        except TransferError:
            self._remove(self._own({self._names[number] for number in self.last_files}))
            raise
        self._ends = True
        self._forget()

    def is_committed(self) -> bool:
        """Return whether the output is complete, with no note that says otherwise.

        False if the store does not tell: an interruption must not end as its error.
        """
        with suppress(CkptoolError, NoAnswer):
            return self._ends and read_note(self._claim, StoreNote) is None
        return False

    def _forget(self) -> None:
        """Remove the notes of parts, then the one that says how many there are."""
        notes = [*(part_note(self._note, number) for number in self._part_notes), self._claim]
        self._store.remove([note.key for note in notes], str(self._claim))
        self._writer = None

    def _require_removal(self) -> None:
        """Raise Denied if nothing may be removed: the note would stay for ever.

        No object has this name, which makes no difference to a store.
        """
        probe = self._note.with_name(hidden_name(self._note.name))
        self._writing(lambda: self._store.remove([probe.key], f"{self._note}: a test removal"))

    def is_partial(self) -> bool:
        """Return whether there is something that a run with ``resume`` continues."""
        return self._writer is not None

    def next_step(self) -> str | None:
        """Return how to continue a run that ended midway; None if there is nothing to continue."""
        return RESUME_HINT if self.is_partial() else None

    def close(self) -> None:
        """Do nothing: a store has no locks."""

    def discard(self, *, resumed: bool = False) -> None:
        """Remove what was written; a resumed output only if requested."""
        if not self._is_new and not resumed:
            return
        own_files = {*self._names, *map(hidden_name, self._names)}
        with suppress(CkptoolError, NoAnswer):
            self._require_mine()
            written = self._own(own_files)
            urls = {str(self.folder / name): info.nbytes for name, info in written.items()}
            self._store.remains |= urls
            self._remove(written)
            for url in urls:
                del self._store.remains[url]
            self._forget()

    def _own(self, names: Collection[str]) -> dict[str, ObjectInfo]:
        """Return those of some files that are there, except what another has written since."""
        existing, mine = self._list_existing(), self._read_back
        return {
            name: info
            for name, info in existing.items()
            if name in names and mine.get(name, info).version == info.version
        }

    def remains(self) -> str | None:
        """Return what could not be removed and costs storage from now on; None if nothing."""
        return charged_note(self._store.remains) if self._store.remains else None

    def _write_note(self) -> None:
        options, old = self._options, sorted(self._old)
        self._writer = self._writer or this_writer()
        note = StoreNote(options.plan, options.source, 0, self._names, self._writer, old)
        self._put_note(self._note, note)

    def _put_note(self, place: RemotePath, note: StoreNote | PartNote) -> None:
        if not self._store.atomic_put:
            self._writing(lambda: self._store.make_folder(self.folder.key, str(self.folder)))
        self._writing(lambda: place.write_bytes(json.dumps(json_of(note)).encode()))

    def _require_left(self, note: StoreNote | None) -> None:
        """Raise Unsupported if another run may still be writing here."""
        if note is not None and note.parts and self._options.overwrite:
            self._part_notes = part_notes(self._note)
        if note is not None:
            require_left(self.target, note, self._part_notes.values(), self._options)

    def _read_writer(self) -> Writer | None:
        claim: StoreNote | PartNote | None = read_note(self._claim, self._claim_kind)
        return None if claim is None else claim.writer

    def _require_mine(self) -> None:
        """Raise TransferError if another run has begun to write here since."""
        writer = self._read_writer()
        if writer != self._writer:
            who = "its record is gone" if writer is None else describe_writer(writer)
            raise TransferError(f"{self.target}: another ckptool is writing it too: {who}")

    def _require_unchanged(self) -> None:
        """Take the note back and raise TransferError if files came or changed before it was there.

        They are another's, who may have listed as early as this run, and be done already.
        """
        news = {name for name, _ in self._list_existing().items() ^ self._existing.items()}
        if news:
            self._forget()
            raise TransferError(f"{self.target}: another writes it too: {list_some(sorted(news))}")

    def _list_existing(self, *, side: bool = True) -> dict[str, ObjectInfo]:
        """Return the files at the place of the output; also a ``side`` file that is not written."""
        if self._layout.folder:
            return self._list(self.folder, below=True)
        beside = side_name(self.target.name) if side else None
        names = self._sizes() if beside is None else self._sizes() | {beside: 0}
        listed = {name: self._list(self.folder / name, below=False) for name in names}
        return {name: infos[""] for name, infos in listed.items() if infos}

    def _list(self, place: RemotePath, *, below: bool) -> dict[str, ObjectInfo]:
        try:
            infos = self._store.find(place.key, str(place))
        except NotFound:
            return {}
        files = {n: i for n, i in infos.items() if not n.startswith(self._note.name)}
        return {n: i for n, i in files.items() if bool(n) is below}

    def _replaces_one_file(self, existing: dict[str, ObjectInfo]) -> bool:
        """Return whether one file replaces one file: the old one then stays until it does."""
        files = {file.path for file in self._layout.files}
        return not self._layout.folder and len(files) == 1 and set(existing) <= files

    def _remove(self, files: Collection[str]) -> None:
        """Remove files of the output, starting with those that make the others a checkpoint."""

        def comes_later(name: str) -> bool:
            return name != self.target.name and not name.endswith(_MARKS)

        keys = [(self.folder / name).key for name in sorted(files, key=comes_later)]
        self._writing(lambda: self._store.remove(keys, str(self.target)))

    def _writing(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Denied as error:
            message = f"{self.target}: cannot be written to: {error}"
            raise Denied(message, error.hint) from None
        except NotFound as error:
            raise Unsupported(
                f"{self.target}: cannot be written to: {error.message}", hint=error.hint
            ) from None

    def _abort_old_uploads(self) -> None:
        """Discard the uploaded parts that a killed run left."""
        names = {*self._names, *self._noted}
        keys = {(self.folder / name).key for name in names}
        abort_uploads(self._store, f"{self.folder.key}/", keys.__contains__)
