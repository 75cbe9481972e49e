"""A file that is not a known checkpoint is named as what it is, with the next step."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.verify import verify
from ckptool.errors import CkptoolError, SourceError

ARRAYS = {"a": np.ones(3), "b": np.zeros((2, 2))}
EXPORTED = [
    *("archive_format", "archive_version", "models/model.json", "byteorder", ".data/version"),
    *("data/weights/model_weights_config.json", "data/weights/weight_0"),
    *("data/constants/model_constants_config.json", "data/sample_inputs/model.pt"),
]
LFS = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


def written(save: Callable[[io.BytesIO], object]) -> bytes:
    buffer = io.BytesIO()
    save(buffer)
    return buffer.getvalue()


def npz(buffer: io.BytesIO) -> None:
    arrays: Any = ARRAYS
    np.savez(buffer, **arrays)


def tar(buffer: io.BytesIO) -> None:
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("model_config.yaml"))


def keras(buffer: io.BytesIO) -> None:
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in ("metadata.json", "config.json", "model.weights.h5"):
            archive.writestr(name, "{}")


def exported(buffer: io.BytesIO) -> None:
    """The records of an archive that ``torch.export.save`` of torch 2.13 wrote."""
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in EXPORTED:
            archive.writestr(f"archive/{name}", "pt2")


KINDS: dict[str, tuple[str, Callable[[], bytes], str, str]] = {
    "git-lfs": (".pt", lambda: LFS, "a git-lfs pointer to a file of 12,345 bytes", "git lfs pull"),
    "html": (".bin", lambda: b"<!DOCTYPE html><html>", "an HTML page", "need a token"),
    "xml": (".pt", lambda: b"<?xml version='1.0'?><Error/>", "an XML document", "download"),
    "answer": (".pt", lambda: b"Entry not found", "first line is 'Entry not", "download"),
    "gzip": (".pt", lambda: gzip.compress(LFS), "gzip-compressed", "gzip -d"),
    "zstd": (".pt", lambda: zstandard.compress(LFS), "zstd-compressed", "zstd -d"),
    "xz": (".ckpt", lambda: lzma.compress(LFS), "xz-compressed", "xz -d"),
    "bzip2": (".pth", lambda: bz2.compress(LFS), "bzip2-compressed", "bzip2 -d"),
    "npz": (".npz", lambda: written(npz), "(.npz)", "save_file"),
    "npy": (".npy", lambda: written(lambda b: np.save(b, ARRAYS["a"])), "(.npy)", "numpy.load"),
    "gguf": (".gguf", lambda: b"GGUF\x03\0\0\0" + bytes(16), "a GGUF model", "gguf_file"),
    "onnx": (".onnx", lambda: b"\x08\x0a\x12\x07pytorch", "an ONNX model", "numpy_helper"),
    "hdf5": (".h5", lambda: b"\x89HDF\r\n\x1a\n" + bytes(88), "an HDF5 file", "h5py"),
    "flax": (".msgpack", lambda: b"\x81\xa6params\x80", "a Flax checkpoint", "msgpack_restore"),
    "pt2": (".pt2", lambda: written(exported), "torch.export", "state_dict"),
    "keras": (".keras", lambda: written(keras), "a Keras model", "unzip"),
    "nemo": (".nemo", lambda: written(tar), "a NeMo archive", "tar -xf"),
    "nemo.gz": (".nemo", lambda: gzip.compress(written(tar)), "a NeMo archive", "tar -xzf"),
    "tar": (".tar", lambda: written(tar), "a tar archive", "tar -xf"),
    "pickle": (".pkl", lambda: pickle.dumps([1, 2]), "a plain pickle", "pickle.load"),
    "dvc": (".pt.dvc", lambda: b"outs:\n- md5: 0123", "a DVC pointer", "dvc pull"),
    "zeros": (".pt", lambda: bytes(4096), "zeros", "another copy"),
    "tensorflow": (".data-00000-of-00001", lambda: b"\x01" * 99, "TensorFlow", "load_checkpoint"),
    "index": (
        ".json",
        lambda: json.dumps({"metadata": {}, "weight_map": {"w": "m-1.safetensors"}}).encode(),
        "an index of shards",
        "put the shards",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_under_its_own_name(kind: str, tmp_path: Path) -> None:
    suffix, make, what, hint = KINDS[kind]
    path = tmp_path / f"model{suffix}"
    path.write_bytes(make())
    for asked in (path, tmp_path):
        with pytest.raises(CkptoolError) as caught:
            open_checkpoint(asked)
        assert caught.value.exit_code == 3
        if asked is path or kind != "answer":
            assert what in str(caught.value)
            assert hint in str(caught.value.hint)
        assert "begins with" not in str(caught.value)
        assert "FILE'" not in str(caught.value.hint)


@pytest.mark.parametrize("kind", ["git-lfs", "html", "answer", "gzip", "gguf", "hdf5"])
@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "pytorch_model.bin"])
def test_a_file_under_a_name_that_promises_another(kind: str, name: str, tmp_path: Path) -> None:
    _, make, what, hint = KINDS[kind]
    (tmp_path / name).write_bytes(make())
    (tmp_path / "config.json").write_text("{}")
    for asked in (tmp_path / name, tmp_path):
        with pytest.raises(CkptoolError) as caught:
            open_checkpoint(asked)
        assert what in str(caught.value)
        assert hint in str(caught.value.hint)


def test_what_torch_saved_under_the_name_of_safetensors(copy_of: Callable[[str], Path]) -> None:
    (file,) = copy_of("zip_zoo").iterdir()
    path = file.rename(file.with_name("model.safetensors"))
    with pytest.raises(CkptoolError, match="a zip archive, such as") as caught:
        open_checkpoint(path)
    assert "--from torch-save" in str(caught.value.hint)
    assert open_checkpoint(path, ReadOptions(from_format="torch-save")).catalog.tensors


@pytest.mark.parametrize("name", [".metadata", "model.safetensors.index.json", "metadata.pkl"])
def test_a_pointer_in_the_place_of_metadata(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(LFS)
    (tmp_path / "__0_0.distcp").write_bytes(LFS)
    if name == "metadata.pkl":
        (tmp_path / "__0_0.distcp").rename(tmp_path / "model_0.pt")
    if name.endswith(".json"):
        (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(CkptoolError, match="a git-lfs pointer to a file of 12,345 bytes") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.hint == "git lfs pull"


def test_pointers_in_a_checkpoint_are_not_damage(copy_of: Callable[[str], Path]) -> None:
    """A clone without git-lfs: every large file is a pointer."""
    folder = copy_of("hf_shards")
    for file in folder.glob("*.safetensors"):
        file.write_bytes(LFS)
    found = verify(folder, VerifyOptions()).findings
    assert {f.code for f in found if f.file and f.file.endswith(".safetensors")} == {
        "file-type-mismatch"
    }


@pytest.mark.parametrize("name", ["dcp_base", "megatron_torch_dist", "snapshot_batched"])
def test_pointers_are_the_cause_of_what_is_truncated(
    name: str, copy_of: Callable[[str], Path]
) -> None:
    """Metadata is small and was fetched, the data was not."""
    folder = copy_of(name)
    for file in folder.rglob("*"):
        if file.is_file() and file.stat().st_size > 300 and not file.name.startswith("."):
            file.write_bytes(LFS)
    with pytest.raises(CkptoolError, match="a git-lfs pointer to a file") as caught:
        open_checkpoint(folder)
    assert caught.value.hint == "git lfs pull"
    assert verify(folder, VerifyOptions()).findings[0].code == "file-type-mismatch"


def test_a_page_that_is_called_one_is_not_a_cause_of_damage(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("hf_shards")
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-8])
    (folder / "report.html").write_text("<html><body>loss</body></html>")
    (folder / "graph.xml").write_text("<?xml version='1.0'?><graph/>")
    with pytest.raises(CkptoolError, match=f"{shard.name}: .* truncated"):
        open_checkpoint(folder)
    assert {f.file for f in verify(folder, VerifyOptions()).findings if f.file} <= {
        *(file.name for file in folder.iterdir() if file.suffix not in (".html", ".xml"))
    }


@pytest.mark.parametrize("data", [b"", b"\x05\x06\x07\x01" * 9, b"\xff\xfe" * 40])
def test_what_nothing_tells(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(data)
    with pytest.raises(CkptoolError, match=r"begins with|is empty"):
        open_checkpoint(tmp_path / "model.bin")


@pytest.mark.parametrize("length", [0x0280, 0x8B1F, 0x685A42])
def test_a_safetensors_file_cut_short_is_none_that_its_length_spells(
    length: int, tmp_path: Path
) -> None:
    """These lengths are how a pickle, gzip and bzip2 begin."""
    header = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    (tmp_path / "m.safetensors").write_bytes(length.to_bytes(8, "little") + header)
    with pytest.raises(SourceError, match=f"the header should have {length:,} bytes") as caught:
        open_checkpoint(tmp_path / "m.safetensors")
    assert "pickle" not in str(caught.value)


def test_a_text_beside_nothing_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n" * 100)
    (tmp_path / "table.parquet").write_bytes(b"PAR1" + bytes(range(200)))
    with pytest.raises(SourceError) as error:
        open_checkpoint(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}: no checkpoint found in 2 files: ")
    assert "import torch" not in str(error.value)
    assert error.value.hint is not None
    assert error.value.hint.startswith("run `ckptool formats`")
