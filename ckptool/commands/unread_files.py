"""Files beside those that a scan reads: unread data, unlisted entries, stand-ins for data.

Unlisted entries are dangling links and whatever cannot be accessed. Stand-ins are small files in
place of large ones: unresolved pointers, a server's answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from ckptool.core.catalog import Catalog
from ckptool.core.text import list_some
from ckptool.errors import Changed, CkptoolError, Damaged, NotFound, Problem
from ckptool.formats import file_rule
from ckptool.formats.base import FileRole, FileRule
from ckptool.formats.companions import RANDOM_STATES, TRAINER_STATE
from ckptool.serialization.file_kinds import FileKind, detect_placeholder, read_head
from ckptool.storage.file_status import NO_FILE
from ckptool.storage.files import Files

if TYPE_CHECKING:
    from ckptool.commands.detect import Candidate

_STEP = re.compile(r"(?:step|iter|epoch|checkpoint|ckpt)[a-z]*[-_=.]?[0-9]", re.IGNORECASE)
_TENSORLESS = {"training_args.bin": "arguments of transformers' Trainer, no tensors"}
_ADAPTER = re.compile(
    r"pytorch_lora_weights\.safetensors|adapter_(?:model|\d+)\.(?:safetensors|pt|bin)"
)
"""What diffusers' scripts save beside accelerate's state, and torchtune beside merged weights."""
_TRAINERS = {
    "transformers' Trainer": (
        re.compile(re.escape(TRAINER_STATE)),
        re.compile(r"(?:optimizer|scheduler|scaler)\.(?:pt|bin)|rng_state(?:_\d+)?\.pth"),
    ),
    "accelerate": (
        RANDOM_STATES,
        re.compile(
            r"(?:random_states|custom_checkpoint)_\d+\.pkl|scaler\.pt"
            r"|(?:scheduler|sampler|dl_state_dict)(?:_\d+)?\.bin"
        ),
    ),
}
"""What trainers go on from beside a model, and the file that each always saves with it.

transformers 4.20 to 5.24, accelerate 1.6 to 1.15; the latter saves it beside DeepSpeed's folder.
"""
Rules = Mapping[str, FileRule | None]
"""The rule of a format for each file of a checkpoint."""

_MOST_FOLDERS = 200
"""Folders that are looked at for checkpoints of their own: each is listed, and files are opened."""
_MOST_SHOWN = 8


def unread_files(
    candidate: Candidate, catalog: Catalog, reported: Iterable[Problem]
) -> list[Problem]:
    """Note the files below a checkpoint that look like data but are not in its catalog.

    ``reported`` are problems of the scan: files that they name are not noted again. Nothing is
    noted beside one of several sets of shards.
    """
    sizes = candidate.source.files
    problems = [*reported, *(note for note in catalog.notes if isinstance(note, Problem))]
    names = {*catalog.files, *catalog.companions, *catalog.copies, *(p.file for p in problems)}
    unread = [name for name, size in sizes.items() if size and name not in names and is_data(name)]
    unread += [name for name in candidate.beside if is_data(name)]
    if not unread or candidate.path.name == candidate.user_file:
        return []
    unfinished = [problem for name in unread if (problem := unfinished_file(name))]
    unread = [name for name in unread if unfinished_file(name) is None]
    folders = dict(_checkpoints(candidate, catalog.files, unread))
    heads = tuple(f"{folder}/" for folder in folders)
    notes = _file_notes([name for name in unread if not name.startswith(heads)], sizes)
    return [*unfinished, *_folder_notes(candidate, folders), *notes]


def _checkpoints(
    candidate: Candidate, used: Iterable[str], unread: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """Yield the folders of unread files that are checkpoints by themselves, and their formats."""
    used_folders = {str(parent) for name in used for parent in PurePosixPath(name).parents}
    neighbours = set(candidate.beside)
    inside = (PurePosixPath(name).parents for name in unread if name not in neighbours)
    folders = dict.fromkeys(str(folder) for parents in inside for folder in reversed(parents))
    candidates = [folder for folder in folders if folder not in used_folders and folder != "."]
    checkpoints: list[str] = []
    for folder in candidates[:_MOST_FOLDERS]:
        if any(folder.startswith(f"{around}/") for around in checkpoints):
            continue
        try:
            row = candidate.detect_below(folder)
        except CkptoolError:
            continue
        if row is not None:
            checkpoints.append(folder)
            yield folder, row.name


def _folder_notes(candidate: Candidate, folders: Mapping[str, str]) -> Iterator[Problem]:
    """Yield one note for all steps, and one for each part that is a checkpoint by itself.

    Of a part that was never finished it says so.
    """
    steps = [folder for folder in folders if _STEP.search(folder.rpartition("/")[2])]
    parts = [folder for folder in folders if folder not in steps]
    if steps:
        message = f"other checkpoints in this folder: {list_some(steps, _MOST_SHOWN)}"
        yield Problem(message, "checkpoint-nested", file=steps[0])
    files = candidate.source.files if parts else ()
    unfinished = uncommitted_folders({file: file_rule(candidate.format, file) for file in files})
    for folder in (folder for folder in parts if folder in unfinished):
        yield Problem(f"not read: {unfinished[folder]}", "checkpoint-nested", file=folder)
    for group in _group_numbered(folder for folder in parts if folder not in unfinished):
        first = group[0]
        names = list_some([f"{name}/" for name in group], 1)
        message = f"not read: {names}, a separate checkpoint ({folders[first]});"
        message += f" run `ckptool inspect {candidate.path / first}`"
        yield Problem(message, "checkpoint-nested", file=first)


def uncommitted_folders(rules: Rules) -> Mapping[str, Problem]:
    """Return the subfolders whose data files lack the metadata that is written last."""
    folders: dict[str, set[FileRule]] = {}
    for file, rule in rules.items():
        if rule is not None:
            folders.setdefault(file.rpartition("/")[0], set()).add(rule)
    problems: dict[str, Problem] = {}
    for folder, kinds in folders.items():
        last = max(rule.committed_by for rule in kinds)
        above = f"{folder.rpartition('/')[0]}/{last}".lstrip("/")  # which names moved files
        is_alone = not any(rule.role is FileRole.METADATA for rule in kinds)
        if folder and last and is_alone and above not in rules:
            message = f"{folder}: data files without {last}, which is written last"
            problems[folder] = Problem(message, "save-incomplete", file=f"{folder}/{last}")
    return problems


def _file_notes(names: list[str], beside: Iterable[str]) -> Iterator[Problem]:
    trainers = {
        trainer: files
        for trainer, (mark, files) in _TRAINERS.items()
        if any(map(mark.fullmatch, beside))
    }
    for group in _group_numbered(names):
        first, text = group[0], list_some(group, 1)
        if tensorless := _TENSORLESS.get(first.rpartition("/")[2]):
            yield Problem(f"not read: {text}: {tensorless}", "note", file=first)
        elif _ADAPTER.fullmatch(first):
            message = f"not read: {text}: an adapter, a separate checkpoint"
            yield Problem(message, "checkpoint-nested", file=first)
        elif trainer := next((t for t, own in trainers.items() if own.fullmatch(first)), None):
            message = f"beside the model: {text}: {trainer} goes on from it"
            yield Problem(message, "note", file=first)
        else:
            message = f"not read: {text}: looks like part of a checkpoint"
            yield Problem(message, "file-unused", file=first)


def _group_numbered(names: Iterable[str]) -> list[list[str]]:
    """Group names that differ in numbers only."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"[0-9]+", "#", name), []).append(name)
    return list(groups.values())


def unlisted_problems(unlisted: Mapping[str, Problem]) -> list[Problem]:
    """Return the problems of unlisted entries that may be part of a checkpoint.

    A dangling link may be if its name is one that data is stored under, anything else unless it is
    hidden.
    """
    return [
        _unlisted_problem(name, why) for name, why in unlisted.items() if _may_belong(name, why)
    ]


def unlisted_notes(unlisted: Mapping[str, Problem]) -> list[Problem]:
    """Return a note for each dangling link that is not part of a checkpoint, or hidden file."""
    return [
        _unlisted_problem(name, why).recoded("note")
        for name, why in unlisted.items()
        if why.code in ("file-missing", "access-denied") and not _may_belong(name, why)
    ]


def require_listed(problems: Sequence[Problem]) -> None:
    """Raise NotFound for unreadable entries, Changed for vanished ones."""
    if problems:
        raise _unlisted_error(problems)


def _unlisted_error(problems: Sequence[Problem]) -> NotFound | Changed:
    """Return one error for all entries that are not listed."""
    lasting = [problem for problem in problems if problem.code != "file-changed"]
    first, *rest = lasting or problems
    message = f"{first} (and {len(rest):,} more)" if rest else str(first)
    shown = Problem(message, first.code, file=first.file)
    if not lasting:
        return Changed(shown, hint="retry when nothing is writing to the source")
    hint = (
        "if it is not part of the checkpoint, pass the checkpoint's own path or move the file away"
    )
    error = NotFound(shown, hint=hint)
    error.problems = tuple(lasting)
    return error


def _unlisted_problem(name: str, why: Problem) -> Problem:
    return Problem(f"{name}: {why}", why.code, file=name)


def _may_belong(name: str, why: Problem) -> bool:
    if why.code == "access-denied":
        return False
    if why.code == "file-missing":
        return is_data(name) or name.endswith(_DECIDING)
    if why.code == NO_FILE:
        return name.endswith(_DECIDING)
    *folders, last = name.split("/")
    is_hidden = any(part.startswith(".") for part in folders)
    return not (is_hidden or last == "lost+found" or (last[:1] == "." and last not in MARKS))


_DECIDING = (
    *(".extra.pt", "adapter_config.json", "config.json", "quantize_config.json"),
    *("hf_quant_config.json", "quant_config.json", "params.json", ".index.json"),
)
"""How names end of files that decide how tensors are read: never absent if something is there."""
_DATA = (
    *(".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".safetensors", ".distcp", ".npz", ".npy"),
    *(".gguf", ".onnx", ".h5", ".hdf5", ".keras", ".msgpack", ".pt2", ".nemo", ".ot", ".zarr"),
)
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".tar", ".tgz")
MARKS = (".metadata", ".snapshot_metadata", "_METADATA", "manifest.ocdbt", ".zarray")
_RANKED = re.compile(
    r"(?:.*[._-])?(?:(?:[a-z]+_)?rank|world_size|shard|stage)[._-]?[0-9]+(?:[._-].*)?",
    re.IGNORECASE,
)
_UNFINISHED = re.compile(r"(?P<whole>.*?)(?:\.tmp|\.dirty|\.incomplete|\.partial|\.part)")


def unfinished_file(file: str) -> Problem | None:
    """Return the problem of a file whose name says that it was never finished."""
    if not (_UNFINISHED.fullmatch(file) or file.endswith(".dirty.pt")):
        return None
    message = f"{file}: unfinished write (temporary file name)"
    return Problem(message, "file-incomplete", file=file)


def is_data(file: str) -> bool:
    """Return whether tensors or parts of a checkpoint are stored under such a name."""
    *folders, name = file.split("/")
    if any(folder.startswith(".") for folder in folders):
        return False
    match = _UNFINISHED.fullmatch(name)
    name = match["whole"] if match else name
    plain = name.lower()
    for suffix in _PACKED:
        plain = plain.removesuffix(suffix)
    is_bare = "." not in plain or plain != name.lower()
    return name in MARKS or plain.endswith(_DATA) or (is_bare and bool(_RANKED.fullmatch(plain)))


_LARGEST = 4096
_TEXTS = (".html", ".htm", ".xhtml", ".xml", ".svg", ".md")
"""Names of small files with no other role: a report, a drawing."""
_MOST = 64
"""Files to look at: if one is a pointer, nearly all are."""


def explain_damage(source: Files, error: Damaged) -> Damaged:
    """Return the error, or if files stand in for others, one that names this as the cause."""
    files = list(_stand_ins(source))
    if not files:
        return error
    file, kind = files[0]
    return Damaged(_stand_in_problem(files), hint=kind.hint_for(file))


def with_cause(source: Files, problems: Iterable[Problem]) -> list[Problem]:
    """Put the problem that explains the others first: files that stand in for others."""
    problems = list(problems)
    files = list(_stand_ins(source)) if problems else []
    return [_stand_in_problem(files), *problems] if files else problems


def _stand_in_problem(files: list[tuple[str, FileKind]]) -> Problem:
    file, kind = files[0]
    names = list_some([name for name, _ in files], 1)
    return Problem(f"{names}: {kind.what}", "file-type-mismatch", file=file)


def _stand_ins(source: Files) -> Iterator[tuple[str, FileKind]]:
    sizes = source.files.items()
    small = [n for n, size in sizes if 0 < size <= _LARGEST and not n.lower().endswith(_TEXTS)]
    for name in small[:_MOST]:
        try:
            kind = detect_placeholder(read_head(source, name))
        except CkptoolError:
            continue
        if kind is not None:
            yield name, kind
