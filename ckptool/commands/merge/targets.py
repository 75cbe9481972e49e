"""Which weight of the base each LoRA of an adapter is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations
from math import perm

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.merge.adapter import Adapter, Matrices, Settings
from ckptool.commands.merge.expressions import require_numbers
from ckptool.commands.merge.operands import Operand
from ckptool.commands.merge.ties import HEAD, Ties, head_of
from ckptool.core.catalog import TensorEntry
from ckptool.core.text import list_some, plural
from ckptool.errors import Undetermined, Unsupported

Tensors = Mapping[str, TensorEntry]
Naming = Callable[[str], str]

_FEW = 3
_NESTED = ("gate_up_proj", "down_proj")
"""The parameters of experts in transformers (5) in the order in which PEFT nests their LoRAs."""
_MOST_ORDERS = 1 << 16
"""Ways to put the LoRAs of a module on its parameters: experts have two or three of these."""
_IN_FILES = (
    {"model.language_model.": "model.", "model.": ""},
    {
        "model.language_model.": "language_model.model.",
        "model.": "",
        "lm_head": "language_model.lm_head",
    },
    {"lm_head": "embed_out"},
)
"""How modules are called in files that have other names in memory (transformers 4.52 to 5.24): of
models of text and other parts as of Qwen2-VL, and as of most; the head of GPT-NeoX."""
_BOTH_CHANGE = (
    "PEFT adds both to it, which no training did. Where they are the same, as with"
    " ensure_weight_tying, `ckptool convert ADAPTER COPY --drop {}` leaves one out"
)
_NO_EXPERTS = (
    "files have experts apart that models have as one tensor: `--experts packed` makes BASE's one,"
    " `--experts separate` apart"
)


class Target(Struct, frozen=True):
    """A LoRA, its weight's ``name`` in the base, and the ``key`` by which settings know it.

    ``experts`` are how many there are in the weight, if that has them as its first dim.
    ``is_turned`` says that inputs come before outputs, as in Conv1D and embeddings.
    """

    lora: Matrices
    name: str
    key: str
    experts: int = 0
    is_turned: bool = False


def base_names(adapter: Adapter, base: Operand, ties: Ties) -> Naming:
    """Return how names of the adapter's model become the base's: with another prefix, or none.

    The module of a tied head, of which the base's files have nothing, is its embedding. A head that
    the adapter has whole may be new: it only decides between names that fit all else. Raises
    Unsupported if the base lacks modules under any prefix, Undetermined if several fit.
    """
    parents = _parents(base.catalog.tensors)
    modules = [*dict.fromkeys([*(lora.module for lora in adapter.loras), *adapter.tokens])]
    heads = [key.rpartition(".")[0] for key in adapter.whole if HEAD.fullmatch(key)]
    firsts = dict.fromkeys(f"{module.partition('.')[0]}." for module in modules)
    ways = [*map(_replacing, ({}, *({first: ""} for first in firsts), *_IN_FILES))]
    if (embedding := ties.embedding_of_head) is not None:
        tied = [*filter(_is_head, modules)]
        ways += [_with(way, dict.fromkeys(tied, embedding)) for way in ways if tied]
    for needed in ((*modules, *heads), modules):
        for way in ways:
            if all(way(module) in parents for module in needed):
                return way
    end = f".{modules[0]}"
    tops = [parent.removesuffix(end) for parent in sorted(parents) if parent.endswith(end)]
    tops = [top for top in tops if all(f"{top}.{module}" in parents for module in modules)]
    if len(tops) > 1:
        raise Undetermined(
            f"{adapter.operand.opened.path}: its modules are {len(tops)} times in"
            f" {base.opened.path}, below {list_some(tops, _FEW)}",
            hint=f"choose one: --select '{tops[0]}.*'",
        )
    if tops:
        return lambda name: f"{tops[0]}.{name}"
    lacks = [module for module in modules if module not in parents]
    experts = any(".experts" in module for module in lacks)
    raise Unsupported(
        f"{base.opened.path}: lacks {len(lacks):,} of {plural(len(modules), 'module')} of"
        f" {adapter.operand.opened.path}: {list_some(lacks, _FEW)}",
        hint=_NO_EXPERTS if experts else _lacking(lacks, base),
    )


def _replacing(prefixes: Mapping[str, str]) -> Naming:
    """Return a function that replaces the first of some prefixes that a name has."""

    def name_of(name: str) -> str:
        first = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        return prefixes.get(first, "") + name.removeprefix(first)

    return name_of


def _is_head(module: str) -> bool:
    return HEAD.fullmatch(f"{module}.weight") is not None


def _with(way: Naming, names: Mapping[str, str]) -> Naming:
    """Return a function that names some modules otherwise than another does."""
    return lambda name: names.get(name) or way(name)


def _lacking(lacks: Sequence[str], base: Operand) -> str:
    head = head_of(base)
    if head is None and all(map(_is_head, lacks)):
        return (
            "a base whose head is tied has none of its own: the LoRA is added to the embedding if"
            " config.json, beside it or in --hf-assets, ties the two, and there is one embedding"
        )
    return (
        "--map auto reads the names of other frameworks, --rename 'REGEX=NEW' changes those that"
        " transformers 5 has otherwise in memory than in files; the adapter may be of another model"
    )


def _parents(tensors: Tensors) -> set[str]:
    """Return every module that has tensors, or has modules that have some."""
    modules = set[str]()
    for name in tensors:
        module = name.rpartition(".")[0]
        while module and module not in modules:
            modules.add(module)
            module = module.rpartition(".")[0]
    return modules


def targets_of(adapter: Adapter, base: Operand, naming: Naming) -> list[Target]:
    """Return the target of each LoRA; Unsupported if one has none, or another shape."""
    tensors = base.catalog.tensors
    by_module: dict[str, list[Matrices]] = {}
    for lora in adapter.loras:
        by_module.setdefault(lora.module, []).append(lora)
    leaves: dict[str, list[str]] = {}
    for name in tensors:
        parent, _, leaf = name.rpartition(".")
        leaves.setdefault(parent, []).append(leaf)
    targets, firsts = list[Target](), dict[str, str]()
    for module, loras in by_module.items():
        first = firsts.setdefault(naming(module), module)
        if first != module:
            raise Unsupported(
                f"{first} and {module} are one tensor in {base.opened.path}, and the adapter"
                " changes each",
                hint=_BOTH_CHANGE.format(max((module, first), key=_is_head)),
            )
        names = leaves.get(naming(module), [])
        if keys := _parameters(module, names, adapter.settings):
            targets += _of_parameters(loras, keys, naming, tensors)
        elif len(loras) == 1 and not loras[0].depth and "weight" in names:
            targets.append(Target(loras[0], f"{naming(module)}.weight", module))
        else:
            require_numbers(base, [f"{naming(module)}.{leaf}" for leaf in names])
            raise Unsupported(
                f"{loras[-1].both[0].name}: no parameter of the base that it is for:"
                f" {naming(module)} has {list_some(names, _FEW) or 'none'}",
                hint=_NO_EXPERTS if ".experts" in f".{module}" else None,
            )
    return list(_orient(targets, tensors, adapter.settings))


def _parameters(module: str, leaves: Sequence[str], settings: Settings) -> list[str]:
    """Return the parameters of a module that were targeted themselves, by their own names."""
    targets = [f".{target}" for target in settings.target_parameters]
    keys = [f"{module}.{leaf}" for leaf in leaves]
    keys = [key for key in keys if any(f".{key}".endswith(target) for target in targets)]
    return sorted(keys, key=_nesting)


def _nesting(key: str) -> int:
    leaf = key.rpartition(".")[2]
    return _NESTED.index(leaf) if leaf in _NESTED else len(_NESTED)


def _of_parameters(
    loras: list[Matrices], keys: list[str], naming: Naming, tensors: Tensors
) -> Iterator[Target]:
    """Yield the LoRAs of a module's parameters: the deepest was put on the first parameter."""
    loras = sorted(loras, key=lambda lora: -lora.depth)
    if perm(len(keys), len(loras)) > _MOST_ORDERS:
        raise Undetermined(
            f"{loras[0].both[0].name}: one of {len(loras)} LoRAs on {len(keys)} parameters of one"
            " module: too many to find out which is for which"
        )
    entries = {key: tensors[naming(key)] for key in keys}
    orders = [
        order
        for order in permutations(keys, len(loras))
        if all(map(_fits, loras, (entries[key] for key in order)))
    ]
    if not orders:
        shapes = [f"{key} {list(entry.shape)}" for key, entry in entries.items()]
        matrices = [f"{part.name} {list(part.shape)}" for part in loras[0].both]
        raise Unsupported(f"{' and '.join(matrices)} fit none of {list_some(shapes, _FEW)}")
    usual = {key.rpartition(".")[2] for key in keys} <= {*_NESTED}
    if len(orders) > 1 and not (usual and len(keys) == len(loras)):
        raise Undetermined(
            f"{loras[0].both[0].name}: fits several of {list_some(keys, _FEW)}, and PEFT does not"
            " record which it is for"
        )
    for lora, key in zip(loras, orders[0], strict=True):
        shape = entries[key].shape
        yield Target(lora, naming(key), key, shape[0] if len(shape) == 3 else 0)


def _fits(lora: Matrices, entry: TensorEntry) -> bool:
    """Return whether a parameter has the inputs and outputs of a LoRA, in either order."""
    left, right = lora.both
    sizes = (left.shape[0], right.shape[-1])
    count = entry.shape[0] if len(entry.shape) == 3 else 1
    return entry.shape[-2:] in (sizes, sizes[::-1]) and right.shape[0] % count == 0


def _orient(targets: Sequence[Target], tensors: Tensors, settings: Settings) -> Iterator[Target]:
    """Yield the targets with the order of their dims, of square ones as in those that are not.

    Raises Unsupported for other shapes or ranks, Undetermined for a square that nothing decides.
    """
    orders = _orders_of_modules(tensors)
    either = {turned: replace(settings, fan_in_fan_out=turned) for turned in (False, True)}
    pairs = list[tuple[Target, set[bool]]]()
    for target in targets:
        entry, key = tensors[target.name], _kind(target)
        # an adapter's config says it of the last module with a LoRA, and PEFT goes by each one's
        is_turned = True in (orders.get(key) or {settings.fan_in_fan_out})
        _require_fit(target, entry, either[is_turned])
        pairs.append((target, _sides(target, entry, either[is_turned])))
    for target, sides in pairs:
        is_matrix = target.experts or len(tensors[target.name].shape) == 2
        if len(sides) == 1 and is_matrix and not target.lora.is_embedding:
            orders.setdefault(_kind(target), set()).update(sides)
    for target, sides in pairs:
        if len(sides) > 1:
            sides = _sides_of_square(target, orders)
        if len(sides) != 1:
            raise Undetermined(
                f"{target.name} {list(tensors[target.name].shape)}: nothing says whether inputs or"
                " outputs come first"
            )
        yield Target(target.lora, target.name, target.key, target.experts, sides.pop())


def _sides_of_square(target: Target, orders: Mapping[str, set[bool]]) -> set[bool]:
    """Return the order of a square weight's dims, given those of weights that are not square.

    Experts are as the others of their module. Modules are turned, as fan_in_fan_out says, if one of
    their stack shows it, as PEFT ignores that for what is no Conv1D, or if nothing shows any order.
    """
    sides = orders.get(_kind(target), set())
    if target.experts:
        return set(sides)
    return {True} if True in sides or not orders else set()


def _orders_of_modules(tensors: Tensors) -> dict[str, set[bool]]:
    """Return for stacks of layers whether inputs come first: a bias is as long as the outputs.

    One stack of layers may have Linears beside another of Conv1Ds, as ViT beside GPT-2.
    """
    orders: dict[str, set[bool]] = {}
    for name, entry in tensors.items():
        module = name.removesuffix(".weight")
        bias = tensors.get(f"{module}.bias")
        if bias is not None and len(entry.shape) == 2 and entry.shape[0] != entry.shape[1]:
            if bias.shape == entry.shape[1:]:
                orders.setdefault(_stack_of(module), set()).add(True)
            elif bias.shape == entry.shape[:1]:
                orders.setdefault(_stack_of(module), set()).add(False)
    return orders


def _stack_of(module: str) -> str:
    """Return the stack of layers that a module is in; empty if it is in none."""
    steps = module.split(".")
    number = next((at for at, step in enumerate(steps) if step.isdecimal()), 0)
    return ".".join(steps[:number])


def _kind(target: Target) -> str:
    """Return the module, or stack of layers, within which all parameters have the same order."""
    return target.lora.module if target.experts else _stack_of(target.name.removesuffix(".weight"))


def _sides(target: Target, entry: TensorEntry, settings: Settings) -> set[bool]:
    """Return whether inputs may come first, and whether outputs may."""
    left, right = target.lora.both
    if target.lora.is_embedding:
        return {True}
    if len(entry.shape) > 2 and not target.experts:
        return {False}
    shape, outputs, inputs = entry.shape[-2:], left.shape[0], right.shape[-1]
    ways = {False: (outputs, inputs), True: (inputs, outputs)}
    is_parameter = target.key != target.lora.module  # which PEFT takes as a Linear's
    if not target.experts and (is_parameter or not settings.fan_in_fan_out):
        ways.pop(True)
    return {is_turned for is_turned, fits in ways.items() if shape == fits}


def _require_fit(target: Target, entry: TensorEntry, settings: Settings) -> None:
    """Raise Unsupported if matrices do not have a weight's shape, or the rank that scales them."""
    left, right = target.lora.both
    rank = settings.rank_of(target.key) * (target.experts or 1)
    if len(left.shape) < 2 or len(right.shape) < 2 or not rank == right.shape[0] == left.shape[1]:
        raise Unsupported(
            f"{left.name} {list(left.shape)} and {right.name} {list(right.shape)}: not of rank"
            f" {rank:,}, which {settings.place} says"
        )
    if not _has_shape(target, entry, settings):
        raise Unsupported(
            f"{target.name}: {list(entry.shape)}, but the product of {left.name} and {right.name}"
            f" is {[left.shape[0], *right.shape[1:]]}",
            hint="the adapter may be of another model; where inputs come before outputs,"
            " adapter_config.json says fan_in_fan_out true",
        )


def _has_shape(target: Target, entry: TensorEntry, settings: Settings) -> bool:
    """Return whether the product of a LoRA's matrices has a weight's shape, maybe turned."""
    left, right = target.lora.both
    product = (left.shape[0], *right.shape[1:])
    if len(entry.shape) > 2 and not target.experts:  # B's kernel has one element
        return product == entry.shape and left.elements == left.shape[0] * left.shape[1]
    if target.lora.is_embedding:
        return product[::-1] == entry.shape
    return len(product) == 2 and bool(_sides(target, entry, settings))
