"""What parts of a checkpoint count, and state that each rank has for itself."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import FIXTURES
from msgspec.structs import replace
from safetensors.torch import save_file
from verify.verify_runs import checked

from ckptool.commands.open import Survey, survey
from ckptool.commands.verify.checks.meaning.arguments import argument_problems
from ckptool.commands.verify.checks.meaning.counts import count_problems, optimizer_step_problems
from ckptool.core.catalog import Catalog, ObjectEntry
from ckptool.formats.companions import MEGATRON
from ckptool.serialization.pickle.records import Call, Global

CODES = ("counts-differ", "counts-apart", "rank-missing", "config-mismatch")


def said(path: Path) -> list[str]:
    report = checked(path, quick=True)
    return [f"{each.code}: {each.message}" for each in report.findings if each.code in CODES]


def torchtitan(path: Path, *, step: int = 7, epoch: int = 7, ranks: Any = (0, 1)) -> Path:
    state: dict[str, Any] = {
        "tok_embeddings.weight": torch.ones(4, 2),
        "lr_scheduler": {"last_epoch": epoch},
        "train_state": {"step": step, "ntokens_seen": 64 * step},
        "dataloader": {f"dp_rank_{rank}": pickle.dumps({"at": rank}) for rank in ranks},
    }
    state["dataloader"]["world_size"] = 2
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.parametrize(
    ("name", "made", "expected"),
    [
        ("step-7", {}, ""),
        ("step-8", {}, ""),  # counted from zero
        ("best", {}, ""),
        ("step-0", {"step": 0, "epoch": 0}, ""),
        ("step-1", {"step": 1, "epoch": 0}, ""),
        (
            "step-9",
            {},
            "counts-apart: train_state.step is 7, but the folder is step-9: it was renamed, or its"
            " files are of another step",
        ),
        (
            "step-9",
            {"epoch": 9},
            "counts-differ: train_state.step is 7, but the folder is step-9, and"
            " lr_scheduler.last_epoch is 9: they are of two saves",
        ),
        (
            "step-7",
            {"epoch": 0},
            "counts-differ: lr_scheduler.last_epoch is 0, as before the first step, but"
            " train_state.step is 7: the learning rate would begin again",
        ),
        (
            "step-7",
            {"epoch": 3},
            "counts-apart: lr_scheduler.last_epoch has counted 3 of 7 steps: learning rates were"
            " begun again, or left out of a load",
        ),
        (
            "step-7",
            {"ranks": (0,)},
            "rank-missing: dataloader.dp_rank_1: missing, of 2 data-parallel ranks",
        ),
    ],
)
def test_what_torchtitan_counts(
    name: str, made: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    assert said(torchtitan(tmp_path / name, **made)) == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        (7, []),
        (8, []),
        (5, ["the optimizer has taken 5 of 7 steps: it was begun again, or is of an earlier save"]),
        (
            12,  # a load may leave the state of the training out
            [
                "the optimizer has taken 12 steps, but train_state.step is 7: it had taken some"
                " before, or takes several at a time"
            ],
        ),
    ],
)
def test_the_steps_of_torchtitans_optimizer(
    taken: int, expected: list[str], tmp_path: Path
) -> None:
    surveyed = survey(torchtitan(tmp_path / "step-7"))
    found = list(optimizer_step_problems(surveyed, surveyed.catalog, {"": taken}))
    assert [(each.code, str(each)) for each in found] == [("counts-apart", e) for e in expected]


@pytest.mark.parametrize("name", ["global_step_6/actor", "global_step_6"])
@pytest.mark.parametrize(
    ("taken", "counted", "expected"),
    [
        (6, 6, ""),
        (24, 6, ""),  # of several mini-batches
        (4, 4, ""),  # began when the critic had
        (3, 6, "the optimizer has taken 3 of 6 steps: it was begun again, or is of an earlier"),
        (9, 9, "extra_state.lr_scheduler.last_epoch is 9, but the folder is global_step_6"),
        (6, 0, ""),  # a loop of one's own may never step it
    ],
)
def test_what_verl_counts(
    name: str, taken: int, counted: int, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.mkdir(parents=True)
    (tmp_path / MEGATRON).write_text("6")  # verl counts on from this, not from what files count
    files = {
        "model": {"w": torch.ones(2)},
        "optim": {"state": {0: {"step": torch.tensor(float(taken)), "exp_avg": torch.ones(2)}}},
        "extra_state": {"lr_scheduler": {"last_epoch": counted}},
    }
    for kind, content in files.items():
        torch.save(content, path / f"{kind}_world_size_1_rank_0.pt")
    found = [f.message for f in checked(path).findings if f.code.startswith("counts-")]
    assert len(found) == bool(expected)
    assert all(message.startswith(expected) and MEGATRON not in message for message in found)


def test_positions_of_a_replica_of_torchft(tmp_path: Path) -> None:
    state = {"dataloader": {"dp_rank_1": b"", "world_size": 2}}
    dcp.save(state, checkpoint_id=tmp_path / "step-7", no_dist=True)
    assert said(tmp_path / "step-7") == []


def of_trainer(
    path: Path, step: int, *, scheduler: Any, epoch: float | None = None, ranks: Any = (0, 1)
) -> Path:
    path.mkdir()
    save_file({"model.norm.weight": torch.ones(2)}, path / "model.safetensors")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": epoch}))
    torch.save(scheduler, path / "scheduler.pt")
    for rank in ranks:
        torch.save({}, path / f"rng_state_{rank}.pth")
    return path


@pytest.mark.parametrize(
    ("name", "step", "epoch", "scheduler", "expected"),
    [
        ("checkpoint-500", 500, 2.5, {"last_epoch": 500, "_step_count": 501}, ""),
        ("checkpoint-500", 500, 2.5, {"last_epoch": 4}, ""),  # begun again
        ("checkpoint-500", 500, 2.5, {"last_epoch": 0, "num_bad_epochs": 0}, ""),
        ("checkpoint-50", 50, 2.5, {"last_epoch": 0}, ""),  # loss scaling may have skipped all
        ("checkpoint-500", 500, 1, {"last_epoch": 0}, ""),  # a user counts epochs as they end
        ("checkpoint-500", 500, None, {"last_epoch": 0}, ""),
        ("checkpoint-best", 40, 2.5, {"last_epoch": 40}, ""),
        ("checkpoint-500", 400, 2.5, {"last_epoch": 500}, "global_step is 400"),
        ("checkpoint-500", 500, 2.5, {"last_epoch": 0}, "scheduler.last_epoch is 0"),
    ],
)
def test_what_the_trainer_counts(
    name: str, step: int, epoch: float | None, scheduler: Any, expected: str, tmp_path: Path
) -> None:
    found = said(of_trainer(tmp_path / name, step, epoch=epoch, scheduler=scheduler))
    assert len(found) == bool(expected)
    assert all(text.startswith("counts-differ: ") and expected in text for text in found)


@pytest.mark.parametrize(
    ("ranks", "missing"),
    [
        ((0, 1), ""),
        ((2,), ""),  # of one node of a cluster, here and below
        ((100, 101), ""),
        ((1, 3, 5), ""),
        ((0, 1, 4, 5), ""),  # in blocks
        ((6, 7, 8, 15, 16, 17, 24, 25, 26), ""),
        ((0, 1, 3, 4), "rng_state_2.pth: missing, of ranks up to 4"),  # none has blocks of one
        ((0, 1, 4, 5, 6), "rng_state_2.pth, rng_state_3.pth: missing, of ranks up to 6"),
        ((0, 1, 3), "rng_state_2.pth: missing, of ranks up to 3"),
        ((100, 101, 103), "rng_state_102.pth: missing, of ranks up to 103"),
        ((1, 3, 7), "rng_state_5.pth: missing, of ranks up to 7"),
    ],
)
def test_random_states_of_one_rank_are_lost(
    ranks: tuple[int, ...], missing: str, tmp_path: Path
) -> None:
    path = of_trainer(tmp_path / "checkpoint-2", 2, scheduler={"last_epoch": 2}, ranks=ranks)
    assert said(path) == ([f"rank-missing: {missing}"] if missing else [])


@pytest.mark.parametrize(
    ("ranks", "processes", "expected"),
    [
        (range(8), 8, []),
        (range(8), 1, []),
        (range(8), 1 << 40, []),  # more than anybody has
        (range(8), 16, ["ranks-fewer"]),  # one of two nodes
        (range(8, 16), 16, ["ranks-fewer"]),
        (range(12), 16, ["rank-missing"]),
        (range(1, 16), 16, ["rank-missing"]),
    ],
)
def test_random_states_of_a_block_of_ranks_are_lost(
    ranks: range, processes: int, expected: list[str], tmp_path: Path
) -> None:
    path = of_trainer(tmp_path / "checkpoint-2", 2, scheduler={"last_epoch": 2}, ranks=ranks)
    state = SimpleNamespace(num_processes=processes)
    torch.save(SimpleNamespace(distributed_state=state), path / "training_args.bin")
    findings = checked(path, quick=True).findings
    found = [f for f in findings if f.message.startswith(("rng_state_", "random states of"))]
    assert [each.code for each in found] == expected
    first = next((rank for rank in range(processes) if rank not in ranks), 0)
    assert all(f"rng_state_{first}.pth" in each.message for each in found)


def with_values(path: Path, values: dict[str, Any]) -> tuple[Survey, Catalog]:
    surveyed = survey(path)
    assert surveyed.catalog is not None
    arguments = {k[5:]: v for k, v in values.items() if k.startswith("args.")}
    rest = {k: v for k, v in values.items() if not k.startswith("args.")}
    rest |= (
        {"args": Call(Global("argparse", "Namespace"), (), state=arguments)} if arguments else {}
    )
    entries = {name: ObjectEntry(name, (name,), value) for name, value in rest.items()}
    return surveyed, replace(surveyed.catalog, objects=surveyed.catalog.objects | entries)


SEEN = {"args.global_batch_size": 8, "args.rampup_batch_size": None}


@pytest.mark.parametrize(
    ("fixture", "values", "expected"),
    [
        ("deepspeed_zero_2", {}, ""),
        ("deepspeed_zero_2", {"global_samples": 8}, "is 8, but global_steps is 9"),
        ("deepspeed_zero_2", {"lr_scheduler.last_batch_iteration": 8}, ""),
        ("deepspeed_zero_2", {"lr_scheduler.last_batch_iteration": -1, "skipped_steps": 8}, ""),
        ("deepspeed_zero_2", {"lr_scheduler.last_batch_iteration": -1}, "is -1, as before the"),
        ("megatron_torch_dist", {"iteration": 101}, ""),
        ("megatron_torch_dist", {"iteration": 90}, "but the folder is iter_0000100"),
        ("megatron_torch_dist", {"opt_param_scheduler.num_steps": 6}, ""),
        ("megatron_torch_dist", {"opt_param_scheduler.num_steps": 0}, ""),  # losses may be scaled
        (
            "megatron_torch_dist",
            {"opt_param_scheduler.num_steps": 0, "args.fp16": False},
            "num_steps is 0",
        ),
        ("megatron_torch_dist", {"args.consumed_train_samples": 0, **SEEN}, ""),
        ("megatron_torch_dist", {"args.consumed_train_samples": 800, **SEEN}, ""),
        ("megatron_torch_dist", {"args.consumed_train_samples": 640, **SEEN}, "of 8 are 800"),
        ("megatron_torch_dist", {"args.consumed_train_samples": 40}, "fewer than one a step"),
    ],
)
def test_what_other_trainers_count(fixture: str, values: dict[str, Any], expected: str) -> None:
    root = FIXTURES / fixture / "ckpt"
    values = {"iteration": 100, "global_steps": 9, "global_samples": 18} | values
    found = [str(each) for each in count_problems(*with_values(root, values))]
    assert len(found) == bool(expected)
    assert all(expected in text for text in found)


@pytest.mark.parametrize("begun", [-1, 2])
@pytest.mark.parametrize(("samples", "code"), [(18, "counts-differ"), (8, "counts-apart")])
def test_a_step_that_was_set_by_hand(begun: int, samples: int, code: str) -> None:
    """DeepSpeed's is an attribute of the engine; it counts samples, too."""
    values = {"global_steps": 9, "global_samples": samples, "skipped_steps": 0}
    values["lr_scheduler.last_batch_iteration"] = begun
    root = FIXTURES / "deepspeed_zero_2" / "ckpt"
    codes = [each.code for each in count_problems(*with_values(root, values))]
    expected = [code if begun < 0 else "counts-apart"]
    assert codes == expected + ["counts-apart"] * (samples < 9)


@pytest.mark.parametrize("pointer", ["100", "200", "release", "", "1" * 100, "é", None])
def test_a_pointer_names_a_folder_of_another_step(
    pointer: str | None, copy_of: Callable[[str], Path]
) -> None:
    root = copy_of("megatron_torch_dist")
    (root / MEGATRON).unlink(missing_ok=True)
    if pointer is not None:
        (root / MEGATRON).write_text(f"{pointer}\n")
    (found,) = count_problems(*with_values(root / "iter_0000100", {"iteration": 90}))
    said = "iteration is 90, but the folder is iter_0000100"
    said += f", as {MEGATRON} says: a resume" if pointer == "100" else ": it was renamed"
    assert found.code == "counts-apart"
    assert found.startswith(said)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("epoch=1-step=12.ckpt", ""),
        ("best-epoch=01-step=13-v1.ckpt", ""),
        ("last.ckpt", ""),
        ("epoch=1-val_loss=0.30.ckpt", ""),
        ("epoch=2-step=18.ckpt", "counts-apart: global_step is 12, but the file is epoch=2-"),
    ],
)
def test_the_step_in_the_name_of_a_file_of_lightning(
    name: str, expected: str, tmp_path: Path
) -> None:
    state = {"pytorch-lightning_version": "2.6.6", "global_step": 12, "epoch": 1}
    torch.save(state | {"state_dict": {"w": torch.ones(2)}}, tmp_path / name)
    found = said(tmp_path / name)
    assert len(found) == bool(expected)
    assert all(text.startswith(expected) for text in found)


@pytest.mark.parametrize(
    ("counted", "epoch", "expected"),
    [
        (500, 2.5, ""),
        (497, 2.5, ""),  # steps of fewer batches at the end of an epoch
        (503, 2.5, ""),
        (400, None, ""),
        (400, 2.5, "counts-differ: global_steps is 400, but trainer_state.json: global_step is"),
        (4000, 2.5, ""),  # several in one of the trainer's
    ],
)
def test_the_engine_that_steps_for_a_trainer(
    counted: int, epoch: float | None, expected: str, copy_of: Callable[[str], Path]
) -> None:
    """As where ``latest`` names the optimizer's folder of another save."""
    root = copy_of("deepspeed_zero_2")
    (root / "trainer_state.json").write_text(json.dumps({"global_step": 500, "epoch": epoch}))
    values = {"global_steps": counted, "global_samples": 2 * counted}
    found = [f"{each.code}: {each}" for each in count_problems(*with_values(root, values))]
    assert len(found) == bool(expected)
    assert all(text.startswith(expected) for text in found)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, ""),
        ({"args.num_layers": 1}, ""),
        ({"args.hidden_size": 12}, "args say hidden_size 12, but "),
        ({"args.padded_vocab_size": 9000}, "args say padded_vocab_size 9,000, but "),
        ({"args.num_layers": 3}, "args say num_layers 3, but "),
        ({"args.num_layers": 3, "args.hybrid_layer_pattern": "M*M"}, ""),
    ],
)
@pytest.mark.parametrize("fixture", ["megatron_torch_dist", "megatron_torch"])
def test_arguments_that_contradict_tensors(
    fixture: str, values: dict[str, Any], expected: str
) -> None:
    root = FIXTURES / fixture / "ckpt"
    found = [str(each) for each in argument_problems(*with_values(root, values))]
    assert len(found) == bool(expected), found
    assert all(text.startswith(expected) for text in found)


@pytest.mark.parametrize(
    ("layers", "code"),
    [((0, 1, 2), ""), ((0, 1), "layers-fewer"), ((0, 2), "config-mismatch"), ((), "")],
)
def test_layers_that_are_not_there(layers: tuple[int, ...], code: str) -> None:
    values = {"args.num_layers": 3, "args.hidden_size": None, "args.padded_vocab_size": None}
    surveyed, catalog = with_values(FIXTURES / "megatron_torch" / "ckpt", values)
    entry = next(iter(catalog.tensors.values()))
    names = [f"decoder.layers.{layer}.mlp.linear_fc1.bias" for layer in layers]
    catalog = replace(catalog, tensors={name: replace(entry, name=name) for name in names})
    assert [each.code for each in argument_problems(surveyed, catalog)] == [code] * bool(code)


def test_arguments_beside_a_part_of_the_tensors_are_a_record() -> None:
    (path,) = (FIXTURES / "megatron_torch" / "ckpt").rglob("mp_rank_00/*.pt")
    for said in ({"args.num_layers": 3}, {"args.padded_vocab_size": 9000}):
        assert not list(argument_problems(*with_values(path, said)))


def test_damage_is_not_reported_as_another_step(tmp_path: Path) -> None:
    path = torchtitan(tmp_path / "step-9")
    (path / "__0_0.distcp").write_bytes(b"")
    assert said(path) == []
