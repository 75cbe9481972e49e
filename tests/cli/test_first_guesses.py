"""The command that a person types first answers the question."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import Ended, case, run_command

from ckptool.commands.open import open_checkpoint
from ckptool.core.catalog import Catalog

LAYERS = {"self_attn.q_proj": (4, 4), "self_attn.k_proj": (2, 4), "mlp.down_proj": (4, 6)}


def model() -> dict[str, torch.Tensor]:
    """A small Llama under its names in Hugging Face's files."""
    shapes = {"lm_head": (8, 4), "model.embed_tokens": (8, 4)}
    for layer in (0, 1, 10):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in LAYERS.items()}
    return {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which ``runs`` has two steps, with an optimizer."""
    folder = tmp_path_factory.mktemp("place")
    for step in (1000, 2000):
        torch.manual_seed(step)
        weights = model()
        moments = {name: {"exp_avg": torch.randn_like(w)} for name, w in weights.items()}
        state = {"model": weights, "optim": {"state": moments, "param_groups": [{"lr": 3e-4}]}}
        saved = folder / "runs" / f"step-{step}"
        dcp.save(state | {"step": step}, checkpoint_id=saved, no_dist=True)
    return folder


@pytest.fixture
def place(runs: Path, tmp_path: Path) -> Path:
    """A folder to work in, with the runs."""
    (tmp_path / "runs").symlink_to(runs / "runs")
    return tmp_path


def ckptool(place: Path, *words: str, code: int = 0) -> Ended:
    """What a person reads who types this."""
    done = run_command(*words, cwd=place)
    assert done.code == code, (done.stdout, done.stderr)
    return done


def catalog(path: Path) -> Catalog:
    return open_checkpoint(path).catalog


def names(path: Path) -> set[str]:
    """The names of tensors and values."""
    held = catalog(path)
    return {*held.tensors, *held.objects}


PARTS = {"q_proj": 6, "layers.1": 6, "optim": 11, "*embed*": 2, "model.lm_head.weight": 1}
"""What is named, and how many tensors of a step it means."""


@pytest.mark.parametrize("part", PARTS)
def test_a_part_between_dots_names_tensors_in_every_option(part: str, place: Path) -> None:
    step = "runs/step-1000"
    listed = ckptool(place, "inspect", step, "--tensors", part, "--format", "csv").stdout
    assert len(listed.splitlines()) == PARTS[part] + 1
    wanted = {line.partition(",")[0] for line in listed.splitlines()[1:]}
    ckptool(place, "convert", step, "one.pt", "--select", part)
    ckptool(place, "convert", step, "rest.pt", "--drop", part)
    assert {*catalog(place / "one.pt").tensors} == wanted
    assert names(place / "rest.pt") == names(place / step) - names(place / "one.pt")
    ckptool(place, "convert", step, "cast.pt", "--dtype", f"{part}=bf16")
    tensors = catalog(place / "cast.pt").tensors.items()
    assert {name for name, entry in tensors if entry.dtype.name == "bfloat16"} == wanted
    rule = ("--mesh", "2", "--shard", f"{part}=Replicate()")
    shown = ckptool(place, "reshard", step, "placed", *rule)
    assert f"{PARTS[part]} x Replicate()  (rule {part})" in shown.stdout


NAMING = (
    ("inspect", "--tensors", "q_porj"),
    ("inspect", "--shards", "q_porj"),
    ("inspect", "--stats", "q_porj"),
    ("convert", "out", "--to", "dcp", "--select", "q_porj"),
    ("convert", "out", "--to", "dcp", "--drop", "q_porj"),
    ("convert", "out", "--to", "dcp", "--dtype", "q_porj=bf16"),
    ("convert", "out", "--to", "dcp", "--rename", "q_porj=q"),
    ("convert", "out", "--to", "dcp", "--strip-prefix", "q_porj"),
    ("reshard", "out", "--mesh", "2", "--shard", "q_porj=Shard(0)"),
    ("extract", "q_porj"),
)


@pytest.mark.parametrize("words", NAMING, ids=" ".join)
def test_what_names_nothing_is_an_error(words: tuple[str, ...], place: Path) -> None:
    command, *rest = words
    done = ckptool(place, command, "runs/step-1000", *rest, code=2)
    assert "q_porj" in done.stderr.splitlines()[0]
    assert not (place / "out").exists()


def test_a_part_of_a_word_is_answered_with_the_glob_for_it(place: Path) -> None:
    done = ckptool(place, "convert", "runs/step-1000", "out.pt", "--select", "q_pro", code=2)
    assert "'*q_pro*' matches 6, such as model.model.layers." in done.stderr


def test_a_misspelled_part_is_answered_with_the_part(place: Path) -> None:
    for words in (("inspect", "q_porj"), ("convert", "out.pt", "--drop", "q_porj")):
        command, *rest = words
        said = ckptool(place, command, "runs/step-1000", *rest, code=2).stderr
        assert "hint: did you mean q_proj?" in said
    averaged = "--average runs/step-1000 runs/step-2000 --take zz FROM runs/step-1000".split()
    said = ckptool(place, "merge", "out", *averaged, code=2).stderr
    assert "`ckptool inspect runs/step-1000 --tensors '*'` lists all" in said


def test_no_optimizer_is_one_word(place: Path) -> None:
    kept = {name for name in names(place / "runs" / "step-1000") if not name.startswith("optim.")}
    ckptool(place, "convert", "runs/step-1000", "small.pt", "--no-optimizer")
    assert names(place / "small.pt") == kept > {"step"}
    same = ("runs/step-1000", "--against", "small.pt", "--no-optimizer")
    assert "EQUAL" in ckptool(place, "verify", *same).stdout
    ckptool(place, "verify", "small.pt", "--against", "runs/step-1000", "--no-optimizer")
    ckptool(place, "verify", "small.pt", "--against", "runs/step-1000", code=1)
    pruning = ("--keep-last", "1", "--keep-every", "1000", "--no-optimizer")
    assert "without its optimizer" in ckptool(place, "prune", "runs", *pruning).stdout


@pytest.mark.parametrize(
    "words",
    [
        ("convert", "runs/step-1000", "o.pt", "--drop-optimizer"),
        ("convert", "runs/step-1000", "o.pt", "--no-optim"),
        ("prune", "runs", "--keep-last", "1", "--drop-optimizer"),
        ("prune", "runs", "--keep-last", "1", "--drop-optimizer-of-older"),
    ],
)
def test_other_words_for_it_are_answered_with_it(words: tuple[str, ...], place: Path) -> None:
    assert "did you mean --no-optimizer?" in ckptool(place, *words, code=2).stderr


def test_reshard_takes_what_convert_takes(place: Path) -> None:
    asked = ("--model-only", "--drop", "layers.10", "--dtype", "bf16")
    ckptool(place, "convert", "runs/step-1000", "whole.pt", *asked)
    ckptool(place, "reshard", "runs/step-1000", "on-2", "--mesh", "2", *asked)
    ckptool(place, "verify", "whole.pt", "--against", "on-2")
    ckptool(place, "verify", "runs/step-1000", "--against", "on-2", *asked)
    ckptool(place, "reshard", "runs/step-1000", "small", "--mesh", "2", "--no-optimizer")
    assert not any(name.startswith("optim.") for name in names(place / "small"))
    assert "step" in names(place / "small")
    ckptool(place, "reshard", "runs/step-1000", "few", "--mesh", "2", "--select", "q_proj")
    assert len(names(place / "few")) == PARTS["q_proj"]


WRITING = (("convert", "new", "--to", "dcp"), ("reshard", "new", "--mesh", "2"))


@pytest.mark.parametrize("how", WRITING, ids=" ".join)
def test_a_command_that_writes_says_what_it_matched(how: tuple[str, ...], place: Path) -> None:
    command, *rest = how
    options = ("--select", "q_proj", "--drop", "layers.10", "--dtype", "layers.0=bf16")
    said = ckptool(place, command, "runs/step-1000", *rest, *options).stdout.splitlines()
    first = said.index("  --select q_proj matches 6 tensors, such as")
    assert said[first + 1 : first + 4] == [
        f"    model.model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1, 10)
    ]
    assert "  --drop layers.10 matches 2 tensors:" in said
    assert "  --dtype layers.0 matches 2 tensors:" in said
    assert "  cast: 2 tensors from fp32" in said
    assert "  excluded: 18 tensors (--select, --drop)" in said


def test_what_is_renamed_is_counted(place: Path) -> None:
    rule = ("--rename", "^model[.]model[.]=model.")
    said = ckptool(place, "convert", "runs/step-1000", "renamed", "--to", "dcp", *rule).stdout
    assert "  renamed: 10 tensors" in said.splitlines()


def test_a_folder_is_converted_to_what_it_is(place: Path) -> None:
    ckptool(place, "convert", "runs/step-1000", "half", "--dtype", "bf16")
    ckptool(place, "convert", "half", "model", "--to", "hf", "--model-only")
    ckptool(place, "convert", "model", "again/in/folders", "--drop", "lm_head")
    formats = {name: open_checkpoint(place / name).format.name for name in ("half", "model")}
    assert formats == {"half": "dcp", "model": "hf"}
    assert open_checkpoint(place / "again/in/folders").format.name == "hf"


def test_what_is_no_folder_that_convert_writes_is_said(place: Path) -> None:
    ckptool(place, "convert", "runs/step-1000", "one.pt")
    said = ckptool(place, "convert", "one.pt", "two", code=2).stderr
    assert "one.pt is torch-save, no folder that convert writes" in said
    folder = case("accelerate_folders").path
    said = ckptool(place, "convert", str(folder), "two", code=2).stderr
    assert f"`ckptool reshard {folder} two --mesh N` writes SRC's own kind" in said


def test_missing_folders_of_a_target_are_made(place: Path) -> None:
    step = "runs/step-1000"
    ckptool(place, "convert", step, "a/b/one.pt")
    ckptool(place, "reshard", step, "c/d/on-2", "--mesh", "2")
    ckptool(place, "extract", step, "model.lm_head.weight", "--out", "e/f/w.npy")
    ckptool(place, "inspect", step, "--html", "g/h/page.html", "--export", "i/j/screen.svg")
    ckptool(place, "verify", step, "--write-manifest", "k/l/manifest.json")
    ckptool(place, "verify", step, "--salvage", "m/n/intact.safetensors")


def test_inspect_shows_the_tensors_that_are_named(place: Path) -> None:
    by_option = ("inspect", "runs/step-1000", "--tensors", "lm_head", "--tensors", "layers.1")
    shown = ckptool(place, "runs/step-1000", "lm_head", "layers.1").stdout
    assert shown == ckptool(place, *by_option).stdout
    row = next(line.split() for line in shown.splitlines() if " model.lm_head.weight " in line)
    assert row == ["model.lm_head.weight", "[8,", "4]", "fp32", "-", "1", "0", "128"]
    assert len(shown.splitlines()) == 1 + 2 + PARTS["layers.1"]
    said = ckptool(place, "inspect", "runs/step-1000", "q_porj", code=2).stderr
    assert "'q_porj' matches none of 22 tensors" in said


def test_several_places_are_answered_with_what_takes_them(place: Path) -> None:
    step, later = "runs/step-1000", "runs/step-2000"
    said = ckptool(place, step, later, code=2).stderr
    assert f"{later}: inspect shows one place, and {step} is that" in said
    assert f"`ckptool diff {step} {later}` compares them" in said


def test_a_name_of_values_alone_shows_them(place: Path) -> None:
    step = "runs/step-1000"
    shown = ckptool(place, step, "lr").stdout.splitlines()
    assert [line.split() for line in shown[1:]] == [["optim.param_groups.0.lr", "float", "0.0003"]]
    assert ckptool(place, step, "lr", "--values").stdout.splitlines() == shown
    assert "  step  int  1000" in ckptool(place, step, "step").stdout.splitlines()
    both = ckptool(place, step, "step", "lm_head").stdout
    assert "model.lm_head.weight" in both
    assert "  step  int  1000" in both
    assert json.loads(ckptool(place, step, "lr", "--json").stdout)["tensors"] == []


def test_extract_takes_the_models_tensor_and_says_what_else_there_is(place: Path) -> None:
    done = ckptool(place, "extract", "runs/step-1000", "lm_head.weight[0:2, :3]")
    assert done.stdout.startswith("model.lm_head.weight[0:2, :3]  [2, 3] of [8, 4]")
    others = "1 other name with lm_head.weight: optim.state.lm_head.weight.exp_avg"
    assert others in done.stderr
    said = ckptool(place, "extract", "runs/step-1000", "q_proj", code=2).stderr
    assert "'q_proj' is in 6 names" in said
    ckptool(place, "extract", "runs/step-1000", "exp_avg", code=2)


@pytest.mark.parametrize("file", ["w.npy", "w.safetensors"])
def test_extract_writes_a_file_that_is_named_last(file: str, place: Path) -> None:
    done = ckptool(place, "extract", "runs/step-1000", "lm_head.weight", file)
    assert f"wrote {file}" in done.stdout
    assert (place / file).stat().st_size > 128
    assert "1 other name with lm_head.weight" in done.stderr


def test_an_open_bracket_is_said(place: Path) -> None:
    for subscript, closed in (("[0:4", "[0:4]"), ("[", "[...]")):
        name = f"lm_head.weight{subscript}"
        said = ckptool(place, "extract", "runs/step-1000", name, code=2).stderr
        assert "the bracket is not closed" in said
        assert f"hint: 'lm_head.weight{closed}'" in said
        ckptool(place, "extract", "runs/step-1000", f"lm_head.weight{closed}")


PLACES = {
    "meta-llama/Llama-3": "if it is a model on the Hugging Face Hub: hf://meta-llama/Llama-3",
    "hf:meta-llama/Llama-3": "if it is a model on the Hugging Face Hub: hf://meta-llama/Llama-3",
    "'runs/step-1000'": "did you mean runs/step-1000, without the quotes?",
    "“runs/step-1000”": "did you mean runs/step-1000, without the quotes?",
    "runs/step-100": "did you mean runs/step-1000?",
    "runs/step-": "did you mean runs/step-",
}
"""What people type for a place, and the hint."""


@pytest.mark.parametrize("text", PLACES)
def test_a_place_that_is_none_is_answered_with_what_is_meant(text: str, place: Path) -> None:
    said = ckptool(place, "inspect", text, code=3).stderr
    assert f"{text}: no such file or folder\nhint: {PLACES[text]}" in said


@pytest.mark.parametrize(
    "text", ["runs/step-1000/", "runs/step-1000/.metadata", "./runs//step-1000"]
)
def test_a_place_that_is_written_in_another_way_is_understood(text: str, place: Path) -> None:
    assert "holds   22 tensors" in ckptool(place, text).stdout


def test_damage_names_the_salvage_and_how_much_it_keeps(place: Path) -> None:
    shutil.copytree(place / "runs" / "step-1000", place / "my run")
    data = place / "my run" / "__0_0.distcp"
    os.truncate(data, data.stat().st_size * 3 // 4)
    said = ckptool(place, "verify", "my run", code=1).stdout
    command, counts = said.splitlines()[-3].split("` writes what is intact: at most ")
    assert command == "hint: `ckptool verify 'my run' --salvage DST"
    done = ckptool(place, "verify", "my run", "--salvage", "kept", code=1).stdout
    kept = len(catalog(place / "kept").tensors)
    assert counts == f"{kept} of 22 tensors"
    assert f"{kept} tensors" in done
    whole = ckptool(place, "verify", "runs/step-1000").stdout
    assert "--salvage" not in whole


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_a_file_that_is_cut_off_names_the_salvage(ending: str, place: Path) -> None:
    ckptool(place, "convert", "runs/step-1000", f"cut.{ending}")
    os.truncate(place / f"cut.{ending}", (place / f"cut.{ending}").stat().st_size * 3 // 4)
    said = ckptool(place, "verify", f"cut.{ending}", code=1).stdout
    assert f"hint: `ckptool verify cut.{ending} --salvage DST` writes the tensors that are" in said
    assert (
        "tensors" in ckptool(place, "verify", f"cut.{ending}", "--salvage", "kept", code=1).stdout
    )
    assert catalog(place / "kept").tensors


@pytest.mark.parametrize(
    "words",
    [("convert", "out.pt"), ("reshard", "out", "--mesh", "2"), ("extract", "lm_head.weight")],
    ids=" ".join,
)
def test_who_asks_for_all_of_what_is_damaged_is_told_what_is_left(
    words: tuple[str, ...], place: Path
) -> None:
    shutil.copytree(place / "runs" / "step-1000", place / "cut")
    data = place / "cut" / "__0_0.distcp"
    os.truncate(data, data.stat().st_size * 3 // 4)
    command, *rest = words
    said = ckptool(place, command, "cut", *rest, code=3).stderr
    hinted, rest_of_it = said.split("; `ckptool ")[1].split("` writes what is intact: at most ")
    *salvage, target = shlex.split(hinted.replace("DST", "kept"))
    ckptool(place, *salvage, target, code=1)
    assert rest_of_it == f"{len(catalog(place / target).tensors)} of 22 tensors\n"


def test_the_parts_of_a_step_are_no_steps(place: Path) -> None:
    for step in ("run/step-7", "run/step-8"):
        for part, selects in (("model", "--no-optimizer"), ("optim", "--select=optim")):
            ckptool(place, "convert", "runs/step-1000", f"{step}/{part}", selects)
    assert "1 of 1 steps OK" in ckptool(place, "verify", "run/step-7", "--all").stdout
    newest = ckptool(place, "verify", "run/step-7", "--latest-good", "--json").stdout
    assert json.loads(newest)["latest_good"] == "run/step-7"
    assert "2 of 2 steps OK" in ckptool(place, "verify", "run", "--all").stdout
    (place / "run" / "step-7" / "optim" / "__0_0.distcp").unlink()
    assert "FAILED  optim: " in ckptool(place, "verify", "run/step-7", "--all", code=1).stdout
    ckptool(place, "verify", "run/step-7", "--latest-good", "--json", code=1)


def test_inspect_says_what_each_rank_of_another_mesh_would_hold(place: Path) -> None:
    shown = ckptool(place, "inspect", "runs/step-1000", "--mesh", "2x4").stdout
    assert "on mesh 2x4" in shown
    assert "8 ranks: mean" in shown
    by_rank = ckptool(place, "inspect", "runs/step-1000", "--mesh", "2x4", "--json").stdout
    planned = ("reshard", "runs/step-1000", "on-8", "--mesh", "2x4", "--dry-run", "--json")
    would_hold = json.loads(ckptool(place, *planned).stdout)["rank_bytes"]
    held = json.loads(by_rank)["holdings"]
    assert [each["bytes"] for each in held] == would_hold
    assert [each["rank"] for each in held] == [*range(8)]
    said = ckptool(place, "inspect", "runs/step-1000", "--mesh", "2x", code=2).stderr
    assert "such as 8, 2x4 or dp=2,tp=4" in said


def test_a_hint_leaves_a_path_as_it_is_that_has_the_word_for_a_place(place: Path) -> None:
    folder = place / "CKPT+2026-11-30+02-10-11+00"  # as SpeechBrain calls its saves
    folder.mkdir()
    torch.save({"a": torch.randn(2)}, folder / "a.ckpt")
    torch.save({"b": torch.randn(2)}, folder / "b.ckpt")
    told = ckptool(place, "verify", folder.name, code=3).stderr
    assert f"`ckptool verify {folder.name} --latest-good`" in told
