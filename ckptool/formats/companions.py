"""Files beside and around a checkpoint: a model's companions, subfolders, trackers, configs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace

from ckptool.core.catalog import Catalog, Computed, Extent, ObjectEntry, Place, TensorEntry
from ckptool.core.mesh import Shard
from ckptool.core.selection import (
    entries_of,
    keep_names,
    strip_prefix,
    without_first_step,
)
from ckptool.errors import CkptoolError, Damaged, Problem
from ckptool.formats.base import ScanOptions
from ckptool.serialization.source import (
    Source,
    find_missing_ranks,
    is_there,
    parse_json_object,
    read_metadata,
)

_NAMES = frozenset(
    "config.json generation_config.json tokenizer.json tokenizer.model tokenizer_config.json"
    " special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt spiece.model"
    " preprocessor_config.json processor_config.json chat_template.json chat_template.jinja"
    " README.md LICENSE LICENSE.txt USE_POLICY.md NOTICE params.json video_preprocessor_config.json"
    " quantize_config.json hf_quant_config.json quant_config.json adapter_config.json".split()
)
PIPELINE = "model_index.json"
"""The list of a pipeline's components, which are in separate folders (diffusers 0.42)."""
OF_VERL = "huggingface"
"""The folder in which verl (0.9) has a model's companions."""
TRAINER_STATE = "trainer_state.json"
TRAINER_FILES = frozenset([TRAINER_STATE, "training_args.bin"])
"""Files that transformers' Trainer writes once beside a checkpoint (transformers 5)."""
_TRAINER_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
"""``OPTIMIZER_NAME`` and ``OPTIMIZER_NAME_BIN`` of transformers' Trainer (4.20 to 5.23)."""
_SUFFIXES = (".py", ".tiktoken")
_PROSE = frozenset("README.md LICENSE LICENSE.txt USE_POLICY.md NOTICE".split())


def companions(source: Source, folder: str = "") -> dict[str, int]:
    """Return the companions in ``folder`` (empty, or with a slash at the end), with sizes."""
    return {
        name: size
        for name, size in source.files.items()
        if name.startswith(folder) and _is_companion(name[len(folder) :])
    }


def trainer_optimizer(sizes: Mapping[str, int], read: Collection[str]) -> str | None:
    """Return the file of a model's folder in which transformers' Trainer saved its optimizer.

    ``sizes`` are those of all files; a file that is ``read`` with the model does not count.
    """
    names = (name for name in _TRAINER_OPTIMIZERS if sizes.get(name) and name not in read)
    return next(names, None)


def _is_companion(name: str) -> bool:
    return name in _NAMES or ("/" not in name and name.endswith(_SUFFIXES))


def companion_targets(catalog: Catalog) -> dict[str, str]:
    """Return a catalog's companions by their paths beside the output.

    A pipeline's models have one each, so they stay in the folders of its components.
    """
    stay = PIPELINE in catalog.companions
    return {name if stay else name.rpartition("/")[2]: name for name in catalog.companions}


def is_of_model(path: str) -> bool:
    """Return whether only a model's own files have this name, no user's code or text."""
    name = path.rpartition("/")[2]
    return name in _NAMES - _PROSE or name.endswith(".tiktoken")


def relocate(catalog: Catalog, folder: str) -> Catalog:
    """Return the catalog of a subfolder, with paths of files relative to the folder above."""
    return replace(
        catalog,
        tensors={name: _relocated_entry(entry, folder) for name, entry in catalog.tensors.items()},
        files={f"{folder}/{name}": size for name, size in catalog.files.items()},
        notes=tuple(
            n.in_folder(folder) if isinstance(n, Problem) and n.file else n for n in catalog.notes
        ),
        copies=frozenset(f"{folder}/{name}" for name in catalog.copies),
        bare=frozenset(f"{folder}/{name}" for name in catalog.bare),
        archives=tuple(replace(at, file=f"{folder}/{at.file}") for at in catalog.archives),
        globals={f"{folder}/{name}": names for name, names in catalog.globals.items()},
        metadata={f"{folder}/{name}": texts for name, texts in catalog.metadata.items()},
    )


def _relocated_entry(entry: TensorEntry, folder: str) -> TensorEntry:
    chunks = (
        chunk.at_places([_relocated_place(folder, at) for at in chunk.places])
        for chunk in entry.chunks
    )
    return replace(entry, chunks=tuple(chunks))


def _relocated_place(folder: str, at: Place) -> Place:
    if isinstance(at, Computed):
        return replace(at, stored=tuple(_relocated_entry(part, folder) for part in at.stored))
    file = f"{folder}/{at.file}"
    if isinstance(at, Extent) and at.record is not None:
        return replace(at, file=file, record=at.record._replace(file=file))
    return replace(at, file=file)


Scan = Callable[[Source, ScanOptions], Catalog]


def scan_subfolder(
    scan: Scan, source: Source, folder: str, options: ScanOptions, *, prefix: str = ""
) -> Catalog:
    """Scan a subfolder; the catalog, notes and errors name files relative to the folder above.

    ``prefix`` is the prefix that tensors' names will get, and have in notes.
    """
    problems: list[Problem] | None = None if options.problems is None else []
    try:
        inner = replace(options, problems=problems, headers=None)
        catalog = scan(source.narrowed(folder), inner)
    except CkptoolError as error:
        raise error.in_folder(folder) from None
    moved = [problem.in_folder(folder) for problem in problems or ()]
    for problem in moved:
        problem.tensor = prefix + problem.tensor if problem.tensor else None
    if options.problems is not None:
        options.problems.extend(moved)
    return relocate(catalog, folder)


def join_catalogs(first: Catalog, *additions: Catalog) -> Catalog:
    """Return the first catalog extended by the tensors, values, files and notes of the others."""
    catalogs = (first, *additions)
    return replace(
        first,
        tensors={n: entry for catalog in catalogs for n, entry in catalog.tensors.items()},
        objects={n: entry for catalog in catalogs for n, entry in catalog.objects.items()},
        files={n: size for catalog in catalogs for n, size in catalog.files.items()},
        world_size=max(catalog.world_size or 1 for catalog in catalogs),
        notes=tuple(dict.fromkeys(note for catalog in catalogs for note in catalog.notes)),
        conflicts={n: why for catalog in catalogs for n, why in catalog.conflicts.items()},
        companions={n: size for catalog in catalogs for n, size in catalog.companions.items()},
        copies=frozenset(name for catalog in catalogs for name in catalog.copies),
        bare=frozenset(name for catalog in catalogs for name in catalog.bare),
        archives=tuple(at for catalog in catalogs for at in catalog.archives),
        globals={file: names for catalog in catalogs for file, names in catalog.globals.items()},
        metadata={file: texts for catalog in catalogs for file, texts in catalog.metadata.items()},
    )


def models_of_pipeline(catalog: Catalog) -> dict[str, Catalog]:
    """Return the models of a pipeline by their folders, under their own names."""
    folders = dict.fromkeys(str(entry.path[0]) for entry in entries_of(catalog))
    return {folder: strip_prefix(component(catalog, folder), folder) for folder in folders}


def component(catalog: Catalog, folder: str) -> Catalog:
    """Return the part of a pipeline in one component, with its paths there."""
    head = f"{folder}/"
    names = {entry.name for entry in entries_of(catalog) if entry.path[0] == folder}
    part = without_first_step(keep_names(catalog, names))
    files = {n.removeprefix(head): s for n, s in catalog.files.items() if n.startswith(head)}
    return replace(part, files=files, companions={})


MEGATRON = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_LONGEST = 64


def latest_folder(source: Source) -> str | None:
    """Return the subfolder that a run's tracker file names; None if there is no tracker.

    Megatron-LM's contains an iteration (``iter_0000100``) or ``release``; ByteCheckpoint and verl
    write the same file beside ``global_step_100``. Raises Damaged if that folder is missing.
    """
    size = source.files.get(MEGATRON)
    if size is None or size > _LONGEST:
        return None
    text = source.read(MEGATRON, 0, size).decode("ascii", "replace").strip()
    if text != RELEASE and not text.isdecimal():
        return None
    names = [text] if text == RELEASE else [f"iter_{int(text):07d}", f"global_step_{int(text)}"]
    folders = {file.partition("/")[0] for file in source.files if "/" in file}
    latest = next((name for name in names if name in folders), None)
    if latest is None:
        raise Damaged(
            f"{source.root}: {MEGATRON} says {text!r}, but there is no {' or '.join(names)}",
            hint="name a folder that is there; it may be older",
        )
    return latest


CONFIG = "config.json"

_ARGUMENTS = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv heads",
    "num_experts": "experts",
    "num_local_experts": "experts",
    "n_routed_experts": "experts",
    "vocab_size": "vocabulary",
}


def describe_framework(objects: Mapping[str, ObjectEntry]) -> dict[str, str]:
    """Return entries for ``Catalog.info``, from values that a framework always saves.

    Lightning 2 (``pytorch-lightning_version``, in ``meta.pt`` or a ``.ckpt``), torchtitan 0.3
    (``train_state``, and a ``dataloader`` state for each data-parallel rank).
    """
    for name in ("meta.pytorch-lightning_version", "pytorch-lightning_version"):
        if name in objects and isinstance(objects[name].value, str):
            return {"framework": "Lightning", "version": objects[name].value}
    if "train_state.step" in objects and any(n.startswith("dataloader.dp_rank_") for n in objects):
        degree = objects.get("dataloader.world_size")
        has_degree = degree is not None and type(degree.value) is int
        parallelism = {"parallelism": f"DP {degree.value}"} if degree and has_degree else {}
        return {"framework": "torchtitan"} | parallelism
    return {}


_POSITION = re.compile(r"dataloader\.dp_rank_(\d{1,6})(?:\..+)?")
_LOADERS = ("dataloader.world_size", "dataloader.dp_world_size")
"""How many data-parallel ranks torchtitan's loader had (0.1 to 0.3; b5bcd76)."""


def loader_ranks(objects: Mapping[str, ObjectEntry]) -> tuple[set[int], int]:
    """Return the ranks of which torchtitan saved positions in the data, and how many there were.

    torchtitan resumes from positions only with as many data-parallel ranks.
    """
    ranks = {int(match[1]) for match in map(_POSITION.fullmatch, objects) if match}
    counts = (objects[name].value for name in _LOADERS if name in objects)
    return ranks, next((n for n in counts if type(n) is int), max(ranks, default=-1) + 1)


def add_tensor_parallelism(catalog: Catalog) -> Catalog:
    """Add the degree of tensor parallelism to torchtitan's catalog, if its chunks show it.

    FSDP cuts torchtitan's dense tensors along dim 0; it is tensor parallelism if the innermost mesh
    dim cuts along another dim, and the others cut the rest among all data-parallel ranks.
    """
    mesh, parallelism = catalog.mesh, catalog.info.get("parallelism", "")
    if catalog.info.get("framework") != "torchtitan" or mesh is None or len(mesh.shape) < 2:
        return catalog
    *data, tensor = mesh.shape
    if parallelism != f"DP {math.prod(data)}" or not any(
        map(_is_cut_in_two_ways, catalog.tensors.values())
    ):
        return catalog
    return replace(catalog, info=catalog.info | {"parallelism": f"TP {tensor}, {parallelism}"})


def _is_cut_in_two_ways(entry: TensorEntry) -> bool:
    """Return whether a dense tensor is cut along dim 0, and by the last mesh dim along another."""
    placements = entry.placements or ()
    dims = [placement.dim if isinstance(placement, Shard) else None for placement in placements]
    return "experts" not in entry.name and bool(dims) and bool(dims[-1]) and 0 in dims[:-1]


def read_config(source: Source) -> Mapping[str, Any]:
    """Read a Hugging Face ``config.json`` (empty without one), merging the text model's.

    Raises Damaged if it is not a JSON object.
    """
    content = read_json_object(source, CONFIG)
    inner = content.get("text_config")
    return {**content, **inner} if isinstance(inner, dict) else content


def read_json_object(source: Source, file: str) -> dict[str, Any]:
    """Read a small file's JSON object, empty without the file; Damaged if it is none."""
    return parse_json_object(read_metadata(source, file), file) if is_there(source, file) else {}


def describe_config(source: Source, options: ScanOptions) -> dict[str, str]:
    """Return entries for ``Catalog.info`` from a Hugging Face config; none without one.

    Raises Damaged for one that cannot be read, or notes it if ``options`` allow.
    """
    config = options.attempt(partial(read_config, source)) or {}
    info = {}
    version = config.get("transformers_version")
    if isinstance(version, str):
        info = {"framework": "transformers", "version": version}
    names = config.get("architectures")
    words = [str(names[0])] if isinstance(names, list) and names else []
    words += [f"{n} {config[key]}" for key, n in _ARGUMENTS.items() if type(config.get(key)) is int]
    return info | ({"arguments": ", ".join(words)} if words else {})


MOST_EXPERTS = 1 << 16
"""Experts of one layer that are read: a file may say any number, or have that many of no size."""


def size_in(content: Mapping[str, Any], key: str) -> int | None:
    """Return a size in a model's config; None if it is not there."""
    value = content.get(key)
    return value if type(value) is int and value > 0 else None


RANDOM_STATES = re.compile(r"random_states_(\d{1,6})\.pkl")
"""The name of accelerate's file of a rank's random states, beside a model of any format."""


def lost_random_states(source: Source, catalog: Catalog) -> list[Problem]:
    """Return the rank whose random states are lost: each writes its own (accelerate 1.15)."""
    ranks = {int(match[1]) for match in map(RANDOM_STATES.fullmatch, source.files) if match}
    missing = find_missing_ranks(ranks, catalog.world_size or 0) if ranks else []
    if not missing:
        return []
    file = f"random_states_{missing[0]}.pkl"
    message = f"{file} is missing, of {catalog.world_size} ranks"
    return [Problem(message, "rank-missing", file=file)]
