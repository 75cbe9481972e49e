"""--overwrite replaces a checkpoint, and nothing beside its files."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import SUFFIX, case, convert_to, read_back
from overwritten import FOREIGN, foreign_of, hidden, put_foreign, ready
from typer.testing import CliRunner

from ckptool.cli.app import app
from ckptool.commands.open import open_checkpoint
from ckptool.errors import TransferError, Unsupported, UsageError

SAMPLES = {
    "dcp": "dcp_fsdp2_tp",
    "hf": "hf_shards",
    "rank-local": "rank_experimental",
}


@pytest.mark.parametrize("to", ["dcp", "safetensors", "dcp-safetensors"])
@pytest.mark.parametrize("old", SAMPLES)
def test_what_no_checkpoint_holds_stays(old: str, to: str, out: Path) -> None:
    target = out / "run"
    shutil.copytree(case(SAMPLES[old]).path, target)
    put_foreign(target)
    before = {path.stat().st_ino for path in target.rglob("*.py")}
    convert_to(to, case("dcp_base").path, target, overwrite=True)
    assert foreign_of(target) == FOREIGN
    assert {path.stat().st_ino for path in target.rglob("*.py")} == before, "copied"
    shutil.rmtree(target / "src")
    assert read_back(to, target) == case("dcp_base").truth
    assert hidden(out) == []


def test_a_dry_run_says_what_stays(out: Path) -> None:
    target = out / "run"
    shutil.copytree(case("dcp_fsdp2_tp").path, target)
    put_foreign(target)
    before = sorted(target.rglob("*"))
    words = ["convert", str(case("dcp_base").path), str(target), "--to", "dcp", "--overwrite"]
    found = CliRunner().invoke(app, [*words, "--dry-run"])
    assert found.exit_code == 0
    for name in ("train.py", "src/", ".git/", "wandb/", "tokenizer.json"):
        assert name in found.stderr
    assert "distcp" not in found.stderr
    assert sorted(target.rglob("*")) == before
    found = CliRunner().invoke(app, [*words, "--dry-run", "--json", "-q"])
    assert "train.py" in " ".join(json.loads(found.stdout)["notes"])


@pytest.mark.parametrize("name", ["tokenizer.json", "merges.txt"])
def test_a_name_that_is_taken_is_refused(name: str, out: Path) -> None:
    """A file of the new one, and one that is not the old one's."""
    source, target = out / "source", out / "run"
    shutil.copytree(case("hf_shards").path, source)
    (source / name).write_bytes(b"of the model")
    shutil.copytree(case("dcp_base").path, target)
    (target / name).write_bytes(b"mine")
    with pytest.raises(Unsupported, match=f"{name}: not part of the checkpoint there"):
        convert_to("safetensors", source, target, overwrite=True)
    assert (target / name).read_bytes() == b"mine"
    assert read_back("dcp", target) == case("dcp_base").truth
    assert hidden(out) == []


def test_text_that_a_person_wrote_is_not_replaced_by_the_models(out: Path) -> None:
    source = out / "source"
    shutil.copytree(case("hf_shards").path, source)
    (source / "README.md").write_text("of the model")
    convert_to("safetensors", source, out / "m")
    convert_to("safetensors", source, out / "m", overwrite=True)
    (out / "m" / "README.md").write_text("my own")
    with pytest.raises(Unsupported, match=r"README\.md"):
        convert_to("safetensors", source, out / "m", overwrite=True)
    assert (out / "m" / "README.md").read_text() == "my own"


def test_what_would_be_read_as_a_part_of_the_new_one_is_named(out: Path) -> None:
    """The old one, of another format, did not read it."""
    import torch

    target = out / "run"
    shutil.copytree(case("dcp_fsdp2_tp").path, target)
    torch.save({"w": torch.ones(1), "of another": 1}, out / "s.pt")
    convert_to("hf", out / "s.pt", out / "other")
    shutil.copy(out / "other" / "model.extra.pt", target)
    with pytest.raises(TransferError, match=r"model\.extra\.pt.* would be read as part") as caught:
        convert_to("safetensors", case("hf_shards").path, target, overwrite=True)
    assert str(caught.value).count(str(target)) == 1
    assert str(caught.value.hint).startswith("move it away")
    assert read_back("dcp", target) == case("dcp_fsdp2_tp").truth


def test_nothing_is_left_where_no_folder_can_be_made(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))

    monkeypatch.setattr(Path, "mkdir", fails)
    with pytest.raises(Unsupported, match="cannot be written to"):
        ready(case("dcp_base").path, out / "m").run()
    assert list(out.iterdir()) == []


def test_a_folder_that_cannot_be_read_as_a_checkpoint_is_left(out: Path) -> None:
    target = out / "run"
    shutil.copytree(case("hf_shards").path, target)
    weights = next(target.glob("*.safetensors"))
    weights.write_bytes(b"\xff" * 64)
    (target / "train.py").write_text("mine")
    try:
        convert_to("dcp", case("dcp_base").path, target, overwrite=True)
    except Unsupported:
        assert weights.exists()
    assert (target / "train.py").read_text() == "mine"


def test_a_link_to_a_folder_is_not_replaced(out: Path) -> None:
    convert_to("dcp", case("dcp_base").path, out / "real")
    (out / "run").symlink_to("real")
    with pytest.raises(Unsupported, match="is a link"):
        convert_to("dcp", case("dcp_fsdp2_tp").path, out / "run", overwrite=True)
    assert read_back("dcp", out / "real") == case("dcp_base").truth


def test_a_kept_file_that_transformers_opens_first_ends_the_commit(out: Path) -> None:
    """Shards take the place of a torch checkpoint, and old weights lie beside it."""
    convert_to("dcp", case("dcp_base").path, out / "m")
    (out / "m" / "model.safetensors").write_bytes(b"old")
    before = {path.name: path.read_bytes() for path in (out / "m").iterdir()}
    with pytest.raises(TransferError, match=r"model\.safetensors: .*would be read"):
        convert_to("hf", case("dcp_base").path, out / "m", overwrite=True, max_shard_size=1_000)
    assert {path.name: path.read_bytes() for path in (out / "m").iterdir()} == before


def test_a_file_that_is_not_a_checkpoint_is_not_replaced(out: Path) -> None:
    (out / "m.txt").write_bytes(b"dear diary")
    with pytest.raises(UsageError, match="whose name ends in one of"):
        convert_to("torch-save", case("dcp_base").path, out / "m.txt", overwrite=True)
    assert (out / "m.txt").read_bytes() == b"dear diary"


def test_what_ckptool_wrote_for_megatron_is_replaced(out: Path) -> None:
    import torch

    torch.save({"embedding.word_embeddings.weight": torch.ones(4, 2)}, out / "s.pt")
    for more in ({}, {"overwrite": True}):
        convert_to("megatron-torch_dist", out / "s.pt", out / "m", **more)
    assert (out / "m" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert hidden(out) == []


def test_a_side_file_goes_with_the_old_one(out: Path) -> None:
    import torch

    torch.save({"w": torch.ones(2), "step": 3}, out / "s.pt")
    torch.save({"w": torch.zeros(2)}, out / "t.pt")
    convert_to("safetensors", out / "s.pt", out / "m.safetensors")
    assert (out / "m.extra.pt").exists()
    convert_to("safetensors", out / "t.pt", out / "m.safetensors", overwrite=True)
    assert not (out / "m.extra.pt").exists()
    assert hidden(out) == []


@pytest.mark.parametrize("more", [{}, {"more": 5}])
@pytest.mark.parametrize(("to", "name"), [("safetensors", "m.safetensors"), ("hf", "run")])
def test_a_side_file_of_another_stays(to: str, name: str, more: dict[str, Any], out: Path) -> None:
    import torch

    torch.save({"w": torch.ones(2), **more}, out / "s.pt")
    convert_to(to, out / "s.pt", out / name)
    side = out / "m.extra.pt" if to == "safetensors" else out / "run" / "model.extra.pt"
    torch.save({"notes": [1, 2]}, side)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    if to == "hf" and not more:
        convert_to(to, out / "s.pt", out / name, overwrite=True)
        assert "model.extra.pt" not in open_checkpoint(out / name).catalog.files
        assert side.read_bytes() == before[side]
        return
    with pytest.raises(Unsupported, match=r"extra\.pt"):
        convert_to(to, out / "s.pt", out / name, overwrite=True)
    assert {path: path.read_bytes() for path in before} == before


def test_a_side_file_is_never_the_source(out: Path) -> None:
    import torch

    torch.save({"w": torch.ones(2), "step": 3}, out / "s.pt")
    convert_to("safetensors", out / "s.pt", out / "m.safetensors")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    pairs = (("m.extra.pt", "m.safetensors"), ("m.safetensors", "m.extra.pt"))
    for (source, target), to in zip(pairs, ("safetensors", "torch-save"), strict=True):
        with pytest.raises(UsageError, match="must not contain one another"):
            convert_to(to, out / source, out / target, overwrite=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_pipe_is_not_replaced(out: Path) -> None:
    os.mkfifo(out / "m.pt")
    with pytest.raises(Unsupported, match="not a checkpoint, and is not replaced"):
        convert_to("torch-save", case("dcp_base").path, out / "m.pt", overwrite=True)
    assert (out / "m.pt").is_fifo()


def test_a_name_that_is_not_a_text_can_be_written_to(out: Path) -> None:
    target = out / os.fsdecode(b"\xff.pt")
    convert_to("torch-save", case("dcp_base").path, target)
    assert read_back("torch-save", target) == case("dcp_base").truth


@pytest.mark.parametrize("target", SUFFIX)
def test_overwriting_ones_own_output(target: str, out: Path) -> None:
    path = out / f"m{SUFFIX[target]}"
    for name in ("hf_shards", "dcp_base", "dcp_base"):
        convert_to(target, case(name).path, path, overwrite=True)
    assert read_back(target, path) == case("dcp_base").truth


@pytest.mark.parametrize("exchanges", [True, False])
def test_what_was_private_stays_private(
    exchanges: bool, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr("ckptool.engine.write.commit.exchange", lambda *_: False)
    target = out / "run"
    for _ in range(2):
        convert_to("dcp", case("dcp_base").path, target, overwrite=True)
        target.chmod(0o2750)
        (target / ".metadata").chmod(0o600)
    convert_to("dcp", case("dcp_base").path, target, overwrite=True)
    modes = [path.stat().st_mode & 0o7777 for path in (target, target / ".metadata")]
    assert modes == [0o2750, 0o600]
    assert read_back("dcp", target) == case("dcp_base").truth


def test_an_owner_that_this_machine_does_not_know(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that maps few users: the mode is kept all the same."""

    def refuse(*args: object) -> None:
        raise OSError(errno.EINVAL, "invalid argument")

    path = out / "m.safetensors"
    convert_to("safetensors", case("dcp_base").path, path)
    path.chmod(0o640)
    real = os.lstat
    monkeypatch.setattr(os, "chown", refuse)
    monkeypatch.setattr(os, "lstat", lambda at: owned(real(at), 7) if at == path else real(at))
    convert_to("safetensors", case("hf_shards").path, path, overwrite=True)
    assert path.stat().st_mode & 0o777 == 0o640


def owned(status: os.stat_result, user: int) -> os.stat_result:
    """A status as another user's file has it."""
    return os.stat_result([*status[:4], user, *status[5:10]])


def test_a_file_keeps_its_mode(out: Path) -> None:
    path = out / "m.safetensors"
    for mode in (0o640, 0o400):
        convert_to("safetensors", case("dcp_base").path, path, overwrite=True)
        path.chmod(mode)
    convert_to("safetensors", case("hf_shards").path, path, overwrite=True)
    assert path.stat().st_mode & 0o777 == 0o400


def test_notes_are_for_what_is_written(out: Path) -> None:
    """What is refused says why, and nothing of what would have been written."""
    words = ["convert", str(case("dcp_base").path), str(out / "m"), "--to", "hf", "--no-fsync"]
    written = CliRunner().invoke(app, words)
    refused = CliRunner().invoke(app, words)
    assert "note:" in written.stderr
    assert "already exists" in str(refused.exception)
    assert refused.stderr == ""
