"""Tensors that are one in the model: an adapter that changes one of them changes all."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.merge.operands import Operand
from ckptool.commands.model.records import records
from ckptool.core.catalog import TensorEntry, tied_names
from ckptool.core.selection import rename_entry
from ckptool.core.text import list_some
from ckptool.errors import Unsupported

EMBEDDING = re.compile(
    r"(?:.+\.)?(?:embed_tokens|wte|word_embeddings|embed_in|embeddings|tokens_embed|shared)\.weight"
)
HEAD = re.compile(
    r"(?:.+\.)?(?:lm_head|proj_out|embed_out|output_projection|(?:lm_head|predictions)\.decoder)"
    r"\.weight"
)
"""The embedding of tokens and the head in transformers (5.24), of which most models tie these."""
_OF_TEXT = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")
"""How classes with a head are called."""
_KEPT = ("embed_tokens.weight", "lm_head.weight")
"""What PEFT (0.21) keeps tied if ensure_weight_tying says so, which it ignores for other names."""
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
    """Which tensors of a base are one: those stored at one place, and a head that its config ties.

    PEFT (0.21) adds a LoRA to a weight in place, and so to all that share it: the result is that of
    its ``merge_and_unload``, though before it, only the adapted module had the LoRA.
    """

    def __init__(self, base: Operand, assets: Path | None) -> None:
        self._base = base
        self._groups = tied_names(base.catalog)
        self._head = head_of(base)
        is_one = any(self._head in group for group in self._groups)
        self._is_head_tied = not is_one and _says_tied(base, assets)
        self.notes: list[str] = []

    def head_is(self, name: str, other: str) -> bool:
        """Return whether two names are a head and an embedding that are one tensor in the base."""
        if not (HEAD.fullmatch(name) and EMBEDDING.fullmatch(other)):
            return False
        is_absent = self._is_head_tied and self._head is None
        return is_absent or any({name, other} <= {*group} for group in self._groups)

    @property
    def embedding_of_head(self) -> str | None:
        """The module of the embedding that is the head, too, if only the config says so."""
        if not self._is_head_tied or self._head is not None:
            return None
        names = [*filter(EMBEDDING.fullmatch, self._base.catalog.tensors)]
        return names[0].removesuffix(".weight") if len(names) == 1 else None

    def shared(self, changes: Mapping[str, Change], *, tied: bool) -> dict[str, Change]:
        """Return the changes of the names that share a changed tensor.

        ``tied`` if the adapter says that tied modules stay so. Raises Unsupported if two
        changes meet in one tensor, or if one would end a tie.
        """
        copies = dict[str, Change]()
        for group in self._groups:
            names = [name for name in group if name in changes]
            if len(names) > 1:
                raise Unsupported(
                    f"{list_some(names, _FEW)} are one tensor in {self._base.opened.path}, and"
                    " the adapter changes each"
                )
            for name in names:
                self._require_tied(name, changes[name], tied=tied)
                twins = [twin for twin in group if twin != name]
                self._note(name, list_some(twins, _FEW))
                for twin in twins:
                    entry = rename_entry(changes[name].entry, twin)
                    copies[twin] = replace(changes[name], entry=entry)
        if self._is_head_tied:
            self._check_head(changes, tied=tied)
        return copies

    def _check_head(self, changes: Mapping[str, Change], *, tied: bool) -> None:
        """Note that a head without a tensor changes, too; refuse a head that has its own."""
        ends = [name for name in changes if HEAD.fullmatch(name) or EMBEDDING.fullmatch(name)]
        for name in ends:
            if HEAD.fullmatch(name) and self._head is None:
                raise self._untied_error(name)
            self._require_tied(name, changes[name], tied=tied)
            if self._head is None:
                self._note(name, "the head")
        are_alike = len(ends) > 1 and all(changes[name].is_whole for name in ends)
        if ends and self._head is not None and not are_alike:
            raise self._twice_error(ends[0], self._head)

    def _require_tied(self, name: str, change: Change, *, tied: bool) -> None:
        if change.is_whole and not (tied and name.endswith(_KEPT)):
            raise self._untied_error(name)

    def _untied_error(self, name: str) -> Unsupported:
        return Unsupported(
            f"{name}: trained apart from what {self._base.opened.path} ties it to: in the result,"
            " the two would be one tensor again",
            hint=f"--hf-assets FOLDER with a config.json that says {_TIED} false, of a base that"
            " has both",
        )

    def _twice_error(self, name: str, head: str) -> Unsupported:
        base = self._base.opened.path
        return Unsupported(
            f"{name}: the config of {base} ties the head to the embedding, and its files have both:"
            " whether they are one tensor cannot be told",
            hint=f"--drop '{head}' leaves the head to the tie; --hf-assets FOLDER with a"
            f" config.json that says {_TIED} false keeps both",
        )

    def _note(self, name: str, twins: str) -> None:
        self.notes.append(
            f"{name} is tied to {twins}: merged into both, as PEFT's merge_and_unload does"
        )


def notes_on_head(base: Operand, assets: Path | None, names: Collection[str]) -> Iterator[str]:
    """Yield notes on tensors taken into a base whose config alone ties its head."""
    embeddings = [*filter(EMBEDDING.fullmatch, names)]
    heads = [*filter(HEAD.fullmatch, names)]
    if not (embeddings or heads) or head_of(base) is not None or not _says_tied(base, assets):
        return
    tied = f"the config of {base.opened.path} ties the head to the embedding"
    if heads:
        yield (
            f"{heads[0]}: {tied}, and a model that is loaded so does not use it: --hf-assets takes"
            f" a config.json with {_TIED} false"
        )
    elif embeddings:
        yield f"{embeddings[0]} is the head, too: {tied}"


def head_of(base: Operand) -> str | None:
    """Return the name of the head that a base's files have, None if they have none."""
    return next(filter(HEAD.fullmatch, base.catalog.tensors), None)


def _says_tied(base: Operand, assets: Path | None) -> bool:
    """Return whether a config ties the head to the embedding.

    One that does not say so ties them if the model needs a head and the base has none.
    """
    configs = records(base.opened.source, base.opened.catalog, assets)
    record = next((record for record in configs if record), {})
    if _TIED in record:
        return record[_TIED] is True
    names = record.get("architectures")
    classes = names if isinstance(names, list) else []
    return head_of(base) is None and any(str(name).endswith(_OF_TEXT) for name in classes)
