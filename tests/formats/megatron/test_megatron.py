"""Megatron's checkpoints, where they are not whole, and where the files leave something open."""

from __future__ import annotations

import json
import operator
import shutil
import zlib
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from conftest import case, convert_to, read_back
from hypothesis import given
from hypothesis import strategies as st

from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.source import ReadOptions, RewriteOptions, Selection
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.compare.against import AgainstOptions, against
from ckptool.commands.verify.verify import verify
from ckptool.core.catalog import Extent
from ckptool.core.dtype import BY_NAME
from ckptool.core.sharding.tensor_parallel import TpRule, fit_rank, parse_tp_rule, parse_tp_rules
from ckptool.errors import Damaged, Undetermined, UsageError
from ckptool.formats.megatron.model import (
    Arguments,
    global_expert,
    global_layer,
    is_expert,
    layer_offsets,
    local_experts,
    read_arguments,
)
from ckptool.formats.megatron.rank_folders import _require_all, _require_own
from ckptool.formats.megatron.tensor_parallel import (
    LocalParameter,
    ParameterRules,
    experts_view,
    find_rule,
)

torch = pytest.importorskip("torch")
Copy = Callable[[str], Path]


def rewritten(file: Path, change: Callable[[Any], Any]) -> None:
    """The torch file with its value changed."""
    value = torch.load(file, weights_only=False)
    torch.save(change(value), file)


# Rules


GATED = Arguments({"swiglu": True, "tensor_model_parallel_size": 2})
PLAIN = Arguments({"swiglu": False})


def rule_or_reason(*facts: Any) -> str:
    """The rule of a parameter, or why it is not known."""
    try:
        return str(find_rule(*facts))
    except Undetermined as error:
        return str(error)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("embedding.word_embeddings.weight", "Shard(0)"),
        ("output_layer.weight", "Shard(0)"),
        ("decoder.layers.3.self_attention.linear_qkv.weight", "Shard(0)"),
        ("decoder.layers.3.self_attention.linear_qkv.bias", "Shard(0)"),
        ("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight", "Replicate()"),
        ("decoder.layers.3.self_attention.linear_proj.weight", "Shard(1)"),
        ("decoder.layers.3.self_attention.linear_q_up_proj.weight", "Shard(0)"),
        ("decoder.layers.3.mlp.linear_fc1.weight", "Shard(0, 2)"),
        ("decoder.layers.3.mlp.linear_fc1.bias", "Shard(0, 2)"),
        ("decoder.layers.3.mlp.linear_fc2.weight", "Shard(1)"),
        ("decoder.layers.3.mlp.router.weight", "Replicate()"),
        ("decoder.layers.3.mlp.shared_experts.linear_fc1.weight", "Shard(0, 2)"),
        ("decoder.layers.3.mlp.shared_experts.gate_weight", "Replicate()"),
        ("decoder.layers.3.mlp.experts.local_experts.2.linear_fc2.weight", "Shard(1)"),
        ("decoder.layers.3.mlp.experts.linear_fc1.weight7", "Shard(0, 2)"),
        ("decoder.layers.3.mlp.experts.linear_fc2.weight7", "Shard(1)"),
        ("decoder.layers.3.input_layernorm.weight", "Replicate()"),
        ("decoder.layers.3.self_attention.q_layernorm.weight", "Replicate()"),
        ("decoder.final_layernorm.bias", "Replicate()"),
        ("vision_model.class_token", "Replicate()"),
        ("vision_model.conv1.weight", "Replicate()"),
        ("vision_model.position_embeddings.weight", "Replicate()"),
        ("vision_model.embedder.weight", "Shard(0)"),
        ("language_model.encoder.layers.0.self_attention.query_key_value.weight", "Shard(0)"),
        ("language_model.encoder.layers.0.self_attention.dense.weight", "Shard(1)"),
        ("language_model.encoder.layers.0.mlp.dense_h_to_4h.weight", "Shard(0, 2)"),
    ],
)
def test_how_megatron_partitions_a_parameter(name: str, rule: str) -> None:
    assert rule_or_reason(name, {name: (8, 8)}, None, GATED) == rule


def test_a_row_parallel_bias_is_replicated() -> None:
    name = "layers.0.mlp.linear_fc2.bias"
    assert rule_or_reason(name, {name: (8,)}, None, PLAIN) == "Replicate()"


def test_a_linear_layer_that_is_not_gated() -> None:
    name = "layers.0.mlp.linear_fc1.weight"
    assert rule_or_reason(name, {name: (8, 8)}, None, PLAIN) == "Shard(0)"
    assert "gate" in rule_or_reason(name, {name: (8, 8)}, None, Arguments({}))


@pytest.mark.parametrize(
    ("name", "down", "taken", "rule"),
    [
        ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight", (6, 8), "Shard(0)"),
        ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight", (6, 4), "Shard(0, 2)"),
        ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight", (6, 5), "Shard(0, 2)"),
        ("mlp.linear_fc1.bias", "mlp.linear_fc2.weight", (6, 8), "Shard(0)"),
        ("experts.linear_fc1.bias3", "experts.linear_fc2.weight3", (6, 8), "Shard(0)"),
        ("experts.weight1", "experts.weight2", (3, 8, 6), "Shard(2)"),
        ("experts.weight1", "experts.weight2", (3, 4, 6), "Shard(2, 2)"),
    ],
)
def test_what_the_next_layer_takes_tells_a_gate_better_than_the_arguments(
    name: str, down: str, taken: tuple[int, ...], rule: str
) -> None:
    """The arguments are those of the language model: a vision model beside it may differ."""
    shapes = {name: (3, 6, 8) if name == "experts.weight1" else (8, 6), down: taken}
    assert rule_or_reason(name, shapes, None, GATED) == rule


@pytest.mark.parametrize(
    ("leaf", "blocks"),
    [
        ("mixer.in_proj.weight", (12, 12, 4, 4, 6)),
        ("mixer.conv1d.weight", (12, 4, 4)),
        ("mixer.conv1d.bias", (12, 4, 4)),
        ("mixer.A_log", (1,)),
        ("mixer.D", (1,)),
        ("mixer.dt_bias", (1,)),
        ("mixer.norm.weight", (1,)),
        ("self_attention.in_proj.weight", (4, 4, 12, 12, 3, 3)),
        ("self_attention.conv1d.weight", (4, 4, 12)),
        ("self_attention.A_log", (1,)),
    ],
)
def test_a_mixer_joins_several_tensors_in_one(leaf: str, blocks: tuple[int, ...]) -> None:
    """Mamba: z, x, B, C, dt; gated delta net: query, key, value, z, beta, alpha."""
    mixer = {"in_proj.weight": (38, 8), "conv1d.weight": (20, 1, 4), "conv1d.bias": (20,)}
    mixer |= {"out_proj.weight": (8, 12), "A_log": (6,), "D": (6,), "dt_bias": (6,)}
    delta = mixer | {"in_proj.weight": (38, 8), "A_log": (3,)}
    shapes = {f"mixer.{n}": s for n, s in (mixer | {"norm.weight": (12,)}).items()}
    shapes |= {f"self_attention.{n}": s for n, s in delta.items()}
    assert find_rule(leaf, shapes, None, PLAIN) == TpRule(0, blocks)


def test_a_mixer_whose_sizes_contradict_is_not_joined() -> None:
    shapes = {"mixer.in_proj.weight": (37, 8), "mixer.conv1d.weight": (20, 1, 4)}
    assert "do not tell" in rule_or_reason("mixer.in_proj.weight", shapes, None, PLAIN)
    shapes |= {"mixer.out_proj.weight": (8, 12), "mixer.A_log": (6,)}
    assert "give 38" in rule_or_reason("mixer.in_proj.weight", shapes, None, PLAIN)


@pytest.mark.parametrize(("rows", "rule"), [(24, "Replicate()"), (12, "Shard(0)"), (7, "it has 7")])
def test_a_down_projection_is_known_by_its_rows(rows: int, rule: str) -> None:
    latent = {"kv_lora_rank": 16, "qk_pos_emb_head_dim": 8, "tensor_model_parallel_size": 2}
    name = "decoder.layers.0.self_attention.linear_kv_down_proj.weight"
    assert rule_or_reason(name, {name: (rows, 4)}, None, Arguments(latent)).startswith(rule)


def test_what_a_master_says_of_itself_counts_where_names_say_nothing() -> None:
    stated = parse_tp_rule("x=row")[1]
    shapes = {"my.own.weight": (4, 4)}
    assert find_rule("my.own.weight", shapes, stated, PLAIN) == stated
    assert "no rule says how Megatron" in rule_or_reason("my.own.weight", shapes, None, PLAIN)


def test_a_scalar_on_one_rank_is_a_contradiction_and_no_failure() -> None:
    rules = ParameterRules(GATED, (2, 1, 1), (), shapes={"mlp.linear_fc1.weight": ()})
    held = LocalParameter("mlp.linear_fc1.weight", (1, 0, 0), 1, (8, 4), BY_NAME["bfloat16"])
    assert rules.fit(held) == fit_rank((8, 4), ())


def test_grouped_experts_are_read_by_expert() -> None:
    assert experts_view("mlp.experts.weight1", (4, 24), 3) == (3, 4, 8)
    assert experts_view("mlp.experts.weight2", (24, 4), 3) == (3, 8, 4)
    assert experts_view("mlp.router.weight", (24, 4), 3) == (24, 4)


# Names


def test_layers_are_counted_through_stages_and_virtual_stages() -> None:
    """Stage 0 has layers 0, 1 and 3; stage 1 has 2 and 4, 5."""
    runs = {
        (0, 0): ["embedding.w", "decoder.layers.0.w", "decoder.layers.1.w"],
        (1, 0): ["decoder.layers.0.w"],
        (0, 1): ["decoder.layers.0.w"],
        (1, 1): ["decoder.layers.0.w", "decoder.layers.1.w", "mtp.layers.0.w"],
    }
    offsets = layer_offsets(runs)
    found = {
        run: [global_layer(name, offsets[run]) for name in names] for run, names in runs.items()
    }
    assert found[1, 0] == ["decoder.layers.2.w"]
    assert found[0, 1] == ["decoder.layers.3.w"]
    assert found[1, 1] == ["decoder.layers.4.w", "decoder.layers.5.w", "mtp.layers.0.w"]


def test_experts_have_numbers_of_the_whole_model() -> None:
    one = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"
    grouped = "decoder.layers.0.mlp.experts.linear_fc1.weight1"
    assert local_experts([one, "x"]) == local_experts([grouped]) == 2
    assert global_expert(one, 4) == one.replace("experts.1", "experts.5")
    assert global_expert(grouped, 4).endswith("weight5")
    assert is_expert(one)
    assert not is_expert("decoder.layers.0.mlp.shared_experts.linear_fc1.weight")


# Arguments


def test_arguments_that_are_no_namespace() -> None:
    assert read_arguments(None).info() == {"framework": "Megatron-core"}
    assert read_arguments({"num_layers": 4, "bf16": True}).info()["arguments"] == "layers 4, bf16"


def test_inspect_tells_the_degrees_and_the_step() -> None:
    opened = open_checkpoint(case("megatron_torch").path)
    assert opened.path.name == "iter_0000100"
    assert opened.catalog.info["parallelism"] == "TP 2, PP 1, DP 1, EP 1"
    assert opened.catalog.objects["iteration"].value == 100


# Folders


def test_the_tracker_says_which_checkpoint_of_a_run_is_meant(copy_of: Copy) -> None:
    run = copy_of("megatron_torch")
    shutil.copytree(run / "iter_0000100", run / "iter_0000200")
    assert open_checkpoint(run).path == run / "iter_0000100"
    (run / "latest_checkpointed_iteration.txt").write_text("200\n")
    assert open_checkpoint(run).path == run / "iter_0000200"
    (run / "latest_checkpointed_iteration.txt").write_text("300")
    with pytest.raises(Damaged, match="no iter_0000300"):
        open_checkpoint(run)


def test_a_rank_without_its_folder(copy_of: Copy) -> None:
    run = copy_of("megatron_torch")
    shutil.rmtree(run / "iter_0000100" / "mp_rank_01")
    with pytest.raises(Damaged, match=r"TP rank 1, PP rank 0, EP rank 0 is missing \(1 of 2 x 1"):
        open_checkpoint(run)


def test_a_folder_of_a_rank_there_is_none_of(copy_of: Copy) -> None:
    run = copy_of("megatron_torch") / "iter_0000100"
    shutil.copytree(run / "mp_rank_01", run / "mp_rank_02")
    with pytest.raises(Damaged, match=r"mp_rank_02/.* belongs to no rank of TP 2 x PP 1 x EP 1"):
        open_checkpoint(run)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("megatron_torch", "mp_rank_00", "mp_rank_01"),
        ("megatron_torch_distributed", "mp_rank_00_000", "mp_rank_00_001"),
    ],
)
def test_folders_that_took_each_others_place(
    name: str, one: str, other: str, copy_of: Copy
) -> None:
    run = copy_of(name) / "iter_0000100"
    for old, new in ((one, "between"), (other, one), ("between", other)):
        (run / old).rename(run / new)
    with pytest.raises(Damaged, match=f"{one}/.* written by rank 1, {other}/.* by rank 0"):
        open_checkpoint(run)


@given(st.permutations(range(12)), st.sets(st.integers(0, 11)))
def test_neighbours_alone_tell_folders_that_took_each_others_place(
    writers: list[int], lacking: set[int]
) -> None:
    """As every pair of folders that differ in one of the three would."""
    places = [place for at, place in enumerate(product(range(2), range(3), range(2)))
              if at not in lacking]  # fmt: skip
    known = dict(zip(places, writers, strict=False))
    wrong = any(
        sum(map(operator.ne, one, other)) == 1 and one < other and known[one] > known[other]
        for one, other in product(known, known)
    )
    try:
        _require_own({rank: str(rank) for rank in known}, {str(r): n for r, n in known.items()})
    except Damaged:
        assert wrong
    else:
        assert not wrong


def test_thousands_of_folders_are_compared_at_once() -> None:
    places = list(product(range(8), range(64), range(64)))
    ranks = {rank: str(rank) for rank in places}
    _require_own(ranks, {str(rank): number for number, rank in enumerate(places)})
    stated = Arguments({"tensor_model_parallel_size": 1 << 30})
    with pytest.raises(Damaged, match=r"TP rank 8, PP rank 0, EP rank 0 is missing"):
        _require_all(ranks, stated)


def test_a_file_that_no_rank_has(copy_of: Copy) -> None:
    run = copy_of("megatron_torch_distributed") / "iter_0000100"
    shutil.copy(run / "mp_rank_00_000" / "distrib_optim.pt", run / "distrib_optim.pt")
    assert "file-unused" in {one.code for one in verify(run, VerifyOptions()).findings}


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
    assert against(run, AgainstOptions(out / "model", one, verify=verifying)).verify.ok
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


def test_the_state_of_a_layer_wise_optimizer_is_not_left_out_in_silence(
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
    entry = opened.located(opened.catalog).tensors[name]
    chunk = next(c for c in entry.chunks if c.box.lo[0] <= start < c.box.hi[0])
    overwritten(opened.path / chunk.at.file, chunk.at, b"\xff" * 4)
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
