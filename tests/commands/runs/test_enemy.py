"""Prune as an enemy would: generated runs of every trainer, and a model of what must stay.

``make mutations`` makes many more cases; ``CKPTOOL_PRUNE_SEED`` is the first of them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import enemy_runs
import pytest
from enemy_runs import Case, run_case
from enemy_samples import Samples
from trials import trials

pytestmark = pytest.mark.trials
COUNT = trials(40)
SEED = int(os.environ.get("CKPTOOL_PRUNE_SEED", "0"))
PARTS = 4


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that other users may enter, too."""
    folder = Path(tempfile.mkdtemp(prefix="prune-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    return Samples(tmp_path_factory.mktemp("samples"))


def outcome(seed: int, samples: Samples, place: Path) -> Case:
    sandbox = place / str(seed)
    sandbox.mkdir()
    try:
        return run_case(seed, samples, sandbox)
    finally:
        shutil.rmtree(sandbox)


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_is_lost_that_must_stay(part: int, samples: Samples, place: Path) -> None:
    cases = [outcome(seed, samples, place) for seed in range(SEED + part, SEED + COUNT, PARTS)]
    wrong = [f"{case.text}\n    " + "\n    ".join(case.losses) for case in cases if case.losses]
    assert not wrong, f"{len(wrong)} of {len(cases)} cases:\n" + "\n".join(wrong)
    stayed = [f"{case.text}\n    {case.stayed}" for case in cases if case.stayed]
    assert not stayed, "nothing keeps these:\n" + "\n".join(stayed)
    assert sum(case.gone for case in cases) > (len(cases) / 4 if COUNT >= 100 else 0)


def test_a_careless_prune_is_noticed(
    samples: Samples, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that keeps the last name of each folder, as ``ls | head -n -1 | xargs rm -r`` does."""

    def keep_last_name(run: Path, options: object, notify: object) -> None:
        for path in sorted(run.iterdir())[:-1]:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    monkeypatch.setattr(enemy_runs, "prune", keep_last_name)
    cases = [outcome(seed, samples, place) for seed in range(20)]
    assert sum(bool(case.losses) for case in cases) > 10
