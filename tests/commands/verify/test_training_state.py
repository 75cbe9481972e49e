"""verify: optimizers and step counters that contradict one another, and NaN."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from verify.verify_runs import checked, saved

from ckptool.commands.open import open_checkpoint
from ckptool.commands.verify.checks import measures
from ckptool.engine.read.tiles import read_tiles


def optimizer(steps: dict[str, int], **without: str) -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    kinds = ("step", "exp_avg", "exp_avg_sq")
    state = {
        name: {
            kind: torch.tensor(float(step)) if kind == "step" else torch.ones(3)
            for kind in kinds
            if without.get(name) != kind
        }
        for name, step in steps.items()
    }
    model = {name: torch.ones(3) for name in steps}
    return {"model": model, "optimizer": {"state": state}, "step": 7}


def test_equal_step_counters_are_nothing_to_report(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", state=optimizer({"a": 7, "b": 7, "c": 7}))
    assert not checked(folder).findings


def test_step_counters_of_two_saves(tmp_path: Path) -> None:
    steps = {"layers.0.up": 7, "layers.0.down": 7, "layers.1.up": 7, "layers.1.down": 3}
    (found,) = checked(saved(tmp_path / "c", state=optimizer(steps))).findings
    assert found.code == "steps-differ"
    counters = "3 for optimizer.state.layers.1.down.step; 7 for optimizer.state.layers.0.up.step"
    assert f"{counters} and 2 more" in found.message


def test_fewer_steps_of_what_had_no_gradient_are_nothing_to_report(tmp_path: Path) -> None:
    state = optimizer({"a": 7, "b": 7, "c": 1, "layers.0.experts.3.w": 4})
    for kind in ("exp_avg", "exp_avg_sq"):
        state["optimizer"]["state"]["c"][kind].zero_()
    assert not checked(saved(tmp_path / "c", state=state)).findings


def test_two_optimizers_count_for_themselves(tmp_path: Path) -> None:
    one, other = optimizer({"a": 3, "b": 3}), optimizer({"c": 15, "d": 15})  # as of a GAN
    state = {"model": one["model"] | other["model"], "generator": one["optimizer"]}
    state |= {"discriminator": other["optimizer"]}
    assert not checked(saved(tmp_path / "c", state=state)).findings
    state["discriminator"] = optimizer({"c": 15, "d": 14})["optimizer"]
    (found,) = checked(saved(tmp_path / "d", state=state)).findings
    counters = "15 for discriminator.state.c.step; 14 for discriminator.state.d.step"
    assert found.message == f"the optimizer's step counters are {counters}"


def test_step_counters_that_differ_between_ranks(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", model_rank0={"step": 7}, model_rank1={"step": 8})
    (found,) = checked(folder).findings
    assert (found.code, found.message) == ("steps-differ", "step: 7 on rank 0, 8 on rank 1")


def test_optimizer_state_that_lacks_a_part(tmp_path: Path) -> None:
    state = optimizer({"a": 7, "b": 7, "c": 7}, c="exp_avg_sq")
    (found,) = checked(saved(tmp_path / "c", state=state), quick=True).findings
    assert found.code == "optimizer-incomplete"
    assert "optimizer.state.c: without exp_avg_sq, which 2 other" in found.message


def test_squares_of_rows_and_columns_are_no_part_that_is_missing(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = optimizer({"a": 7, "b": 7, "c": 7}, c="exp_avg_sq")  # Adafactor with a mean, CAME
    factors = {f"exp_avg_sq_{dim}": torch.ones(3) for dim in ("row", "col")}
    state["optimizer"]["state"]["c"] |= factors
    assert not checked(saved(tmp_path / "c", state=state), quick=True).findings


def test_what_another_optimizer_has_is_no_part_that_is_missing(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = optimizer({"a": 7, "b": 7, "c": 7}, c="exp_avg_sq")
    del state["optimizer"]["state"]["c"]["exp_avg"]
    state["optimizer"]["state"]["c"]["square_avg"] = torch.ones(3)  # RMSprop's
    assert not checked(saved(tmp_path / "c", state=state), quick=True).findings
    state["optimizer"]["state"]["c"] = optimizer({"c": 7})["optimizer"]["state"]["c"]
    state["optimizer"]["state"]["c"]["step"] = 7  # SparseAdam's is no tensor
    assert not checked(saved(tmp_path / "d", state=state), quick=True).findings


@pytest.mark.parametrize(
    ("name", "option", "least"),
    [("Adam", {"amsgrad": True}, {}), ("RMSprop", {"momentum": 0.9}, {"momentum": 0})],
)
def test_what_an_option_of_a_group_leaves_out_is_no_part_that_is_missing(
    name: str, option: dict[str, Any], least: dict[str, Any], tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    weights = [torch.nn.Parameter(torch.randn(3, 2)) for _ in range(4)]
    groups = [{"params": weights[:2], **option}, {"params": weights[2:], **least}]
    trained = getattr(torch.optim, name)(groups)
    sum(weight.sum() for weight in weights).backward()
    trained.step()
    state = {"optimizer": trained.state_dict()}
    assert not checked(saved(tmp_path / "c", state=state)).findings
    own = state["optimizer"]["state"][1]
    (kind,) = own.keys() - state["optimizer"]["state"][2].keys()
    del own[kind]  # of the group that keeps it
    (found,) = checked(saved(tmp_path / "d", state=state)).findings
    assert "optimizer.state.1: without" in found.message


def test_one_mean_of_squares_for_a_parameter_or_a_row_is_of_its_shape(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = optimizer({"a": 7, "b": 7})
    for name, shape in {"a": (), "b": (4, 1)}.items():  # as of NovoGrad
        own = state["optimizer"]["state"][name]
        state["model"][name] = own["exp_avg"] = torch.ones(4, 6)
        own["exp_avg_sq"] = torch.ones(shape)
    assert not checked(saved(tmp_path / "c", state=state)).findings


@pytest.mark.parametrize(("mask", "count"), [((4, 6), 0), ((6, 4), 1), ((4,), 1), (None, 1)])
def test_moments_of_the_elements_that_a_mask_chooses(
    mask: tuple[int, ...] | None, count: int, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    state = optimizer({"a": 7})
    state["model"]["a"], own = torch.ones(4, 6), state["optimizer"]["state"]["a"]
    own["exp_avg"] = own["exp_avg_sq"] = torch.ones(5)  # as of SaRA
    if mask is not None:
        own["mask"] = torch.ones(mask, dtype=torch.bool)
    assert len(checked(saved(tmp_path / "c", state=state)).findings) == count


def test_a_module_called_state_is_part_of_a_parameters_name(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    parameters = ["proj.w", *(f"layers.{n}.state.proj.w" for n in range(3))]
    state = optimizer(dict.fromkeys(parameters, 7))
    for kind in ("exp_avg", "exp_avg_sq"):
        state["optimizer"]["state"]["proj.w"][kind] = torch.ones(4)
    state["model"]["proj.w"] = torch.ones(4)
    assert not checked(saved(tmp_path / "c", state=state)).findings


def test_one_buffer_of_all_parameters_has_the_shape_of_none(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = {"w": torch.ones(4, 4), "optim": {"state": {"momentum_buffer": torch.ones(20)}}}
    assert not checked(saved(tmp_path / "c", state=state)).findings


def test_optimizer_state_of_another_shape(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = optimizer({"a": 7, "b": 7})
    state["optimizer"]["state"]["b"]["exp_avg"] = torch.ones(4)
    (found,) = checked(saved(tmp_path / "c", state=state), quick=True).findings
    assert found.code == "optimizer-shape"
    assert "[4]" in found.message


@pytest.mark.parametrize(
    ("matrix", "vector", "count"),
    [
        ((16, 12), (12,), 1),
        ((16, 12), (6,), 0),  # what has the shape of a norm is of this model
        ((2, 6), (), 0),  # a LoRA that was merged
        ((), (54,), 0),  # a buffer of all
    ],
)
def test_numbered_state_of_another_model(
    matrix: tuple[int, ...], vector: tuple[int, ...], count: int, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    model = {"up": torch.ones(8, 6), "norm": torch.ones(6)}
    shapes = [shape for shape in (matrix, vector) if shape]
    kinds = ("exp_avg", "exp_avg_sq")
    state = {n: {k: torch.ones(shape) for k in kinds} for n, shape in enumerate(shapes)}
    groups = [{"params": [*state]}]
    content = {"model": model, "optimizer": {"state": state, "param_groups": groups}}
    findings = checked(saved(tmp_path / "c", state=content), quick=True).findings
    assert [found.code for found in findings] == ["optimizer-shape"] * count


@pytest.mark.parametrize(
    ("odd", "of", "count"),
    [
        ((2, 6), "abcd", 0),  # as GaLore and APOLLO project gradients
        ((2, 6), "a", 2),
        ((2, 5), "abcd", 8),  # of another model
        ((9, 6), "abcd", 8),
    ],
)
def test_moments_of_a_projection(odd: tuple[int, ...], of: str, count: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = {name: torch.ones(8, 6) for name in "abcd"} | {"norm": torch.ones(6)}
    state = {
        name: {
            kind: torch.ones(odd if name in of else w.shape) for kind in ("exp_avg", "exp_avg_sq")
        }
        for name, w in model.items()
    }
    content = {"model": model, "optimizer": {"state": state}}
    findings = checked(saved(tmp_path / "c", state=content), quick=True).findings
    assert sum(len(found.affected) or 1 for found in findings) == count


@pytest.mark.parametrize(
    ("odd", "count"),
    [
        ({"up": (4, 16), "down": (16, 4)}, 0),  # a minority of matrices is projected
        ({"up": (4, 16), "down": (16, 3)}, 0),  # each kind to a rank of its own
        ({"up": (4, 16), "head": (32, 4)}, 0),
        ({"2.up": (4, 16)}, 2),  # of one layer
        ({"up": (32, 8), "down": (8, 32), "q": (8, 16)}, 12),  # half of what is cut by rows
        ({"head": (32, 4)}, 2),
    ],
)
def test_moments_are_projected_by_kind(
    odd: dict[str, tuple[int, ...]], count: int, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    shapes = {"up": (64, 16), "down": (16, 64), "gate": (64, 16), "q": (16, 16), "o": (16, 16)}
    shapes = {f"layers.{n}.{kind}": shape for n in range(3) for kind, shape in shapes.items()}
    shapes |= {"embed": (32, 16), "head": (32, 16)}
    odd = {name: of for name in shapes for end, of in odd.items() if name.endswith(end)}
    model = {name: torch.ones(shape) for name, shape in shapes.items()}
    state = {
        name: {kind: torch.ones(odd.get(name, shape)) for kind in ("exp_avg", "exp_avg_sq")}
        for name, shape in shapes.items()
    }
    content = {"model": model, "optimizer": {"state": state}}
    findings = checked(saved(tmp_path / "c", state=content), quick=True).findings
    assert sum(len(found.affected) or 1 for found in findings) == count


def test_nan_is_a_warning_and_finite_makes_it_an_error(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    values = torch.ones(1000, 3)
    values[7, 1], values[8, 2] = float("nan"), float("-inf")
    folder = saved(tmp_path / "c", state={"w": values, "columns": values.t(), "ok": torch.ones(3)})
    (found,) = [f for f in checked(folder).findings if f.code == "not-finite"]
    assert [(each.tensor, each.message) for each in found.affected] == [
        (name, f"{name}: 1 NaN and 1 infinite values of 3,000, first {first} (rank 0, state.pt)")
        for name, first in (("w", "nan at [7, 1]"), ("columns", "nan at [1, 7]"))
    ]
    counts = {"nan": 1, "infinite": 1, "below_zero": 1}
    assert [each.counts for each in found.affected] == [counts, counts]
    assert found.message.endswith("2 tensors affected: w, columns")
    assert checked(folder).ok
    assert not checked(folder, fail_nonfinite=True).ok


def test_all_tensors_with_nan_are_counted_in_one_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    counted: list[int] = []

    def count(*arguments: Any) -> None:
        counted.append(1)
        read_tiles(*arguments)

    monkeypatch.setattr(measures, "read_tiles", count)
    state = {f"w{n}": torch.full((n + 1,), float("nan")) for n in range(5)}
    (found,) = checked(saved(tmp_path / "c", state=state)).findings
    assert [each.message for each in found.affected] == [
        f"w{n}: {n + 1} NaN and 0 infinite values of {n + 1}, first nan at [0] (rank 0, state.pt)"
        for n in range(5)
    ]
    assert "5 tensors affected: w0, w1, w2 and 2 more" in found.message
    assert len(counted) == 1


def test_the_first_value_that_is_not_finite_beyond_a_tile(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    values = torch.ones(3, 700, 1000, dtype=torch.bfloat16)
    values[2, 5, 7], values[2, 600, 0] = float("-inf"), float("nan")
    (found,) = checked(saved(tmp_path / "c", state={"w": values})).findings
    assert "1 NaN and 1 infinite values of 2,100,000, first -inf at [2, 5, 7]" in found.message


def test_the_models_values_that_are_not_finite_come_first(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = optimizer({"a": 7, "b": 7})
    state["optimizer"]["state"]["b"]["exp_avg"][0] = float("inf")
    state["model"] = {"w": torch.tensor([1.0, float("nan")])}
    (found,) = [f for f in checked(saved(tmp_path / "c", state=state)).findings if "fin" in f.code]
    names = ["model.w", "optimizer.state.b.exp_avg"]
    assert [each.tensor for each in found.affected] == names


@pytest.mark.parametrize("name", ["dcp_fsdp2_tp", "rank_experimental"])
def test_the_rank_and_file_of_a_value_that_is_not_finite(
    name: str, copy_of: Callable[[str], Path]
) -> None:
    opened = open_checkpoint(copy_of(name))
    catalog = opened.open_containers(opened.catalog)
    entry, chunk = next(
        (entry, chunk)
        for entry in catalog.tensors.values()
        for chunk in entry.chunks
        if chunk.rank and any(chunk.box.lo) and entry.dtype.name in ("float32", "bfloat16")
    )
    file = Path(str(opened.path)) / chunk.at.file
    with file.open("r+b") as data:
        data.seek(chunk.at.offset)
        data.write(b"\xff" * entry.dtype.itemsize)
    found = [f for f in checked(Path(str(opened.path))).findings if f.code == "not-finite"]
    where = f"(rank {chunk.rank}, {chunk.at.file})"
    assert f"first nan at {list(chunk.box.lo)} {where}" in found[0].message
    assert entry.name in found[0].message


LATE = [f"layers.{layer}.{part}.{kind}" for layer in (0, 1) for part in "ab" for kind in "wv"]
FIRST = ["layers.2.a.w", "layers.2.b.w", "norm.w", "head.w"]
APART, DIFFER = ["steps-apart"], ["steps-differ"]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (dict.fromkeys(LATE, 3), []),  # layers that were frozen at first
        (dict.fromkeys(LATE[:4], 2) | dict.fromkeys(LATE[4:], 3), []),  # one after the other
        (dict.fromkeys(LATE, 3) | {"embed.w": 3}, []),
        (dict.fromkeys(["layers.0.a.w", "layers.1.a.w", "layers.2.a.w"], 3), []),  # one kind
        ({"embed.w": 3}, APART),
        (dict.fromkeys(LATE[:2], 3), APART),  # a module of one layer
        (dict.fromkeys(LATE[:1], 3), DIFFER),
        (dict.fromkeys([LATE[0], LATE[3]], 3), APART),  # matrices of one layer
        (dict.fromkeys([LATE[0], LATE[3], LATE[6]], 3), DIFFER),  # one of the other, too
        (dict.fromkeys(LATE[1:], 3), APART),
    ],
)
def test_parts_that_were_frozen_at_first_have_fewer_steps(
    steps: dict[str, int], expected: list[str], tmp_path: Path
) -> None:
    state = optimizer(dict.fromkeys(["embed.w", *LATE, *FIRST], 7) | steps)
    found = checked(saved(tmp_path / "c", state=state)).findings
    assert [each.code for each in found] == expected


@pytest.mark.parametrize(
    ("steps", "groups", "expected"),
    [
        ([3, 3, 3, 7, 7, 7], [[0, 1, 2, 3, 4, 5]], []),  # numbers are in the order of the model
        ([3, 5, 5, 4, 4, 7], [[0, 1, 2, 3, 4, 5]], []),
        ([7, 7, 7, 7, 7, 3], [[0, 1, 2, 3, 4], [5]], []),  # a group that was added
        ([3, 7, 3, 7, 3, 7], [[0, 1, 2, 3, 4, 5]], DIFFER),
        ([7, 7, 3, 7, 7, 7], [[0, 1, 2, 3, 4, 5]], DIFFER),
        ([3, 7, 7, 7, 7, 7], [[0, 1, 2, 3, 4, 5]], APART),  # an embedding
        ([*[3] * 11, 7], [[*range(12)]], []),
    ],
)
def test_numbered_parameters_that_were_frozen_at_first(
    steps: list[int], groups: list[list[int]], expected: list[str], tmp_path: Path
) -> None:
    state = numbered(steps)
    state["param_groups"] = [{"lr": 0.1, "params": group} for group in groups]
    path = saved(tmp_path / "c", state={"optimizer": state})
    assert [each.code for each in checked(path).findings] == expected


def numbered(steps: list[int]) -> dict[str, Any]:
    state = optimizer({str(number): count for number, count in enumerate(steps)})["optimizer"]
    return {"state": {int(number): own for number, own in state["state"].items()}}


def test_an_embedding_that_was_frozen_at_first_is_told_by_its_shape(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = numbered([3, 7, 7, 7, 7])
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg_sq"] = torch.ones(9, 3)
    (found,) = checked(saved(tmp_path / "c", state={"optimizer": state})).findings
    assert (found.code, found.severity.value) == ("steps-apart", "info")
    assert found.message.startswith("the optimizer's step counters are 3 for optimizer.state.0")


@pytest.mark.parametrize(
    ("ends", "codes"), [([8], DIFFER), ([4, 8], DIFFER), ([2, 3, 4, 5, 6, 7, 8], [])]
)
def test_whole_layers_of_an_earlier_save_are_found(
    ends: list[int], codes: list[str], tmp_path: Path
) -> None:
    """Where many ranks share counters out, each may have one of layers that were frozen."""
    parts = [LATE[start:end] for start, end in pairwise([0, *ends])]
    ranks = [optimizer(dict.fromkeys(part, 3)) for part in parts]
    ranks.append(optimizer(dict.fromkeys(FIRST, 7)))
    files = {f"model_rank{rank}": state for rank, state in enumerate(ranks)}  # of a pipeline
    found = checked(saved(tmp_path / "c", **files)).findings
    assert [each.code for each in found] == codes
