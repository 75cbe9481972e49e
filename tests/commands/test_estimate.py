"""How long a command says that it takes, before it starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import case, run_command

from ckptool.commands.bench.run import PreparedBench
from ckptool.commands.convert import prepare
from ckptool.commands.options.target import ConvertOptions
from ckptool.commands.transfer import estimate as estimates
from ckptool.commands.transfer import transfer
from ckptool.commands.transfer.estimate import Estimate
from ckptool.core.text import duration_range
from ckptool.storage.local import LocalReader

SOURCE = case("dcp_fsdp2").path
COMMANDS = (
    ("convert", SOURCE, "out.pt"),
    ("reshard", SOURCE, "out", "--mesh", "2"),
    ("merge", "out", "--average", SOURCE, SOURCE),
)


@pytest.mark.parametrize(
    ("least", "most", "text"),
    [
        (12, 33, "10 to 35 s"),
        (40, 150, "40 s to 2 min"),
        (130, 290, "2 to 5 min"),
        (3000, 9000, "50 min to 2 h"),
        (9000, 36_000, "2 to 10 h"),
    ],
)
def test_a_range_of_time(least: float, most: float, text: str) -> None:
    assert duration_range(least, most) == text


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize("dry", [True, False], ids=["dry run", "run"])
def test_a_command_says_how_long_it_takes_before_it_starts(
    command: tuple[object, ...], dry: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        transfer, "estimate", lambda *a: Estimate(130, 290, 5 << 30, float(1 << 28))
    )
    said = "about 2 to 5 min: 5.00 GiB to read and write, at 256 MiB/s, as the source is read now"
    words = (*command, *(["--dry-run"] if dry else []))
    assert said not in run_command(*words, "--dry-run", "--quiet", cwd=tmp_path).stderr
    done = run_command(*words, "--json", cwd=tmp_path)
    assert said in done.stderr.splitlines()
    assert "about" not in done.stdout


def test_a_probe_reads_all_over_and_less_than_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimates, "WORTH", 0)
    monkeypatch.setattr(estimates, "SPAN", 64)
    read: list[tuple[str, int, int]] = []
    really = LocalReader.read_into

    def note(self: LocalReader, file: str, offset: int, buffer: memoryview) -> None:
        read.append((file, offset, len(buffer)))
        really(self, file, offset, buffer)

    monkeypatch.setattr(LocalReader, "read_into", note)
    planned = prepare(SOURCE, tmp_path / "out.pt", ConvertOptions())
    read.clear()
    found = planned.estimate()
    assert found is not None
    assert 0 < found.least < found.most
    assert found.moved == planned.report.read_bytes + 2 * planned.report.write_bytes
    assert len({file for file, _, _ in read}) > 1
    assert len({*read}) == len(read)
    assert list(tmp_path.iterdir()) == []


def test_a_probe_that_cannot_read_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimates, "WORTH", 0)
    planned = prepare(SOURCE, tmp_path / "out.pt", ConvertOptions())

    def fail(*arguments: Any) -> None:
        raise OSError("gone")

    monkeypatch.setattr(LocalReader, "read_into", fail)
    assert planned.estimate() is None


def test_nothing_is_probed_where_the_work_is_small(tmp_path: Path) -> None:
    assert prepare(SOURCE, tmp_path / "out.pt", ConvertOptions()).estimate() is None


def test_a_benchmark_says_how_long_it_takes_once_it_has_written() -> None:
    settings: Any = SimpleNamespace(repeat=5, nbytes=1 << 30)
    prepared = PreparedBench(settings, [], ["a", "b"], None)  # type: ignore[arg-type]
    least, most = prepared.estimate({"write": float(1 << 28)}) or (0.0, 0.0)
    assert (least, most) == (2 * (4 + 28), 2 * (30 + 5 * 28))
    assert prepared.estimate({"write": None, "upload": None}) is None
