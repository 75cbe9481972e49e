"""Interrupted after the commit: the message says that the target stands, and what is left."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import case

from ckptool.cli import _run
from ckptool.commands.transfer.transfer import Transfer
from ckptool.engine.write.commit import FileCommit, FolderCommit
from ckptool.engine.write.disk_target import DiskTarget
from ckptool.storage.commit_note import NoteFile

SOURCE = str(case("dcp_base").path)
ENDINGS = {130: KeyboardInterrupt(), 143: SystemExit(143)}
AFTER: dict[str, list[tuple[type, str]]] = {
    "replaced": [(FolderCommit, "replace"), (FileCommit, "replace")],
    "cleared": [(FolderCommit, "clear"), (FileCommit, "clear")],
    "forgotten": [(NoteFile, "remove")],
    "closed": [(DiskTarget, "close")],
    "reported": [(Transfer, "_written")],
}
COMMANDS = {
    "file": ["convert", SOURCE, "m.safetensors"],
    "folder": ["convert", SOURCE, "m", "--to", "hf"],
    "reshard": ["reshard", SOURCE, "m", "--mesh", "2"],
}


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ended_after(real: Callable[..., Any], ending: BaseException) -> Callable[..., Any]:
    def call(*args: Any, **more: Any) -> Any:
        real(*args, **more)
        raise ending

    return call


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command that ends after some calls; return its exit code and last line on stderr."""

    def run(words: list[str], after: list[tuple[type, str]], ending: BaseException) -> Any:
        ending.__notes__ = []
        with monkeypatch.context() as patched:
            patched.setattr(sys, "argv", ["ckptool", *words])
            for owner, name in after:
                patched.setattr(owner, name, ended_after(getattr(owner, name), ending))
            code = _run()
        return code, capsys.readouterr().err.splitlines()[-1:]

    return run


@pytest.mark.parametrize("code", ENDINGS)
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_target_that_stands_is_said_to_be_complete(
    command: str, after: str, code: int, said: Any
) -> None:
    words = COMMANDS[command]
    for more in ([], ["--overwrite"]):
        done, (line,) = said([*words, *more], AFTER[after], ENDINGS[code])
        assert done == code
        assert line.startswith(f"interrupted: {words[2]} is complete and verified")
        assert ("the next command that writes there" in line) is (after in ("replaced", "cleared"))
        assert "--resume" not in line
        assert said(["verify", words[2]], [], ENDINGS[code])[0] == 0
        assert said([*words, "--overwrite", "-q"], [], ENDINGS[code]) == (0, [])
    assert [path.name for path in Path().iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("after", AFTER)
def test_what_the_parts_wrote_stands_once_it_is_finished(after: str, said: Any) -> None:
    words = COMMANDS["reshard"]
    for number in "12":
        assert said([*words, "--part", f"{number}/2", "-q"], [], ENDINGS[130]) == (0, [])
    _, (line,) = said([*words, "--finish"], AFTER[after], ENDINGS[130])
    assert line.startswith("interrupted: m is complete and verified")
    assert "kept" not in line


def test_what_was_not_verified_is_named_with_the_command_that_does(said: Any) -> None:
    words = [*COMMANDS["folder"], "--no-verify"]
    _, (line,) = said(words, AFTER["cleared"], ENDINGS[130])
    assert line.startswith("interrupted: m is complete, but not verified: `ckptool verify ")
    assert f"{SOURCE} --against m`, with the same options" in line


def test_before_the_commit_nothing_stands(said: Any) -> None:
    written = [(Transfer, "_verify")]
    _, (line,) = said(COMMANDS["folder"], written, ENDINGS[130])
    assert "--resume" in line
    assert "complete" not in line
    assert not Path("m").exists()


def test_interrupted_while_it_is_shown(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptool.render import convert

    written = [(convert, "show_convert")]
    _, (line,) = said(COMMANDS["folder"], written, ENDINGS[130])
    assert line == "interrupted: m is complete and verified"
    words = [*COMMANDS["reshard"][:2], "parts", "--mesh", "2", "--part", "1/2"]
    _, (line,) = said(words, [(convert, "show_part")], ENDINGS[130])
    assert line == "interrupted: part 1 of 2 of parts is complete"
    words = [*COMMANDS["folder"][:2], "other", "--to", "hf", "--dry-run"]
    _, (line,) = said(words, written, ENDINGS[130])
    assert line == "interrupted"
