"""The target of convert: its name and format, and what is refused."""

from __future__ import annotations

import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FIXTURES, case, convert_to, read_back
from safetensors.torch import load_file

import ckptool
from ckptool.errors import CkptoolError, Unsupported, UsageError


@pytest.mark.parametrize(
    ("target", "to", "says"),
    [
        ("m", "nothing", "unknown format"),
        ("m.safetensors", "dcp", "the name of a .safetensors file, but --to dcp writes a folder"),
        ("m.safetensors", "torch-save", "but --to torch-save writes .pt files"),
        ("m.safetensors", "hf", "but --to hf writes a folder"),
        ("m.pt", "dcp", "the name of a .pt file, but --to dcp writes a folder"),
        ("m.pt", "safetensors", "the name of a .pt file"),
        ("m.safetensor", None, "a file's name, whose end is none that convert knows"),
        ("m", "torch-save", "writes a file, whose name ends in one of .pt, .pth"),
        ("step-1.0", "torch-save", "writes a file, whose name"),
    ],
)
def test_targets_that_make_no_sense(target: str, to: str | None, says: str, out: Path) -> None:
    with pytest.raises(UsageError, match=says):
        ckptool.convert(case("dcp_base").path, out / target, to=to)
    assert not list(out.iterdir())


@pytest.mark.parametrize("target", ["m", "m.safetensors", "m.pt"])
def test_only_a_folder_of_a_model_has_shards_of_a_size(target: str, out: Path) -> None:
    to, size = "dcp" if target == "m" else None, "1MB"
    with pytest.raises(UsageError, match="has no shards of a size"):
        ckptool.convert(case("dcp_base").path, out / target, to=to, max_shard_size=size)
    with pytest.raises(UsageError, match="has no shards of a size"):
        ckptool.save({"w": torch.ones(2)}, out / target, to=to, max_shard_size=size)
    assert not list(out.iterdir())


@pytest.mark.parametrize(
    ("target", "to", "expected"),
    [
        ("m.safetensors", None, "safetensors"),
        ("m.pt", None, "torch-save"),
        ("m.pth", None, "torch-save"),
        ("m", "hf", "hf"),
        ("m", "safetensors", "hf"),
    ],
)
def test_the_name_of_a_target_says_its_format(
    target: str, to: str | None, expected: str, out: Path
) -> None:
    report = ckptool.convert(case("hf_full").path, out / target, to=to, fsync=False)
    assert report.target_format == expected
    assert (out / target).is_dir() == (expected == "hf")


def test_what_a_model_server_would_not_find_is_reported(out: Path) -> None:
    source = case("dcp_fsdp2_tp").path
    notes = ckptool.convert(source, out / "m", to="hf", dry_run=True).notes
    assert "config.json and a tokenizer are missing: copy with --hf-assets FOLDER" in notes
    (optimizer,) = [note for note in notes if note.startswith("optimizer state is included")]
    assert "--model-only leaves it out" in optimizer
    assets = out / "assets"
    assets.mkdir()
    for name in ("tokenizer.json", "config.json"):
        (assets / name).write_text("{}")
    done = ckptool.convert(
        source, out / "m", to="hf", dry_run=True, model_only=True, hf_assets=assets
    )
    assert not [note for note in done.notes if "without" in note or "optimizer" in note]
    (assets / "adapter_config.json").write_text("{}")
    done = ckptool.convert(
        source, out / "m", to="hf", dry_run=True, model_only=True, hf_assets=assets
    )
    left_out = f"adapter_config.json of {assets} left out: the tensors are no adapter's"
    assert left_out in done.notes
    done = ckptool.convert(FIXTURES / "merged" / "plain" / "adapter", out / "a", dry_run=True)
    assert any("an adapter: loading it needs its base model" in note for note in done.notes)


@pytest.mark.parametrize(("folder", "step"), [(".", "step-1"), ("huggingface", "actor/step-1")])
def test_the_folder_above_that_has_a_config_is_named(folder: str, step: str, out: Path) -> None:
    run = out / "a run"
    shutil.copytree(case("dcp_fsdp2_tp").path, run / step)
    (run / folder).mkdir(exist_ok=True)
    (run / folder / "config.json").write_text('{"model_type": "llama"}')
    notes = ckptool.convert(run / step, out / "m", to="hf", dry_run=True).notes
    assert any(note.endswith(f"copy with --hf-assets '{run / folder}'") for note in notes)


@pytest.mark.parametrize(
    ("names", "wrapper"),
    [
        (("_orig_mod.a.w", "_orig_mod.b.w"), "_orig_mod"),
        (("a._checkpoint_wrapped_module.w", "b.w"), "_checkpoint_wrapped_module"),
        (("module.a.w", "module.b.w"), "module"),
        (("module.a.w", "b.w"), None),
        (("_orig_mod.a.w", "a.w"), None),
    ],
    ids=["compiled", "checkpointed", "ddp", "a-model-with-a-module", "two-of-one-name"],
)
def test_names_that_no_model_loads_are_reported(
    names: tuple[str, ...], wrapper: str | None, out: Path
) -> None:
    torch.save({"model": {name: torch.ones(2) for name in names}}, out / "run.pt")
    convert = partial(ckptool.convert, out / "run.pt", out / "m", to="hf", model_only=True)
    said = [note for note in convert(dry_run=True).notes if note.startswith("wrapped names")]
    assert len(said) == (wrapper is not None)
    if wrapper is not None:
        (rule,) = re.findall(f"\\({wrapper}\\).*--rename '(.*)'", said[0])
        convert(rename=[rule], fsync=False)
        written = load_file(out / "m" / "model.safetensors")
        assert len(written) == 2
        assert not [name for name in written if wrapper in name.split(".")[:-1]]


ADAPTER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("names", "config", "file"),
    [
        ((f"{ADAPTER}.lora_A.weight", f"{ADAPTER}.lora_B.weight"), None, "adapter_model"),
        ((f"{ADAPTER}.lora_A.default.weight",), None, "adapter_model"),
        ((f"{ADAPTER}.lora_A.weight", "lm_head.weight"), None, "model"),
        ((f"{ADAPTER}.ia3_l",), "adapter_config.json", "adapter_model"),
        ((f"{ADAPTER}.lora_A.weight",), "config.json", "model"),
    ],
    ids=["lora", "lora-of-a-run", "with-a-weight", "by-its-config", "a-model-by-its-config"],
)
def test_an_adapter_has_the_name_that_peft_opens(
    names: tuple[str, ...], config: str | None, file: str, out: Path
) -> None:
    torch.save({name: torch.ones(4, 2) for name in names}, out / "run.pt")
    (out / "assets").mkdir()
    if config is not None:
        (out / "assets" / config).write_text("{}")
    assets = None if config is None else out / "assets"
    ckptool.convert(
        out / "run.pt", out / "m", to="hf", hf_assets=assets, max_shard_size=16, fsync=False
    )
    written = sorted(path.name for path in (out / "m").glob("*.safetensors"))
    assert (written == ["adapter_model.safetensors"]) == (file == "adapter_model")


@pytest.mark.parametrize("target", [".", ".."])
def test_a_folder_without_a_name_is_replaced_by_its_own(
    target: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, inner = out / "run", out / "run" / "inner"
    inner.mkdir(parents=True)
    monkeypatch.chdir(run if target == "." else inner)
    with pytest.raises(CkptoolError, match=f"{run} already exists"):
        convert_to("dcp", case("dcp_base").path, Path(target))
    inner.rmdir()
    if target == ".":
        convert_to("dcp", case("dcp_base").path, Path(target), overwrite=True)
        assert read_back("dcp", run) == case("dcp_base").truth
    assert [path.name for path in out.iterdir()] == ["run"]


def test_names_that_no_file_can_have_are_refused_before_anything_is_written(out: Path) -> None:
    with pytest.raises(CkptoolError, match="file names have at most 255 bytes") as caught:
        convert_to("dcp", case("dcp_base").path, out / ("m" * 228))
    assert caught.value.exit_code == 4
    with pytest.raises(Unsupported, match="file names have at most 255 bytes"):
        convert_to("dcp", case("dcp_base").path, out / ("m" * 250))
    with pytest.raises(Unsupported, match="paths have at most 4,096 bytes"):
        convert_to("dcp", case("dcp_base").path, out / "/".join(["m" * 200] * 25))
    convert_to("dcp", case("dcp_base").path, out / ("m" * 227))
    source, rename = case("deepspeed_zero_2").path, [f"embed={'m' * 300}"]
    with pytest.raises(CkptoolError, match="has 307"):
        convert_to("deepspeed-universal", source, out / "m", rename=rename)
    assert [path.name for path in out.iterdir()] == ["m" * 227]


@pytest.mark.parametrize("said", [0, -1])
def test_a_file_system_that_does_not_say_how_long_names_are_takes_all(
    said: int, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pathconf", lambda path, name: said)
    convert_to("dcp", case("dcp_base").path, out / "m")


def test_the_root_of_the_disk_is_not_a_target() -> None:
    with pytest.raises(UsageError, match="is the root folder"):
        convert_to("dcp", case("dcp_base").path, Path("/"), overwrite=True)


def test_the_target_lies_apart_from_the_source(copy_of: Any) -> None:
    source = copy_of("dcp_base")
    before = sorted(path.name for path in source.iterdir())
    for target in (source, source / "inside", source.parent):
        with pytest.raises(CkptoolError) as caught:
            convert_to("dcp", source, target, overwrite=True)
        assert caught.value.exit_code == 2
    assert sorted(path.name for path in source.iterdir()) == before


def test_conflicting_ranks_are_refused_or_kept_apart(out: Path) -> None:
    source = case("rank_differing").path
    with pytest.raises(CkptoolError, match="local") as caught:
        convert_to("safetensors", source, out / "m")
    assert "--per-rank" in (caught.value.hint or "")
    convert_to("safetensors", source, out / "kept", per_rank=True)
    assert set(read_back("safetensors", out / "kept")) == {"shared", "local@rank0", "local@rank1"}
    convert_to("safetensors", source, out / "dropped", drop=("local",))
    assert set(read_back("safetensors", out / "dropped")) == {"shared"}
