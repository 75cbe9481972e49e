"""What names a step stays, however it is spelled; what cannot be read stops everything."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import case
from fault_server import refuse
from prune_runs import names_in, pruned
from store_server import S3, s3, server
from trainer_runs import TRAINERS, run_of

from ckptool.commands.options.prune import PruneOptions
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.runs.pointers.pointers import find_pointers
from ckptool.commands.runs.prune.prune import prune
from ckptool.commands.runs.search import find_run
from ckptool.commands.runs.verify import verify_run
from ckptool.errors import NoAnswer, TransferError
from ckptool.storage.url import location

__all__ = ["s3", "server"]
SOURCE = case("dcp_base").path


def steps(run: Path, *names: str) -> Path:
    for name in names:
        shutil.copytree(SOURCE, run / name)
    return run


def named(run: Path) -> set[str]:
    return {str(path).removeprefix(f"{run}/") for path in find_pointers(find_run(run))}


SPELLINGS: dict[str, tuple[str, bytes]] = {
    "plain": ("latest", b"step-1"),
    "new line": ("latest", b"step-1\n"),
    "quoted": ("latest", b'"step-1"\n'),
    "single quotes": ("latest", b"'step-1'\r\n"),
    "JSON": ("latest.json", b'{"latest": "step-1"}'),
    "JSON with escapes": ("latest.json", b'{"latest": "st\\u0065p\\u002d1"}'),
    "JSON list": ("keep.json", b'["runs/step-1/"]'),
    "JSON number": ("state.json", b'{"last_step": 1}'),
    "TensorFlow's": ("checkpoint", b'model_checkpoint_path: "step-1"\n'),
    "YAML": ("resume.yaml", b"resume:\n  from: /w/step-1\n"),
    "assignment": ("latest.env", b"LATEST=step-1\n"),
    "several lines": ("keep", b"# keep\n\nstep-1\n"),
    "path of another machine": ("last_checkpoint", b"/gpfs/a/run/step-1/.metadata"),
    "path of Windows": ("latest", b"C:\\runs\\step-1\r\n"),
    "byte order mark": ("latest", "\ufeffstep-1".encode()),
    "UTF-16": ("latest", "step-1\r\n".encode("utf-16")),
    "UTF-16, big": ("latest", b"\xfe\xff" + "step-1".encode("utf-16-be")),
    "UTF-16 without a mark": ("latest", "step-1".encode("utf-16-le")),
    "UTF-32": ("latest", "step-1".encode("utf-32")),
    "number": ("latest_checkpointed_iteration.txt", b"1\n"),
    "number in quotes": ("latest.txt", b'"0001"'),
    "other zeros": ("latest", b"runs/step-0001"),
    "key and number": ("latest.txt", b"iteration: 1\n"),
    "other name": ("NOTES", b"the best so far is step-1."),
    "index of shards": (
        "model.safetensors.index.json", json.dumps({"weight_map": {"w": "step-1/a.st"}}).encode()
    ),
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_what_is_named_stays(spelling: str, tmp_path: Path) -> None:
    run = steps(tmp_path / "run", "step-1", "step-2", "step-10", "step-11")
    file, data = SPELLINGS[spelling]
    (run / file).write_bytes(data)
    assert named(run) == {"step-1"}
    pruned(run, yes=True, quick=True)
    assert names_in(run) == sorted([file, "step-1", "step-11"])


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", '{"num_hidden_layers": 1, "lr": 1}'),
        ("args.yaml", "checkpoint_hist: 1\ncooldown_epochs: 1\nmixup_off_epoch: 2\n"),
        ("args.json", '{"max_steps": 2, "num_train_epochs": 1, "grad_accum_steps": 1}'),
        ("latest", "step-100"),
        ("README", "my-step-1 and step-1-old"),
        ("README.md", "- lr_scheduler_warmup_steps: 1\n- training_steps: 2\n"),
        ("args.json", '{"save_steps": 1, "num_train_epochs": 2, "max_steps": 2}'),
    ],
)
def test_what_is_not_named_is_not_kept(file: str, text: str, tmp_path: Path) -> None:
    run = steps(tmp_path / "run", "step-1", "step-2")
    (run / file).write_text(text)
    assert named(run) == set()


PLACES: dict[str, tuple[tuple[str, ...], str, str, set[str]]] = {
    "above the steps": (("a/ckpt/step-1", "a/ckpt/step-2"), "a/latest", "ckpt/step-1",
                        {"a/ckpt/step-1"}),
    "above, by name": (("a/ckpt/step-1", "a/ckpt/step-2"), "latest", "step-1", {"a/ckpt/step-1"}),
    "of another run": (("a/step-1", "a/step-2", "b/step-7"), "b/resumed_from", "../a/step-1",
                       {"a/step-1"}),
    "in another run": (("a/step-1", "b/step-1"), "b/latest", "step-1", {"b/step-1"}),
    "absolute, of one of two": (("a/step-1", "b/step-1"), "latest", "/w/a/step-1", {"a/step-1"}),
    "of either": (("a/step-1", "b/step-1"), "latest", "step-1", {"a/step-1", "b/step-1"}),
    "in a folder without steps": (("step-1", "step-2"), "logs/best.txt", "step-1", {"step-1"}),
    "an index in a step": (("step-1", "step-2"), "step-2/model.safetensors.index.json",
                           '{"weight_map": {"w": "../step-1/a.safetensors"}}', {"step-1"}),
    "the base of an adapter": (("step-1", "step-2"), "lora/adapter_config.json",
                               '{"base_model_name_or_path": "/w/run/step-1", "r": 2}', {"step-1"}),
    "the base of one in a step": (("a/step-1", "a/step-2", "b/step-2"),
                                  "b/step-2/adapter_config.json",
                                  '{"base_model_name_or_path": "a/step-1", "total_step": 2}',
                                  {"a/step-1"}),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_pointers_wherever_they_lie(place: str, tmp_path: Path) -> None:
    names, file, text, kept = PLACES[place]
    run = steps(tmp_path / "run", *names)
    (run / file).parent.mkdir(exist_ok=True)
    (run / file).write_text(text)
    assert named(run) == kept


def test_a_pointer_right_above_the_run(tmp_path: Path) -> None:
    run = steps(tmp_path / "run", "step-1", "step-2", "step-3")
    (tmp_path / "latest").write_text("run/step-1")
    (tmp_path / "best").symlink_to("run/step-2")
    assert named(run) == {"step-1", "step-2"}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("20240501.log.json", '{"epoch": 1}\n{"epoch": 2}\n'),
        ("checkpoint.lock", ""),
        ("last_save.done", ""),
        ("notes.json", "{"),
        ("best_metric.txt", "0.93"),
    ],
)
def test_other_small_files_stop_nothing(file: str, text: str, tmp_path: Path) -> None:
    run = steps(tmp_path / "run", "step-7", "step-8")
    (run / file).write_text(text)
    pruned(run, yes=True, quick=True)
    assert names_in(run) == sorted([file, "step-8"])


def test_every_link_of_a_chain_stays(tmp_path: Path) -> None:
    run = steps(tmp_path / "run", *(f"step-{i}" for i in range(1, 7)))
    for step in (3, 4):
        shard = run / f"step-{step}" / "__0_0.distcp"
        shard.unlink()
        shard.symlink_to(f"../step-{step - 1}/__0_0.distcp")
    (run / "alias").symlink_to("step-5", target_is_directory=True)
    shard = run / "step-6" / "__0_0.distcp"
    shard.unlink()
    shard.symlink_to(run / "alias" / "__0_0.distcp")
    assert named(run) == {"alias", "step-2", "step-3", "step-5"}
    pruned(run, yes=True, quick=True)
    assert names_in(run) == ["alias", "step-2", "step-3", "step-5", "step-6"]


def test_a_circle_of_links_ends(tmp_path: Path) -> None:
    run = steps(tmp_path / "run", "step-1", "step-2")
    (run / "a").symlink_to("b")
    (run / "b").symlink_to("a")
    (run / "up").symlink_to("..")
    assert named(run) == set()


UNREADABLE: dict[str, Callable[[Path], object]] = {
    "cut off JSON": lambda run: (run / "latest.json").write_text('{"latest": "ste'),
    "cut off name": lambda run: (run / "latest").write_text("runs/ste"),
    "empty": lambda run: (run / "latest").touch(),
    "best, cut off": lambda run: (run / "trainer_state.json").write_text(
        '{"best_metric": 1, "best_model_checkpoint": "out/st'
    ),
    "best, no text": lambda run: (run / "trainer_state.json").write_bytes(
        b'{"best_model_checkpoint": "out/st\xff"}'
    ),
    "best, no escape": lambda run: (run / "trainer_state.json").write_text(
        '{"best_model_checkpoint": "out\\step-1"}'
    ),
    "state, cut off": lambda run: (run / "step-2" / "trainer_state.json").write_text('{"epoch": 1'),
    "state, empty": lambda run: (run / "step-2" / "trainer_state.json").touch(),
    "no file of torch": lambda run: (run / "latest_train_state.pt").write_text("PK"),
}


@pytest.mark.parametrize("fault", UNREADABLE)
def test_a_pointer_that_ends_early_stops_everything(fault: str, tmp_path: Path) -> None:
    run = steps(tmp_path / "run", "step-1", "step-2", "step-3")
    UNREADABLE[fault](run)
    with pytest.raises(TransferError, match="it may name any step"):
        pruned(run, yes=True, quick=True)
    assert {"step-1", "step-2", "step-3"} <= set(names_in(run))


@pytest.mark.parametrize("file", ["latest", "notes", "step-2/trainer_state.json"])
def test_a_pointer_without_permission_stops_everything(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = steps(tmp_path / "run", "step-1", "step-2")
    (run / file).write_text('{"a": "step-1"}')
    real = open

    def denying(path: object, *rest: object, **more: object) -> object:
        if str(path) == str(run / file):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *rest, **more)  # type: ignore[call-overload]

    monkeypatch.setattr("builtins.open", denying)
    monkeypatch.setattr("io.open", denying)
    with pytest.raises(TransferError, match=r"cannot be read: Permission denied"):
        pruned(run, yes=True, quick=True)
    assert (run / "step-1").exists()


@pytest.mark.parametrize("status", [403, 500, 503])
def test_a_pointer_that_a_store_refuses_stops_everything(status: int, s3: S3) -> None:
    for step in (1, 2):
        s3.put(SOURCE, f"run/step-{step}")
    s3.write("run/latest", b"step-1")
    s3.fail(
        refuse(status, "AccessDenied" if status == 403 else "Slow"), "GetObject", key="*/latest"
    )
    before = s3.get("run").keys()
    with pytest.raises((TransferError, NoAnswer)) as caught:
        prune(location(s3.url("run")), PruneOptions(keep_last=1, yes=True))
    assert getattr(caught.value, "exit_code", 5) == 5
    assert s3.get("run").keys() == before
    s3.heal()
    prune(location(s3.url("run")), PruneOptions(keep_last=1, yes=True))
    assert s3.get("run").keys() == before


def test_the_best_of_a_state_of_any_size(tmp_path: Path) -> None:
    run = run_of(tmp_path, TRAINERS["transformers"], (1, 2, 3, 4, 5))
    for step, best in ((3, 1), (5, 2)):
        words = json.dumps({"best_model_checkpoint": f"/w/out/checkpoint-{best}"})
        (run / f"checkpoint-{step}" / "trainer_state.json").write_text(words)
    large = json.dumps({"log_history": "x" * (3 << 20), "best_model_checkpoint": "checkpoint-3"})
    (run / "trainer_state.json").write_text(large)
    pruned(run, yes=True, quick=True)
    assert names_in(run) == ["checkpoint-2", "checkpoint-3", "checkpoint-5", "trainer_state.json"]
    os.truncate(run / "trainer_state.json", 2 << 20)
    with pytest.raises(TransferError, match="before the best checkpoint"):
        pruned(run, yes=True, quick=True)
    os.truncate(run / "trainer_state.json", 1 << 40)
    with pytest.raises(TransferError, match="it has 1,099,511,627,776 bytes, more than the"):
        pruned(run, yes=True, quick=True)


@pytest.mark.parametrize("end", ['"}', ""], ids=["closed", "cut off"])
def test_a_long_text_in_a_state_takes_no_more_memory_than_the_state(
    end: str, tmp_path: Path
) -> None:
    run = run_of(tmp_path, TRAINERS["transformers"], (1, 2))
    long = '{"best_model_checkpoint": "' + "x" * (2 << 20) + end
    (run / "trainer_state.json").write_text(long)
    tracemalloc.start()
    with suppress(TransferError):
        find_pointers(find_run(run))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20


@pytest.mark.parametrize(
    ("file", "text", "lost"),
    [
        ("latest", "step-3", True),
        ("latest_checkpointed_iteration.txt", "3\n", True),
        ("last_checkpoint", "/gpfs/a/run/step-3", True),
        ("latest", "step-1", False),
        ("latest_checkpointed_iteration.txt", "2", False),
        ("latest", "see the notes", False),
        ("notes.txt", "step-3", False),
    ],
)
def test_a_pointer_to_a_step_that_is_not_there(
    file: str, text: str, lost: bool, tmp_path: Path
) -> None:
    run = steps(tmp_path / "run", "step-1", "step-2")
    (run / file).write_text(text)
    chosen = verify_run(run, VerifyOptions(), every=False).chosen
    assert chosen.endswith(f"; {file} names {text.strip()}, which is not there") == lost
    assert ("is not there" in chosen) == lost


def test_what_describes_a_step_keeps_none(tmp_path: Path) -> None:
    """wenet, utils/train_utils.py: each save has a file of settings and counts beside it."""
    for epoch, step in ((1, 8), (2, 16), (3, 24)):
        for name in (f"epoch_{epoch}", f"step_{step}"):
            torch.save({"w": torch.rand(4)}, tmp_path / f"{name}.pt")
            settings = f"tag: {name}\nepoch: {epoch}\nstep: {step}\nmodel_dir: /w/exp\n"
            (tmp_path / f"{name}.yaml").write_text(settings)
    assert named(tmp_path) == set()
    with (tmp_path / "epoch_3.yaml").open("a") as file:
        file.write("init_from: epoch_1.pt\n")
    assert named(tmp_path) == {"epoch_1.pt"}
    torch.save({"w": torch.rand(4)}, tmp_path / "latest.pt")
    (tmp_path / "latest.yaml").write_text("epoch: 2\n")
    assert named(tmp_path) == {"epoch_1.pt", "epoch_2.pt"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("epoch_3.yaml", "epoch: 3\nbest_epoch: 1\n"),
        ("epoch_3.json", '{"epoch": 3, "best": {"epoch": 1}}'),
        ("checkpoint.json", '{"epoch": 1}'),
    ],
)
def test_what_lies_beside_a_step_may_count_another(name: str, text: str, tmp_path: Path) -> None:
    for stem in ("epoch_1", "epoch_2", "epoch_3", "checkpoint"):
        torch.save({"w": torch.rand(4)}, tmp_path / f"{stem}.pt")
    (tmp_path / name).write_text(text)
    assert "epoch_1.pt" in named(tmp_path)
