"""A target in a store, which has no rename: the marker is written last, and removed first.

A store has no locks either: a note there names the process that writes an unfinished output.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ckptool.core.layout import Data, Layout
from ckptool.core.text import list_some
from ckptool.engine.share import Share
from ckptool.engine.write.existing import (
    already_in_store,
    charged_note,
    not_known,
    not_replaced,
    nothing_to_resume,
    require_no_conflict,
)
from ckptool.engine.write.parts import PartState, run_head
from ckptool.engine.write.schemas import ObjectMark, PartEnd, PartNote, StoreNote, require_same_run
from ckptool.engine.write.stage import WHOLE, StageOptions, Target
from ckptool.engine.write.store_notes import (
    StoreNotes,
    naming,
    require_ended,
    require_writable,
    this_writer,
)
from ckptool.engine.write.work import Work
from ckptool.errors import CkptoolError, NoAnswer, NotFound, TransferError, Unsupported
from ckptool.storage.clients.client import ObjectInfo, hidden_name
from ckptool.storage.commit_note import side_name
from ckptool.storage.remote import RemoteSource
from ckptool.storage.url import RemotePath

_MARKS = (".metadata", ".json", ".pkl", "latest", "meta.pt")
"""Ends of the names of files that make a checkpoint of others."""


class StoreTarget(Target):
    """The target itself, and a small object that names the run and the writer of its output.

    A file of a store appears once it is complete, so existing ones of the right size are finished.
    """

    path: RemotePath

    def __init__(self, path: RemotePath, layout: Layout, options: StageOptions) -> None:
        self.path = path
        self.is_new = False
        self.marker: int | None = len(layout.files) - 1
        parts = layout.files[self.marker].parts
        tensors = any(isinstance(part, Data) for part in parts)
        self.last_files: tuple[int, ...] = () if tensors else (self.marker,)
        self._folder = path if layout.folder else path.parent
        self._layout = layout
        self._sizes = layout.sizes
        self._options = options
        self._role = role = options.role
        self._store = path.store
        self._notes = StoreNotes(path, layout, options, role.part)
        self.finds_changes = role == WHOLE and not options.resume
        self._ends = False
        self._ended: Mapping[int, PartNote] = {}
        self._finished: frozenset[str] = frozenset()
        self._old: frozenset[str] = frozenset()
        self._existing: dict[str, ObjectInfo] = {}
        self._note: StoreNote | None = None
        self._sent_marks: Mapping[str, ObjectMark] = {}
        """The sizes and versions of files that this writer was done with before."""
        self._read_back: dict[str, ObjectInfo] = {}

    # What is there

    def require_possible(self) -> None:
        """Raise Unsupported if what is there must not be replaced, or nothing can be continued."""
        require_writable(self.path)
        self._existing = self._list_existing()
        note = self._note = self._notes.read()
        if self._role.part is not None:
            self._require_part_possible(self._role.part, note)
        elif self._role.finishes:
            require_ended(self.path, note, "it")
            ended = {} if note is None else note.ended_parts
            noted = self._notes.read_parts() if note is not None and note.parts else {}
            self._ended = {**ended, **noted}
        else:
            self._require_whole_possible(note)

    def _require_whole_possible(self, note: StoreNote | None) -> None:
        existing = self._existing
        self._notes.require_left(note)
        if self._options.resume:
            if note is None:
                raise nothing_to_resume(self.path)
            expected = {"source": self._options.source, "plan": self._options.plan}
            require_same_run(self._notes.run, note, expected)
        self._take_noted(note)
        names = [name for name in existing if name not in self._old]
        if self._options.resume or not names:
            return
        if not self._options.overwrite:
            if self._replaces_one_file(existing):
                replaces = "--overwrite replaces it once all is written"
                raise Unsupported(f"{self.path} already exists", hint=replaces)
            removes = "--overwrite removes its checkpoint before the new one is written"
            raise already_in_store(self.path, names, removes)
        self._require_replaceable(names, begun=note is not None)

    def _require_part_possible(self, part: Share, note: StoreNote | None) -> None:
        """Raise Unsupported if something exists, this part is being written, or others differ.

        A store's content cannot be replaced in parts, as one of them would have to remove it first.
        """
        existing = self._existing
        if note is not None:
            require_same_run(self._notes.run, note, run_head(self._options, part.size))
        elif existing:
            hint = "parts cannot replace a target in a store: write elsewhere, or remove it first"
            raise already_in_store(self.path, [*existing], hint)
        require_ended(self.path, self._notes.read_part(), "this part")

    def _take_noted(self, note: StoreNote | None) -> None:
        """Take the noted files for an unfinished run's, if they are known without the note.

        They are this run's too, or a checkpoint's that may be replaced. Raises Unsupported if a
        file that would have to go is neither: anybody may have written the note.
        """
        names = [] if note is None else note.old if self._options.resume else note.noted
        existing = {*names, *map(hidden_name, names)} & self._existing.keys()
        own_names = {*self._sizes, *map(hidden_name, self._sizes), side_name(self.path.name)}
        if existing - own_names and (self._options.resume or self._options.overwrite):
            own_names |= frozenset(self._options.find_own() or ())
            if unknown := sorted(existing - own_names):
                resumes = self._options.resume
                raise not_known(self._notes.run, self._folder, unknown, resumes=resumes)
        self._old = frozenset(existing & own_names)

    def _require_replaceable(self, existing: Collection[str], *, begun: bool) -> None:
        """Raise Unsupported if something that is not a checkpoint's would be replaced.

        Once it is ``begun`` the old checkpoint may be gone, and others' files stay.
        """
        own_files = frozenset(self._options.find_own() or ())
        foreign = [] if self._layout.folder else sorted(frozenset(existing) - own_files)
        if foreign and not begun:
            raise not_replaced(self._folder / foreign[0], self.path)
        if not own_files and not begun:
            raise not_replaced(self.path, self.path)
        self._old |= own_files & frozenset(existing)
        names = self._sizes.keys() & frozenset(existing) - self._old
        require_no_conflict(self.path, sorted(names))

    def _list_existing(self, *, side: bool = True) -> dict[str, ObjectInfo]:
        """Return the files at the place of the output; also a ``side`` file that is not written."""
        if self._layout.folder:
            return self._list_folder()
        side_file = side_name(self.path.name) if side else None
        names = self._sizes if side_file is None else self._sizes | {side_file: 0}
        infos = {name: (self._folder / name).file_now() for name in names}
        return {name: info for name, info in infos.items() if info is not None}

    def _list_folder(self) -> dict[str, ObjectInfo]:
        try:
            infos = self._store.find(self._folder.key, str(self._folder))
        except NotFound:
            return {}
        return {n: i for n, i in infos.items() if n and not n.startswith(self._notes.run.name)}

    def _replaces_one_file(self, existing: Mapping[str, ObjectInfo]) -> bool:
        """Return whether one file replaces one file: the old one then stays until it does."""
        files = self._sizes.keys()
        return not self._layout.folder and len(files) == 1 and existing.keys() <= files

    # Claim

    def claim(self) -> None:
        """Note the writer of the output, or of a part of it, and clear the place.

        Raises Denied if nothing may be removed, Unsupported if another run may write here.
        """
        if self._role.finishes:
            self._claim_parts()
            return
        self._notes.require_removal()
        if self._role.part is None:
            self._claim_whole()
        else:
            self._claim_part(self._role.part)

    def _claim_whole(self) -> None:
        """Note the owner of the output and remove what it replaces.

        The note names the old files until they are removed: a resumed run removes them first, as
        one of the size of a new file would pass for it.
        """
        if self._notes.read() != self._note:  # another run has begun, or ended
            self.require_possible()
        self._notes.write(old=sorted(self._old))
        if not self._options.resume:
            self._require_unchanged()
            self.is_new = True
        if self._old and not self._replaces_one_file(self._existing):
            self._remove(self._old & self._existing.keys())
            self._notes.require_mine()  # another may have begun while this took its time
            self._old = frozenset()
            self._notes.write()

    def _claim_part(self, part: Share) -> None:
        """Note the owner of the output, unless another part has, and the writer of this part."""
        notes = self._notes
        if notes.read() is None:
            notes.write_run(parts=part.size)
        # as it is now: another part may have written it, too
        require_same_run(notes.run, notes.read(), run_head(self._options, part.size))
        claim = notes.read_part()
        self.is_new = claim is None
        if claim is not None and claim.part is not None:
            self._sent_marks = claim.part.files
        notes.writer = this_writer()
        notes.write_part(writer=notes.writer)

    def _claim_parts(self) -> None:
        """Note who finishes, and what each part has written: their notes are removed one by one."""
        ended = {str(number): part for number, part in self._ended.items()}
        names = [*self._sizes][: self.marker]
        self._read_back |= {name: self._existing[name] for name in names}
        self._notes.write(parts=len(ended), ended=ended)

    def _require_unchanged(self) -> None:
        """Take the note back and raise TransferError if files came or changed before it was there.

        They are another's, who may have listed as early as this run, and be done already.
        """
        news = {name for name, _ in self._list_existing().items() ^ self._existing.items()}
        if news:
            self._notes.remove()
            raise TransferError(f"{self.path}: another writes it too: {list_some(sorted(news))}")

    def join(self, rank: int) -> None:
        """Read who began, and what an earlier run finished, after ``claim``."""
        if self._notes.writer is None:
            self._notes.writer = self._notes.read_writer()
        if self._options.resume:
            existing, sizes = self._list_existing(side=False), self._sizes
            infos = {n: i for n, i in existing.items() if sizes.get(n) == i.nbytes}
            done = {n for n, i in infos.items() if i[:2] == self._sent_marks.get(n, i[:2])}
            # not the last one: it makes a checkpoint of the others once these are proved
            self._finished = frozenset(done - {self._layout.files[-1].path})

    # Write

    def write(self, work: Work) -> None:
        """Write files of the plan, but for those that an earlier run finished."""
        from ckptool.engine.write.send import send

        names = [self._layout.files[number].path for number in work.numbers]
        self._notes.require_mine()
        if names and set(work.numbers) <= set(self.last_files):
            # the marker makes a checkpoint of the others: they must be what was read back
            self._require_whole([*self._sizes][:-1])
        for name in names:
            self._read_back.pop(name, None)
        send(work, self._folder, self._finished)

    @property
    def written(self) -> RemoteSource:
        """The files that were written, to be read back in the version that is there now."""
        existing, sizes = self._list_existing(side=False), self._sizes
        now = {name: info for name, info in existing.items() if name in sizes}
        self._read_back = now | self._read_back  # a file of another version by now must show
        return RemoteSource(self._folder, self._read_back)

    def _require_whole(self, names: Iterable[str]) -> dict[str, ObjectInfo]:
        """Return files as they are there now; TransferError if one is not as it was written.

        That means another size, or another version than the one that was read back.
        """
        existing, read_back = self._list_existing(side=False), self._read_back
        infos = {name: existing[name] for name in names if name in existing}
        intact = {
            name
            for name, info in infos.items()
            if (info.nbytes, info.version) == (self._sizes[name], read_back.get(name, info).version)
        }
        if wrong := [name for name in names if name not in intact]:
            why = f"missing, or changed since written: {list_some(wrong)}"
            raise TransferError(f"{self.path}: {why}")
        return infos

    def parts(self) -> Mapping[int, PartState]:
        """Return the notes of parts, by their numbers."""
        return {number: PartState(end, end.part) for number, end in self._ended.items()}

    def marks(self, names: Iterable[str]) -> dict[str, ObjectMark]:
        """Return the sizes and versions of those files that were there."""
        return {name: self._existing[name][:2] for name in names if name in self._existing}

    def seal(self, names: Sequence[str]) -> dict[str, ObjectMark]:
        """Return the marks of files as they are there now; TransferError if one has changed."""
        self._notes.require_mine()
        return {name: info[:2] for name, info in self._require_whole(names).items()}

    def end_part(self, end: PartEnd[Any]) -> None:
        """Note that the part is done."""
        self._notes.write_part(part=end)

    # Commit

    def publish(self) -> None:
        """Remove the note: nothing is partial any more.

        TransferError if a file is not as it was; the files that make a checkpoint of the rest are
        then removed, unless another run wrote them.
        """
        self._notes.require_mine()
        try:
            self._require_whole(self._sizes)
        except TransferError:
            self._remove(self._own({self._layout.files[number].path for number in self.last_files}))
            raise
        self._ends = True  # before: an interruption may come right after the note is gone
        self._notes.remove()

    def is_published(self) -> bool:
        """Return whether the output is complete, with no note that says otherwise.

        False if the store does not tell: an interruption must not end as its error.
        """
        with suppress(CkptoolError, NoAnswer):
            return self._ends and self._notes.read() is None
        return False

    # End

    def is_partial(self) -> bool:
        """Return whether there is something that another run continues."""
        return self._notes.writer is not None or (self._role.finishes and not self._ends)

    def remains(self) -> str | None:
        """Return what could not be removed and costs storage from now on; None if nothing."""
        return charged_note(self._store.remains) if self._store.remains else None

    def discard(self, names: Sequence[str]) -> None:
        """Remove files that this process wrote, and its note."""
        with suppress(CkptoolError, NoAnswer):
            self._notes.require_mine()
            written = self._own({*names, *map(hidden_name, names)})
            urls = {str(self._folder / name): info.nbytes for name, info in written.items()}
            self._store.remains |= urls  # told as what costs storage if removing fails
            self._remove(written)
            for url in urls:
                del self._store.remains[url]
            self._notes.remove()

    def _own(self, names: Collection[str]) -> dict[str, ObjectInfo]:
        """Return the files that are there, of ``names``, but for those that another wrote since."""
        existing, read_back = self._list_existing(), self._read_back
        return {
            name: info
            for name, info in existing.items()
            if name in names and read_back.get(name, info).version == info.version
        }

    def _remove(self, files: Collection[str]) -> None:
        """Remove files of the output, starting with those that make the others a checkpoint."""

        def comes_later(name: str) -> bool:
            return name != self.path.name and not name.endswith(_MARKS)

        keys = [(self._folder / name).key for name in sorted(files, key=comes_later)]
        with naming(self.path):
            self._store.remove(keys, str(self.path))
