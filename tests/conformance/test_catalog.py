"""The catalog of each real checkpoint equals the truth."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import CASES, GOOD, REFUSED, UNREAD, Case, by_name, case, inspect_one

import ckptool
import ckptool.errors
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.read import ReadOptions
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.mesh import Replicate
from ckptool.core.sharding.coverage import coverage_problem

WITH_PLACEMENTS = [
    one for one in GOOD if any("placements" in t for t in one.facts["tensors"].values())
]
RECORDED = "rank-local"


def catalog_of(one: Case) -> Catalog:
    return open_checkpoint(one.path).catalog


@pytest.mark.parametrize("one", [c for c in CASES if c not in REFUSED], ids=by_name)
def test_format_and_world_size(one: Case) -> None:
    catalog = catalog_of(one)
    assert catalog.format == one.facts["format"]
    if one.facts["world_size"] > 1:
        assert catalog.world_size == one.facts["world_size"]


@pytest.mark.parametrize("one", GOOD, ids=by_name)
def test_names_shapes_and_element_types(one: Case) -> None:
    found = {n: (e.dtype.name, e.shape) for n, e in catalog_of(one).tensors.items()}
    states = {n for n in found if n.startswith(("extra_state.", "random_states."))}
    assert {n: found[n] for n in found if n not in states} == one.shapes


@pytest.mark.parametrize("one", GOOD, ids=by_name)
def test_chunks_tile_every_tensor_exactly(one: Case) -> None:
    assert not [p for p in map(coverage_problem, catalog_of(one).tensors.values()) if p]


@pytest.mark.parametrize("one", GOOD, ids=by_name)
def test_files_are_those_of_the_checkpoint(one: Case) -> None:
    opened = open_checkpoint(one.path)
    assert opened.catalog.files
    path = Path(str(opened.path))
    folder = path if path.is_dir() else path.parent
    for name, size in opened.catalog.files.items():
        assert opened.source.files[name] == size
        if path.suffix != ".nemo":
            assert (folder / name).stat().st_size == size


@pytest.mark.parametrize("one", [c for c in WITH_PLACEMENTS if c.facts["mesh"]], ids=by_name)
def test_mesh(one: Case) -> None:
    catalog = catalog_of(one)
    assert catalog.mesh is not None
    assert list(catalog.mesh.shape) == one.facts["mesh"]["shape"]
    declared = one.facts["format"] == RECORDED
    assert catalog.mesh_source == ("declared" if declared else "inferred")
    if declared and one.facts["mesh"]["names"]:
        assert list(catalog.mesh.names or ()) == one.facts["mesh"]["names"]


@pytest.mark.parametrize("one", WITH_PLACEMENTS, ids=by_name)
def test_placements_where_they_can_be_known(one: Case) -> None:
    catalog = catalog_of(one)
    wrong = {}
    for name, fields in one.facts["tensors"].items():
        entry = catalog.tensors[name]
        if "placements" in fields and entry.placements is not None and entry.elements:
            said = over_whole_mesh(entry, catalog)
            if said != fields["placements"] and not alike(said, fields["placements"], entry):
                wrong[name] = (said, fields["placements"])
    assert not wrong


def over_whole_mesh(entry: TensorEntry, catalog: Catalog) -> list[str]:
    """Placements over all dimensions of the mesh; a sub-mesh's others hold replicas."""
    placements = [str(one) for one in entry.placements or ()]
    if entry.mesh is None or catalog.mesh is None or entry.mesh == catalog.mesh:
        return placements
    by_dim = dict(zip(entry.mesh.names or (), placements, strict=True))
    return [by_dim.get(dim, str(Replicate())) for dim in catalog.mesh.names or ()]


def alike(said: list[str], truth: list[str], entry: TensorEntry) -> bool:
    """An inferred placement may name another cut of the same boxes: one row has no two halves."""
    boxes = {chunk.box for chunk in entry.chunks if chunk.box.volume}
    return len(boxes) == 1 and len(said) == len(truth)


@pytest.mark.parametrize("one", [c for c in WITH_PLACEMENTS if c.facts["mesh"]], ids=by_name)
def test_most_placements_are_found(one: Case) -> None:
    catalog = catalog_of(one)
    stated = [n for n, fields in one.facts["tensors"].items() if "placements" in fields]
    known = [n for n in stated if catalog.tensors[n].placements is not None]
    assert len(known) > len(stated) / 2, sorted(set(stated) - set(known))


@pytest.mark.parametrize("one", REFUSED, ids=by_name)
def test_what_cannot_be_read_is_refused(one: Case, out) -> None:
    from conftest import convert_to

    wanted = getattr(ckptool.errors, one.expect)
    with pytest.raises(wanted) as caught:
        convert_to("safetensors", one.path, out / "model")
    assert caught.value.exit_code == 3
    assert not list(out.iterdir())


@pytest.mark.parametrize(
    ("name", "unread"),
    [
        ("odd_kinds", UNREAD["odd_kinds"]),
        ("torchao", ("0.weight",)),
        ("rank_partial", UNREAD["rank_partial"]),
    ],
)
def test_what_is_not_a_plain_tensor_is_named(name: str, unread: tuple[str, ...]) -> None:
    notes = " ".join(inspect_one(case(name).path).notes)
    assert all(one in notes for one in unread)


def test_plain_tensors_that_differ_are_a_conflict_unless_kept_for_each_rank() -> None:
    one = case("rank_differing")
    assert list(catalog_of(one).conflicts) == ["local"]
    kept = open_checkpoint(one.path, ReadOptions(per_rank=True)).catalog
    assert {n: e.shape for n, e in kept.tensors.items()} == {
        "shared": (4, 2),
        "local@rank0": (2, 3),
        "local@rank1": (3, 3),
    }


def test_a_rank_holds_several_ranges_of_rows() -> None:
    entry = catalog_of(case("rank_strided")).tensors["first"]
    held: dict[int | None, list[tuple[int, int]]] = {}
    for chunk in entry.chunks:
        for rank in (chunk.rank, *(copy.rank for copy in chunk.copies)):
            held.setdefault(rank, []).append((chunk.box.lo[0], chunk.box.hi[0]))
    assert held[0] == held[1] == [(0, 2), (4, 6)]
    assert held[2] == held[3] == [(2, 4), (6, 8)]
