"""Output made in a store by independent processes; another one commits it.

The note that keeps readers away records the number of parts. Beside it each part has a note of its
own: its writer, and once it is done the files it has written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ckptool.core.layout import Layout
from ckptool.core.text import plural
from ckptool.engine.checksum import RecordCheck
from ckptool.engine.run_options import StageOptions
from ckptool.engine.share import Share
from ckptool.engine.write.journal import require_same_run
from ckptool.engine.write.parts import (
    COMMITS,
    CONTINUES,
    damaged_part,
    end_of_part,
    require_parts,
    run_head,
)
from ckptool.engine.write.remote_stage import RemoteStage
from ckptool.engine.write.writer import part_note, read_note, this_writer
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
        self._claim = part_note(self._note, share.position)
        self._names = []

    def require_possible(self) -> None:
        """Raise Unsupported if something exists, this part is being written, or others differ.

        A store's content cannot be replaced in parts, as one of them would have to remove it first.
        """
        self._require_writable()
        note = read_note(self._note)
        if note is not None:
            self._require_same_run()
        elif existing := self._list_existing():
            raise Unsupported(
                f"{self.target} already exists ({plural(len(existing), 'file')}, such as"
                f" {next(iter(existing))})",
                hint="parts cannot replace a target in a store: write elsewhere, or remove it "
                "first",
            )
        self._require_ended(read_note(self._claim), "this part")

    def begin(self) -> None:
        """Note the owner of this output, unless another part has, and the writer of this part."""
        self.require_possible()
        self._require_removal()
        if read_note(self._note) is None:
            files = [file.path for file in self._layout.files]
            self._put_note(self._note, parts=self._share.size, files=files)
        self._require_same_run()
        claim = read_note(self._claim)
        self._is_new = claim is None
        self._sent = ((claim or {}).get("part") or {}).get("files", {})
        self._writer = this_writer()
        self._put_note(self._claim, parts=self._share.size, writer=self._writer)

    def _require_same_run(self) -> None:
        options = self._options
        expected = run_head(options.plan, options.source, self._share.size)
        require_same_run(str(self._note), read_note(self._note) or {}, expected)

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
        self._put_note(self._claim, parts=self._share.size, part=part)

    def next_step(self) -> str | None:
        """Return how to continue a part that ended midway."""
        return CONTINUES if self.is_partial() else None


class RemotePartsStage(RemoteStage):
    """The parts in a store, to be made a checkpoint by the last file.

    The note then lists what each part has written: the parts' notes are removed one by one.
    """

    _ended: Mapping[str, Any] = MappingProxyType({})

    def require_possible(self) -> None:
        """Raise Unsupported if a part is not done, or its files are missing."""
        self._require_writable()
        note = read_note(self._note) or {}
        self._require_ended(note, "it")
        self._parts = note.get("parts", 0)
        known = note.get("ended", {})
        notes = {
            n: read_note(part_note(self._note, n)) or known.get(str(n)) for n in range(self._parts)
        }
        parts = {n: (each, each.get("part") or {}) for n, each in notes.items() if each}
        self._ended = {str(n): each for n, each in notes.items()}
        self.noted = [part.get("joined", ()) for _, part in parts.values()]
        existing = self._list_existing()
        for number, part in enumerate(require_parts(self.target, parts, self._options)):
            noted = {name: (size, version) for name, (size, version) in part.items()}
            changed = [name for name in noted if existing.get(name, ())[:2] != noted[name]]
            if changed:
                raise damaged_part(self.target, number, self._parts, changed)
            self._read_back |= {name: existing[name] for name in noted}

    def begin(self) -> None:
        """Note who commits; raise Unsupported if a part is not done."""
        self.require_possible()
        self._writer = this_writer()
        files = [file.path for file in self._layout.files]
        more = {"writer": self._writer, "ended": self._ended}
        self._put_note(self._note, parts=self._parts, files=files, **more)

    def takes(self, numbers: Iterable[int]) -> list[int]:
        """Return the last file if it holds tensors: it makes a checkpoint of the others."""
        last = len(self._layout.files) - 1
        return [] if self.last_files else [last]

    def next_step(self) -> str | None:
        """Return how to continue if the commit failed."""
        return COMMITS

    def discard(self, *, resumed: bool = False) -> None:
        """Keep what the parts wrote."""
