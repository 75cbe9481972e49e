"""verify: each kind of damage has its code."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from recipes.damage import DAMAGE
from recipes.hostile import HOSTILE
from verify.verify_runs import checked, codes

from ckptool.commands.verify.codes import Severity

EXPECTED = {
    "snapshot_file_lost": "file-missing",
    "snapshot_file_short": "file-truncated",
    "snapshot_manifest_cut": "metadata-unreadable",
    "truncated": "file-truncated",
    "file_lost": "file-missing",
    "file_empty": "file-empty",
    "file_zeroed": "item-mismatch",
    "files_swapped": "file-truncated",
    "of_two_saves": "overwrite-interrupted",
    "data_flipped": "crc-mismatch",
    "directory_flipped": "zip-structure",
    "pickle_flipped": "crc-mismatch",
    "no_metadata": "save-incomplete",
    "metadata_unfinished": "save-incomplete",
    "metadata_truncated": "metadata-unreadable",
    "metadata_empty": "metadata-unreadable",
    "metadata_of_something_else": "metadata-unreadable",
    "length_past_the_end": "file-truncated",
    "offset_past_the_end": "file-truncated",
    "offset_negative": "metadata-unreadable",
    "chunks_overlap": "chunk-overlap",
    "chunk_gap": "chunk-gap",
    "chunk_without_storage": "data-missing",
    "storage_without_chunk": "data-unused",
    "chunk_outside": "chunk-outside",
    "shape_too_large": "chunk-gap",
    "other_dtype": "item-mismatch",
    "items_of_other_shapes": "item-mismatch",
    "one_place_twice": "items-overlap",
    "path_traversal": "path-outside",
    "path_beside": "path-outside",
    "path_absolute": "path-outside",
    "stale_files": "file-unused",
    "rank_metadata_lost": "rank-missing",
    "zstd_truncated": "file-truncated",
    "zstd_flipped": "codec-corrupt",
    "shard_truncated": "file-truncated",
    "shard_empty": "file-empty",
    "header_past_the_end": "safetensors-header",
    "header_huge": "safetensors-header",
    "header_no_json": "safetensors-header",
    "bytes_shared": "safetensors-overlap",
    "shape_lies": "safetensors-header",
    "dtype_unknown": "safetensors-dtype",
    "offsets_negative": "safetensors-header",
    "sharding_info_lost": "sharding-unknown",
    "middle_shard_lost": "chunk-gap",
    "last_shard_lost": "data-missing",
    "last_shard_lost_without_a_trace": "world-size-unrecorded",
    "indexed_file_lost": "file-missing",
    "index_names_another_file": "index-mismatch",
    "index_of_lost_tensor": "index-mismatch",
    "index_no_json": "index-unreadable",
    "index_leaves_the_folder": "path-outside",
    "total_size_wrong": "index-total-size",
    "bin_lost": "file-missing",
    "rank_lost": "rank-missing",
    "last_rank_lost": "rank-missing",
    "rank_copied_over": "rank-copied",
    "rank_truncated": "zip-structure",
    "rank_empty": "file-empty",
    "rank_flipped": "crc-mismatch",
    "replicas_differ": "replicas-differ",
    "replicas_differ_without_crc": "replicas-differ",
    "replicas_of_other_types": "ranks-disagree",
    "verl_rank_lost": "rank-missing",
    "archive_without_end": "zip-structure",
    "archive_of_zeros": "file-type-mismatch",
    "storage_short": "storage-mismatch",
    "archive_flipped": "crc-mismatch",
    "legacy_truncated": "legacy-stream",
    "deflated_flipped": "codec-corrupt",
    "zero_rank_lost": "rank-missing",
    "zero_optimizers_lost": "file-missing",
    "sharding_declarations_lost": "save-incomplete",
    "zero_rank_copied_over": "rank-copied",
    "zero_rank_too_many": "saves-mixed",
    "zero_model_lost": "rank-missing",
    "zero_tag_lost": "file-missing",
    "zero_truncated": "zip-structure",
    "stage_lost": "rank-missing",
    "universal_parameter_lost": "file-missing",
    "universal_unfinished": "save-incomplete",
}


UNSEEN = ["items_swapped", "shard_flipped"]
"""Nothing in the files shows it: bytes of equal kind exchanged, or bytes without a checksum."""


NO_CHECKPOINT = ["snapshot_of_yaml"]


def test_every_damage_has_a_code() -> None:
    assert {*EXPECTED, *UNSEEN, *NO_CHECKPOINT} == DAMAGE.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_damage_has_its_code(name: str, copy_of: Callable[[str], Path]) -> None:
    folder = copy_of(DAMAGE[name].source)
    DAMAGE[name].apply(folder)
    report = checked(folder)
    assert EXPECTED[name] in {finding.code for finding in report.findings}
    assert report.ok == (DAMAGE[name].answer == "note")
    assert all(finding.message for finding in report.findings)


@pytest.mark.parametrize("name", UNSEEN)
def test_what_nothing_can_show_is_sound(name: str, copy_of: Callable[[str], Path]) -> None:
    """Kept so that a check that learns to notice it says so here."""
    folder = copy_of(DAMAGE[name].source)
    DAMAGE[name].apply(folder)
    assert checked(folder).ok


HOSTILE_CODES = {
    "Hostile": {"hostile-global"},
    "Damaged": {
        "pickle-bomb",
        "pickle-malformed",
        "archive-content",
        "storage-mismatch",
        "safetensors-header",
        "zip-structure",
        "damaged",
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_reported_and_never_run(name: str, tmp_path: Path) -> None:
    source, marker = tmp_path / "source", tmp_path / "marker"
    source.mkdir()
    HOSTILE[name].make(source, marker)
    report = checked(source)
    assert codes(report, Severity.ERROR) & HOSTILE_CODES[HOSTILE[name].answer]
    assert not marker.exists()


def test_a_global_is_named_with_its_place_in_the_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    HOSTILE["in_zip"].make(source, tmp_path / "marker")
    (found,) = [f for f in checked(source).findings if f.code == "hostile-global"]
    (position,) = re.findall(r"at byte ([\d,]+)", found.message)
    data = (source / "evil.pt").read_bytes()[int(position.replace(",", "")) :]
    assert found.file == "evil.pt"
    assert data.startswith((b"cposix\nsystem\n", b"cos\nsystem\n"))


def test_all_damage_is_collected(copy_of: Callable[[str], Path]) -> None:
    """Four kinds of damage in one checkpoint are four findings."""
    folder = copy_of("dcp_base")
    DAMAGE["data_flipped"].apply(folder)
    DAMAGE["stale_files"].apply(folder)
    (folder / "__2_0.distcp").unlink()
    (folder / ".metadata.tmp").write_bytes(b"")
    found = codes(checked(folder))
    assert {"crc-mismatch", "file-unused", "file-missing", "overwrite-interrupted"} <= found


@pytest.mark.parametrize(
    ("source", "name", "content", "code"),
    [
        ("dcp_base", ".metadata.tmp", b"x", "overwrite-interrupted"),
        ("hf_shards", "model.safetensors.incomplete", b"x", "file-incomplete"),
        ("rank_base", "checkpoint_3.pt.tmp", b"x", "file-incomplete"),
        ("rank_base", "iter_0000010_0_local.dirty.pt", b"x", "file-incomplete"),
        ("dcp_base", "weights.bin", b"", "file-empty"),
    ],
)
def test_names_and_sizes_that_are_suspicious(
    source: str, name: str, content: bytes, code: str, copy_of: Callable[[str], Path]
) -> None:
    folder = copy_of(source)
    (folder / name).write_bytes(content)
    assert code in codes(checked(folder, quick=True))


def edited(folder: Path, file: str, at: Callable[[bytes], int]) -> None:
    data = bytearray((folder / file).read_bytes())
    data[at(bytes(data))] ^= 1
    (folder / file).write_bytes(bytes(data))


@pytest.mark.parametrize("record", ["version", "byteorder", ".data/serialization_id"])
def test_every_record_of_an_archive_is_checked(record: str, copy_of: Callable[[str], Path]) -> None:
    """Also those that no reader looks at."""
    folder = copy_of("dcp_base")
    name = f"archive/{record}".encode()

    def content(data: bytes) -> int:
        descriptor = data.index(b"PK\x07\x08", data.index(name))
        return descriptor - 1

    edited(folder, "__0_0.distcp", content)
    assert "crc-mismatch" in codes(checked(folder))


def test_a_checksum_of_zero_is_one_where_others_are_stored(copy_of: Callable[[str], Path]) -> None:
    """A pickle that was changed cannot pass by a checksum that says nothing."""
    path = copy_of("rank_base") / "checkpoint_1.pt"
    data = bytearray(path.read_bytes())
    name = data.index(b"data.pkl", data.index(b"PK\x01\x02")) - len("checkpoint_1/")
    descriptor = data.index(b"PK\x07\x08")
    data[name - 46 + 16 : name - 46 + 20] = data[descriptor + 4 : descriptor + 8] = bytes(4)
    path.write_bytes(data)
    assert "crc-mismatch" in codes(checked(path.parent))


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        (
            "deepspeed_zero_3",
            "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
            "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        ),
        ("llama_consolidated", "consolidated.00.pth", "consolidated.01.pth"),
    ],
)
def test_ranks_that_took_each_others_place(
    name: str, one: str, other: str, copy_of: Callable[[str], Path]
) -> None:
    """No record says which rank wrote these; the archives are called as they were saved."""
    folder = copy_of(name)
    (first,), (second,) = (list(folder.rglob(file)) for file in (one, other))
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    shutil.copyfile(first, first.with_name("best.pt"))
    report = checked(folder)
    assert [f.code for f in report.findings if f.severity is Severity.ERROR] == ["rank-copied"] * 2


def test_the_next_step_is_the_one_of_the_reader(copy_of: Callable[[str], Path]) -> None:
    """Where the reader that refuses a file knows more than the finding's code does."""
    folder = copy_of("deepspeed_experts")
    expert = sorted(folder.rglob("*_expert_0_*"))[0]
    shutil.copyfile(expert, expert.with_name(expert.name.replace("_expert_0_", "_expert_99_")))
    hints = [f.hint for f in checked(folder).findings if f.code == "saves-mixed"]
    assert hints == ["an earlier save with more experts may have left it: move it away"]


@pytest.mark.parametrize("field", range(4, 16))
def test_a_descriptor_that_contradicts_the_directory(
    field: int, copy_of: Callable[[str], Path]
) -> None:
    folder = copy_of("dcp_base")
    edited(folder, "__0_0.distcp", lambda data: data.index(b"PK\x07\x08") + field)
    assert "zip-headers" in codes(checked(folder))


@pytest.mark.parametrize(
    ("name", "file", "more"),
    [
        ("rank_base", "checkpoint_1.pt", b"left over"),
        ("rank_base", "checkpoint_1.pt", None),
        ("legacy_zoo", "zoo.pt", b"left over"),
    ],
)
def test_bytes_behind_what_torch_saved_belong_to_nothing(
    name: str, file: str, more: bytes | None, copy_of: Callable[[str], Path]
) -> None:
    """Also another archive, whose end record says nothing of the first one's directory."""
    path = copy_of(name) / file
    data = path.read_bytes()
    path.write_bytes(data + (more or data))
    report = checked(path.parent)
    unclaimed = [one for one in report.findings if one.code == "bytes-unused"]
    assert [f"{len(more or data):,} of its" in one.message for one in unclaimed] == [True]


def weights(zeros_from: int) -> dict[str, Any]:
    """Two tensors of 64 KiB and a bias, the last rows of the second zero, and the bias too."""
    dice = np.random.default_rng(1)
    second = dice.standard_normal((64, 256), np.float32)
    second[zeros_from:] = 0
    first = dice.standard_normal((64, 256), np.float32)
    return {"a": first, "b": second, "c": np.zeros(3000, np.float32)}


@pytest.mark.parametrize(
    ("rows", "page", "found"),
    [
        (64, 4, {"zeros-at-end"}),
        (64, 17, {"zeros-at-end"}),
        (40, 17, {"zeros-at-end"}),
        (64, None, set()),
        (40, None, set()),
        (0, None, set()),
    ],
)
def test_zeros_from_a_page_to_the_end(
    rows: int, page: int | None, found: set[str], tmp_path: Path
) -> None:
    """As a crash leaves a file that was sized and not written; rows of zeros are no damage."""
    path = tmp_path / "model.safetensors"
    data = safetensors.numpy.save(weights(rows))
    start = len(data) if page is None else page * 4096
    path.write_bytes(data[:start] + bytes(len(data) - start))
    assert codes(checked(path)) == found
    assert codes(checked(path, sample=0.5)) == set()


def with_zeros(path: Path, tensors: dict[str, Any], *pages: int) -> Path:
    """Save tensors, and clear pages of the file."""
    data = bytearray(safetensors.numpy.save(tensors))
    for page in pages:
        data[page * 4096 : (page + 1) * 4096] = bytes(4096)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("pages", [(4,), (4, 5), (16,), (3, 20, 27)])
def test_pages_of_zeros(pages: tuple[int, ...], tmp_path: Path) -> None:
    """As a crash leaves those that were not written, also from one tensor to the next."""
    path = with_zeros(tmp_path / "model.safetensors", weights(64), *pages)
    assert codes(checked(path)) == {"zeros-inside"}
    first = next(f for f in checked(path).findings if f.code == "zeros-inside").message
    assert f" zeros from byte {pages[0] * 4096:,} on, from one page boundary to another" in first


@pytest.mark.parametrize("width", [1024, 4096])
def test_zeros_of_rows_and_of_blocks_are_no_pages(width: int, tmp_path: Path) -> None:
    """Where rows lie on pages, also of what was made flat: some never trained, or a block."""
    table = np.random.default_rng(1).standard_normal((64, width), np.float32)
    if width == 1024:
        table[[3, 4, 30]] = 0
    else:
        table[:32, 1024:2048] = 0
    for shape in (table.shape, (table.size,)):
        item = {"dtype": "F32", "shape": shape, "data_offsets": [0, table.nbytes]}
        header = json.dumps({"a": item}).encode().ljust(4096 - 8)
        path = tmp_path / "model.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + table.tobytes())
        assert codes(checked(path)) == set()
