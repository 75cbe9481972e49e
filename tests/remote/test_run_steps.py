"""A run's steps in a store, and written to one: convert --all-steps, verify --follow."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from conftest import case, run_command
from store_server import S3, s3, server

from ckptool.commands.verify import follow as module
from ckptool.engine.write import stage

SOURCE = case("dcp_base").path


def states(*words: object, code: int = 0) -> list[str]:
    done = run_command("convert", *words, "--all-steps", "--json")
    assert done.code == code, (done.stdout, done.stderr)
    return [step["state"] for step in json.loads(done.stdout)["steps"]]


def test_a_run_is_converted_from_and_to_a_store(s3: S3, tmp_path: Path) -> None:
    s3.put(SOURCE, "run/step-1")
    url = s3.put(SOURCE, "run/step-2").rpartition("/")[0]
    assert states(url, tmp_path / "out") == ["written", "written"]
    back = url.replace("/run", "/back")
    assert states(tmp_path / "out", back) == ["written", "written"]
    assert states(tmp_path / "out", back) == ["equal", "equal"]


def test_an_interrupted_step_in_a_store_is_continued(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put(SOURCE, "run/step-1")
    url = s3.put(SOURCE, "run/step-2").rpartition("/")[0]
    back = url.replace("/run", "/back")
    with monkeypatch.context() as patch:
        patch.setattr(stage.Stage, "commit", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run_command("convert", url, back, "--all-steps").code == 130
    assert states(url, back, "--resume") == ["written", "written"]
    assert states(url, back) == ["equal", "equal"]


def test_a_run_in_a_store_is_followed(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    url = s3.put(SOURCE, "run/step-1").rpartition("/")[0]
    things = iter([lambda: None, lambda: s3.put(SOURCE, "run/step-2"), lambda: None])

    def wait(seconds: float) -> None:
        assert seconds == 30
        thing = next(things, None)
        if thing is None:
            raise KeyboardInterrupt
        thing()

    monkeypatch.setattr(module, "follow", partial(module.follow, wait=wait))
    done = run_command("verify", url, "--follow")
    assert done.code == 0
    assert done.stdout.splitlines() == [f"OK     {url}/step-1", f"OK     {url}/step-2"]
