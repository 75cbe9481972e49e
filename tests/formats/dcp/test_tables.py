"""Metadata whose chunks are columns, against the same read record by record."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptool.core.box import Box, is_grid
from ckptool.core.catalog import Catalog, Chunk, Extent, ObjectEntry, TensorEntry
from ckptool.core.chunks import ChunkTable
from ckptool.core.dtype import BY_NAME
from ckptool.core.layout import Literal
from ckptool.core.mesh import Placements, Replicate, Shard
from ckptool.core.sharding.coverage import coverage_problem
from ckptool.core.sharding.placement import PlacedTensors, parse_mesh
from ckptool.errors import Damaged, Problem, SourceError
from ckptool.formats.base import Request, ScanOptions
from ckptool.formats.dcp import FORMAT
from ckptool.formats.dcp.metadata import parse
from ckptool.formats.dcp.write import lay_out
from ckptool.formats.writing import WriterAssignment
from ckptool.serialization.pickle import builder, instances, machine, records, row_reader
from ckptool.serialization.pickle.load import read_pickle
from ckptool.storage.local import LocalSource

torch = pytest.importorskip("torch")
metadata = pytest.importorskip("torch.distributed.checkpoint.metadata")
filesystem = pytest.importorskip("torch.distributed.checkpoint.filesystem")

Change = tuple[str, int, int]
CHANGES = [
    "item lost", "item twice", "item of another name", "chunk lost", "chunk twice", "chunk moved",
    "of other dims", "packed", "overlapping", "outside the file", "file missing", "negative",
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def few_rows_too() -> Iterator[None]:
    """Read rows as columns however few they are."""
    with mock.patch.object(instances, "_WORTH_NUMPY", 0):
        yield


def make(shapes: list[tuple[int, ...]], ranks: int, changes: list[Change]) -> bytes:
    """Metadata of tensors of these shapes a rank, cut by rows, as torch writes it."""
    tensors: dict[str, Any] = {}
    items: list[tuple[str, int, Any, list[Any]]] = []
    for number, shape in enumerate(shapes):
        whole = torch.Size([shape[0] * ranks, *shape[1:]]) if shape else torch.Size()
        lows = (
            [[rank * shape[0], *[0] * (len(shape) - 1)] for rank in range(ranks)] if shape else [[]]
        )
        name = f"layers.{number}.weight"
        chunks = [[torch.Size(low), torch.Size(shape)] for low in lows]
        tensors[name] = [whole, chunks]
        items += [
            (name, rank, low, [f"__{rank}_0.distcp", number]) for rank, low in enumerate(lows)
        ]
    items.sort(key=lambda item: item[1])
    stored: dict[Any, Any] = {"value": ("__0_0.distcp", 90, 10, None)}
    for name, rank, low, (file, number) in items:
        stored["".join([*name]), tuple(low), rank] = (file, number * 10, 10, None)
    for change, first, second in changes:
        _change(change, first, second, tensors, stored)
    state: dict[str, Any] = {
        name: metadata.TensorStorageMetadata(
            metadata.TensorProperties(torch.float32),
            whole,
            [metadata.ChunkStorageMetadata(*chunk) for chunk in chunks],
        )
        for name, (whole, chunks) in tensors.items()
    }
    state["value"] = metadata.BytesStorageMetadata()
    storage = {}
    for key, (file, offset, length, packed) in stored.items():
        where = filesystem._StorageInfo(file, offset, length, [packed] if packed else None)
        if key == "value":
            index = metadata.MetadataIndex(key)
        else:
            name, low, rank = key
            index = metadata.MetadataIndex(name, torch.Size(low), rank)
        storage[index] = where
    paths = {name: tuple(name.split(".")) for name in state}
    return pickle.dumps(metadata.Metadata(state, paths, storage))


def _change(
    change: str, first: int, second: int, tensors: dict[str, Any], stored: dict[Any, Any]
) -> None:
    keys = [key for key in stored if key[0] in tensors]
    if not keys:
        return
    key, other = keys[first % len(keys)], keys[second % len(keys)]
    chunks = tensors[key[0]][1]
    if not chunks:
        return
    at, to = first % len(chunks), second % len(chunks)
    if change == "item lost":
        del stored[key]
    elif change == "item twice":
        stored[key[0], key[1], 99] = stored[other]
    elif change == "item of another name":
        stored["other", key[1], 0] = stored.pop(key)
    elif change == "chunk lost":
        del chunks[at]
    elif change == "chunk twice":
        chunks.append([*chunks[at]])
    elif change == "chunk moved":
        chunks[at], chunks[to] = chunks[to], chunks[at]
    elif change == "of other dims":
        chunks[at] = [torch.Size([*chunks[at][0], 0]), torch.Size([*chunks[at][1], 1])]
    elif change == "negative":
        stored[key] = (stored[key][0], -1, 10, None)
    else:
        file, offset, length, packed = stored[key]
        stored[key] = {
            "packed": (file, offset, length, "stream.zstd/1"),
            "overlapping": (*stored[other][:2], length, packed),
            "outside the file": (file, offset + 1000, length, packed),
            "file missing": ("__99_0.distcp", offset, length, packed),
        }[change]


def scanned(folder: Path, *, as_rows: bool) -> Any:
    """The tensors of a folder with their chunks, and what is wrong with them; or the error."""
    problems: list[Problem] = []
    options = ScanOptions(problems=problems, values=False)
    with mock.patch.object(row_reader, "LEAST", 3 if as_rows else 1 << 30):
        try:
            catalog: Catalog = FORMAT.scan(LocalSource.folder(folder), options)
        except SourceError as error:
            return str(error)
    tensors = {
        name: (entry.shape, entry.placements, coverage_problem(entry), [*entry.chunks])
        for name, entry in catalog.tensors.items()
    }
    archives = sorted((at.file, at.offset, at.nbytes) for at in catalog.archives)
    return tensors, catalog.mesh, sorted(problems), archives, catalog.files, catalog.notes


SHAPES = st.lists(st.integers(0, 3), max_size=4).map(tuple)


@given(
    st.lists(SHAPES | st.just((2, 3)), min_size=1, max_size=5),
    st.integers(1, 12),
    st.lists(
        st.tuples(st.sampled_from(CHANGES), st.integers(0, 99), st.integers(0, 99)), max_size=2
    ),
)
@example([(0,), (0,), (2, 3), ()], 7, [("chunk lost", 2, 0)])
def test_columns_say_what_records_say(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[int, ...]],
    ranks: int,
    changes: list[Change],
) -> None:
    folder = tmp_path_factory.mktemp("columns")
    (folder / ".metadata").write_bytes(make(shapes, ranks, changes))
    for rank in range(ranks):
        (folder / f"__{rank}_0.distcp").write_bytes(bytes(100))
    assert scanned(folder, as_rows=True) == scanned(folder, as_rows=False)


def test_a_large_table_makes_chunks_on_demand(tmp_path: Path) -> None:
    data = make([(2, 3), (4,), (1, 2, 3)], 200, [("chunk moved", 3, 150)])
    tables = [entry.table for entry in parse(data, ".metadata").tensors.values()]
    assert all(type(table) is ChunkTable and len(table) == 200 for table in tables)
    (tmp_path / ".metadata").write_bytes(data)
    for rank in range(200):
        (tmp_path / f"__{rank}_0.distcp").write_bytes(bytes(100))
    catalog = FORMAT.scan(LocalSource.folder(tmp_path), ScanOptions(values=False))
    chunks = catalog.tensors["layers.1.weight"].chunks
    assert type(chunks) is ChunkTable
    assert isinstance(chunks[7], Chunk)
    assert chunks[7] == [*chunks][7]
    assert chunks == tuple(chunks)
    assert [*chunks[3:6]] == [*chunks][3:6]
    assert [*chunks.boxes[3:6]] == [chunk.box for chunk in chunks[3:6]]
    assert [*chunks.items[3:6]] == [chunk.at for chunk in chunks[3:6]]
    assert str(catalog.mesh) == str(scanned(tmp_path, as_rows=False)[1])


@pytest.mark.parametrize("ranks", [2, 9])
def test_of_two_items_of_a_quantized_tensor_none_is_taken(ranks: int) -> None:
    data = make([(2, 3)], ranks, [])
    assert parse(data, ".metadata").tensors
    with pytest.raises(Damaged, match=r"layers\.0\.weight: two items for a value"):
        parse(data.replace(b"\x07float32", b"\x08quint4x2"), ".metadata")


def test_what_is_not_a_row_is_bounded_however_large_the_pickle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a large one only rows are read beyond the limit of others; few become objects."""
    data = make([(2, 3), (4,), (1, 2, 3)], 400, [])
    monkeypatch.setattr(machine, "MOST_SINGLE", len(data) // 3)
    monkeypatch.setattr(records, "_MOST_OF_ROWS", 800)
    assert parse(data, ".metadata") == parse(data, ".metadata")
    with pytest.raises(Damaged, match=r"more than 800 objects made of a pickle's rows"):
        parse(data.replace(b"\x06length", b"\x06lengti"), ".metadata")
    monkeypatch.setattr(machine, "MOST_SINGLE", 600)
    with pytest.raises(Damaged, match="more than 600 bytes that are not records alike"):
        parse(data, ".metadata")
    with pytest.raises(Damaged, match="more than 600 bytes that are not records alike"):
        read_pickle(pickle.dumps([float(n) for n in range(100)]), what="floats")
    records_alike = b"h\x02)\x81\x94}\x94(h\x03K\x01ub" * 100
    head = b"\x80\x04\x8c\x01m\x94\x8c\x01c\x94\x93\x94\x8c\x01f\x94"
    with pytest.raises(Damaged, match="more than 600 bytes that are not records alike"):
        read_pickle(head + records_alike + b".", what="records that are in no list", rows=True)


def test_no_line_of_a_pickle_is_as_long_as_the_largest_pickle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(builder, "MOST_SINGLE", 600)
    read_pickle(b"I" + b"7" * 500 + b"\n.", what="a line")
    with pytest.raises(Damaged, match="ends before its last opcode"):
        read_pickle(b"I" + b"7" * 700 + b"\n.", what="a line")


WHOLE = {
    "a.weight": (70, 64, 2),
    "b.weight": (70, 64, 2),
    "bias": (3,),
    "cube": (2,) * 5,
    "step": (),
}


def test_what_is_written_for_many_ranks_is_read_by_torch_and_as_columns() -> None:
    entries = {
        name: TensorEntry(name, (name,), BY_NAME["bfloat16"], shape, ())
        for name, shape in WHOLE.items()
    }
    cuts: dict[str, Placements] = dict.fromkeys(WHOLE, (Replicate(), Replicate()))
    cuts |= {name: (Shard(0), Shard(1)) for name in ("a.weight", "b.weight")}
    placed = PlacedTensors(parse_mesh("8x16"), cuts)
    values = {"lr": ObjectEntry("lr", ("lr",), 0.5)}
    catalog = Catalog("dcp", entries, values, {})
    files = {file.path: file for file in lay_out(catalog, Request("out", placed=placed)).files}
    (literal,) = files[".metadata"].parts
    assert isinstance(literal, Literal)
    assert literal.nbytes == files[".metadata"].nbytes
    loaded, parsed = pickle.loads(literal.data), parse(literal.data, ".metadata")
    for name, shape in WHOLE.items():
        entry = loaded.state_dict_metadata[name]
        assert tuple(entry.size) == shape
        boxes = [Box.at(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
        assert boxes == [*parsed.tensors[name].boxes]
        assert is_grid([box for box in boxes if box.volume], shape)
    assert parsed.tensors["a.weight"].table is not None
    where = sorted((at.relative_path, at.offset, at.length) for at in loaded.storage_data.values())
    for path in {path for path, _, _ in where}:
        of_file = [(offset, length) for file, offset, length in where if file == path]
        ends = [0, *(offset + length for offset, length in of_file)]
        assert [offset for offset, _ in of_file] == ends[:-1]
        assert ends[-1] == files[path].nbytes == sum(part.nbytes for part in files[path].parts)
    assert len(where) == sum(len(e.boxes) for e in parsed.tensors.values()) + len(values)


def test_tensors_that_are_cut_alike_share_their_cut() -> None:
    """A cut for each of 100,000 small tensors costs a third of writing them."""
    rows = [Box((0, 0), (1, 3)), Box((1, 0), (2, 3))]
    held = {
        "whole": (), "whole2": (), "rows": (0, 1), "rows2": (0, 1), "other ranks": (1, 0)
    }  # fmt: skip
    assignment = WriterAssignment(Request("out"))
    cut = {}
    for name, ranks in held.items():
        place = Extent("file", 0, (3, 1))
        chunks = tuple(Chunk(b, place, r) for b, r in zip(rows, ranks, strict=False))
        cut[name] = assignment.boxes(TensorEntry(name, (name,), BY_NAME["int8"], (2, 3), chunks))
    assert cut["whole"] is cut["whole2"]
    assert cut["whole"] == {Box.whole((2, 3)): 0}
    assert cut["rows"] is cut["rows2"]
    assert cut["rows"] == dict(zip(rows, (0, 1), strict=True))
    assert cut["other ranks"] == dict(zip(rows, (1, 0), strict=True))


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_metadata_of_equal_tensors_that_ckptool_wrote_are_read_once(ranks: int) -> None:
    names = [f"layers.{number}.weight" for number in range(200)]
    tensors = {n: TensorEntry(n, (n,), BY_NAME["float32"], (8, 3), ()) for n in names}
    placed = PlacedTensors(parse_mesh(str(ranks)), dict.fromkeys(names, (Shard(0),)))
    layout = lay_out(Catalog("dcp", tensors, {}, {}), Request("out", placed=placed))
    (literal,) = layout.files[-1].parts
    assert isinstance(literal, Literal)
    entries: Any = read_pickle(literal.data, what="p").value
    equal = [*entries.fields["state_dict_metadata"].values()]
    assert len(equal) == 200
    assert len({*map(id, equal)}) <= 4
