"""Tensors that are one in the model: an adapter that changes one of them changes all."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.merge.operands import Operand
from ckptool.commands.model.records import Record, is_causal, records
from ckptool.core.catalog import TensorEntry, tied_names
from ckptool.core.selection import rename_entry
from ckptool.core.text import list_some
from ckptool.errors import Unsupported

_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in")
_HEAD = "lm_head.weight"
_TIED = "tie_word_embeddings"
_FEW = 3


class Change(Struct, frozen=True):
    """A tensor of the result that an adapter changed, and what it is in words.

    ``is_whole`` if it was trained as a whole, apart from what it was tied to.
    """

    entry: TensorEntry
    text: str
    is_whole: bool = False


class Ties:
    """Which tensors of a base are one: those stored at one place, and a head that is not stored.

    PEFT (0.21) adds a LoRA to a weight in place, and so to all that share it: the result is that of
    its ``merge_and_unload``, though before it, only the adapted module had the LoRA.
    """

    def __init__(self, base: Operand, assets: Path | None) -> None:
        self._base = base
        self._groups = tied_names(base.catalog)
        self._is_head_tied = _is_head_tied(base, assets)
        self.notes: list[str] = []

    def shared(self, changes: Mapping[str, Change], *, tied: bool) -> dict[str, Change]:
        """Return the changes of what shares a changed tensor.

        ``tied`` if the adapter was trained so that tied modules stay so. Raises Unsupported if two
        changes meet in one tensor, or if one would end a tie.
        """
        found = dict[str, Change]()
        for group in self._groups:
            changed = [name for name in group if name in changes]
            if len(changed) > 1:
                raise Unsupported(
                    f"{list_some(changed, _FEW)} are one tensor in {self._base.opened.path}, and"
                    " the adapter changes each"
                )
            for name in changed:
                self._require_tied(name, changes[name], tied=tied)
                others = [other for other in group if other != name]
                self._note(name, list_some(others, _FEW))
                for other in others:
                    entry = rename_entry(changes[name].entry, other)
                    found[other] = replace(changes[name], entry=entry)
        if self._is_head_tied:
            self._check_head(changes, tied=tied)
        return found

    def _check_head(self, changes: Mapping[str, Change], *, tied: bool) -> None:
        """Note that a head without a tensor of its own changes, too; refuse one of its own."""
        for name, change in changes.items():
            if name.endswith(_HEAD):
                raise self._untied(name)
            if _is_embedding(name):
                self._require_tied(name, change, tied=tied)
                self._note(name, "the head")

    def _require_tied(self, name: str, change: Change, *, tied: bool) -> None:
        if change.is_whole and not tied:
            raise self._untied(name)

    def _untied(self, name: str) -> Unsupported:
        return Unsupported(
            f"{name}: trained apart from what {self._base.opened.path} ties it to: in the result,"
            " the two would be one tensor again",
            hint=f"--hf-assets FOLDER with a config.json that says {_TIED} false, of a base that"
            " has both",
        )

    def _note(self, name: str, others: str) -> None:
        self.notes.append(
            f"{name} is tied to {others}: merged into both, as PEFT's merge_and_unload does"
        )


def notes_on_head(base: Operand, assets: Path | None, taken: Collection[str]) -> Iterator[str]:
    """Yield notes on tensors taken into a base whose config alone ties its head."""
    embeddings = [name for name in taken if _is_embedding(name)]
    heads = [name for name in taken if name.endswith(_HEAD)]
    if not (embeddings or heads) or not _is_head_tied(base, assets):
        return
    tied = f"the config of {base.opened.path} ties the head to the embedding"
    if heads:
        yield (
            f"{heads[0]}: {tied}, and a model that is loaded so does not use it: --hf-assets takes"
            f" a config.json with {_TIED} false"
        )
    elif embeddings:
        yield f"{embeddings[0]} is the head, too: {tied}"


def _is_head_tied(base: Operand, assets: Path | None) -> bool:
    """Return whether a base has no head of its own, and its config says that none is needed."""
    if any(name.endswith(_HEAD) for name in base.catalog.tensors):
        return False
    known = records(base.opened.source, base.opened.catalog, assets)
    return _says_tied(next((record for record in known if record), {}))


def _is_embedding(name: str) -> bool:
    return name.rpartition(".")[0].rpartition(".")[2] in _EMBEDDINGS


def _says_tied(record: Record) -> bool:
    """Return whether a config ties the head to the embedding, as causal models do by default."""
    said = record.get(_TIED)
    return is_causal(record) if said is None else said is True
