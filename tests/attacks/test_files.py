"""Hostile folders: links, devices, pipes, odd names, and files that change while they are read."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import attack_build as b
import pytest
from attack_harness import attack, attack_all
from honest_files import W, require_honest

import ckptool
from ckptool.commands.convert import prepare
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.files import text_of
from ckptool.commands.options.target import ConvertOptions
from ckptool.commands.verify.manifest import schema
from ckptool.errors import CkptoolError, Damaged, UsageError

STATE = b.program(b.dct(w=b.tensor()))


def honest(folder: Path) -> Path:
    b.torch_file(folder / "model.pt", STATE)
    return folder


def with_entry(add: Callable[[Path], object]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        honest(folder)
        add(folder)
        return folder

    return make


def bound_socket(folder: Path) -> None:
    here = os.getcwd()
    os.chdir(folder)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("model.sock.pt")
    finally:
        os.chdir(here)


def fan_out(folder: Path) -> None:
    """Six levels of folders, each of 40 links to the next: 40**5 ways, no file."""
    last = folder / "level6"
    last.mkdir()
    for level in range(5, 0, -1):
        here = folder / f"level{level}"
        here.mkdir()
        for i in range(40):
            (here / str(i)).symlink_to(last)
        last = here


def many_folders(folder: Path) -> None:
    for i in range(3000):
        (folder / f"run{i}").mkdir()
        for j in range(3):
            (folder / f"run{i}" / f"log{j}.txt").touch()


def squares(folder: Path) -> None:
    """Digits that ``isdigit`` knows and ``int`` does not."""
    for name in ("\u00b2", "\u2460", "step\u00b9"):
        honest(folder / name)


def circle(folder: Path) -> None:
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")


def link_to_pipe(path: Path, pipe: Path) -> None:
    os.mkfifo(pipe)
    path.symlink_to(pipe)


def empty_files(folder: Path) -> None:
    for suffix in ("pt", "bin", "safetensors", "distcp", "json"):
        (folder / f"e.{suffix}").touch()


def folders_like_files(folder: Path) -> None:
    for name in (".metadata", "a.safetensors", "checkpoint_0.pt"):
        (folder / name).mkdir()


def empty_folders(folder: Path) -> Path:
    for number in range(9):
        (folder / str(number) / "x").mkdir(parents=True)
    return folder


def sparse(path: Path, begin: bytes) -> None:
    """Write a file of a terabyte, nearly all of it a hole."""
    path.write_bytes(begin)
    os.truncate(path, 1 << 40)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def file_as_parent(path: Path) -> None:
    path.parent.rmdir()
    path.parent.touch()


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "honest": honest,
    "link to the folder itself": with_entry(lambda f: (f / "again").symlink_to(f)),
    "link to itself": with_entry(lambda f: (f / "loop.pt").symlink_to("loop.pt")),
    "links in a circle": with_entry(circle),
    "link to the root": with_entry(lambda f: (f / "root").symlink_to("/proc/self/fd")),
    "dangling link": with_entry(lambda f: (f / "gone.pt").symlink_to("nowhere")),
    "links that fan out": with_entry(fan_out),
    "pipe": with_entry(lambda f: os.mkfifo(f / "pipe.pt")),
    "pipe called .metadata": with_entry(lambda f: os.mkfifo(f / ".metadata")),
    "link to a pipe": with_entry(lambda f: link_to_pipe(f / "p.pt", f.parent / "p")),
    "socket": with_entry(bound_socket),
    "link to /dev/zero": with_entry(lambda f: (f / "zero.bin").symlink_to("/dev/zero")),
    "link to /dev/stdin": with_entry(lambda f: (f / "x.pt").symlink_to("/dev/stdin")),
    "empty files of every kind": with_entry(empty_files),
    "folders called like files": with_entry(folders_like_files),
    "names of control characters": with_entry(lambda f: honest(f / "\x1b[2J\n[/red]")),
    "names that are no utf-8": with_entry(
        lambda f: honest(Path(os.fsdecode(bytes(f) + b"/\xff\xfe")))
    ),
    "names of odd digits": with_entry(squares),
    "names of 255 bytes": with_entry(lambda f: honest(f / ("n" * 255))),
    "3,000 folders": with_entry(many_folders),
    "nothing but empty folders": empty_folders,
}


@pytest.mark.parametrize("name", list(FOLDERS))
def test_folder(name: str, tmp_path: Path) -> None:
    source = FOLDERS[name](tmp_path / "src" / "ck")
    outcome = attack(source, to=("safetensors", "torch-save"))
    require_honest(outcome)
    if name == "honest":
        assert outcome.tensors or outcome.kind == "ok", str(outcome)


PATHS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a link to a pipe": lambda p: link_to_pipe(p, p.with_name(f"{p.name}.p")),
    "a device": lambda p: p.symlink_to("/dev/zero"),
    "a terminal's device": lambda p: p.symlink_to("/dev/full"),
    "a link to itself": lambda p: p.symlink_to(p.name),
    "a link to nothing": lambda p: p.symlink_to("nothing"),
    "a file under a file": lambda p: None,
    "a sparse file of a terabyte": lambda p: sparse(p, b""),
    "a sparse zip of a terabyte": lambda p: sparse(p, b.torch_zip(STATE)),
    "a sparse legacy file of a terabyte": lambda p: sparse(p, b.legacy(STATE)[:100]),
}


@pytest.mark.parametrize("name", list(PATHS))
def test_path(name: str, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    path = tmp_path / "src" / "x.pt"
    PATHS[name](path)
    outcome = attack(path, to=("safetensors",))
    assert outcome.kind == "error", str(outcome)
    assert outcome.exit_code == 3, str(outcome)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("what", ["the file", "its folder", "a folder beside it"])
def test_unreadable(what: str, tmp_path: Path) -> None:
    folder = honest(tmp_path / "src" / "ck")
    (folder / "private").mkdir()
    shut = {"the file": folder / "model.pt", "its folder": folder}.get(what, folder / "private")
    shut.chmod(0)
    try:
        outcome = attack(folder / "model.pt", to=("safetensors",))
    finally:
        shut.chmod(0o700)
    assert outcome.answered, str(outcome)
    if what == "a folder beside it":
        assert outcome.kind == "ok", str(outcome)


def as_nobody(work: Callable[[], int]) -> int:
    """The exit code of ``work`` in a child that gave up root."""
    child = os.fork()
    if not child:
        code = 99
        try:
            os.setgid(65534)
            os.setuid(65534)
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("what", ["the file", "a folder beside it"])
def test_unreadable_for_another_user(what: str, tmp_path: Path) -> None:
    """As in /tmp, where folders of other users lie beside one's own file."""
    folder = honest(tmp_path / "src" / "ck")
    (folder / "private").mkdir(mode=0o700)
    (folder / "model.pt").chmod(0 if what == "the file" else 0o644)
    for parent in [folder, *folder.parents][:-2]:
        if parent.owner() == "root" and not parent.stat().st_mode & 0o001:
            parent.chmod(0o755)

    def work() -> int:
        try:
            open_checkpoint(folder / "model.pt")
        except CkptoolError as error:
            return error.exit_code
        return 0

    assert as_nobody(work) == (3 if what == "the file" else 0)


CHANGES: dict[str, Callable[[Path], object]] = {
    "shrinks": lambda p: os.truncate(p, 100),
    "becomes empty": lambda p: os.truncate(p, 0),
    "vanishes": lambda p: p.unlink(),
    "becomes a folder": folder_instead,
    "other bytes": lambda p: p.write_bytes(p.read_bytes().replace(b.WEIGHT, b.WEIGHT[::-1])),
}


def torch_source(folder: Path) -> Path:
    return b.torch_file(folder / "x.pt", STATE)


def dcp_source(folder: Path) -> Path:
    return b.one_tensor_dcp(folder / "ck") / "__0_0.distcp"


@pytest.mark.parametrize("source", [torch_source, dcp_source])
@pytest.mark.parametrize("change", list(CHANGES))
def test_source_that_changes_after_the_scan(
    change: str, source: Callable[[Path], Path], tmp_path: Path
) -> None:
    file = source(tmp_path / "src")
    path = file if file.suffix == ".pt" else file.parent
    target = tmp_path / "out.safetensors"
    prepared = prepare(path, target, ConvertOptions(to="safetensors"))
    CHANGES[change](file)
    with pytest.raises(CkptoolError) as caught:
        prepared.run()
    assert caught.value.exit_code in (3, 5)
    assert not target.exists()


TARGETS: dict[str, Callable[[Path], object]] = {
    "exists": lambda p: p.touch(),
    "is a folder": lambda p: p.mkdir(),
    "is a dangling link": lambda p: p.symlink_to("nowhere"),
    "is a link to itself": lambda p: p.symlink_to(p.name),
    "is a pipe": os.mkfifo,
    "has a file for a folder": file_as_parent,
}


@pytest.mark.parametrize("name", list(TARGETS))
@pytest.mark.parametrize("suffix", [".safetensors", ""])
def test_target(name: str, suffix: str, tmp_path: Path) -> None:
    path = b.torch_file(tmp_path / "src" / "x.pt", STATE)
    target = tmp_path / "to" / f"out{suffix}"
    target.parent.mkdir()
    TARGETS[name](target)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CkptoolError) as caught:
        prepare(path, target, ConvertOptions(to="safetensors")).run()
    assert caught.value.exit_code in (2, 4, 5)
    assert sorted(tmp_path.rglob("*")) == before, "something was left"


def test_nothing_outside_the_target_is_written(tmp_path: Path) -> None:
    """Names that climb are names in the output too, not paths."""
    names = ["../up", "/abs", "a/../../b", "..", "con\0", "x" * 300]
    state = b.pairs(*((b.text(name), b.tensor()) for name in names))
    path = b.torch_file(tmp_path / "src" / "x.pt", b.program(state))
    outcomes = attack_all([path], to=("safetensors",))
    assert [outcome.kind for outcome in outcomes] == ["ok"], str(outcomes[0])
    assert set(outcomes[0].tensors.values()) == {W}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src", "src.target"]
    assert sorted(p.name for p in (tmp_path / "src").iterdir()) == ["x.pt"]


def sound(folder: Path) -> Path:
    path = folder / "m.safetensors"
    path.write_bytes(b.safetensors({"w": b.entry()}))
    return path


def test_a_file_that_an_option_names_may_have_no_end() -> None:
    with pytest.raises(UsageError, match="more than 67,108,864 bytes"):
        text_of(Path("/dev/zero"), "--plan")


def test_a_manifest_may_have_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "_LARGEST", 1 << 20)
    with pytest.raises(Damaged, match="too large for a manifest"):
        ckptool.verify(sound(tmp_path), manifest="/dev/zero")
