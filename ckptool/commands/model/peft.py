"""PEFT's adapter from a trainer's checkpoint: its tensors, its names, adapter_config.json.

Names are those that PEFT 0.21 saves: without the adapter's name, ``base_layer`` and the wrappers of
a LoRA's module, and including the neighbors in ``modules_to_save``.
"""

from __future__ import annotations

import re
from collections import defaultdict

from msgspec.structs import replace

from ckptool.commands.model.adapter_config import ADAPTER_CONFIG, adapter_problems
from ckptool.commands.model.assets import config_file, read_object
from ckptool.commands.model.records import CONFIG, Record, read_nearest
from ckptool.commands.open import OpenedCheckpoint
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.keymap.wrappers import unwrapping_rule
from ckptool.core.layout import Layout
from ckptool.core.selection import rename_entry, substitution
from ckptool.core.text import list_some, plural
from ckptool.errors import Problem, Unsupported, UsageError

_VERL = "lora_train_meta.json"
"""What verl (0.9) writes beside an actor's shards: ``r``, ``lora_alpha`` and ``task_type``."""
_PREFIX = "base_model.model."
_NAME = r"(?!weight$|bias$)(?P<adapter>[^.]+)"
_KINDS = (
    rf"(?P<name>.+\.lora_[AB])(?:\.{_NAME})?(?P<rest>\.(?:weight|bias))",
    rf"(?P<name>.+\.lora_embedding_[AB])(?:\.{_NAME})?(?P<rest>)",
    rf"(?P<name>.+\.lora_magnitude_vector)(?:\.{_NAME}(?:\.weight)?)?(?P<rest>)",
    rf"(?P<name>.+)\.modules_to_save\.{_NAME}(?P<rest>\..+)",
)
_TENSOR = re.compile(
    "|".join(re.sub(r"P<(\w+)>", rf"P<\g<1>{i}>", k) for i, k in enumerate(_KINDS))
)
_TOKENS = ".token_adapter.trainable_tokens_"
_OF_A = re.compile(r".+\.lora_(?:A\.weight|embedding_A)")


def adapter_of(catalog: Catalog) -> Catalog:
    """Return only the tensors of a model's adapter, under PEFT's names.

    An adapter does not need the frozen weights around it, which trainers may leave out.

    Raises UsageError if there is none, or several; Unsupported if two models have one, and for
    separately trained tokens.
    """
    rule = unwrapping_rule([name for name in catalog.tensors if ".lora_" in name])
    unwrap = substitution(rule) if rule else str
    tensors: dict[str, TensorEntry] = {}
    of_models: dict[str, str] = {}
    adapters: dict[str, list[str]] = defaultdict(list)
    for name, entry in catalog.tensors.items():
        match = _TENSOR.fullmatch(unwrap(name))
        if match is not None:
            groups = {k[:-1]: v for k, v in match.groupdict().items() if v is not None}
            inner = groups["name"].rpartition(_PREFIX)[2]
            new = _PREFIX + inner + groups["rest"]
            adapter = groups.get("adapter", "")
            adapters[adapter].append(name)
            if of_models.setdefault(f"{adapter}/{new}", name) != name:
                raise Unsupported(
                    f"--peft-adapter: {of_models[f'{adapter}/{new}']} and {name} are both {new}",
                    hint=f"choose a model: --select '{name.partition(_PREFIX)[0] or name[:1]}*'",
                )
            tensors[new] = rename_entry(entry, new)
        elif _TOKENS in name:
            raise Unsupported(
                f"--peft-adapter: {name}: trainable_token_indices are not supported",
                hint=f"use --drop '*{_TOKENS}*' to exclude them",
            )
    if not any(".lora_" in name for name in tensors):
        raise UsageError(
            f"--peft-adapter: no LoRA among {plural(len(catalog.tensors), 'tensor')}",
            hint="names of LoRA tensors contain `.lora_`; to convert the model, leave it out",
        )
    if len(adapters) > 1:
        raise UsageError(
            f"--peft-adapter: {len(adapters)} adapters: {list_some(sorted(adapters))}",
            hint=f"choose one: --select '*.{max(adapters)}*'",
        )
    sizes = {n: size for n, size in catalog.companions.items() if n.rpartition("/")[2] != CONFIG}
    conflicts = {n: why for n, why in catalog.conflicts.items() if not _is_of_frozen(why)}
    adapter = catalog.with_tensors(tensors)
    return replace(adapter, objects={}, companions=sizes, conflicts=conflicts)


def _is_of_frozen(why: str) -> bool:
    """Return whether a conflict is that frozen parameters are in no file."""
    return isinstance(why, Problem) and why.code == "frozen-excluded"


def with_adapter_config(opened: OpenedCheckpoint, catalog: Catalog, layout: Layout) -> Layout:
    """Add adapter_config.json to a folder, as recorded in or around the checkpoint.

    A config.json, which describes the model, is dropped. If ``lora_alpha`` is recorded nowhere, a
    note says what to pass. Raises Unsupported if the recorded rank is not that of the tensors.
    """
    files = tuple(file for file in layout.files if file.path != CONFIG)
    layout = replace(layout, files=files)
    part = next((file.parts[0] for file in files if file.path == ADAPTER_CONFIG), None)
    if part is not None:
        _require_true(read_object(opened, part), ADAPTER_CONFIG, catalog)
        return layout
    modules = sorted({name.split(".")[-3] for name in catalog.tensors if _is_plain(name)})
    place, record = read_nearest(opened.path, (ADAPTER_CONFIG, _VERL))
    if not place:
        ranks = list_some([str(rank) for rank in sorted(_ranks(catalog))])
        note = (
            f"{ADAPTER_CONFIG} not written: lora_alpha is not recorded (r {ranks}, target_modules"
            f" {', '.join(modules)}); --hf-assets FOLDER copies one"
        )
        return replace(layout, notes=(*layout.notes, note))
    _require_true(record, place, catalog)
    config = dict(record)
    if place.endswith(_VERL):
        config = {"peft_type": "LORA", "base_model_name_or_path": None, "bias": "none"}
        config |= {key: record.get(key) for key in ("task_type", "r", "lora_alpha")}
        config |= {"target_modules": modules}
    note = f"{ADAPTER_CONFIG} written from {place}"
    files = (config_file(config, ADAPTER_CONFIG), *files)
    return replace(layout, files=files, notes=(*layout.notes, note))


def _is_plain(name: str) -> bool:
    return name.endswith(".lora_A.weight")


def _ranks(catalog: Catalog) -> set[int]:
    """Return the ranks of all LoRAs: the rows of their first matrix."""
    return {e.shape[0] for name, e in catalog.tensors.items() if _OF_A.fullmatch(name) and e.shape}


def _require_true(record: Record, place: str, catalog: Catalog) -> None:
    """Raise Unsupported if a configuration has biases, or does not describe the tensors."""
    if record.get("bias", "none") != "none":
        raise Unsupported(
            f"{place} says bias {record['bias']}: the base model's biases are not supported",
            hint="convert the whole model, without --peft-adapter",
        )
    for problem in adapter_problems(record, catalog.tensors, place) if record else ():
        hint = "use --hf-assets FOLDER to copy the adapter_config.json of this adapter"
        raise Unsupported(problem, hint=problem.hint or hint)
