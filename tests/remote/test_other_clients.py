"""Google Cloud Storage and Azure by obstore: answers that are refused, and credentials."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from emulators import KEY, Asked, Emulator, Said, box, emulator, place
from msgspec.structs import replace
from store_server import QUICK

from ckptool.errors import Changed, Denied, NoAnswer, NotFound, Unsupported
from ckptool.storage.clients.client import ObjectVersion
from ckptool.storage.store import Store
from ckptool.storage.url import RemotePath, storage_options

pytest.importorskip("obstore")

DATA = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "policy", QUICK)


def put(url: str) -> RemotePath:
    there = place(url)
    there.write_bytes(DATA)
    return there


def read(there: RemotePath, start: int, end: int) -> bytes:
    return bytes(there.store.read(ObjectVersion(there.key, there.listing[""].version), start, end))


def test_what_is_written_is_read(box: str) -> None:
    there = put(f"{box}/a.bin")
    for start, end in ((0, 10), (5, 5000), (10_000, 10_240), (10_200, 99_999)):
        assert read(there, start, end) == DATA[start:end]


@pytest.mark.parametrize("key", ["a b#1%20+ü/ä.bin", "~a/*b/c.bin", "a/.b..c.bin"])
def test_any_plain_key_is_read(key: str, box: str) -> None:
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


@pytest.mark.parametrize(
    ("fault", "error"), [(whole, Unsupported), (shifted, NoAnswer), (fewer, NoAnswer)]
)
def test_other_bytes_are_not_taken(
    fault: Any,
    error: type[Exception],
    box: str,
    emulator: Emulator,
) -> None:
    there = put(f"{box}/a.bin")
    emulator.proxy.fail(fault, "READ")
    with pytest.raises(error):
        read(there, 10, 500)
    emulator.proxy.heal()
    assert read(there, 10, 500) == DATA[10:500]


def test_a_file_that_was_replaced_is_not_read(box: str) -> None:
    there = put(f"{box}/a.bin")
    assert read(there, 0, 10) == DATA[:10]
    there.afresh().write_bytes(DATA[::-1])
    with pytest.raises(Changed):
        read(there, 0, 10)


def test_a_store_is_asked_once_an_attempt(box: str, emulator: Emulator) -> None:
    there = put(f"{box}/a.bin")
    assert read(there, 0, 10) == DATA[:10]
    busy = emulator.refuse(503, "ServerBusy")
    tries = iter([busy, busy])
    emulator.proxy.fail(
        lambda asked, ask: next(tries, lambda asked, ask: ask(asked))(asked, ask), "READ"
    )
    assert read(there, 20, 30) == DATA[20:30]
    assert [one.kind for one in emulator.proxy.log].count("READ") == 4


# Credentials


def authorizations(emulator: Emulator) -> set[str]:
    return {one.headers.get("authorization", "") for one in emulator.proxy.log}


def test_a_token_of_google(box: str, emulator: Emulator) -> None:
    if emulator.scheme != "gs":
        pytest.skip("Azure has others")
    with storage_options({"token": "secret-token", "requester_pays": "payer"}):
        there = put(f"{box}/a.bin")
        assert read(there, 0, 10) == DATA[:10]
    assert authorizations(emulator) == {"Bearer secret-token"}
    assert {one.headers.get("x-goog-user-project") for one in emulator.proxy.log} == {"payer"}


def test_credentials_that_google_auth_finds(
    box: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if emulator.scheme != "gs":
        pytest.skip("Azure has others")
    auth = pytest.importorskip("google.auth")
    from google.oauth2.credentials import Credentials

    class Renewed(Credentials):
        def refresh(self, request: object) -> None:
            self.token = "renewed"

    held = Renewed("old", quota_project_id="quota")
    monkeypatch.setattr(auth, "default", lambda scopes: (held, "project"))
    with storage_options({"token": "google_default"}):
        assert read(put(f"{box}/a.bin"), 0, 10) == DATA[:10]
    assert authorizations(emulator) == {"Bearer renewed"}
    assert {one.headers.get("x-goog-user-project") for one in emulator.proxy.log} == {"quota"}


def test_an_account_and_its_key_in_the_environment(
    box: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if emulator.scheme != "az":
        pytest.skip("Google has others")
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "devstoreaccount1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    with storage_options({"endpoint": f"{emulator.proxy.endpoint}/devstoreaccount1"}):
        assert read(put(f"{box}/a.bin"), 0, 10) == DATA[:10]


def test_a_token_of_azure(box: str, emulator: Emulator) -> None:
    if emulator.scheme != "az":
        pytest.skip("Google has others")
    pytest.importorskip("azure.identity")

    class Held:
        def get_token(self, *scopes: str, tenant_id: str | None = None) -> Any:
            return SimpleNamespace(token="secret-token", expires_on=4e9)

    with storage_options({"credential": Held()}), pytest.raises((NoAnswer, NotFound, Denied)):
        put(f"{box}/a.bin")
    assert "Bearer secret-token" in authorizations(emulator)
