"""Moments of an optimizer that no step leaves, and those that rightly look odd."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import FIXTURES
from formats.rank_files.rank_writes import rank_of_a_job
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_with_path
from verify.verify_runs import checked

from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.verify.checks.meaning.moment_bits import Moment
from ckptool.commands.verify.checks.meaning.moments import _lost_ranks, _steps_of_values
from ckptool.commands.verify.checks.measures import are_equal
from ckptool.commands.verify.findings import Finding
from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Chunk, Extent, ObjectEntry, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.engine.check.spans import Part
from ckptool.errors import CkptoolError, Problem
from ckptool.storage.local import LocalReader

LAYERS, SHAPE = 4, (40, 30)
State = dict[str, Any]


def found(path: Path, *codes: str) -> list[Finding]:
    wanted = codes or ("moments-negative", "moments-zero", "moments-copied")
    return [finding for finding in checked(path).findings if finding.code in wanted]


@pytest.mark.parametrize("folder", sorted(FIXTURES.glob("*/ckpt")), ids=lambda p: p.parent.name)
def test_no_fixture_has_moments_that_no_step_leaves(folder: Path) -> None:
    with suppress(CkptoolError):  # what is refused has no moments
        assert not found(folder)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(SHAPE[1], SHAPE[0])
        self.down = torch.nn.Linear(SHAPE[0], SHAPE[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(torch.relu(self.up(x)))
        return x + down


class Sum(torch.nn.Module):
    """Products that are added up have the same gradients, whatever the weights."""

    def __init__(self) -> None:
        super().__init__()
        parts = (torch.nn.Linear(SHAPE[1], SHAPE[0]) for _ in range(LAYERS))
        self.parts = torch.nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(x) for part in self.parts]).sum(0)


def layers() -> torch.nn.Module:
    return torch.nn.Sequential(*(Layer() for _ in range(LAYERS)))


def trained(
    steps: int = 3,
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
    make: Callable[[], torch.nn.Module] = layers,
    dtype: torch.dtype = torch.float32,
) -> State:
    """A model and its optimizer's state by names, after real steps."""
    torch.manual_seed(1)
    model = make()
    optimizer = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, SHAPE[1], dtype=dtype)).square().mean().backward()
        optimizer.step()
    names = [f"layers.{name}" for name, _ in model.named_parameters()]
    weights = dict(zip(names, model.state_dict().values(), strict=True))
    states = optimizer.state_dict()["state"]
    return {"model": weights, "optimizer": {"state": {names[at]: states[at] for at in states}}}


def saved(path: Path, state: State) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def of_layer(state: State, layer: int, part: str = "up") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = state["optimizer"]["state"][f"layers.{layer}.{part}.weight"]
    return found


KINDS_OF = ("exp_avg", "exp_avg_sq")
KINDS = [
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adafactor,
]


@pytest.mark.parametrize("steps", [0, 1, 30])
@pytest.mark.parametrize("make", [layers, Sum])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_real_steps_leave_nothing_to_report(
    steps: int,
    make: Callable[[], torch.nn.Module],
    kind: type[torch.optim.Optimizer],
    tmp_path: Path,
) -> None:
    assert not found(saved(tmp_path / "c", trained(steps, kind, make)))


def test_squares_below_zero(tmp_path: Path) -> None:
    state = trained()
    of_layer(state, 2)["exp_avg_sq"][7, 3:5] *= -1
    (finding,) = found(saved(tmp_path / "c", state))
    assert (finding.code, finding.severity.value) == ("moments-negative", "warning")
    assert finding.message == (
        "optimizer.state.layers.2.up.weight.exp_avg_sq: 2 of 1,200 values are negative, first at"
        " [7, 3]: means of squares cannot be"
    )


def test_means_and_squares_that_were_exchanged_are_one_finding(tmp_path: Path) -> None:
    state = trained()
    for name, own in state["optimizer"]["state"].items():
        if name.startswith("layers.2."):
            own["exp_avg"], own["exp_avg_sq"] = own["exp_avg_sq"], own["exp_avg"]
    (finding,) = found(saved(tmp_path / "c", state))
    assert finding.code == "moments-negative"
    assert len(finding.affected) == 4


def test_random_numbers_in_place_of_all_squares_are_none_of_an_optimizer(tmp_path: Path) -> None:
    state = trained()
    for own in state["optimizer"]["state"].values():
        own["exp_avg_sq"] = torch.randn_like(own["exp_avg_sq"])
    assert not found(saved(tmp_path / "c", state), "moments-negative")


def test_squares_that_are_minus_zero_or_not_finite_are_not_negative(tmp_path: Path) -> None:
    state = trained()
    odd = torch.tensor([-0.0, float("-inf"), -float("nan")])
    of_layer(state, 2)["exp_avg_sq"][0, :3] = odd
    assert not found(saved(tmp_path / "c", state))


def zero(state: State, *kinds: str, layers: range = range(LAYERS)) -> State:
    for name, own in state["optimizer"]["state"].items():
        if int(name.split(".")[1]) in layers:
            for kind in kinds:
                own[kind].zero_()
    return state


def test_all_moments_that_are_zero_after_steps(tmp_path: Path) -> None:
    state = zero(trained(3), "exp_avg", "exp_avg_sq")
    (finding,) = found(saved(tmp_path / "c", state))
    assert finding.code == "moments-zero"
    assert "all moments of all parameters are zero, but 3 steps are counted" in finding.message


def test_moments_of_64_bits(tmp_path: Path) -> None:
    """As of potentials, which are often trained so."""
    state = trained(30, make=lambda: layers().double(), dtype=torch.float64)
    assert not found(saved(tmp_path / "sound", state))
    of_layer(state, 2)["exp_avg_sq"][7, 3] *= -1
    assert [f.code for f in found(saved(tmp_path / "below", state))] == ["moments-negative"]
    state = zero(state, "exp_avg_sq", layers=range(2, 3))
    assert [f.code for f in found(saved(tmp_path / "squares", state))] == ["moments-zero"]
    state = zero(state, "exp_avg", "exp_avg_sq")
    assert [f.code for f in found(saved(tmp_path / "all", state))] == ["moments-zero"]


def test_all_moments_that_are_zero_where_one_parameter_was_never_used(tmp_path: Path) -> None:
    state = zero(trained(3), "exp_avg", "exp_avg_sq")
    of_layer(state, 2)["step"].fill_(1)  # that of the step which made the state
    (finding,) = found(saved(tmp_path / "c", state))
    assert "are zero, but 3 steps are counted" in finding.message


@pytest.mark.parametrize(("skipped", "count"), [(0, 1), (6, 0)])
def test_all_moments_that_are_zero_after_steps_of_deepspeed(
    skipped: int, count: int, tmp_path: Path
) -> None:
    moments = {f"{kind}.{name}": torch.zeros(3) for kind in KINDS_OF for name in ("a", "b")}
    state = moments | {"module": {"a": torch.ones(3), "b": torch.ones(3)}}
    torch.save(state | {"global_steps": 7, "skipped_steps": skipped}, tmp_path / "c.pt")
    assert len(found(tmp_path / "c.pt")) == count


@pytest.mark.parametrize(
    ("steps", "kinds", "layers"),
    [
        (1, ["exp_avg", "exp_avg_sq"], range(LAYERS)),  # the step that makes the state
        (0, ["exp_avg", "exp_avg_sq"], range(LAYERS)),
        (9, ["exp_avg", "exp_avg_sq"], range(1, 3)),  # experts never chosen
        (9, ["exp_avg"], range(1, 3)),  # and not chosen for long
    ],
)
def test_zero_moments_that_may_be_right_are_none(
    steps: int, kinds: list[str], layers: range, tmp_path: Path
) -> None:
    assert not found(saved(tmp_path / "c", zero(trained(steps), *kinds, layers=layers)))


def test_squares_that_are_zero_beside_means_that_are_not(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", zero(trained(), "exp_avg_sq", layers=range(1, 2)))
    (finding,) = found(path)
    assert len(finding.affected) == 4
    assert finding.code == "moments-zero"
    assert "all values are zero, but optimizer.state.layers.1." in finding.message


@pytest.mark.parametrize(
    ("steps", "decay", "is_lost"),
    [(30, 0.9, True), (600, 0.9, False), (600, 0.99, True), (30, 0.1, False), (30, 0.0, False)],
)
def test_means_that_are_zero_though_no_step_forgets_so_much(
    steps: int, decay: float, is_lost: bool, tmp_path: Path
) -> None:
    state = trained()
    state["optimizer"]["param_groups"] = [{"betas": (decay, 0.999), "lr": 0.01}]
    for values in state["optimizer"]["state"].values():
        values["step"].fill_(steps)
    assert not found(saved(tmp_path / "sound", state))
    for layer in range(LAYERS):
        of_layer(state, layer)["exp_avg"].zero_()
    codes = [finding.code for finding in found(saved(tmp_path / "lost", state))]
    assert codes == (["moments-zero"] if is_lost else [])
    for layer in range(LAYERS):
        of_layer(state, layer)["exp_avg_sq"].fill_(1e-16)  # CAME adds it to squares of zeros
    assert not found(saved(tmp_path / "unused", state))


def test_squares_too_small_for_their_type_are_none(tmp_path: Path) -> None:
    state = zero(trained(), "exp_avg_sq", layers=range(1, 2))
    for own in state["optimizer"]["state"].values():
        own["exp_avg"].mul_(1e-30)
    assert not found(saved(tmp_path / "c", state))


def zero_tail(state: State, count: int, *kinds: str, of: str = "up") -> State:
    for kind in kinds or ("exp_avg", "exp_avg_sq"):
        of_layer(state, 2, of)[kind].view(-1)[-count:] = 0
    return state


def saved_by_ranks(path: Path, state: State, *whole: str) -> Path:
    """Save as two ranks of verl do, each half of the rows, or all of what has a ``whole`` name."""
    path.mkdir()
    parts = {"model": state["model"], "optim": {**state["optimizer"], "param_groups": []}}
    for rank in range(2):
        with rank_of_a_job(rank, 2):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
            shard = partial(half_of, rank, mesh, whole)
            for part, content in parts.items():
                of_rank = tree_map_with_path(shard, content)
                torch.save(of_rank, path / f"{part}_world_size_2_rank_{rank}.pt")
    return path


def half_of(
    rank: int, mesh: DeviceMesh, whole: Sequence[str], keys: tuple[Any, ...], value: Any
) -> Any:
    is_whole = any(name in str(keys) for name in whole)
    if not isinstance(value, torch.Tensor) or not value.ndim or is_whole:
        return value
    return DTensor.from_local(value.chunk(2)[rank].clone(), mesh, [Shard(0)])


def test_a_slice_that_ends_with_zeros(tmp_path: Path) -> None:
    state = zero_tail(trained(), 50)
    assert not found(saved(tmp_path / "one", state))  # its rows are short
    (finding,) = found(saved_by_ranks(tmp_path / "c", state))
    assert (finding.code, finding.severity.value) == ("moments-zero", "warning")
    assert finding.message == (
        "optim.state.layers.2.up.weight.exp_avg: 50 of 1,200 values are zero, from [38, 10] to"
        " [39, 29], which end where the part of a rank does"
    )
    state["model"]["layers.2.up.weight"].view(-1)[-50:] = 0  # as padding is
    assert not found(saved_by_ranks(tmp_path / "filled", state))


@pytest.mark.parametrize(
    ("count", "kinds", "is_found"),
    [
        (50, ("exp_avg", "exp_avg_sq"), True),
        (35, ("exp_avg", "exp_avg_sq"), True),
        (50, ("exp_avg",), True),
        (50, ("exp_avg_sq",), True),
        (45, ("exp_avg",), False),  # what began to be too small
        (35, ("exp_avg",), False),
        (80, ("exp_avg", "exp_avg_sq"), False),  # whole rows
    ],
)
def test_moments_that_were_not_written_to_their_end(
    count: int, kinds: Sequence[str], is_found: bool, tmp_path: Path
) -> None:
    state = zero_tail(trained(), count, *kinds, of="down")
    messages = [finding.message for finding in found(saved(tmp_path / "c", state))]
    assert all(each.endswith("which end where the tensor does") for each in messages)
    assert bool(messages) is is_found


def dead_columns(state: State) -> State:
    """Units without gradients, of which the last columns are: those of all rows."""
    for kind in ("exp_avg", "exp_avg_sq"):
        of_layer(state, 2, "up")[kind][:, 10:] = 0
        of_layer(state, 2, "up")[kind][39] = 0
    return state


def unseen(state: State) -> State:
    """Rows of words that did not occur, and of units without gradients, scattered."""
    for kind in ("exp_avg", "exp_avg_sq"):
        of_layer(state, 1, "up")[kind][30:] = 0
        of_layer(state, 2, "up")[kind][torch.arange(40) % 2 == 1, 10:] = 0
        of_layer(state, 2, "up")[kind][39] = 0
    return state


@pytest.mark.parametrize(
    "change",
    [
        lambda state: zero_tail(state, 60),  # whole rows
        lambda state: zero_tail(state, 31),  # few
        lambda state: zero_tail(state, 50, "exp_avg"),  # gradients that ended
        dead_columns,
        unseen,
    ],
)
def test_zeros_with_other_borders_are_none(
    change: Callable[[State], State], tmp_path: Path
) -> None:
    assert not found(saved_by_ranks(tmp_path / "c", change(trained())))


def test_all_moments_of_one_rank(tmp_path: Path) -> None:
    copy = shutil.copytree(FIXTURES / "megatron_torch" / "ckpt", tmp_path / "c")
    (path,) = copy.rglob("mp_rank_01/*.pt")
    state = torch.load(path, weights_only=False)
    for own in state["optimizer"]["optimizer"]["state"].values():
        own["exp_avg"].zero_()
        own["exp_avg_sq"].zero_()
    torch.save(state, path)
    (finding,) = found(copy)
    assert finding.code == "moments-zero"
    assert "all moments of rank 1 are zero, of" in finding.message


@pytest.mark.parametrize(("sizes", "count"), [((4, 5, 6, 6), 1), ((4, 4, 5, 5), 0)])
def test_all_moments_of_one_rank_whose_parameters_have_numbers(
    sizes: tuple[int, ...], count: int
) -> None:
    """What has a number, as in the rank files of verl, is of a kind by its shape."""
    seen: dict[str, Moment] = {}
    located: dict[str, TensorEntry] = {}
    for number, size in enumerate(sizes):
        name, shape = f"optim.state.{number}.exp_avg", (2 * size,)
        boxes = (Box((0,), (size,)), Box((size,), shape))
        seen[name] = Moment(is_square=False)
        for rank, box in enumerate(boxes):
            values = np.full(size, not rank, np.float32)
            seen[name].take(values.view(np.uint8).data, Part(shape, box, BY_NAME["float32"]), 0)
        chunks = tuple(Chunk(box, Extent("f", 0, (4,)), rank) for rank, box in enumerate(boxes))
        located[name] = TensorEntry(name, (name,), BY_NAME["float32"], shape, chunks)
    problems = list(_lost_ranks(seen, located))
    assert ["all moments of rank 1 are zero, of" in each for each in problems] == [True] * count


def of_ranks(*zero: str) -> list[Problem]:
    """What is said of two ranks' layers, of which the ``zero`` ones have no moments."""
    seen: dict[str, Moment] = {}
    located: dict[str, TensorEntry] = {}
    names = [f"{part}.{n}.{m}" for part in ("eye", "text") for n in (0, 1) for m in "abc"]
    for name in (f"exp_avg.{name}" for name in names):
        seen[name] = Moment(is_square=False)
        box = Box.whole((4,))
        values = np.full(4, not any(part in name for part in zero), np.float32)
        seen[name].take(values.view(np.uint8).data, Part((4,), box, BY_NAME["float32"]), 0)
        chunk = Chunk(box, Extent("f", 0, (4,)), int("text" in name))
        located[name] = TensorEntry(name, (name,), BY_NAME["float32"], (4,), (chunk,))
    return list(_lost_ranks(seen, located))


def test_a_rank_with_layers_of_a_kind_that_is_not_used_is_none() -> None:
    assert not of_ranks("eye")
    assert not of_ranks("eye.0")
    assert not of_ranks("nothing")


@pytest.mark.parametrize(("zero", "count"), [(range(14, 28), 1), (range(12, 36), 0)])
def test_a_rank_with_nothing_but_a_part_of_layers_that_are_not_used(
    zero: range, count: int
) -> None:
    """Of four layers in a flat buffer, which four ranks share."""
    seen: dict[str, Moment] = {}
    located: dict[str, TensorEntry] = {}
    for at, name in enumerate(f"exp_avg.{n}.{m}" for n in range(4) for m in "abc"):
        seen[name] = Moment(is_square=False)
        chunks = []
        for rank in range(4):
            low, high = max(at * 4, rank * 14), min(at * 4 + 4, rank * 14 + 14)
            box = Box((low - at * 4,), (max(low, high) - at * 4,))
            values = np.array([n not in zero for n in range(low, high)], np.float32)
            if box.volume:
                part = Part((4,), box, BY_NAME["float32"])
                seen[name].take(values.view(np.uint8).data, part, 0)
                chunks.append(Chunk(box, Extent("f", 0, (4,)), rank))
        located[name] = TensorEntry(name, (name,), BY_NAME["float32"], (4,), tuple(chunks))
    problems = list(_lost_ranks(seen, located))
    assert ["all moments of rank 1 are zero, of" in str(each) for each in problems] == [
        True
    ] * count


def copy_moments(state: State, *parts: str) -> State:
    for part in parts:
        for kind in ("exp_avg", "exp_avg_sq"):
            of_layer(state, 2, part)[kind] = of_layer(state, 1, part)[kind].clone()
    return state


def test_moments_of_another_layer_in_which_a_part_of_a_rank_begins(tmp_path: Path) -> None:
    state = copy_moments(trained(), "up", "down")
    whole = [f"layers.{n}.{part}" for n, part in ((1, "up"), (1, "down"), (2, "down"))]
    (finding,) = found(saved_by_ranks(tmp_path / "c", state, *whole))
    assert (finding.code, len(finding.affected)) == ("moments-copied", 4)


def test_moments_of_another_layer(tmp_path: Path) -> None:
    state = copy_moments(trained(), "up", "down")
    (finding,) = found(saved(tmp_path / "c", state))
    assert finding.code == "moments-copied"
    assert {each.tensor for each in finding.affected} == {
        f"optimizer.state.layers.2.{part}.weight.{kind}"
        for part in ("up", "down")
        for kind in ("exp_avg", "exp_avg_sq")
    }


def of_masters_alone(state: State) -> State:
    """The same as DeepSpeed's ZeRO 3 names it, which stores no weights beside their masters."""
    moments = {
        f"{kind}.{name}": state["optimizer"]["state"][name][kind]
        for name in state["model"]
        for kind in ("exp_avg", "exp_avg_sq")
    }
    return {f"fp32.{name}": weight for name, weight in state["model"].items()} | moments


def test_moments_of_another_layer_beside_masters_alone(tmp_path: Path) -> None:
    assert not found(saved(tmp_path / "sound", of_masters_alone(trained())))
    state = of_masters_alone(copy_moments(trained(), "up", "down"))
    (finding,) = found(saved(tmp_path / "c", state))
    assert (finding.code, len(finding.affected)) == ("moments-copied", 4)
    state = of_masters_alone(with_equal_weights(copy_moments(trained(), "up", "down")))
    assert not found(saved(tmp_path / "equal", state))


def with_equal_weights(state: State) -> State:
    for part in ("up", "down"):
        copied = state["model"][f"layers.1.{part}.weight"].clone()
        state["model"][f"layers.2.{part}.weight"] = copied
    return state


def but_for_the_last(state: State) -> State:
    for part in ("up", "down"):
        for kind in ("exp_avg", "exp_avg_sq"):
            of_layer(state, 2, part)[kind][-1, -1] += 1
    return state


@pytest.mark.parametrize("change", [with_equal_weights, but_for_the_last])
def test_layers_that_are_equal_or_only_begin_so_are_none(
    change: Callable[[State], State], tmp_path: Path
) -> None:
    state = change(copy_moments(trained(), "up", "down"))
    assert not found(saved(tmp_path / "c", state))


@pytest.mark.parametrize(("differing", "share"), [(slice(None), 1), (slice(-1, None), 2)])
def test_of_two_tensors_that_differ_all_over_little_is_read(
    differing: slice, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = torch.zeros(32 << 20, dtype=torch.uint8)
    other = one.clone()
    other[differing] = 1
    save_file({"one": one, "other": other}, tmp_path / "t.safetensors")
    opened = open_checkpoint(tmp_path / "t.safetensors", ReadOptions())
    read, real = list[int](), LocalReader.read_some
    tensors = opened.catalog.tensors

    def note(reader: LocalReader, file: str, offset: int, buffer: memoryview) -> int:
        read.append(len(buffer))
        return real(reader, file, offset, buffer)

    monkeypatch.setattr(LocalReader, "read_some", note)
    assert are_equal(tensors["one"], tensors["one"], opened.source)
    read.clear()
    assert not are_equal(tensors["one"], tensors["other"], opened.source)
    assert sum(read) <= share * one.nbytes


def test_moments_of_megatron_by_kind(tmp_path: Path) -> None:
    copy = shutil.copytree(FIXTURES / "megatron_torch" / "ckpt", tmp_path / "c")
    (path,) = copy.rglob("mp_rank_01/*.pt")
    state = torch.load(path, weights_only=False)
    own = next(iter(state["optimizer"]["optimizer"]["state"].values()))
    own["exp_avg_sq"][:2] *= -1
    torch.save(state, path)
    (finding,) = found(copy)
    assert finding.code == "moments-negative"
    assert all(each.tensor and each.tensor.startswith("exp_avg_sq.") for each in finding.affected)


@pytest.mark.parametrize(
    ("count", "is_odd"),
    [(7, True), (7.0, True), (1, False), (None, False), (10**400, False), (math.inf, False)],
)
def test_moments_that_are_all_zero_by_the_count_of_a_group(
    count: float | None, is_odd: bool, tmp_path: Path
) -> None:
    """As Apex's and Megatron-core's optimizers count, for all parameters at once."""
    state = {n: {kind: torch.zeros(4) for kind in ("exp_avg", "exp_avg_sq")} for n in range(3)}
    groups = [{"params": [0, 1, 2], "lr": 0.1} | ({} if count is None else {"step": count})]
    torch.save({"optimizer": {"state": state, "param_groups": groups}}, tmp_path / "c.pt")
    messages = [finding.message for finding in found(tmp_path / "c.pt")]
    assert [f"but {count:g} steps are counted" in each for each in messages] == [True] * is_odd


@pytest.mark.parametrize("kind", KINDS_OF)
@pytest.mark.parametrize(("count", "is_odd"), [(10, False), (11, True)])
def test_squares_of_gradients_that_are_kept_for_some_steps(
    kind: str, count: int, is_odd: bool, tmp_path: Path
) -> None:
    """As AdaShift keeps them; in earlier versions there are no means either."""
    state = {n: {each: torch.ones(4) for each in KINDS_OF} for n in range(3)}
    for own in state.values():
        own[kind].zero_()
        own["exp_avg_sq"].zero_()
    others = {"max_precond_dim": 10_000, "warmup_steps": 100}
    groups = [{"params": [0, 1, 2], "lr": 0.1, "keep_num": 10, "step": count} | others]
    torch.save({"optimizer": {"state": state, "param_groups": groups}}, tmp_path / "c.pt")
    assert bool(found(tmp_path / "c.pt")) == is_odd


@pytest.mark.parametrize(
    ("value", "steps"),
    [
        ({"param_groups": [{"step": 7.0}, {"step": 7.0}]}, 7),
        ({"param_groups": [{"lr": 0.1}, None]}, None),
        ({"param_groups": None}, None),
        ([7], None),
    ],
)
def test_the_steps_of_an_optimizer_that_is_one_value(value: object, steps: int | None) -> None:
    """As of Megatron's ``dp_reshardable``."""
    name = "optimizer.distributed.dp_group_idx_0.optimizer"
    entries = {name: ObjectEntry(name, (name,), value), "x": ObjectEntry("x", ("x",), {"y": 9})}
    assert _steps_of_values(Catalog("dcp", {}, entries, {})) == steps
