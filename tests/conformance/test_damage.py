"""Damaged and hostile checkpoints: the right error, nothing at the target, no code run."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import case, convert_to, read_back
from recipes.damage import DAMAGE
from recipes.hostile import HOSTILE
from trials import trials

import ckptool
import ckptool.errors
from ckptool.commands.open import open_checkpoint
from ckptool.errors import CkptoolError, Damaged

REPORTED = [name for name, one in DAMAGE.items() if one.answer not in ("note", "silent")]
AT_ONCE = [name for name in REPORTED if not DAMAGE[name].conversion]
TARGETS = ("safetensors", "torch-save", "dcp", "dcp-safetensors")


def damaged_copy(name: str, copy_of: Callable[[str], Path]) -> Path:
    folder = copy_of(DAMAGE[name].source)
    DAMAGE[name].apply(folder)
    return folder


@pytest.mark.parametrize("name", REPORTED)
def test_damage_is_reported_and_nothing_written(
    name: str, copy_of: Callable[[str], Path], out: Path
) -> None:
    source = damaged_copy(name, copy_of)
    for target in TARGETS:
        path = out / ("m.pt" if target == "torch-save" else "m")
        with pytest.raises(getattr(ckptool.errors, DAMAGE[name].answer)) as caught:
            convert_to(target, source, path)
        assert caught.value.exit_code == 3
        text = f"{caught.value.message} {caught.value.hint}"
        assert [word for word in DAMAGE[name].words if word not in text] == [], text
        assert not list(out.iterdir())


@pytest.mark.parametrize("name", REPORTED)
def test_damage_is_no_part_of_an_average(
    name: str, copy_of: Callable[[str], Path], out: Path
) -> None:
    source = damaged_copy(name, copy_of)
    with pytest.raises(getattr(ckptool.errors, DAMAGE[name].answer)) as caught:
        ckptool.merge(out / "m", source, source, average=True, with_optimizer=True, to="dcp")
    assert caught.value.exit_code == 3
    assert not list(out.iterdir())


def test_what_is_damaged_can_be_excluded(copy_of: Callable[[str], Path], out: Path) -> None:
    source = damaged_copy("chunk_gap", copy_of)
    convert_to("safetensors", source, out / "m", drop=("w",))
    whole = case("dcp_base").truth
    assert read_back("safetensors", out / "m") == {n: whole[n] for n in whole if n != "w"}


@pytest.mark.parametrize("name", AT_ONCE)
def test_structural_damage_shows_without_reading_tensors(
    name: str, copy_of: Callable[[str], Path]
) -> None:
    with pytest.raises(CkptoolError):
        open_checkpoint(damaged_copy(name, copy_of))


@pytest.mark.parametrize("name", [name for name, one in DAMAGE.items() if one.answer == "note"])
def test_what_is_suspicious_is_noted(name: str, copy_of: Callable[[str], Path], out: Path) -> None:
    report = convert_to("safetensors", damaged_copy(name, copy_of), out / "m")
    notes = " ".join(report.notes)
    assert all(word in notes for word in DAMAGE[name].words)


@pytest.mark.parametrize("name", ["stale_files", "total_size_wrong"])
def test_what_is_harmless_changes_nothing(
    name: str, copy_of: Callable[[str], Path], out: Path
) -> None:
    convert_to("safetensors", damaged_copy(name, copy_of), out / "m")
    assert read_back("safetensors", out / "m") == case(DAMAGE[name].source).truth


@pytest.mark.parametrize("name", [name for name, one in DAMAGE.items() if one.answer == "silent"])
def test_what_nothing_can_show_is_not_an_error(
    name: str, copy_of: Callable[[str], Path], out: Path
) -> None:
    """Kept so that a reader that learns to notice it says so here."""
    convert_to("safetensors", damaged_copy(name, copy_of), out / "m")
    assert read_back("safetensors", out / "m") != case(DAMAGE[name].source).truth


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("zip_zoo", "zoo.pt"),
        ("legacy_zoo", "zoo.pt"),
        ("dcp_base", ".metadata"),
        ("dcp_base", "__0_0.distcp"),
        ("dcp_zstd", "__0_0.distcp"),
        ("safetensors_file", "model.safetensors"),
        ("hf_shards", "model.safetensors.index.json"),
        ("rank_experimental", "checkpoint_3.pt"),
        ("torch_checkpointing", "metadata.pkl"),
        ("snapshot_batched", ".snapshot_metadata"),
        ("bytecheckpoint_flat", "global_step_7/model/.metadata"),
        ("bytecheckpoint_flat", "global_step_7/optimizer/__1_0.distcp"),
    ],
)
def test_cut_anywhere(
    name: str, file: str, share: float, copy_of: Callable[[str], Path], out: Path
) -> None:
    folder = copy_of(name)
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CkptoolError) as caught:
        convert_to("dcp", folder, out / "m")
    assert caught.value.exit_code == 3
    assert not list(out.iterdir())


@pytest.mark.trials
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("zip_zoo", "zoo.pt"),
        ("legacy_zoo", "zoo.pt"),
        ("dcp_base", ".metadata"),
        ("dcp_base", "__0_0.distcp"),
        ("dcp_zstd", ".metadata"),
        ("safetensors_file", "model.safetensors"),
        ("hf_shards", "model.safetensors.index.json"),
        ("rank_experimental", "checkpoint_3.pt"),
        ("rank_fsdp1", "model_rank0.pt"),
        ("torch_checkpointing_safetensors", "metadata.pkl"),
        ("deepspeed_zero_2", "global_step1/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("deepspeed_universal", "global_step1_universal/zero/optimizer_state.pt"),
        ("snapshot", ".snapshot_metadata"),
        ("bytecheckpoint_flat", "global_step_7/model/.metadata"),
    ],
)
def test_a_flipped_byte_is_never_a_traceback(
    name: str, file: str, copy_of: Callable[[str], Path], out: Path
) -> None:
    """Anywhere in a file: an error of ours, or a conversion; never another exception."""
    folder = copy_of(name)
    good = (folder / file).read_bytes()
    step = max(1, len(good) // trials(20))
    for position in range(0, len(good), step):
        data = bytearray(good)
        data[position] ^= 0x15
        (folder / file).write_bytes(bytes(data))
        with suppress(CkptoolError):
            convert_to("dcp", folder, out / "m", overwrite=True)


@pytest.mark.trials
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("zip_zoo", "zoo.pt"),
        ("dcp_base", "__0_0.distcp"),
        ("rank_experimental", "checkpoint_3.pt"),
        ("rank_fsdp1", "model_rank0.pt"),
        ("deepspeed_zero_3", "global_step1/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ],
)
def test_a_flipped_byte_never_makes_a_wrong_tensor(
    name: str, file: str, copy_of: Callable[[str], Path], out: Path
) -> None:
    """Where the writer recorded checksums: refused, or of no consequence."""
    folder = copy_of(name)
    good = (folder / file).read_bytes()
    step = max(1, len(good) // trials(15))
    for position in range(step // 2, len(good), step):
        data = bytearray(good)
        data[position] ^= 0x15
        (folder / file).write_bytes(bytes(data))
        try:
            convert_to("torch-save", folder, out / "m.pt", overwrite=True)
        except CkptoolError:
            continue
        assert read_back("torch-save", out / "m.pt") == case(name).truth


# Hostile files


@pytest.fixture
def limited_memory() -> Iterator[None]:
    """Room for torch and for what a file may honestly need, not for what it claims."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.usefixtures("limited_memory")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_and_never_run(name: str, tmp_path: Path, out: Path) -> None:
    source, marker = tmp_path / "source", tmp_path / "marker"
    source.mkdir()
    HOSTILE[name].make(source, marker)
    with pytest.raises(getattr(ckptool.errors, HOSTILE[name].answer)) as caught:
        convert_to("safetensors", source, out / "m")
    assert caught.value.exit_code == 3
    assert [word for word in HOSTILE[name].words if word not in caught.value.message] == []
    assert not marker.exists()
    assert not list(out.iterdir())


def test_the_attacks_are_real(tmp_path: Path) -> None:
    """Python's own pickle would have run them."""
    import torch

    source, marker = tmp_path / "source", tmp_path / "marker"
    source.mkdir()
    HOSTILE["in_zip"].make(source, marker)
    torch.load(source / "evil.pt", weights_only=False)
    assert marker.exists()


def test_loops_of_links_end(tmp_path: Path, copy_of: Callable[[str], Path], out: Path) -> None:
    folder = copy_of("dcp_base")
    (folder / "again").symlink_to(folder)
    (folder / "dangling").symlink_to(tmp_path / "nowhere")
    convert_to("safetensors", folder, out / "m")
    assert read_back("safetensors", out / "m") == case("dcp_base").truth


def test_a_link_is_followed(copy_of: Callable[[str], Path], tmp_path: Path, out: Path) -> None:
    folder = copy_of("dcp_base")
    (folder / "__1_0.distcp").rename(tmp_path / "elsewhere")
    (folder / "__1_0.distcp").symlink_to(tmp_path / "elsewhere")
    convert_to("safetensors", folder, out / "m")
    assert read_back("safetensors", out / "m") == case("dcp_base").truth


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file(copy_of: Callable[[str], Path], out: Path) -> None:
    folder = copy_of("dcp_base")
    (folder / "__1_0.distcp").chmod(0)
    with pytest.raises(ckptool.errors.SourceError, match=r"__1_0\.distcp"):
        convert_to("safetensors", folder, out / "m")


def test_a_fifo_in_the_folder_is_left_alone(copy_of: Callable[[str], Path], out: Path) -> None:
    folder = copy_of("dcp_base")
    os.mkfifo(folder / "__9_0.distcp")
    convert_to("safetensors", folder, out / "m")
    (folder / "__1_0.distcp").unlink()
    os.mkfifo(folder / "__1_0.distcp")
    with pytest.raises(Damaged, match=r"__1_0\.distcp"):
        open_checkpoint(folder)
