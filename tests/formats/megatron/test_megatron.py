"""Incomplete Megatron checkpoints, and facts that the files do not determine."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import case, convert_to, read_back

from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.question import Question
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.rewrite import RewriteOptions, Selection
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.compare.against import against
from ckptool.commands.verify.verify import verify
from ckptool.core.catalog import Extent
from ckptool.core.sharding.tensor_parallel import parse_tp_rules
from ckptool.errors import Damaged, UsageError

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
Copy = Callable[[str], Path]


def rewritten(file: Path, change: Callable[[Any], Any]) -> None:
    """The torch file with its value changed."""
    value = torch.load(file, weights_only=False)
    torch.save(change(value), file)


def test_a_number_that_may_be_a_pipeline_or_an_expert_rank(copy_of: Copy) -> None:
    run = copy_of("megatron_torch_distributed")

    def without_degrees(state: Any) -> Any:
        state["args"].pipeline_model_parallel_size = None
        return state

    for file in run.rglob("model_optim_rng.pt"):
        rewritten(file, without_degrees)
    with pytest.raises(Damaged, match="may be a pipeline or an expert rank"):
        open_checkpoint(run)


def test_a_save_that_never_finished(copy_of: Copy) -> None:
    run = copy_of("megatron_torch_dist")
    (run / "iter_0000100" / "metadata.json").unlink()
    notes = " ".join(open_checkpoint(run).catalog.notes)
    assert "never finished" in notes
    found = verify(run, VerifyOptions())
    assert [one.code for one in found.findings if one.severity.value == "error"] == [
        "save-incomplete"
    ]
    (run / "iter_0000100" / ".metadata").unlink()
    with pytest.raises(Damaged, match="never finished"):
        open_checkpoint(run)


@pytest.mark.parametrize(
    ("fixture", "lost", "code", "words"),
    [
        ("megatron_torch_dist", "common.pt", "file-missing", "keeps arguments, step"),
        (
            "megatron_torch_distributed",
            "mp_rank_00_001/distrib_optim.pt",
            "file-missing",
            "which 1 of 2 model-parallel ranks have",
        ),
    ],
)
def test_a_file_that_all_saves_have(
    fixture: str, lost: str, code: str, words: str, copy_of: Copy
) -> None:
    run = copy_of(fixture)
    (run / "iter_0000100" / lost).unlink()
    with pytest.raises(Damaged, match=words) as error:
        open_checkpoint(run)
    assert [problem.code for problem in error.value.problems] == [code]


def test_a_config_that_names_no_backend_is_damaged(copy_of: Copy) -> None:
    run = copy_of("megatron_torch_dist")
    (run / "iter_0000100" / "metadata.json").write_text("{")
    with pytest.raises(Damaged, match=r"metadata\.json names no backend"):
        open_checkpoint(run)


@pytest.mark.parametrize("left", ["\0{", '{"sharded_backenc": "torch_dist"}', None])
def test_a_folder_without_common_pt_is_still_known_where_its_config_is_damaged(
    left: str | None, tmp_path: Path
) -> None:
    """As of Megatron-core 0.20, whose common state is a ShardedObject: a bytes item of a list."""
    run = tmp_path / "iter_0000100"
    state = {"common_state/shard_0_1": [{"iteration": 100}], "decoder.w": torch.ones(3)}
    dcp.save(state, checkpoint_id=run, planner=dcp.DefaultSavePlanner(False), no_dist=True)
    config = run / "metadata.json"
    if left is None:
        catalog = open_checkpoint(run).catalog
        assert catalog.format == "megatron-torch_dist"
        assert "never finished" in " ".join(catalog.notes)
        assert not verify(run, VerifyOptions()).ok
        return
    config.write_text(left)
    with pytest.raises(Damaged, match=r"metadata\.json names no backend"):
        open_checkpoint(run)


def test_another_backend_is_named(copy_of: Copy) -> None:
    run = copy_of("megatron_torch_dist")
    config = run / "iter_0000100" / "metadata.json"
    config.write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    with pytest.raises(Exception, match="of the backend 'zarr'"):
        open_checkpoint(run)


# What the files leave open


def renamed_projection(state: Any) -> Any:
    model = state["model"]
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    state["model"] = {("my.own.weight" if key == name else key): v for key, v in model.items()}
    del state["optimizer"]
    return state


def test_a_rule_that_nobody_knows_is_a_conflict_that_tp_rule_settles(
    copy_of: Copy, out: Path
) -> None:
    run = copy_of("megatron_torch")
    for file in run.rglob("model_optim_rng.pt"):
        rewritten(file, renamed_projection)
    catalog = open_checkpoint(run).catalog
    assert list(catalog.conflicts) == ["model.my.own.weight"]
    assert "--tp-rule 'my.own.weight=RULE'" in catalog.conflicts["model.my.own.weight"]
    with pytest.raises(Damaged):
        convert_to("safetensors", run, out / "refused")
    rules = parse_tp_rules(["my.own.weight=row"])
    convert_to("safetensors", run, out / "model", tp_rules=rules)
    verifying = VerifyOptions(ReadOptions(tp_rules=rules))
    assert verify(run, verifying).ok
    one = RewriteOptions(Selection(select=("model.my.own.weight",)))
    assert against(run, out / "model", Question(check=verifying, rewrite=one)).verify.ok
    wanted = case("megatron_torch").truth[
        "model.decoder.layers.0.self_attention.linear_proj.weight"
    ]
    assert read_back("safetensors", out / "model")["model.my.own.weight"] == wanted


def test_a_tp_rule_for_a_format_that_needs_none() -> None:
    with pytest.raises(UsageError, match="not applicable"):
        open_checkpoint(case("dcp_base").path, ReadOptions(tp_rules=parse_tp_rules(["w=row"])))
    rules = parse_tp_rules(["nothing=row"])
    with pytest.raises(UsageError, match="matches none"):
        open_checkpoint(case("megatron_torch").path, ReadOptions(tp_rules=rules))


def test_a_parameter_with_two_names_has_one_state(copy_of: Copy) -> None:
    """As T5's position embeddings, which the model holds as a module of its own as well."""
    run = copy_of("megatron_torch")

    def named_twice(state: Any) -> Any:
        for model in (state[key] for key in state if key.startswith("model")):
            name = next(n for n in model if "layernorm" in n)
            model[f"again.{name}"] = model[name]
        return state

    for file in run.rglob("model_optim_rng.pt"):
        rewritten(file, named_twice)
    catalog = open_checkpoint(run).catalog
    assert not catalog.conflicts
    states = {name for name in catalog.tensors if not name.startswith("model.")}
    assert states == {n for n in case("megatron_torch").truth if not n.startswith("model.")}
    assert any(name.startswith("model.again.") for name in catalog.tensors)


def test_state_by_number_that_no_name_fits_is_a_conflict_of_the_optimizer(
    copy_of: Copy, out: Path
) -> None:
    run = copy_of("megatron_torch")

    def one_group_less(state: Any) -> Any:
        state["optimizer"]["optimizer"]["param_groups"][0]["params"].pop()
        return state

    for file in run.rglob("model_optim_rng.pt"):
        rewritten(file, one_group_less)
    assert list(open_checkpoint(run).catalog.conflicts) == ["optimizer.state"]
    convert_to("safetensors", run, out / "model", model_only=True)
    found = read_back("safetensors", out / "model")
    truth = case("megatron_torch").truth
    assert found == {
        n.removeprefix("model."): v for n, v in truth.items() if n.startswith("model.")
    }


def test_the_state_of_a_layer_wise_optimizer_is_not_excluded_in_silence(
    copy_of: Copy, out: Path
) -> None:
    run = copy_of("megatron_torch")
    for rank in (0, 1):
        own = run / "iter_0000100" / "mp_rank_00" / f"layer_wise_optimizer_{rank}.pt"
        torch.save([{"state": {}}], own)
    with pytest.raises(Damaged, match=r"layer_wise_optimizer_0\.pt and 1 more files"):
        convert_to("safetensors", run, out / "model")


def test_buckets_that_do_not_fit_the_model_stay_buckets(copy_of: Copy) -> None:
    run = copy_of("megatron_torch_dist")

    rewritten(run / "iter_0000100" / "common.pt", with_tensor_parallelism)
    catalog = open_checkpoint(run).catalog
    assert any("kept by bucket" in note for note in catalog.notes)
    assert any("bucket_idx_0.exp_avg" in name for name in catalog.tensors)


def test_replicas_that_differ_are_refused(copy_of: Copy, out: Path) -> None:
    run = copy_of("megatron_torch")

    def changed(state: Any) -> Any:
        state["model"]["decoder.final_layernorm.weight"][0] += 1
        return state

    rewritten(run / "iter_0000100" / "mp_rank_01" / "model_optim_rng.pt", changed)
    with pytest.raises(Damaged, match="different values"):
        convert_to("safetensors", run, out / "model")


# Stacked layers


def test_unstack_gives_each_layer_its_tensor(out: Path) -> None:
    one = case("megatron_torch_dist")
    convert_to("safetensors", one.path, out / "model", split_stacked=True)
    found = read_back("safetensors", out / "model")
    stacked = one.truth["decoder.layers.mlp.linear_fc1.weight"]
    assert found["decoder.layers.0.mlp.linear_fc1.weight"][1:] == (stacked[1][1:], stacked[2])
    assert "decoder.layers.mlp.linear_fc1.weight" not in found


WRONG = ("not-finite", "crc-mismatch")


def overwritten(file: Path, at: Extent, values: bytes) -> None:
    """Elements of a file that torch.save wrote replaced, and the checksum of their record."""
    assert at.record is not None
    data = bytearray(file.read_bytes())
    data[at.offset : at.offset + len(values)] = values
    old, record = at.record.crc32, slice(at.record.offset, at.record.offset + at.record.nbytes)
    new = zlib.crc32(data[record]).to_bytes(4, "little")
    file.write_bytes(bytes(data).replace(old.to_bytes(4, "little"), new))


@pytest.mark.parametrize(("start", "found"), [(0, True), (96, False), (134, False), (896, True)])
def test_padding_in_buckets_may_hold_anything(start: int, found: bool, copy_of: Copy) -> None:
    """Megatron leaves it as memory happens to be; what belongs to a parameter is looked at."""
    run = copy_of("megatron_torch_dist")
    rewritten(run / "iter_0000100" / "common.pt", with_tensor_parallelism)
    opened = open_checkpoint(run)
    name = next(name for name in opened.catalog.tensors if name.endswith("bucket_idx_0.exp_avg"))
    entry = opened.open_containers(opened.catalog).tensors[name]
    chunk = next(c for c in entry.chunks if c.box.lo[0] <= start < c.box.hi[0])
    assert isinstance(chunk.at, Extent)
    overwritten(run / "iter_0000100" / chunk.at.file, chunk.at, b"\xff" * 4)
    problems = [f for f in verify(run, VerifyOptions()).findings if f.code in WRONG]
    assert [(f.code, f.tensor) for f in problems] == ([("not-finite", name)] if found else [])


def with_tensor_parallelism(state: Any) -> Any:
    """Arguments that do not fit the model, so that nothing says what is in the buckets."""
    state["args"].tensor_model_parallel_size = 2
    return state


@pytest.mark.parametrize("name", ["megatron_torch", "megatron_torch_dist"])
def test_the_weights_of_a_release(name: str, copy_of: Copy, out: Path) -> None:
    """A folder that is called ``release``, as converters to Megatron leave it."""
    run = copy_of(name)
    (run / "iter_0000100").rename(run / "release")
    (run / "latest_checkpointed_iteration.txt").write_text("release")
    assert open_checkpoint(run).path == run / "release"
    convert_to("safetensors", run, out / "model", model_only=True)
    found = read_back("safetensors", out / "model")
    truth = case(name).truth
    assert found == {tensor: truth[truth_name(name, tensor)] for tensor in found}
    assert len(found) > 5
    assert verify(run, VerifyOptions()).ok


def truth_name(name: str, tensor: str) -> str:
    return tensor if name == "megatron_torch_dist" else f"model.{tensor}"
