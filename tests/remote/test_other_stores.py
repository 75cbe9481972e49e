"""Stores of other kinds than S3: memory, and servers of the web."""

from __future__ import annotations

import http.server
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from conftest import case
from places import file_system, in_store
from safetensors.torch import save_file
from store_server import s3, server
from test_s3 import files_of, resharded
from web_server import serving

from ckptool.commands.open import open_checkpoint
from ckptool.errors import Damaged, NoAnswer, Unsupported
from ckptool.storage.block_cache import BLOCK
from ckptool.storage.clients.retry import RetryPolicy
from ckptool.storage.remote import RemoteSource
from ckptool.storage.store import Store
from ckptool.storage.url import location

SOURCE = case("dcp_fsdp2_tp").path


@pytest.fixture
def memory() -> Any:
    found = fsspec.filesystem("memory")
    found.store.clear()
    return found


def test_a_store_that_shows_files_while_they_grow(memory: Any, out: Path) -> None:
    resharded(SOURCE, out / "m", "4")
    resharded(SOURCE, "memory://run/m", "4")
    found = {name.removeprefix("/run/m/"): memory.cat_file(name) for name in memory.find("/run")}
    assert found == files_of(out / "m")


class Web(http.server.SimpleHTTPRequestHandler):
    ranges = True
    heads = True
    sizes = True
    shift = 0

    def log_message(self, *said: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        if self.heads:
            super().do_HEAD()
        else:
            self.send_error(403)

    def send_header(self, keyword: str, value: str) -> None:
        if self.sizes or keyword != "Content-Length":
            super().send_header(keyword, value)

    def do_GET(self) -> None:
        if self.path.startswith("/moved/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/moved"))
            self.end_headers()
            return
        asked = self.headers.get("Range")
        if not (self.ranges and asked):
            super().do_GET()
            return
        start, last = asked.removeprefix("bytes=").split("-")
        start = str(int(start) + self.shift)
        data = Path(self.translate_path(self.path)).read_bytes()
        piece = data[int(start) : int(last) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{last}/{len(data)}")
        self.send_header("Content-Length", str(len(piece)))
        self.end_headers()
        self.wfile.write(piece)

    def list_directory(self, path: Any) -> None:
        self.send_error(403)


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("aiohttp")
    with serving(lambda *a: Web(*a, directory=str(tmp_path))) as base:
        yield base


@pytest.mark.parametrize("name", ["hf_shards", "dcp_fsdp2_tp", "zip_zoo"])
def test_the_web_is_read_by_the_names_that_metadata_has(
    name: str, web: str, copy_of: Any, tmp_path: Path
) -> None:
    path = copy_of(name)
    path = next(path.iterdir()) if name == "zip_zoo" else path
    url = f"{web}/{path.relative_to(tmp_path)}"
    found, wanted = open_checkpoint(location(url)), open_checkpoint(path)
    assert found.catalog.tensors == wanted.catalog.tensors


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("path", ["m.safetensors?X-Sig=a%2Fb&y=/z", "moved/m.safetensors"])
def test_a_signed_url_and_one_that_leads_elsewhere(
    path: str, head: bool, web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Web, "heads", head)
    save_file({"a": torch.ones(3)}, tmp_path / "m.safetensors")
    opened = open_checkpoint(location(f"{web}/{path}"))
    assert opened.catalog.tensors["a"].shape == (3,)
    assert "X-Sig" not in str(opened.path)


def test_a_server_that_tells_no_size(
    web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Web, "sizes", False)
    save_file({"a": torch.ones(3)}, tmp_path / "m.safetensors")
    with pytest.raises(Unsupported, match="does not say how large it is"):
        open_checkpoint(location(f"{web}/m.safetensors"))


def test_a_server_that_gives_no_parts_of_files(
    web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Web, "ranges", False)
    torch.save(torch.ones(1 << 20), tmp_path / "m.pt")
    with pytest.raises(Unsupported, match="does not answer requests for a part of a file"):
        open_checkpoint(location(f"{web}/m.pt"))


def test_a_server_that_gives_other_bytes_than_were_asked_for(
    web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Web, "shift", 1)
    monkeypatch.setattr(Store, "policy", RetryPolicy(attempts=2, pause=0.01))
    save_file({"a": torch.ones(1 << 20)}, tmp_path / "m.safetensors")
    with pytest.raises(NoAnswer, match=r"the answer covers other bytes: bytes 1-\d+"):
        open_checkpoint(location(f"{web}/m.safetensors"))


def test_behind_the_end_of_a_file_nothing_is_asked_for() -> None:
    place = in_store("memory://short/m.bin")
    file_system(place).pipe_file("/short/m.bin", bytes(1000))
    source = RemoteSource.file(place)
    before = place.store.traffic.requests
    with pytest.raises(Damaged):
        source.read_into("m.bin", 3 * BLOCK, memoryview(bytearray(8)))
    assert place.store.traffic.requests == before
