"""The results of ``inspect`` and ``--stats``."""

from __future__ import annotations

import json
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import case

from ckptool.commands.inspect import report as commands
from ckptool.commands.inspect import values
from ckptool.commands.inspect.report import InspectReport, report, step_of
from ckptool.commands.inspect.stats import stats
from ckptool.commands.inspect.views import inspect_json
from ckptool.commands.open import OpenedCheckpoint
from ckptool.commands.open import survey as open_survey
from ckptool.commands.options.inspect import InspectOptions
from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Catalog, Chunk, Extent, ObjectEntry, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.mesh import Mesh, Replicate, Shard, StridedShard
from ckptool.engine.read.numbers import decode
from ckptool.errors import Damaged, UsageError
from ckptool.formats import FORMATS
from ckptool.serialization.pickle.records import Call, Global
from ckptool.storage.local import LocalSource


def tensor(name, shape=(4, 2), dtype="float32", *, rows=None, offset=0, placements=None):
    """A tensor whose row ranges ``rows`` lie one after another in file ``f``, one a rank."""
    kind = BY_NAME[dtype]
    strides = row_major_strides(shape, kind.itemsize)
    boxes = [Box.whole(shape)]
    if rows is not None:
        boxes = [Box((low, *(0,) * len(shape[1:])), (high, *shape[1:])) for low, high in rows]
    chunks = tuple(
        Chunk(box, Extent("f", offset + (box.lo[0] * strides[0] if shape else 0), strides), rank)
        for rank, box in enumerate(boxes)
    )
    return TensorEntry(name, tuple(name.split(".")), kind, shape, chunks, placements)


def catalog(*entries, objects=None, **others):
    values = {k: ObjectEntry(k, tuple(k.split(".")), v) for k, v in (objects or {}).items()}
    return Catalog("dcp", {e.name: e for e in entries}, values, {"f": 64}, **others)


def opened(found: Catalog, root: Path = Path("ckpt")) -> OpenedCheckpoint:
    return OpenedCheckpoint(root, LocalSource(root, {"f": 64}), FORMATS["safetensors"], found)


def described(*entries, **others) -> InspectReport:
    return report(opened(catalog(*entries, **others)))


def test_totals_count_parameters_of_the_model_only():
    found = described(tensor("model.w"), tensor("optim.state.w.exp_avg"), tensor("train.x", (1,)))
    assert (found.totals.tensors, found.totals.parameters, found.totals.nbytes) == (3, 8, 68)


def test_shares_are_by_part_and_dtype_largest_first():
    found = described(
        tensor("optim.m"), tensor("model.b", (1,), "bfloat16"), tensor("model.w"), tensor("model.v")
    )
    assert [(s.part, s.dtype.name, s.tensors, s.nbytes) for s in found.shares] == [
        ("model", "float32", 2, 64),
        ("model", "bfloat16", 1, 2),
        ("optimizer", "float32", 1, 32),
    ]


def test_contradictions_and_gaps_are_problems_and_the_rest_is_still_shown():
    found = described(tensor("w", rows=[(0, 1), (2, 4)]), conflicts={"x": "x: ranks differ"})
    assert found.problems[0] == "x: ranks differ"
    assert "2 missing" in found.problems[1]
    assert found.totals.tensors == 1


@pytest.mark.parametrize(
    ("path", "values", "step"),
    [
        ("out", {"train_state.step": 7}, 7),
        ("out", {"meta.global_step": 0}, 0),
        ("step-3", {"step": 9}, 9),
        ("step-3", {}, 3),
        ("run/checkpoint-500", {}, 500),
        ("global_step_10/actor", {}, 10),
        ("global_step20", {}, 20),
        ("iter_0000100", {}, 100),
        ("llama-step=7", {}, 7),
        ("step1_sft", {}, None),
        ("out", {"step": True}, None),
        ("out", {"step": "7"}, None),
        ("out", {"random_states.step": 7}, None),
        ("checkpoint_0", {}, None),
        ("steps", {}, None),
    ],
)
def test_step(path, values, step):
    assert step_of(Path("/nowhere", path), catalog(objects=values)) == step


def test_a_step_that_the_format_found_counts_before_the_folders_name():
    found = catalog(info={"step": "12"})
    assert step_of(Path("/nowhere/step-3"), found) == 12


def test_json_of_a_sharded_checkpoint():
    placements = (StridedShard(0, 2), Shard(0))
    found = inspect_json(
        described(
            tensor("w", rows=[(0, 2), (2, 4)], placements=placements),
            tensor("s", ()),
            objects={"step": 7},
            world_size=4,
            mesh=Mesh.of((2, 2), ("dp", "tp")),
            mesh_source="declared",
        )
    )
    assert found["schema"] == "ckptool.inspect/2"
    assert found["mesh"] == {"shape": [2, 2], "names": ["dp", "tp"], "source": "declared"}
    assert found["totals"] == {"tensors": 2, "parameters": 9, "bytes": 36, "files": 1}
    assert found["tensors"][0] == {
        "name": "w",
        "part": "model",
        "dtype": "float32",
        "shape": [4, 2],
        "bytes": 32,
        "placements": ["StridedShard(0, 2)", "Shard(0)"],
        "chunks": 2,
    }
    assert found["tensors"][1]["placements"] is None
    assert found["values"] == [{"name": "step", "type": "int", "value": 7}]


@pytest.mark.parametrize(
    "value", [None, True, -3, 0.5, "a", [], [1, "b"], {"a": [None]}, 2**63 - 1]
)
def test_json_holds_a_plain_value(value):
    assert inspect_json(described(objects={"v": value}))["values"][0]["value"] == value


def test_json_holds_a_tuple_as_a_list():
    described_value = inspect_json(described(objects={"v": (1, (2,))}))["values"][0]
    assert described_value == {"name": "v", "type": "tuple", "value": [1, [2]]}


def _cycle():
    value: list[Any] = []
    value.append(value)
    return value


def _shared():
    value: list[Any] = ["x"]
    for _ in range(30):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        b"x",
        {1},
        {1: 2},
        2**63,
        float("nan"),
        [float("inf")],
        1j,
        Global("torch", "bfloat16"),
        Call(Global("os", "x"), ()),
        _cycle(),
        _shared(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_json_leaves_out_a_value_it_cannot_hold(value, monkeypatch):
    monkeypatch.setattr(values, "_MOST_NODES", 1 << 12)
    assert "value" not in inspect_json(described(objects={"v": value}))["values"][0]


def test_json_has_the_views_that_are_asked_for():
    held = described(tensor("a.w"), tensor("b.w"))
    found = inspect_json(held, InspectOptions(("a.*",), rank_bytes=True, shards="b.w"))
    assert [row["name"] for row in found["tensors"]] == ["a.w"]
    assert found["totals"]["tensors"] == 2
    assert [(one["from"], one["to"]) for one in found["shards"]] == [([0, 0], [4, 2])]
    assert found["rank_bytes"] == [{"rank": 0, "chunks": 2, "bytes": 64}]
    with pytest.raises(UsageError, match="NAME 'c' matches none of"):
        inspect_json(held, InspectOptions(("c",)))


def test_json_is_ascii_whatever_the_names_are():
    found = inspect_json(described(tensor("\ud800.\x1b[31m\u202e"), objects={"v": "\udfff"}))
    text = json.dumps(found, allow_nan=False)
    assert text.isascii()
    assert json.loads(text)["tensors"][0]["name"] == "\ud800.\x1b[31m\u202e"


def _stats(tmp_path, values, dtype, rows=None):
    (tmp_path / "f").write_bytes(values.tobytes())
    entry = tensor("w", values.shape, dtype, rows=rows)
    return stats(opened(catalog(entry), tmp_path), ["*"])[0]


def test_sizes_of_values_are_counted_by_powers_of_two(tmp_path):
    values = np.array([0, -0.75, 0.5, 3, 2.0**-20, np.inf, np.nan, 0], "float16")
    found = _stats(tmp_path, values, "float16").to_dict()
    assert found["histogram"] == [[-20, 1], [-1, 2], [1, 1]]
    assert (found["denormal"], found["zero_share"], found["absmax"]) == (1, 0.25, 3.0)
    finite = np.array([-0.75, 0.5, 3, 2.0**-20])
    assert found["norm"] == pytest.approx(float(np.linalg.norm(finite)))
    assert _stats(tmp_path, np.array([3, -4, 0, 0]), "int64").to_dict()["denormal"] is None


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int8", "uint64", "int64"])
def test_stats_of_native_types(tmp_path, dtype):
    values = np.arange(24, dtype=dtype).reshape(6, 4)
    found = _stats(tmp_path, values, dtype, rows=[(0, 1), (1, 6)])
    assert (found.minimum, found.maximum, found.zeros, found.nan, found.inf) == (0, 23, 1, 0, 0)
    assert found.mean == pytest.approx(11.5)
    assert found.std == pytest.approx(values.astype(float).std())


def test_stats_keep_large_integers_exact(tmp_path):
    values = np.array([2**63 - 1, -(2**63)], "int64")
    found = _stats(tmp_path, values, "int64")
    assert (found.minimum, found.maximum) == (-(2**63), 2**63 - 1)


def test_stats_count_nan_and_inf_apart(tmp_path):
    values = np.array([np.nan, np.inf, -np.inf, 1, 3, 0], "float32")
    found = _stats(tmp_path, values, "float32")
    assert (found.nan, found.inf, found.zeros, found.minimum, found.maximum) == (1, 2, 1, 0, 3)
    assert found.mean == pytest.approx(4 / 3)


@pytest.mark.parametrize("values", [np.zeros((0,), "float32"), np.full(2, np.nan, "float32")])
def test_stats_of_no_finite_value_are_null(tmp_path, values):
    found = _stats(tmp_path, values, "float32").to_dict()
    assert (found["min"], found["max"], found["mean"], found["std"]) == (None,) * 4


def test_stats_of_complex_numbers_are_of_magnitudes(tmp_path):
    found = _stats(tmp_path, np.array([3 + 4j, 0], "complex64"), "complex64")
    assert (found.minimum, found.maximum, found.zeros) == (0, 5, 1)
    assert found.to_dict()["of"] == "magnitudes"


def test_stats_merge_tiles_without_losing_digits(tmp_path, monkeypatch):
    monkeypatch.setattr("ckptool.commands.inspect.stats._TILE_ELEMENTS", 7)
    values = 1e8 + np.random.default_rng(0).standard_normal((40, 5))
    found = _stats(tmp_path, values, "float64")
    assert found.std == pytest.approx(values.std(), rel=1e-8)
    assert found.mean == pytest.approx(values.mean(), rel=1e-15)


def test_stats_of_packed_bits_are_null(tmp_path):
    found = _stats(tmp_path, np.zeros(4, "u1"), "float4_e2m1fn_x2")
    assert (found.minimum, found.zeros) == (None, None)


def test_stats_of_a_missing_name_or_chunk_are_errors(tmp_path):
    gap = catalog(tensor("w", rows=[(0, 1)]))
    with pytest.raises(UsageError, match="matches none of"):
        stats(opened(gap, tmp_path), ["v"])
    with pytest.raises(Damaged, match="missing"):
        stats(opened(gap, tmp_path), ["w"])


@pytest.mark.parametrize(
    "name",
    [
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ],
)
def test_decoded_agrees_with_torch_on_every_code(name):
    torch = pytest.importorskip("torch")
    kind = BY_NAME[name]
    codes = np.arange(256**kind.itemsize).astype(f"u{kind.itemsize}")
    wanted = torch.from_numpy(codes.view("u1")).view(getattr(torch, name)).to(torch.float32)
    np.testing.assert_array_equal(decode(codes, kind), wanted.numpy())


def test_an_element_type_that_is_not_known_is_not_decoded_as_another():
    with pytest.raises(KeyError, match="float4_e2m1fn_x2"):
        decode(np.zeros(4, "u1"), BY_NAME["float4_e2m1fn_x2"])


def test_placements_of_every_kind_have_one_spelling():
    found = inspect_json(described(tensor("w", placements=(Replicate(), Shard(1)))))
    assert found["tensors"][0]["placements"] == ["Replicate()", "Shard(1)"]


def test_what_is_damaged_is_not_held_while_it_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(case("dcp_fsdp2_tp").path, tmp_path / "m")
    (tmp_path / "m" / "__0_0.distcp").unlink()
    held: list[Any] = []

    def survey(*args: Any) -> Any:
        error: BaseException | None = sys.exception()
        while error is not None:
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            held.append([frame.f_locals.keys() for frame in frames[1:] if frame.f_locals])
            error = error.__cause__ or error.__context__
        return open_survey(*args)

    monkeypatch.setattr(commands, "survey", survey)
    found = commands.inspect_readable(tmp_path / "m")
    assert found.problems
    assert found.error is not None
    assert found.error.__traceback__ is not None
    assert held
    assert not any(held)
