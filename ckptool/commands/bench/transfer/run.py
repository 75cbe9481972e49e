"""Measure whole commands against ``cp`` and torch's own tools, interleaved, as ratios with memory.

A row of the report is one of ``rows.ROWS``: a name, a command line and its peers. Every sample is
one process from start to end, its output removed afterwards; before it, all is synced and its
source is read, so that the page cache is warm. A round is every row once. The checkpoint is one
that torch itself wrote: ``torch.distributed.checkpoint.save`` on four gloo ranks, tensors sharded
as FSDP2 shards them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptool.commands.bench.machine import describe_machine, list_versions, require_disk
from ckptool.commands.bench.specs import parameter_shapes
from ckptool.commands.bench.transfer.programs import RANKS
from ckptool.commands.bench.transfer.rows import OTHERS, PROGRAM, ROWS, Row
from ckptool.errors import TransferError, Unsupported, UsageError

_LIGHT_BYTES = 4_000_000
_MANY = ("1000", "64")


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of a command: seconds, and the largest resident set of any of its processes.

    ``load`` and ``read_bytes`` are what the command itself reports of a load, 0 elsewhere.
    """

    wall: float
    cpu: float
    peak_bytes: int
    load: float = 0.0
    read_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Ratio:
    """A row's median over its peer's, and the lowest and highest of the single rounds."""

    peer: str
    value: float
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True)
class RowResult:
    """A row's samples, one a round. ``imports_torch`` is None where it was not looked at.

    ``nbytes`` is the size of the checkpoint that the row's command moves, 0 where it moves none.
    """

    row: Row
    samples: tuple[Sample, ...]
    imports_torch: bool | None = None
    nbytes: int = 0

    @property
    def values(self) -> tuple[float, ...]:
        """The seconds that count for this row."""
        return tuple(getattr(sample, self.row.measure) for sample in self.samples)

    @property
    def median(self) -> float:
        """Median of the seconds that count."""
        return statistics.median(self.values)

    @property
    def peak_bytes(self) -> int:
        """The largest peak of all samples."""
        return max(sample.peak_bytes for sample in self.samples)

    @property
    def read_bytes(self) -> int:
        """The most that a load read from files; 0 for other commands."""
        return max(sample.read_bytes for sample in self.samples)

    def against(self, peer: RowResult) -> Ratio:
        """Return this row as a multiple of another."""
        rounds = [own / theirs for own, theirs in zip(self.values, peer.values, strict=True)]
        return Ratio(peer.row.name, self.median / peer.median, min(rounds), max(rounds))


@dataclass(frozen=True, slots=True)
class TransferBenchReport:
    """All that was measured, on what, and what was left out with the reason."""

    source: str
    nbytes: int
    files: int
    light_tensors: int
    repeat: int
    machine: Mapping[str, str | int]
    versions: Mapping[str, str]
    results: tuple[RowResult, ...]
    skipped: Mapping[str, str]

    def ratios(self, result: RowResult) -> tuple[Ratio, ...]:
        """Return the row against each of its peers that was measured."""
        peers = {peer.row.name: peer for peer in self.results}
        return tuple(result.against(peers[name]) for name in result.row.peers if name in peers)


Progress = Callable[[str], None]


def transfer_bench(
    source: Path | None,
    size: int,
    workdir: Path,
    repeat: int,
    *,
    rows: tuple[Row, ...] = ROWS,
    progress: Progress = lambda line: None,
) -> TransferBenchReport:
    """Measure ``rows`` on the checkpoint ``source``, or on a generated one of ``size`` bytes.

    Works in a folder of its own below ``workdir`` and removes it in every case. Raises Unsupported
    where the disk will not hold it, or torch is missing to generate with.
    """
    if repeat < 1:
        raise UsageError(f"--repeat {repeat}: at least one round is needed")
    has_torch = importlib.util.find_spec("torch") is not None
    if source is None and not has_torch:
        raise Unsupported("no torch to write a checkpoint with", hint="name one to measure")
    opened, nbytes, dcp = (None, size, True) if source is None else _open_source(source)
    # room for the largest output, and for the sources too where they are made here
    checkpoints = 1.0 if source else 1 + sum(OTHERS.values()) + max(OTHERS.values())
    require_disk(workdir, int(nbytes * checkpoints * 1.05) + 4 * _LIGHT_BYTES)
    with tempfile.TemporaryDirectory(prefix="ckptool-bench-", dir=workdir) as scratch:
        paths = _prepare_paths(rows, opened, size, Path(scratch), has_torch, progress)
        obstacles = {r.name: _obstacle(r, paths, has_torch=has_torch, dcp=dcp) for r in rows}
        skipped = {name: reason for name, reason in obstacles.items() if reason}
        results = _measure(rows, paths, repeat, skipped, progress)
        measured = Path(paths["{source}"])
        return TransferBenchReport(
            source=str(source) if source else f"written by torch on {RANKS} gloo ranks",
            nbytes=_count_bytes(measured),
            files=sum(1 for _ in _walk_files(measured)),
            light_tensors=len(parameter_shapes()) * 3 if has_torch else 0,
            repeat=repeat,
            machine=describe_machine(workdir),
            versions=list_versions("torch", "safetensors", "numpy") | {"cp": _version_of_cp()},
            results=results,
            skipped=skipped,
        )


def _version_of_cp() -> str:
    ran = subprocess.run(["cp", "--version"], capture_output=True, text=True, check=False)
    return ran.stdout.partition("\n")[0].removeprefix("cp ") or "unknown"


def _open_source(source: Path) -> tuple[Path, int, bool]:
    """Return where the given checkpoint lies, its bytes, and whether torch's DCP tools read it."""
    from ckptool.commands.open import open_checkpoint

    opened = open_checkpoint(source)
    path = Path(str(opened.path)).absolute()
    return path, _count_bytes(path), opened.format.name == "dcp"


def _walk_files(path: Path) -> Iterator[Path]:
    yield from [path] if path.is_file() else (file for file in path.rglob("*") if file.is_file())


def _count_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in _walk_files(path))


def _prepare_paths(
    rows: tuple[Row, ...],
    opened: Path | None,
    size: int,
    scratch: Path,
    has_torch: bool,
    progress: Progress,
) -> dict[str, str]:
    """Return what the placeholders of the rows stand for; write checkpoints that are missing."""
    outputs = scratch / "outputs"
    outputs.mkdir()
    paths = {"{target}": str(outputs / "target"), "{result}": str(outputs / "result")}
    tasks: dict[str, tuple[str, ...]] = {}
    if opened is not None:
        paths["{source}"] = str(opened)
    else:
        for mark, times in {"{source}": 1.0, **OTHERS}.items():
            tasks[mark] = ("write-wide" if mark == "{wide}" else "write", str(int(size * times)))
    if has_torch:
        tasks |= {"{light}": ("write", str(_LIGHT_BYTES)), "{many}": ("write-many", *_MANY)}
    used = {"{source}"} | {word for row in rows for word in row.command}
    for mark, (task, *words) in tasks.items():
        if mark in used:
            progress("writing " + _describe(*words))
            paths[mark] = str(scratch / mark.strip("{}"))
            run_sample((*PROGRAM, task, paths[mark], *words))
    paths.setdefault("{light}", paths["{source}"])
    return paths


def _describe(number: str, ranks: str | None = None) -> str:
    if ranks is not None:
        return f"what {ranks} ranks save of {number} tensors"
    return f"a checkpoint of {int(number):,} bytes with torch on {RANKS} gloo ranks"


def _obstacle(row: Row, paths: Mapping[str, str], *, has_torch: bool, dcp: bool) -> str | None:
    """Return why a row cannot be measured here, or None."""
    absent = {"{many}", *OTHERS}.intersection(row.command) - paths.keys()
    if row.torch and not has_torch:
        return "torch is not installed"
    if row.torch and "{source}" in row.command and not dcp:
        return "torch's own tools read only its DCP format"
    if "{many}" in absent:
        return "torch is not installed to write a checkpoint"
    return "no checkpoint of another size is made beside a given one" if absent else None


def _measure(
    rows: tuple[Row, ...],
    paths: Mapping[str, str],
    repeat: int,
    skipped: dict[str, str],
    progress: Progress,
) -> tuple[RowResult, ...]:
    """Measure every row once a round; a torch row that fails is left out with its error."""
    samples: dict[str, list[Sample]] = {row.name: [] for row in rows}
    for number in range(1, repeat + 1):
        for row in rows:
            if row.name in skipped:
                continue
            progress(f"round {number} of {repeat}: {row.name}")
            try:
                samples[row.name].append(_measure_once(row, paths))
            except TransferError as error:
                if not row.torch:
                    raise
                skipped[row.name] = error.message
    measured = [row for row in rows if row.name not in skipped]
    return tuple(
        RowResult(r, tuple(samples[r.name]), _imports_torch(r, paths), _moved_bytes(r, paths))
        for r in measured
    )


def _moved_bytes(row: Row, paths: Mapping[str, str]) -> int:
    """Return the bytes of the checkpoint that a row moves, to a target or into memory."""
    moves = any("{target}" in word or word == "{result}" for word in row.command)
    return _count_bytes(_sources(row, paths)[0]) if moves else 0


def _sources(row: Row, paths: Mapping[str, str]) -> list[Path]:
    """Return where the large checkpoints lie that a row reads."""
    return [Path(paths[mark]) for mark in ("{source}", *OTHERS) if mark in row.command]


def _measure_once(row: Row, paths: Mapping[str, str]) -> Sample:
    """Take one sample of a row; its output is removed."""
    outputs = Path(paths["{target}"]).parent
    os.sync()
    for checkpoint in _sources(row, paths):
        _warm_cache(checkpoint)
    try:
        sample = run_sample(_fill(row.command, paths))
        if row.measure != "load":
            return sample
        result = json.loads(Path(paths["{result}"]).read_text())
        return replace(sample, load=result["seconds"], read_bytes=result["nbytes"])
    finally:
        shutil.rmtree(outputs)
        outputs.mkdir()


def _warm_cache(checkpoint: Path) -> None:
    """Read a checkpoint, so that no row pays for what the page cache gave up in the meantime."""
    for file in _walk_files(checkpoint):
        with open(file, "rb") as stream:
            while stream.read(1 << 20):
                pass


def _fill(command: tuple[str, ...], paths: Mapping[str, str]) -> list[str]:
    """Put paths for placeholders."""
    return [re.sub(r"\{\w+\}", lambda mark: paths[mark[0]], word) for word in command]


def _imports_torch(row: Row, paths: Mapping[str, str]) -> bool | None:
    """Return whether a command that is measured in CPU seconds loads torch, by Python's account."""
    if row.measure != "cpu" or row.torch:
        return None
    python, *words = _fill(row.command, paths)
    ran = subprocess.run(
        [python, "-X", "importtime", *words], capture_output=True, text=True, check=True
    )
    modules = (line.rpartition("|")[2].strip() for line in ran.stderr.splitlines())
    return any(module == "torch" for module in modules)


_LAUNCHER = """
import os, sys, time
quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
begin = time.perf_counter()
pid = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=quiet)
_, status, usage = os.wait4(pid, 0)
wall = time.perf_counter() - begin
print(os.waitstatus_to_exitcode(status), wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
"""
"""Starts the command and waits. A peak counts from the parent's size, so the parent is small."""


def run_sample(command: Sequence[str]) -> Sample:
    """Run a command to its end and return what it took.

    TransferError with its own words where it fails. The command runs in a process group of its own,
    which is killed should this process be interrupted.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _LAUNCHER, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        usage, words = process.communicate()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()  # ends when the last of the session has closed its stderr
        raise
    if process.returncode or not usage.startswith("0 "):
        code = (usage.split() or [str(process.returncode)])[0]
        raise TransferError(f"{' '.join(command)} ended with {code}: {_reason(words)}")
    wall, cpu, peak = map(float, usage.split()[1:])
    return Sample(wall, cpu, int(peak) * (1 if sys.platform == "darwin" else 1024))


def _reason(words: str) -> str:
    """Return the line of stderr that tells why a command failed."""
    lines = words.strip().splitlines() or ["no error message"]
    return next((line for line in lines if line.startswith("error: ")), lines[-1])
