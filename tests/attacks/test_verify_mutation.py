"""Seeded damage to real checkpoints of every format: verify reports whatever changes what is read.

A mutation flips, replaces, adds or takes away a byte, cuts, empties, zeroes, drops, swaps or copies
over a file. The specification is exact: what a mutation changed is judged by reading the checkpoint
back (names, shapes, element types, the SHA-256 of each tensor and of each value). It must be
reported unless the mutated byte is one that nothing in the files protects, and those bytes are
listed in ``UNPROTECTED``:

- the data of formats without a checksum: safetensors, the legacy torch.save stream, archives saved
  without CRC-32;
- metadata without a checksum, where a changed byte leaves it consistent: a name, an element type of
  the same size, equal numbers exchanged. These are DCP's ``.metadata``, the header of a safetensors
  file, ``metadata.pkl``, the pickles of a legacy stream;
- files that no other file promises, where they are lost (``NAMED_BY_NOTHING``), and files that took
  each other's place and are whole, which is another checkpoint, unless ``ckptool/docs/verify.md``
  says that it is always seen.

With a manifest that was written before, none of these passes: whatever changes what is read is
reported, and so is every byte of every file. What verify alone rightly says nothing of, because no
reader and no checksum sees it (padding, alignment, times in zip headers), is printed as such
(``pytest -rP`` shows it). ``make mutations`` makes many more mutations.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from attack_files import FileMutation, mutations, said_in_docs
from attack_harness import CANARY, place_canary
from conftest import case
from format_tables import FIXTURES
from trials import trials

from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.question import Question
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.compare.values import value_digest
from ckptool.commands.verify.manifest.build import build_manifest
from ckptool.commands.verify.manifest.check import check_manifest
from ckptool.commands.verify.verify import verify
from ckptool.engine.check.digest import digests
from ckptool.engine.read.tensors import TensorSource
from ckptool.errors import CkptoolError

pytestmark = pytest.mark.trials
COUNT = trials(200)
"""Mutations in all."""
SEED = int(os.environ.get("CKPTOOL_VERIFY_SEED", "20261"))
SECONDS = 20.0
"""Of processor time, for one mutation."""
MEMORY = 1 << 30

Read = dict[str, tuple[str, tuple[int, ...], str]]
"""Name to element type (or that it is a value), shape and SHA-256 of the content."""


def nothing(file: str) -> bool:
    return False


def everything(file: str) -> bool:
    return True


def ends(*suffixes: str) -> Callable[[str], bool]:
    return lambda file: file.endswith(suffixes)


UNPROTECTED: dict[str, Callable[[str], bool]] = {
    "dcp_base": ends(".metadata"),
    "dcp_fsdp2_tp": ends(".metadata"),
    "dcp_zstd": ends(".metadata"),
    "dcp_file_an_item": ends(".metadata"),
    "dcp_no_collectives": ends(".metadata"),
    "dcp_lightning": ends(".metadata"),
    "accelerate_folders": ends(".metadata"),
    "safetensors_file": everything,
    "hf_shards": everything,
    "hf_sharded": everything,
    "zip_zoo": nothing,
    "zip_protocol_4": nothing,
    "zip_deflated": nothing,
    "zip_big_endian": nothing,
    "zip_without_crc": everything,
    "legacy_zoo": everything,
    "bin_shards": ends(".json"),
    "rank_base": nothing,
    "rank_fsdp1": nothing,
    "rank_experimental": nothing,
    "rank_verl": nothing,
    "torch_checkpointing": ends("metadata.pkl"),
    "torch_checkpointing_safetensors": everything,
    "accelerate_rank_files": nothing,
    "bytecheckpoint_ddp": everything,
    "bytecheckpoint_flat": everything,
    "deepspeed_experts": ends("latest"),
    "deepspeed_pipeline": ends("latest"),
    "deepspeed_universal": ends("latest", "latest_universal"),
    "deepspeed_zero_2": ends("latest"),
    "deepspeed_zero_3": ends("latest"),
    "llama_consolidated": ends(".json"),
    "megatron_fsdp_dtensor": ends(".metadata", ".txt"),
    "megatron_local": ends(".txt"),
    "megatron_torch": ends(".txt"),
    "megatron_torch_dist": ends(".metadata", ".json"),
    "megatron_torch_distributed": ends(".txt"),
    "snapshot": everything,
    "snapshot_batched": everything,
    "vllm_sharded_state": everything,
}
"""Fixture to its files whose bytes, where they change what is read, may do so unseen."""
UNPROTECTED |= {
    names[0]: everything
    for names in FIXTURES.values()
    if names and UNPROTECTED.keys().isdisjoint(names)
}

SAID_IN_DOCS = said_in_docs()
NAMED_BY_NOTHING = ("meta.pt", "scheduler.bin")
"""Files that no other file promises, so that their loss cannot be seen."""


@dataclass(frozen=True)
class Mutation:
    """``what`` was done to ``file``; ``exchanged`` where whole files took each other's place.

    ``kind`` is one of ``attack_files.KINDS`` where it is one of theirs.
    """

    what: str
    file: str
    exchanged: bool = False
    kind: str = ""


KINDS = ["byte", "insert", "remove", "append", "cut", "zero", "tail", "empty"]
KINDS += ["lose", "swap", "copy", "whole", "whole"]


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def mutate(folder: Path, dice: random.Random, whole: Sequence[FileMutation]) -> Mutation:
    """Damage one file of a copy, or two; ``whole`` is what can happen to whole files."""
    files = files_of(folder)
    kind = dice.choice(["flip"] * 8 + KINDS)
    if kind == "whole" and whole:
        chosen = dice.choice(whole)
        chosen.change(folder)
        return Mutation(chosen.kind, chosen.what, exchanged=True, kind=chosen.kind)
    victim = dice.choices(files, [path.stat().st_size + 1 for path in files])[0]
    name, data = str(victim.relative_to(folder)), victim.read_bytes()
    other = dice.choice(files)
    if kind == "lose":
        victim.unlink()
        return Mutation("lost", name)
    if kind in ("swap", "copy"):
        if kind == "swap":
            victim.write_bytes(other.read_bytes())
        other.write_bytes(data)
        return Mutation(f"{kind} with {other.relative_to(folder)}", name, exchanged=True)
    what, changed = changed_bytes(kind, data, dice)
    victim.write_bytes(changed)
    return Mutation(what, name)


def changed_bytes(kind: str, data: bytes, dice: random.Random) -> tuple[str, bytes]:
    if kind in ("empty", "whole") or not data:
        return "emptied", b""
    spot = dice.randrange(len(data))
    if kind == "cut":
        return f"cut at {spot}", data[:spot]
    if kind == "zero":
        end = min(len(data), spot + dice.choice([1, 16, 4096]))
        return f"zeros from {spot} to {end}", data[:spot] + bytes(end - spot) + data[end:]
    if kind == "tail":
        page = spot // 512 * 512
        return f"zeros from {page} to the end", data[:page] + bytes(len(data) - page)
    if kind == "append":
        return "with bytes behind it", data + dice.randbytes(dice.choice([1, 16, 4096]))
    if kind == "insert":
        return f"one byte more at {spot}", data[:spot] + dice.randbytes(1) + data[spot:]
    if kind == "remove":
        return f"one byte less at {spot}", data[:spot] + data[spot + 1 :]
    new = dice.randrange(256) if kind == "byte" else data[spot] ^ 1 << dice.randrange(8)
    return f"{kind} at {spot}", data[:spot] + bytes([new]) + data[spot + 1 :]


def read(folder: Path) -> Read | None:
    """What a reader finds; None if it refuses to read."""
    try:
        opened = open_checkpoint(folder)
        if opened.catalog.conflicts:
            return None
        located = opened.open_containers(opened.catalog).tensors
        found = digests(located.values(), TensorSource(opened.source), 1)
        values = {n: value_digest(e.value, n) for n, e in opened.catalog.objects.items()}
    except CkptoolError:
        return None
    tensors = {n: (e.dtype.name, e.shape, found[n]) for n, e in located.items()}
    return tensors | {n: ("value", (), digest) for n, digest in values.items()}


class TooLate(BaseException):
    """A mutation that takes more than its time."""


@pytest.fixture(autouse=True)
def bounded(tmp_path: Path) -> Iterator[None]:
    """Time and memory are capped, and nothing that a pickle names may be imported."""

    def too_late(*_: object) -> None:
        raise TooLate

    flag = place_canary(tmp_path / CANARY)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGPROF, too_late)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)
    assert not flag.exists()


def noise(folder: Path) -> Counter[str]:
    """What verify says of the unharmed checkpoint, such as the NaN that some hold."""
    findings = verify(folder, VerifyOptions(workers=1)).findings
    return Counter(f.code for f in findings if f.severity.value != "info")


@dataclass
class Told:
    """What was wrongly not reported, and what was rightly not."""

    unseen: list[str]
    unproved: list[str]
    nowhere: Counter[str]


def judged(mutation: Mutation, name: str, changed: str, *, differs: bool, told: Told) -> None:
    """Note a mutation that verify said nothing of."""
    alone = mutation.what == "lost" and mutation.file in NAMED_BY_NOTHING
    if not differs or alone:
        told.nowhere[mutation.file] += 1
    elif is_said_to_be_seen(mutation, name) or not (
        UNPROTECTED[name](mutation.file) or mutation.exchanged
    ):
        told.unseen.append(f"{mutation}: {changed}")


def is_said_to_be_seen(mutation: Mutation, name: str) -> bool:
    row = SAID_IN_DOCS[case(name).facts["format"]]
    return bool(mutation.kind) and row[mutation.kind] == "yes"


@pytest.mark.parametrize("name", UNPROTECTED)
def test_mutations(name: str, tmp_path: Path) -> None:
    source, truth, usual = case(name).path, read(case(name).path), noise(case(name).path)
    assert truth is not None
    recorded, held = manifest_of(source, tmp_path / "manifest.json"), contents(source)
    whole = list(mutations(source, 2))
    dice = random.Random(f"{SEED} {name}")
    told = Told([], [], Counter())
    for _ in range(max(1, COUNT // len(UNPROTECTED))):
        folder = tmp_path / "mutated"
        shutil.copytree(source, folder)
        mutation = mutate(folder, dice, whole)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        found, reported = read(folder), reported_beyond(folder, usual)
        proved = is_proved(folder, tmp_path / "manifest.json", usual)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if not reported:
            judged(mutation, name, changes(truth, found), differs=found != truth, told=told)
        left = contents(folder)
        spoilt = any(left.get(name) != held[name] for name in recorded)
        if proved and (found != truth or (spoilt and not mutation.exchanged)):
            told.unproved.append(f"{mutation}: {changes(truth, found)}")
        shutil.rmtree(folder)
    print(
        f"{name}: bytes that neither readers nor checksums see were changed in {dict(told.nowhere)}"
    )
    assert told.unseen == []
    assert told.unproved == []


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in files_of(folder)}


def manifest_of(source: Path, target: Path) -> set[str]:
    """Write the manifest of an unharmed checkpoint; the files that it records, below ``source``."""
    report = build_manifest(source, target, Question(check=VerifyOptions(workers=1)))
    assert report.ok
    files = json.loads(target.read_text())["files"]
    root = report.path if report.path.is_dir() else report.path.parent
    return {str((root / name).relative_to(source)) for name in files}


def is_proved(folder: Path, manifest: Path, usual: Counter[str]) -> bool:
    try:
        options = VerifyOptions(workers=1, quick=True, strict=True, ignore=tuple(usual))
        return check_manifest(folder, manifest, Question(check=options)).ok
    except CkptoolError:
        return False


def reported_beyond(folder: Path, usual: Counter[str]) -> bool:
    """Whether verify reports more than of the unharmed checkpoint."""
    try:
        return bool(noise(folder) - usual)
    except CkptoolError:
        return True


def changes(truth: Read, found: Read | None) -> str:
    if found is None:
        return "a reader refuses it"
    names = sorted(truth.keys() | found.keys())
    return ", ".join(n for n in names if truth.get(n) != found.get(n))
