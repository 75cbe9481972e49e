"""NeMo's archives are read in place, and refused if a member is not what it seems."""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Bits, bits, case, convert_to, flat, load_torch, read_back, run_verify
from hypothesis import given
from hypothesis import strategies as st

import ckptool
from ckptool.commands.open import open_checkpoint
from ckptool.errors import CkptoolError, Damaged, Unrecognized
from ckptool.storage.local import LocalSource
from ckptool.storage.virtual.placed import PlacedFiles
from ckptool.storage.virtual.tar import tar_members

NEMO = case("nemo_archive")
ARCHIVE = NEMO.path / "model.nemo"
Members = list[tuple[tarfile.TarInfo, bytes]]


def member(
    name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, **fields: object
) -> Members:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return [(info, data)]


def pack(path: Path, members: Members, dialect: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w:", format=dialect) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data) if data else None)
    return path


def opened(path: Path) -> PlacedFiles:
    return tar_members(LocalSource.file(path), path.name)


def contents(source: PlacedFiles) -> dict[str, bytes]:
    return {name: source.read(name, 0, size) for name, size in source.files.items()}


def loaded(path: Path) -> dict[str, Bits]:
    with ckptool.open(path) as checkpoint:
        return {name: bits(tensor) for name, tensor in flat(dict(checkpoint.state_dict())).items()}


def test_a_model_comes_out_of_it(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    convert_to("safetensors", ARCHIVE, out)
    assert read_back("safetensors", out) == NEMO.truth
    assert loaded(ARCHIVE) == NEMO.truth


def test_every_command_reads_it(tmp_path: Path) -> None:
    assert run_verify(str(ARCHIVE)).exit_code == 0
    plain = tmp_path / "model_weights.ckpt"
    plain.write_bytes(contents(opened(ARCHIVE))["model_weights.ckpt"])
    assert load_torch(plain).keys() == NEMO.truth.keys()
    assert ckptool.compare(ARCHIVE, plain)
    assert ckptool.diff(ARCHIVE, plain).alike == len(NEMO.truth)
    ckptool.extract(ARCHIVE, "encoder.bias", tmp_path / "bias.npy")
    assert np.array_equal(np.load(tmp_path / "bias.npy"), load_torch(plain)["encoder.bias"])
    assert ckptool.inspect(ARCHIVE).to_dict()["format"] == "torch-save"


@pytest.mark.parametrize(
    ("name", "folder"), [("megatron_torch_dist", "iter_0000100"), ("dcp_base", ".")]
)
def test_a_folder_of_shards_in_it(name: str, folder: str, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    one = case(name)
    with tarfile.open(tmp_path / "model.nemo", "w:") as archive:
        archive.add(one.path / folder, arcname="./model_weights")
    found = open_checkpoint(tmp_path / "model.nemo")
    assert found.format.name == one.facts["format"]
    convert_to("torch-save", tmp_path / "model.nemo", out)
    convert_to("torch-save", one.path, tmp_path / "direct.pt")
    assert read_back("torch-save", out) == read_back("torch-save", tmp_path / "direct.pt")


def test_one_flipped_byte_is_found(tmp_path: Path) -> None:
    data = bytearray(ARCHIVE.read_bytes())
    values = NEMO.truth["encoder.bias"]
    data[data.index(bytes(values[2] if isinstance(values, tuple) else values))] ^= 1
    (tmp_path / "model.nemo").write_bytes(data)
    assert run_verify(str(tmp_path / "model.nemo")).exit_code != 0


NAMES = st.lists(
    st.text("abz.-_é ", min_size=1, max_size=70).filter(lambda t: t.strip(" .") == t),
    min_size=1,
    max_size=4,
).map("/".join)


@given(
    files=st.dictionaries(NAMES, st.binary(max_size=1200), max_size=5),
    dialect=st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
    time=st.sampled_from([0, 1700000000.25]),
)
def test_as_tarfile_packs_it(
    files: dict[str, bytes], dialect: int, time: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("packed") / "a.nemo"
    members = member(".", kind=tarfile.DIRTYPE)
    for name, data in files.items():
        members += member(f"./{name}", data, mtime=time)
    assert contents(opened(pack(path, members, dialect))) == files


@pytest.mark.parametrize("dialect", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_a_file_of_more_than_8_gib(dialect: Any, tmp_path: Path) -> None:
    size = 9 << 30
    info = member("./model_weights.ckpt", size=size)[0][0]
    path = tmp_path / "a.nemo"
    path.write_bytes(info.tobuf(dialect))
    at = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(at + size + 1024)  # a sparse file of the disk
        file.seek(at + size - 3)
        file.write(b"end")
    source = opened(path)
    assert source.files == {"model_weights.ckpt": size}
    assert source.read("model_weights.ckpt", size - 4, 4) == b"\0end"
    with pytest.raises(Damaged, match="expected at offset"):
        source.read("model_weights.ckpt", size - 4, 5)


def test_a_member_is_never_read_past_its_end(tmp_path: Path) -> None:
    source = opened(pack(tmp_path / "a.nemo", [*member("a", b"xy"), *member("b", b"z")]))
    reader = source.reader()
    with pytest.raises(Damaged, match="2 bytes"):
        reader.read_into("a", 1, memoryview(bytearray(2)))
    with pytest.raises(Damaged, match="2 bytes"):
        reader.read_runs("a", 0, 2, [memoryview(bytearray(1)), memoryview(bytearray(1))])
    reader.close()


HOSTILE: dict[str, tuple[Members, str]] = {
    "absolute": (member("/etc/model_weights.ckpt", b"x"), "outside the folder"),
    "above": (member("./../model_weights.ckpt", b"x"), "outside the folder"),
    "folder above": (member("../x", kind=tarfile.DIRTYPE), "outside the folder"),
    "control": (member("a\x1b[2J", b"x"), "outside the folder"),
    "symbolic": (member("a", kind=tarfile.SYMTYPE, linkname="/etc/passwd"), "a symbolic link"),
    "long link": (member("a", kind=tarfile.SYMTYPE, linkname="x" * 300), "a symbolic link"),
    "hard": (member("a", kind=tarfile.LNKTYPE, linkname="b"), "a hard link"),
    "sparse": (member("a", b"x" * 512, kind=tarfile.GNUTYPE_SPARSE), "a sparse file"),
    "pax sparse": (member("a", b"x", pax_headers={"GNU.sparse.map": "0,1"}), "a sparse file"),
    "device": (member("a", kind=tarfile.CHRTYPE), "a member of type b'3'"),
    "pipe": (member("a", kind=tarfile.FIFOTYPE), "a member of type b'6'"),
    "twice": ([*member("a", b"x"), *member("./a", b"y")], "a second one of this name"),
    "size": (member("a", b"x", pax_headers={"size": "-512"}), "of a negative size"),
    "beyond": (member("a", b"x", pax_headers={"size": "99999999"}), "it is truncated"),
    "no name": (member("a", b"x", pax_headers={"path": ""}), "no name"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_not_a_plain_file_of_one_name_is_refused(kind: str, tmp_path: Path) -> None:
    members, said = HOSTILE[kind]
    dialect = tarfile.GNU_FORMAT if kind == "long link" else tarfile.PAX_FORMAT
    path = pack(tmp_path / "a.nemo", [*member("model_weights.ckpt", b"x"), *members], dialect)
    with pytest.raises(Damaged) as error:
        open_checkpoint(path)
    assert said in str(error.value)


def _resum(data: bytearray) -> bytes:
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    return bytes(data)


def negative_size(data: bytearray) -> bytes:
    data[124:136] = b"\xff" * 12
    return _resum(data)


def huge_size(data: bytearray) -> bytes:
    data[124:136] = b"\x80" + struct.pack(">3xQ", 1 << 62)
    return _resum(data)


def long_name_without_end(data: bytearray) -> bytes:
    data[156:157] = b"L"
    data[124:136] = b"%011o\0" % (1 << 30)
    return _resum(data)


def long_names_of_long_names(data: bytearray) -> bytes:
    data[156:157] = b"L"
    data[124:136] = b"%011o\0" % 1
    return _resum(data)[:1024] * 2_000 + bytes(data)


def many_sparse_parts(data: bytearray) -> bytes:
    records = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n"
    header = bytearray(data[:512])
    header[156:157], header[124:136] = b"x", b"%011o\0" % len(records)
    return _resum(header) + records.ljust(512, b"\0") + data[:512] + b"9999999\n" + b"0\n" * 99_999


def changed_header(data: bytearray) -> bytes:
    data[3] ^= 1
    return bytes(data)


def changed_second_header(data: bytearray) -> bytes:
    data[1024 + 3 : 1024 + 4] = b"x"
    return bytes(data)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (negative_size, "of a negative size"),
        (huge_size, "it is truncated"),
        (long_name_without_end, "more than 65,536 bytes before a member"),
        (long_names_of_long_names, "more than 65,536 bytes before a member"),
        (many_sparse_parts, "more than 65,536 bytes before a member"),
        (changed_header, "no header of a member: bad checksum"),
        (changed_second_header, "no header of a member: it was changed"),
    ],
)
def test_a_spoiled_header(spoil: Callable[[bytearray], bytes], said: str, tmp_path: Path) -> None:
    path = pack(tmp_path / "a.nemo", member("model_weights.ckpt", b"x"))
    path.write_bytes(spoil(bytearray(path.read_bytes())))
    with pytest.raises(Damaged) as error:
        open_checkpoint(path)
    assert said in str(error.value)


def test_wherever_it_is_cut(tmp_path: Path) -> None:
    data = ARCHIVE.read_bytes()
    end = len(data.rstrip(b"\0")) // 512 * 512 + 512
    path = tmp_path / "model.nemo"
    for length in (512, 1024, 1100, 3000, end - 512, end):
        path.write_bytes(data[:length])
        with pytest.raises(Damaged, match="it is truncated") as error:
            open_checkpoint(path)
        assert error.value.problems[0].code == "file-truncated"


@given(at=st.integers(0, 20_479), value=st.integers(0, 255))
def test_any_byte_changed_ends_in_an_answer(
    at: int, value: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = bytearray(ARCHIVE.read_bytes())
    data[at] = value
    path = tmp_path_factory.mktemp("changed") / "model.nemo"
    path.write_bytes(data)
    try:
        found = loaded(path)
    except CkptoolError:
        return
    assert found == NEMO.truth


def test_the_parts_of_several_ranks_are_not_guessed_at(tmp_path: Path) -> None:
    data = contents(opened(ARCHIVE))["model_weights.ckpt"]
    ranks = [m for r in (0, 1) for m in member(f"./mp_rank_0{r}/model_weights.ckpt", data)]
    path = pack(tmp_path / "model.nemo", ranks)
    with pytest.raises(Unrecognized, match=r"mp_rank_00/model_weights.ckpt") as error:
        open_checkpoint(path)
    assert f"tar -xf {path} -C FOLDER" in str(error.value.hint)


def test_it_is_found_in_a_folder_and_what_is_excluded_is_reported(tmp_path: Path) -> None:
    data = contents(opened(ARCHIVE))["model_weights.ckpt"]
    more = member("./timestamps_asr_model_weights.ckpt", data)
    pack(tmp_path / "model.nemo", [*member("./model_weights.ckpt", data), *more])
    found = open_checkpoint(tmp_path)
    assert found.path == tmp_path / "model.nemo"
    assert any("timestamps_asr_model_weights.ckpt" in note for note in found.catalog.notes)


def test_an_archive_that_is_replaced_is_not_read(tmp_path: Path) -> None:
    path = pack(tmp_path / "a.nemo", member("a", b"xy"))
    source = opened(path)
    assert source.changed(["a"]) == []
    pack(path, member("a", b"longer"))
    assert source.changed(["a"]) == ["a"]
    with pytest.raises(CkptoolError):
        source.read("a", 0, 2)


def test_no_archive_is_exchanged_for_one_without_its_optimizer(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}}
    torch.save(state, tmp_path / "weights")
    for step in (1, 2):
        (tmp_path / f"step-{step}").mkdir()
        data = (tmp_path / "weights").read_bytes()
        pack(tmp_path / f"step-{step}" / "m.nemo", member("model_weights.ckpt", data))
    (tmp_path / "weights").unlink()
    before = [path.read_bytes() for path in sorted(tmp_path.rglob("*.nemo"))]
    options: dict[str, Any] = {"keep_every": 1, "no_optimizer": True, "yes": True}
    report = ckptool.prune(tmp_path, keep_last=1, **options)
    assert "ckptool does not write archives" in str(report.to_dict())
    assert [path.read_bytes() for path in sorted(tmp_path.rglob("*.nemo"))] == before
