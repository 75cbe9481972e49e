"""Output made in a store by independent processes; another one commits it.

The note that keeps readers away records the number of parts. Beside it each part has a note of its
own: its writer, and once it is done the files it has written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from ckptool.core.layout import Layout
from ckptool.core.text import plural
from ckptool.engine.checksum import RecordCheck
from ckptool.engine.run_options import StageOptions
from ckptool.engine.share import Share
from ckptool.engine.write.journal import require_same_run
from ckptool.engine.write.parts import (
    COMMITS,
    CONTINUES,
    PartState,
    damaged_part,
    end_of_part,
    require_parts,
    run_head,
)
from ckptool.engine.write.remote_stage import RemoteStage
from ckptool.engine.write.schemas import PartNote, StoreNote
from ckptool.engine.write.writer import (
    part_note,
    part_notes,
    read_note,
    require_ended,
    require_writable,
    this_writer,
)
from ckptool.errors import Unsupported
from ckptool.storage.url import RemotePath


class RemotePartStage(RemoteStage):
    """One part of the output in a store. The file that makes it a checkpoint belongs to no part."""

    def __init__(
        self, target: RemotePath, layout: Layout, options: StageOptions, share: Share
    ) -> None:
        super().__init__(target, layout, options)
        self._share = share
        self.joined = RecordCheck(shared=not share.is_all)
        self._claim, self._claim_kind = part_note(self._note, share.position), PartNote
        self._names = []

    def require_possible(self) -> None:
        """Raise Unsupported if something exists, this part is being written, or others differ.

        A store's content cannot be replaced in parts, as one of them would have to remove it first.
        """
        require_writable(self.target)
        existing = self._list_existing()
        if read_note(self._note, StoreNote) is not None:
            self._require_same_run()
        elif existing:
            raise Unsupported(
                f"{self.target} already exists ({plural(len(existing), 'file')}, such as"
                f" {next(iter(existing))})",
                hint="parts cannot replace a target in a store: write elsewhere, or remove it "
                "first",
            )
        require_ended(self.target, read_note(self._claim, PartNote), "this part")

    def begin(self) -> None:
        """Note the owner of this output, unless another part has, and the writer of this part."""
        self.require_possible()
        self._require_removal()
        options, parts = self._options, self._share.size
        if read_note(self._note, StoreNote) is None:
            files = [file.path for file in self._layout.files]
            self._put_note(self._note, StoreNote(options.plan, options.source, parts, files))
        self._require_same_run()
        claim = read_note(self._claim, PartNote)
        self._is_new = claim is None
        if claim is not None and claim.part is not None:
            self._sent = claim.part.files
        self._writer = this_writer()
        self._put_note(
            self._claim, PartNote(options.plan, options.source, parts, writer=self._writer)
        )

    def _require_same_run(self) -> None:
        options = self._options
        expected = run_head(options.plan, options.source, self._share.size)
        require_same_run(str(self._note), read_note(self._note, StoreNote), expected)

    def takes(self, numbers: Iterable[int]) -> list[int]:
        """Return the files of this part; removes what its earlier runs left half sent."""
        last = len(self._layout.files) - 1
        taken = [number for number in numbers if number != last]
        self._names = [self._layout.files[number].path for number in taken]
        self._abort_old_uploads()
        return taken

    def commit(self) -> None:
        """Note that this part is done."""
        self._require_mine()
        files = {name: info[:2] for name, info in self._require_whole(self._names).items()}
        part = end_of_part(self._options, files, self.note_joined())
        options, size = self._options, self._share.size
        self._put_note(self._claim, PartNote(options.plan, options.source, size, part=part))

    def next_step(self) -> str | None:
        """Return how to continue a part that ended midway."""
        return CONTINUES if self.is_partial() else None


class RemotePartsStage(RemoteStage):
    """The parts in a store, to be made a checkpoint by the last file.

    The note then lists what each part has written: the parts' notes are removed one by one.
    """

    _ended: Mapping[int, PartNote] = MappingProxyType({})

    def require_possible(self) -> None:
        """Raise Unsupported if a part is not done, or its files are missing."""
        require_writable(self.target)
        existing = self._list_existing()
        note = read_note(self._note, StoreNote)
        require_ended(self.target, note, "it")
        known = {} if note is None else note.ended_parts
        self._part_notes = part_notes(self._note) if note is not None and note.parts else {}
        self._ended = {**known, **self._part_notes}
        parts = {number: PartState(each, each.part) for number, each in self._ended.items()}
        ended = require_parts(self.target, parts, self._options, self._names[:-1])
        self.noted = [end.joined for end in ended]
        for number, end in enumerate(ended):
            changed = [n for n, mark in end.files.items() if existing.get(n, ())[:2] != mark]
            if changed:
                raise damaged_part(self.target, number, len(ended), changed)
            self._read_back |= {name: existing[name] for name in end.files}

    def begin(self) -> None:
        """Note who commits; raise Unsupported if a part is not done."""
        self.require_possible()
        self._writer = this_writer()
        note = StoreNote(
            self._options.plan,
            self._options.source,
            parts=len(self._ended),
            files=list(self._names),
            writer=self._writer,
            ended={str(number): each for number, each in self._ended.items()},
        )
        self._put_note(self._note, note)

    def takes(self, numbers: Iterable[int]) -> list[int]:
        """Return the last file if it holds tensors: it makes a checkpoint of the others."""
        last = len(self._layout.files) - 1
        return [] if self.last_files else [last]

    def next_step(self) -> str | None:
        """Return how to continue if the commit failed."""
        return COMMITS

    def discard(self, *, resumed: bool = False) -> None:
        """Keep what the parts wrote."""
