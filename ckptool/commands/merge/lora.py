"""Fold an adapter into its base: each of its tensors is used, or an error names it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from ckptool.commands.merge.adapter import TAKES, Adapter, Matrices, read_adapter, same_base
from ckptool.commands.merge.adapter_values import digests_of, notes_on_values
from ckptool.commands.merge.expressions import (
    Computation,
    Expression,
    computed,
    how_to_grow,
    may_be_grown,
    require_numbers,
)
from ckptool.commands.merge.operands import Operand
from ckptool.commands.merge.products import Product, product_of
from ckptool.commands.merge.targets import base_names, targets_of
from ckptool.commands.merge.ties import HEAD, Change, Ties
from ckptool.commands.merge.vocabulary import notes_on_tokenizer
from ckptool.commands.model.adapter_config import ADAPTER_CONFIG
from ckptool.core.casts import as_type, can_cast
from ckptool.core.catalog import TensorEntry
from ckptool.core.selection import rename_entry
from ckptool.core.text import list_some, plural
from ckptool.engine.formulas.rows import ReplacedRows
from ckptool.engine.formulas.weighted import WeightedSum, same_box
from ckptool.errors import Unsupported

_FEW = 3
_HEAD_IS_TIED = (
    "a base whose head is tied has none of its own; `ckptool convert ADAPTER COPY --drop '*.{}'`"
    " leaves it out of the adapter"
)

_LOST_BIASES = (
    "PEFT 0.7 to 0.20 do not save the biases of bias lora_only, and merge the base's: so does bias"
    ' "none" in adapter_config.json'
)


def fold(base: Operand, operand: Operand, assets: Path | None) -> Computation:
    """Return the base with an adapter merged into it, as PEFT's ``merge_and_unload`` does.

    A weight W becomes ``W + s * (B @ A)``, in 64 bits, rounded once to its type; with DoRA each
    row of that is scaled to its magnitude. Modules that were trained whole, biases and tokens
    replace the base's, in the base's type. Raises Unsupported for what is not understood, is not
    in the base, or does not fit it.
    """
    adapter, ties = read_adapter(operand), Ties(base, assets)
    folding = _Folding(base, adapter, ties)
    folding.replace_whole()
    folding.add_products()
    folding.replace_tokens()
    folding.require_biases()
    folding.require_whole()
    shared = ties.shared(folding.changes, tied=adapter.settings.ensure_weight_tying)
    notes = *ties.notes, *notes_on_values(operand), *notes_on_tokenizer(base, operand, assets)
    return folding.result(shared, notes)


class _Folding:
    """The changes that an adapter makes to a base, by the names that its tensors have there."""

    def __init__(self, base: Operand, adapter: Adapter, ties: Ties) -> None:
        self._base, self._adapter, self._ties = base, adapter, ties
        self._tensors = base.catalog.tensors
        self._name = base_names(adapter, base, ties)
        self.changes: dict[str, Change] = {}
        self._cast: list[str] = []
        self._again: list[str] = []
        self._added: list[str] = []
        self._scaled_otherwise: list[str] = []

    def replace_whole(self) -> None:
        """Replace the tensors that the adapter has whole; add those of a new head."""
        label = self._adapter.operand.label
        heads = self._heads_again()
        for key, entry in self._adapter.whole.items():
            name = self._name(key)
            old = self._tensors.get(name)
            if key in heads:
                self._again.append(name)
                continue
            if self._is_of_tied_head(key):
                name = f"{self._ties.embedding_of_head}.weight"
                old = self._tensors[name]
            if name in self.changes:
                raise Unsupported(f"{entry.name}: {name} is replaced by another tensor, too")
            if old is None:
                self._require_new(key, entry)
                self._added.append(name)
            else:
                entry = self._fit(entry, old)
            is_whole = self._is_to_save(key) and key not in heads.values()
            self.changes[name] = Change(rename_entry(entry, name), label, is_whole=is_whole)

    def _heads_again(self) -> dict[str, str]:
        """Return the heads, and of each the embedding that it is tied to, whose bytes it has.

        So PEFT saves what ensure_weight_tying keeps one tensor in training.
        """
        whole, operand = self._adapter.whole, self._adapter.operand
        pairs = {
            head: twin
            for head in whole
            if HEAD.fullmatch(self._name(head))
            for twin in whole
            if self._ties.head_is(self._name(head), self._name(twin))
        }
        entries = {whole[key].name: whole[key] for pair in pairs.items() for key in pair}
        hexes = digests_of(operand, entries)
        return {
            head: twin
            for head, twin in pairs.items()
            if hexes[whole[head].name] == hexes[whole[twin].name]
        }

    def _is_of_tied_head(self, key: str) -> bool:
        """Return whether a tensor is a tied head's before its LoRA, which PEFT saves, too."""
        embedding, module = self._ties.embedding_of_head, key.rpartition(".")[0]
        is_base = self._name(module) == embedding and HEAD.fullmatch(key) is not None
        return embedding is not None and is_base and not self._is_to_save(key)

    def add_products(self) -> None:
        """Add the product of each LoRA's matrices to its weight."""
        targets = targets_of(self._adapter, self._base, self._name)
        require_numbers(self._base, [target.name for target in targets])
        for target in targets:
            term = self._term(target.name)
            product = product_of(target, term.entry, self._adapter.settings)
            if self._adapter.settings.may_be_scaled_otherwise(target.key):
                self._scaled_otherwise.append(target.name)
            text = _text(product, term.text, self._adapter.operand.label)
            self.changes[target.name] = Change(product.entry, text)
            if target.lora.bias is not None:
                self._add_bias(target.lora, target.lora.bias, product.scale)

    def _add_bias(self, lora: Matrices, bias: TensorEntry, scale: float) -> None:
        name = f"{self._name(lora.module)}.bias"
        if name not in self._tensors:
            raise Unsupported(f"{bias.name}: {self._base.opened.path} has no {name} to add it to")
        term = self._term(name)
        _require_shape(bias, term.entry, self._base)
        parts = [term.entry, bias]
        formula = WeightedSum((1.0, scale))
        entry = computed(term.entry, parts, formula, same_box, exceeds=True)
        text = f"{term.text} + {scale:g} * bias of {self._adapter.operand.label}"
        self.changes[name] = Change(entry, text)

    def _term(self, name: str) -> Change:
        """Return what a product or bias is added to: the base's tensor, unless it is replaced."""
        return self.changes.get(name) or Change(self._tensors[name], self._base.label)

    def replace_tokens(self) -> None:
        """Replace the rows of embeddings that were trained apart."""
        for module, entry in self._adapter.tokens.items():
            name, rows = f"{self._name(module)}.weight", self._adapter.settings.tokens_of(module)
            old = self._tensors.get(name)
            if old is None or name in self.changes:
                why = "has no" if old is None else "is not alone in changing"
                raise Unsupported(f"{entry.name}: {self._base.opened.path} {why} {name}")
            is_known = len(set(rows)) == len(rows) and all(0 <= r < old.shape[0] for r in rows)
            if entry.shape != (len(rows), *old.shape[1:]) or not is_known:
                raise Unsupported(
                    f"{entry.name}: {list(entry.shape)} for {plural(len(rows), 'row')} of {name}"
                    f" {list(old.shape)} that {self._adapter.settings.place} names"
                )
            formula = ReplacedRows(rows)
            new = computed(old, [old, entry], formula, formula.reads)
            label = self._adapter.operand.label
            text = f"{self._base.label} with {plural(len(rows), 'row')} of {label}"
            self.changes[name] = Change(new, text)

    def require_biases(self) -> None:
        """Raise Unsupported if biases were trained that the adapter does not have."""
        bias, place = self._adapter.settings.bias, self._adapter.settings.place
        if bias == "none":
            return
        names = [f"{self._name(lora.module)}.bias" for lora in self._adapter.loras]
        if bias == "all":
            names = [name for name in self._tensors if name.rpartition(".")[2] == "bias"]
        lacks = [name for name in names if name in self._tensors and name not in self.changes]
        if lacks:
            raise Unsupported(
                f"{place} says bias {bias}, but the adapter lacks {plural(len(lacks), 'bias')}:"
                f" {list_some(lacks, _FEW)}",
                hint=_LOST_BIASES if bias == "lora_only" else TAKES,
            )

    def require_whole(self) -> None:
        """Raise Unsupported if modules or tokens were trained that the adapter does not have."""
        settings, tokens = self._adapter.settings, [f"{name}." for name in self._adapter.tokens]
        indices = settings.trainable_token_indices
        claims = [
            ("modules_to_save", name, [*self._adapter.whole]) for name in settings.modules_to_save
        ]
        if isinstance(indices, Mapping):
            claims += [("trainable_token_indices", name, tokens) for name in indices]
        for key, module, names in claims:
            lacks = [] if _have(names, module) else [n for n in self._tensors if _have([n], module)]
            if lacks:
                raise Unsupported(
                    f"{settings.place} says {key} {module}, but the adapter lacks"
                    f" {list_some(lacks, _FEW)}",
                    hint=TAKES,
                )
        if indices and not tokens:
            raise Unsupported(
                f"{settings.place} says trainable_token_indices, but the adapter lacks these rows",
                hint=TAKES,
            )

    def result(self, shared: dict[str, Change], notes: Sequence[str]) -> Computation:
        """Return the base with all changes, and what each tensor is."""
        changes = self.changes | shared
        tensors = self._tensors | {name: change.entry for name, change in changes.items()}
        expressions = tuple(
            Expression(name, changes[name].text if name in changes else self._base.label)
            for name in tensors
        )
        companions = {
            n: size for n, size in self._base.catalog.companions.items() if n != ADAPTER_CONFIG
        }
        catalog = replace(self._base.catalog.with_tensors(tensors), companions=companions)
        return Computation(catalog, expressions, (*self._notes(), *notes), self._adapter.settings)

    def _notes(self) -> Iterator[str]:
        settings = self._adapter.settings
        if not same_base(settings, self._base.opened.path):
            yield (
                f"{settings.place} names {settings.base} as its base: whether"
                f" {self._base.opened.path} is that one cannot be told"
            )
        if self._scaled_otherwise:
            yield (
                f"{list_some(self._scaled_otherwise, _FEW)}: scaled as since PEFT 0.14, which"
                " before took the alpha of the pattern that names the rank"
            )
        if bare := self._without_lora():
            yield (
                f"{plural(len(bare), 'module')} that target_modules names without a LoRA:"
                f" {list_some(bare, _FEW)}"
            )
        if self._added:
            yield (
                f"{plural(len(self._added), 'tensor')} ({list_some(self._added, _FEW)}) of"
                " modules_to_save that the base lacks"
            )
        if self._again:
            yield (
                f"{list_some(self._again, _FEW)} of {self._adapter.operand.label} has the bytes of"
                " the embedding: they stay one tensor"
            )
        if unread := self._adapter.unread:
            yield f"without {list_some(unread, _FEW)}, which PEFT saves and never reads"
        if self._cast:
            names = list_some(self._cast, _FEW)
            yield f"rounded to the base's type: {plural(len(self._cast), 'tensor')} ({names})"

    def _without_lora(self) -> list[str]:
        """Return the base's modules that target_modules names without a LoRA: PEFT only warns."""
        ends = tuple(f".{target}" for target in self._adapter.settings.target_modules)
        lora_weights = {f"{self._name(lora.module)}.weight" for lora in self._adapter.loras}
        weights = (name for name in self._tensors if name.endswith(".weight"))
        modules = [name.removesuffix(".weight") for name in weights if name not in lora_weights]
        return [module for module in modules if f".{module}".endswith(ends)]

    def _require_new(self, key: str, entry: TensorEntry) -> None:
        """Raise Unsupported for a tensor that is neither in the base nor of a new module."""
        name, base = self._name(key), self._base.opened.path
        if not self._is_to_save(key):
            raise Unsupported(
                f"{self._adapter.operand.opened.path}: {entry.name} is no part of a LoRA, and"
                f" {base} has no {name}",
                hint=_hint_on_missing(key),
            )
        if twins := [twin for twin in self._tensors if _may_be_same(name, twin)]:
            raise Unsupported(
                f"{self._adapter.operand.opened.path}: {entry.name} would be {name}, a new tensor"
                f" beside {list_some(twins, _FEW)} of {base}",
                hint="--rename changes the base's names",
            )

    def _is_to_save(self, key: str) -> bool:
        """Return whether a tensor is of a module that was trained as a whole."""
        return any(_have([key], module) for module in self._adapter.settings.modules_to_save)

    def _fit(self, entry: TensorEntry, old: TensorEntry) -> TensorEntry:
        """Return a tensor in the type of the base's that it replaces."""
        _require_shape(entry, old, self._base)
        if entry.dtype == old.dtype:
            return entry
        if not (can_cast(entry) and can_cast(old)):
            raise Unsupported(
                f"{entry.name}: {entry.dtype}, {old.dtype} in {self._base.opened.path}"
            )
        self._cast.append(old.name)
        return as_type(entry, old.dtype)


def _have(names: Iterable[str], module: str) -> bool:
    """Return whether a name is of a module, of which the end of its name is given."""
    return any(f".{module}." in f".{name}" for name in names)


def _hint_on_missing(key: str) -> str:
    is_of_head = HEAD.fullmatch(f"{key.rpartition('.')[0]}.weight")
    if is_of_head:
        return _HEAD_IS_TIED.format(key)
    return "where the base has it by another name, --rename changes that"


def _may_be_same(name: str, base_name: str) -> bool:
    """Return whether two names may mean the same: both heads, or one below a prefix."""
    are_heads = all(map(HEAD.fullmatch, (name, base_name)))
    return are_heads or name.endswith(f".{base_name}") or base_name.endswith(f".{name}")


def _require_shape(entry: TensorEntry, old: TensorEntry, base: Operand) -> None:
    if entry.shape == old.shape:
        return
    hint = "the adapter may be of another model"
    if may_be_grown(entry.shape, old.shape):
        hint = "a vocabulary that was resized needs a base that was resized, too"
        if entry.shape > old.shape:
            hint += f": {how_to_grow(base.opened.path, old.name, entry.shape[0])}"
    raise Unsupported(
        f"{entry.name}: {list(entry.shape)}, but {old.name} in {base.opened.path} is"
        f" {list(old.shape)}",
        hint=hint,
    )


def _text(product: Product, weight: str, adapter: str) -> str:
    """Return a sum in words."""
    times = "" if product.scale == 1 else f"{product.scale:g} * "
    total = f"{weight} + {times}(B A) of {adapter}"
    return f"m * unit rows of ({total})" if product.is_scaled else total
