"""Where rows are measured: the values of their placeholders, and samples of them all in turn."""

from __future__ import annotations

import compileall
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from msgspec.structs import replace

import ckptool
from benchmarks import page_cache
from benchmarks.page_cache import walk_files
from benchmarks.report import RowResult
from benchmarks.rows import OTHERS, Row
from benchmarks.samples import Sample, isolated_environment, run_sample
from ckptool.commands.bench.machine import require_disk
from ckptool.errors import TransferError

Progress = Callable[[str], None]
_PACKAGE = Path(ckptool.__file__).parent
_LARGE = 1 << 28
"""Bytes of checkpoints from which it matters where what a command writes finds memory."""


class Scene:
    """Checkpoints on a disk; what a command writes lies beside ``{target}``."""

    def __init__(
        self, paths: Mapping[str, str], large: tuple[str, ...] = ("{source}", *OTHERS)
    ) -> None:
        self.paths = paths
        self._large = large
        self.environment: Mapping[str, str] = isolated_environment()

    def command(self, row: Row) -> list[str]:
        """Return a row's command, with paths for placeholders."""
        return [re.sub(r"\{\w+\}", lambda mark: self.paths[mark[0]], word) for word in row.command]

    def moved_bytes(self, row: Row) -> int:
        """Return the bytes of the checkpoint that a row moves, to a target or into memory."""
        moves = any("{target}" in word or word == "{result}" for word in row.command)
        return count_bytes(self._sources(row)[0]) if moves else 0

    def take_sample(self, row: Row) -> Sample:
        """Take one sample of a row; its output is removed."""
        outputs, sources = Path(self.paths["{target}"]).parent, self._sources(row)
        os.sync()
        for checkpoint in sources if row.cold else ():
            page_cache.drop(checkpoint)
        if sum(map(count_bytes, sources)) > _LARGE:
            self._filler.fill()
        for checkpoint in () if row.cold else sources:
            page_cache.warm(checkpoint)
        try:
            sample = run_sample(self.command(row), self.environment)
            if row.measure != "load":
                return sample
            return replace(sample, **json.loads(Path(self.paths["{result}"]).read_text()))
        finally:
            shutil.rmtree(outputs)
            outputs.mkdir()

    def imports_torch(self, row: Row) -> bool | None:
        """Return whether a command measured in CPU seconds imports torch, as Python reports.

        None of those that read large checkpoints, and of what needs torch.
        """
        if row.measure != "cpu" or "torch" in row.needs or self._sources(row):
            return None
        python, *words = self.command(row)
        ran = subprocess.run(
            [python, "-X", "importtime", *words],
            capture_output=True,
            text=True,
            check=True,
            env=self.environment,
        )
        modules = (line.rpartition("|")[2].strip() for line in ran.stderr.splitlines())
        return any(module == "torch" for module in modules)

    @cached_property
    def _filler(self) -> page_cache.Filler:
        """A file beside what commands write."""
        return page_cache.Filler(Path(self.paths["{target}"]).parent.with_name("filler"))

    def _sources(self, row: Row) -> list[Path]:
        """Return where the large checkpoints lie that a row reads."""
        return [Path(self.paths[mark]) for mark in self._large if mark in row.command]


def count_bytes(path: Path) -> int:
    """Return the bytes of all files of a checkpoint."""
    return sum(file.stat().st_size for file in walk_files(path))


@contextmanager
def bench_folder(workdir: Path, nbytes: int) -> Iterator[Path]:
    """Make a folder below ``workdir`` for so many bytes, and remove it in every case.

    Raises Unsupported where the disk will not hold them.
    """
    require_disk(workdir, nbytes)
    with tempfile.TemporaryDirectory(prefix="ckptool-bench-", dir=workdir) as scratch:
        yield Path(scratch)


def without_packages(rows: Iterable[Row]) -> dict[str, str]:
    """Return the rows that need a package that is missing, by name, each with the reason."""
    reasons = {row.name: missing_package(row) for row in rows}
    return {name: reason for name, reason in reasons.items() if reason}


def missing_package(row: Row) -> str | None:
    """Return why a row cannot be measured, if a package that it needs is missing; else None."""
    missing = [name for name in row.needs if find_spec(name) is None]
    return f"{', '.join(missing)} is not installed" if missing else None


def measure(
    rows: tuple[Row, ...], scene: Scene, repeat: int, skipped: dict[str, str], progress: Progress
) -> tuple[RowResult, ...]:
    """Measure every row once per round; a failing row of a peer is left out with its error.

    The package is compiled first, as pip leaves it: where no byte code is kept
    (PYTHONDONTWRITEBYTECODE), each start of a checkout would take twice as long.
    """
    compileall.compile_dir(_PACKAGE, quiet=2)
    samples: dict[str, list[Sample]] = {row.name: [] for row in rows}
    for number in range(1, repeat + 1):
        for row in rows:
            if row.name in skipped or (row.once and number > 1):
                continue
            progress(f"round {number} of {repeat}: {row.name}")
            try:
                samples[row.name].append(scene.take_sample(row))
            except TransferError as error:
                if not row.needs and row.command[0] != "sh":  # dd: not every disk reads so
                    raise
                skipped[row.name] = error.message
    measured = [row for row in rows if row.name not in skipped]
    return tuple(
        RowResult(r, tuple(samples[r.name]), scene.imports_torch(r), scene.moved_bytes(r))
        for r in measured
    )
