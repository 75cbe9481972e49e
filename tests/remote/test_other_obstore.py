"""Reads of Google Cloud Storage and Azure by obstore, and by gcsfs and adlfs if it cannot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from emulators import KEY, Asked, Emulator, Said, box, emulator, place
from msgspec.structs import replace
from store_server import QUICK

from ckptool.errors import Changed, NoAnswer, NotFound, Unsupported
from ckptool.storage.block_cache import ObjectVersion
from ckptool.storage.clients import obstore_others
from ckptool.storage.store import Store
from ckptool.storage.url import RemotePath, storage_options

pytest.importorskip("obstore")

DATA = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "policy", QUICK)


def put(url: str) -> RemotePath:
    there = place(url)
    there.store.fs.pipe_file(there.key, DATA)
    return there


def read(there: RemotePath, start: int, end: int) -> bytes:
    return bytes(there.store.read(ObjectVersion(there.key, there.listing[""].version), start, end))


def clients(emulator: Emulator) -> list[str]:
    """What sent each of the reads."""
    agents = [one.headers["user-agent"] for one in emulator.proxy.log if one.kind == "READ"]
    return ["obstore" if "object_store" in agent else "fsspec" for agent in agents]


def test_obstore_reads_all(box: str, emulator: Emulator) -> None:
    there = put(f"{box}/a.bin")
    for start, end in ((0, 10), (5, 5000), (10_000, 10_240), (10_200, 99_999)):
        assert read(there, start, end) == DATA[start:end]
    assert clients(emulator) == ["obstore"] * 4


def test_without_obstore_fsspec_does(
    box: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstore_others, "is_available", lambda: False)
    assert read(put(f"{box}/a.bin"), 5, 5000) == DATA[5:5000]
    assert clients(emulator) == ["fsspec"]


@pytest.mark.parametrize("key", ["a b#1%20+ü/ä.bin", "~a/*b/c.bin", "a/.b..c.bin"])
def test_any_key_is_read_by_one_of_them(key: str, box: str) -> None:
    there = put(f"{box}/{key}")
    assert read(there, 0, 10) + read(there, 10, 20) == DATA[:20]


# Answers that are others


def whole(asked: Asked, ask: Any) -> Said:
    """The whole file, as of a proxy that does not know ranges."""
    headers = {n: t for n, t in ask(asked).headers.items() if n.lower() != "content-range"}
    return Said(200, DATA, headers)


def shifted(asked: Asked, ask: Any) -> Said:
    """Other bytes, as the answer says."""
    said = ask(asked)
    name = next(name for name in said.headers if name.lower() == "content-range")
    first, last = said.headers.pop(name).removeprefix("bytes ").partition("/")[0].split("-")
    said.headers["Content-Range"] = f"bytes {int(first) + 1}-{int(last) + 1}/{len(DATA)}"
    return said


def fewer(asked: Asked, ask: Any) -> Said:
    """Fewer bytes than requested, as if that were all."""
    said = ask(asked)
    return replace(said, body=said.body[:3])


@pytest.mark.parametrize("by_obstore", [True, False])
@pytest.mark.parametrize(
    ("fault", "error"), [(whole, Unsupported), (shifted, NoAnswer), (fewer, NoAnswer)]
)
def test_other_bytes_are_not_taken(
    fault: Any,
    error: type[Exception],
    by_obstore: bool,
    box: str,
    emulator: Emulator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(obstore_others, "is_available", lambda: by_obstore)
    there = put(f"{box}/a.bin")
    emulator.proxy.fail(fault, "READ")
    with pytest.raises(error):
        read(there, 10, 500)
    emulator.proxy.heal()
    assert read(there, 10, 500) == DATA[10:500]


@pytest.mark.parametrize("by_obstore", [True, False])
def test_a_file_that_was_replaced_is_not_read(
    by_obstore: bool, box: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstore_others, "is_available", lambda: by_obstore)
    there = put(f"{box}/a.bin")
    assert read(there, 0, 10) == DATA[:10]
    there.store.fs.pipe_file(there.key, DATA[::-1])
    with pytest.raises(Changed):
        read(there, 0, 10)


def test_whoever_has_to_wait_is_asked_once_an_attempt(box: str, emulator: Emulator) -> None:
    there = put(f"{box}/a.bin")
    assert read(there, 0, 10) == DATA[:10]
    busy = emulator.refuse(503, "ServerBusy")
    tries = iter([busy, busy])
    emulator.proxy.fail(
        lambda asked, ask: next(tries, lambda asked, ask: ask(asked))(asked, ask), "READ"
    )
    assert read(there, 20, 30) == DATA[20:30]
    assert clients(emulator) == ["obstore", "obstore", "fsspec", "obstore"]


# Credentials: those of fsspec's client


def authorizations(emulator: Emulator) -> set[str]:
    return {one.headers.get("authorization", "") for one in emulator.proxy.log}


def test_a_token_of_google(box: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    if emulator.scheme != "gs":
        pytest.skip("Azure has others")
    monkeypatch.setenv("FETCH_RAW_TOKEN_EXPIRY", "false")
    with storage_options({"token": "secret-token", "requester_pays": "payer"}):
        there = put(f"{box}/a.bin")
        assert read(there, 0, 10) == DATA[:10]
    assert clients(emulator) == ["obstore"]
    assert authorizations(emulator) == {"Bearer secret-token"}
    payers = [one.headers.get("x-goog-user-project") for one in emulator.proxy.log]
    assert payers[-1] == "payer"


def test_a_signature_of_azure(
    box: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if emulator.scheme != "az":
        pytest.skip("Google has others")
    blob = pytest.importorskip("azure.storage.blob")
    import datetime

    put(f"{box}/a.bin")
    signature = blob.generate_account_sas(
        "devstoreaccount1",
        KEY,
        blob.ResourceTypes(container=True, object=True),
        blob.AccountSasPermissions(read=True, list=True),
        datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1),
    )
    end = f"BlobEndpoint={emulator.proxy.endpoint}/devstoreaccount1"
    text = f"{end};SharedAccessSignature={signature}"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    place(box).store.fs.clear_instance_cache()
    emulator.proxy.log.clear()
    assert read(place(f"{box}/a.bin"), 0, 10) == DATA[:10]
    assert clients(emulator) == ["obstore"]
    assert authorizations(emulator) == {""}


def test_a_token_of_azure(box: str, emulator: Emulator) -> None:
    """Which adlfs sends by TLS alone."""
    if emulator.scheme != "az":
        pytest.skip("Google has others")

    class Token:
        async def get_token(self, scope: str) -> Any:
            return SimpleNamespace(token="secret-token")

    there = put(f"{box}/a.bin")
    assert there.listing
    there.store.fs.service_client.credential = Token()
    with pytest.raises(NotFound, match="HTTPS"):
        read(there, 0, 10)
    assert clients(emulator) == ["obstore"]
    assert "Bearer secret-token" in authorizations(emulator)
