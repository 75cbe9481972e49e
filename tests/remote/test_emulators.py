"""The same against emulators of other stores: Google Cloud Storage's, and Azure's (azurite).

They run where they are installed: ``make stores`` brings them.
"""

from __future__ import annotations

import logging
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from conftest import case, convert_to
from test_s3 import big, files_of, resharded

from ckptool.commands.convert import prepare
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.target import ConvertOptions
from ckptool.errors import CkptoolError, NotFound
from ckptool.storage.remote import RemoteSource
from ckptool.storage.retry import RetryPolicy
from ckptool.storage.store import Store
from ckptool.storage.url import RemotePath, location

SOURCE = case("dcp_fsdp2_tp").path
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of ``devstoreaccount1``, as azurite's documentation has it."""


@contextmanager
def google() -> Iterator[dict[str, str]]:
    """An emulator of Google Cloud Storage."""
    pytest.importorskip("gcsfs")
    server = pytest.importorskip("gcp_storage_emulator.server")
    logging.getLogger("gcp_storage_emulator").disabled = True
    running = server.create_server("127.0.0.1", 0, in_memory=True, default_bucket="box")
    running.start()
    host = f"http://127.0.0.1:{running._api._httpd.server_port}"
    yield {"STORAGE_EMULATOR_HOST": host}
    running.stop()


@contextmanager
def azure() -> Iterator[dict[str, str]]:
    """An emulator of Azure's blobs."""
    adlfs = pytest.importorskip("adlfs")
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("no azurite-blob here")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--disableTelemetry"]
    running = subprocess.Popen([program, "--blobPort", str(port), *words])
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        endpoint = f"BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1"
        account = f"AccountName=devstoreaccount1;AccountKey={KEY}"
        connection = f"DefaultEndpointsProtocol=http;{account};{endpoint};"
        adlfs.AzureBlobFileSystem(connection_string=connection).mkdir("box")
        yield {"AZURE_STORAGE_CONNECTION_STRING": connection}
    finally:
        running.kill()
        running.wait()


EMULATORS = {"gs": google, "az": azure}


@pytest.fixture(scope="module", params=EMULATORS)
def emulator(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, str]]]:
    with EMULATORS[request.param]() as environment:
        yield request.param, environment


@pytest.fixture
def box(emulator: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a folder where nothing is."""
    scheme, environment = emulator
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    url = f"{scheme}://box/{uuid.uuid4().hex[:8]}"
    place(url).store.fs.clear_instance_cache()
    return url


def place(url: str) -> RemotePath:
    found = location(url)
    assert isinstance(found, RemotePath)
    return found


def stored(url: str) -> dict[str, bytes]:
    folder = place(url)
    fs = folder.store.fs
    fs.invalidate_cache()
    return {name.removeprefix(f"{folder.key}/"): fs.cat_file(name) for name in fs.find(folder.key)}


def test_what_is_written_and_read_is_the_same(box: str, out: Path) -> None:
    convert_to("safetensors", SOURCE, out / "m")
    resharded(SOURCE, f"{box}/source", "4")
    resharded(SOURCE, f"{box}/source", "2", overwrite=True)
    resharded(SOURCE, out / "two", "2")
    assert stored(f"{box}/source") == files_of(out / "two")
    prepare(place(f"{box}/source"), place(f"{box}/m"), ConvertOptions("safetensors")).run()
    assert stored(f"{box}/m") == files_of(out / "m")
    found = open_checkpoint(place(f"{box}/source")).catalog
    assert found.tensors == open_checkpoint(out / "two").catalog.tensors


def test_uploads_in_parts(box: str, out: Path) -> None:
    source = big(out, 3)
    resharded(source, f"{box}/m", "1")
    resharded(source, out / "m", "1")
    assert stored(f"{box}/m") == files_of(out / "m")


def test_a_file_by_itself(box: str, out: Path) -> None:
    convert_to("safetensors", SOURCE, out / "m.safetensors")
    target = place(f"{box}/m.safetensors")
    prepare(SOURCE, target, ConvertOptions("safetensors")).run()
    assert stored(box) == {f.name: f.read_bytes() for f in out.iterdir()}
    found = open_checkpoint(target).catalog
    assert found.tensors == open_checkpoint(out / "m.safetensors").catalog.tensors


def test_what_is_not_there(box: str) -> None:
    scheme = box.partition("://")[0]
    for url in (f"{box}/no", f"{scheme}://no-such-bucket/m"):
        with pytest.raises(NotFound, match="no such file or folder"):
            open_checkpoint(place(url))


def test_a_name_that_none_can_have(box: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "policy", RetryPolicy(attempts=2, pause=0.01))
    target = place(f"{box.partition('://')[0]}://x/m")
    with pytest.raises(CkptoolError):
        prepare(SOURCE, target, ConvertOptions("dcp")).run()


def test_what_was_replaced_since_it_was_listed(box: str) -> None:
    target = place(f"{box}/m")
    resharded(SOURCE, f"{box}/m", "2")
    files = list(RemoteSource.folder(target).files)
    source = RemoteSource.folder(target)
    assert source.changed(files) == []
    data = (target / "__0_0.distcp").read_bytes()
    time.sleep(1.1)  # a version may be a time, in seconds
    (target / "__0_0.distcp").write_bytes(bytes(len(data)))
    assert source.changed(files) == ["__0_0.distcp"]
    assert source.changed(["__0_0.distcp"]) == ["__0_0.distcp"]
    assert source.changed([".metadata"]) == []
