"""Files of the Hugging Face Hub against the hashes that its client keeps of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub._local_folder import (
    get_local_download_paths,
    read_download_metadata,
    write_download_metadata,
)
from huggingface_hub.file_download import repo_folder_name
from safetensors.torch import save

import ckptool

COMMIT = "a" * 40
WEIGHTS = {
    f"model-0000{n}-of-00002.safetensors": save({f"w{n}": torch.ones(64, 64)}) for n in (1, 2)
}
INDEX = json.dumps({"weight_map": {f"w{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}})
TEXTS = {"config.json": b"{}", "model.safetensors.index.json": INDEX.encode()}


def etag(data: bytes, *, is_large: bool) -> str:
    """What the Hub sends: the SHA-256 of files in LFS, git's name of others."""
    if is_large:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def cached(root: Path) -> Path:
    """A snapshot in the cache."""
    repository = root / repo_folder_name(repo_id="org/name", repo_type="model")
    snapshot = repository / "snapshots" / COMMIT
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name, data in (WEIGHTS | TEXTS).items():
        blob = repository / "blobs" / etag(data, is_large=name in WEIGHTS)
        blob.write_bytes(data)
        (snapshot / name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def downloaded(root: Path) -> Path:
    """A subfolder of a ``--local-dir``."""
    folder = root / "sub" / "model"
    folder.mkdir(parents=True)
    for name, data in (WEIGHTS | TEXTS).items():
        (folder / name).write_bytes(data)
        write_download_metadata(
            root, f"sub/model/{name}", COMMIT, etag(data, is_large=name in WEIGHTS)
        )
        assert read_download_metadata(root, f"sub/model/{name}")
    return folder


PLACES = pytest.mark.parametrize("make", [cached, downloaded])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@PLACES
def test_what_was_sent_is_what_is_there(make: object, tmp_path: Path) -> None:
    assert callable(make)
    folder = make(tmp_path)
    assert constants.HF_HUB_CACHE
    report = ckptool.verify(folder)
    assert (report.ok, {f.code for f in report.findings}) == (True, set())
    assert report.summary == "OK: all data read and checked"
    assert ckptool.verify(folder / next(iter(WEIGHTS))).ok


@PLACES
@pytest.mark.parametrize("options", [{}, {"write": True}, {"part": "1/2"}])
def test_a_changed_value_is_found(make: object, options: dict[str, object], tmp_path: Path) -> None:
    assert callable(make)
    folder = make(tmp_path)
    name = list(WEIGHTS)[1]
    flip(folder / name)
    if options.pop("write", False):
        options["write_manifest"] = tmp_path / "m.json"
    report = ckptool.verify(folder, **options)  # type: ignore[arg-type]
    (finding,) = [f for f in report.findings if f.severity.value == "error"]
    assert (finding.code, finding.file) == ("sha256-mismatch", name)
    assert "download it again" in str(finding.hint)
    assert ckptool.verify(folder, quick=True).ok
    assert ckptool.verify(folder, sample=0.5).ok


@PLACES
def test_a_changed_text_is_damage_in_the_cache_and_maybe_an_edit_elsewhere(
    make: object, tmp_path: Path
) -> None:
    assert callable(make)
    folder = make(tmp_path)
    (folder / "config.json").write_bytes(b"{ }")
    report = ckptool.verify(folder)
    code = "sha1-mismatch" if make is cached else "download-changed"
    assert (report.ok, [f.code for f in report.findings]) == (make is downloaded, [code])


def test_what_is_no_record_of_a_download_says_nothing(tmp_path: Path) -> None:
    folder = downloaded(tmp_path)
    record = get_local_download_paths(tmp_path, f"sub/model/{next(iter(WEIGHTS))}").metadata_path
    for text in (
        "",
        "x\ny\nz\n",
        f'{COMMIT}\n"abc"\n1\n',
        f"{COMMIT}\n{'g' * 64}\n1\n",
        "\xff" * 5000,
    ):
        record.write_text(text)
        assert [f.code for f in ckptool.verify(folder).findings] == ["no-checksum"]
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / ("0" * 64)).write_bytes(next(iter(WEIGHTS.values())))
    (tmp_path / "m.safetensors").symlink_to(f"blobs/{'0' * 64}")
    assert ckptool.verify(tmp_path / "m.safetensors").ok
