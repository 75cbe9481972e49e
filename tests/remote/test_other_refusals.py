"""Google Cloud Storage and Azure that refuse credentials, or give no answer: as S3 does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import case
from emulators import Asked, Emulator, Said, box, emulator, place, put, stored
from store_server import QUICK
from test_refusals import Clock, ended, many
from test_s3 import big, files_of, resharded

from ckptool.commands.convert import prepare
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.target import ConvertOptions
from ckptool.errors import Changed, Denied, NoAnswer, NotFound, TransferError
from ckptool.storage.clients import retry as retrying
from ckptool.storage.clients.retry import RetryPolicy, Unaccepted
from ckptool.storage.store import Store
from ckptool.storage.url import location

SOURCE = case("dcp_fsdp2_tp").path
ON_THEIR_WAY = 40
DENIED = (403, "AuthorizationPermissionMismatch", "caller does not have access")
EXPIRED = {
    "gs": (401, "", "Invalid Credentials"),
    "az": (403, "AuthenticationFailed", "Signature not valid in the specified time frame"),
}
BUSY = (503, "ServerBusy", "try again")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "policy", QUICK)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(retrying, "time", found)
    monkeypatch.setattr(Store, "policy", RetryPolicy())
    return found


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("denied", ["convert", "SOURCE", "OUT", "--to", "safetensors"]),
        ("expired", ["convert", "SOURCE", "OUT", "--to", "safetensors"]),
        ("expired", ["verify", "SOURCE"]),
        ("denied", ["verify", "SOURCE", "--against", "SOURCE"]),
    ],
)
def test_a_refused_read_ends_all_work_and_is_not_damage(
    kind: str, command: list[str], many: Path, box: str, emulator: Emulator, out: Path
) -> None:
    put(many, box)
    said = DENIED if kind == "denied" else EXPIRED[emulator.scheme]
    rule = emulator.proxy.fail(emulator.refuse(*said), "READ", key="distcp", start=3)
    words = [{"SOURCE": box, "OUT": out / "out"}.get(one, one) for one in command]
    code, told = ended(*words)
    assert code == 5, told
    assert ("access is denied" if kind == "denied" else "or no longer, valid") in told
    assert not {"problems", "lost", "damaged"} & set(told.split())
    assert rule.seen - 3 < ON_THEIR_WAY
    assert not (out / "out").exists()
    emulator.proxy.heal()
    if "--resume" in told:
        assert ended(*words, "--resume")[0] == 0


def test_a_refused_listing_says_what_helps(box: str, emulator: Emulator) -> None:
    put(SOURCE, box)
    rule = emulator.proxy.fail(emulator.refuse(*DENIED), "LIST")
    with pytest.raises(Denied) as caught:
        open_checkpoint(location(box))
    assert f"{box}/.metadata" in str(caught.value.hint)
    assert rule.seen <= 3
    wanted = open_checkpoint(SOURCE).catalog.tensors
    assert open_checkpoint(location(f"{box}/.metadata")).catalog.tensors == wanted


def test_credentials_that_expired_are_reported_at_once(box: str, emulator: Emulator) -> None:
    put(SOURCE, box)
    rule = emulator.proxy.fail(emulator.refuse(*EXPIRED[emulator.scheme]))
    with pytest.raises(Unaccepted, match="not, or no longer, valid"):
        open_checkpoint(location(box))
    assert rule.seen <= 3


@pytest.mark.parametrize("large", [True, False])
def test_a_refused_write_leaves_no_checkpoint(
    large: bool, box: str, emulator: Emulator, out: Path
) -> None:
    source = big(out, 2) if large else SOURCE
    rule = emulator.proxy.fail(emulator.refuse(*DENIED), "WRITE", start=3)
    with pytest.raises(TransferError, match="access is denied") as caught:
        resharded(source, f"{box}/m", "1")
    assert "--resume" in str(caught.value.hint)
    assert rule.seen - 3 < ON_THEIR_WAY
    emulator.proxy.heal()
    assert ".metadata" not in stored(box)
    resharded(source, f"{box}/m", "1", resume=True)
    resharded(source, out / "m", "1")
    assert stored(f"{box}/m") == files_of(out / "m")


def test_who_may_not_remove_changes_nothing(box: str, emulator: Emulator) -> None:
    resharded(SOURCE, f"{box}/m", "2")
    before = stored(box)
    emulator.proxy.fail(emulator.refuse(*DENIED), "DELETE")
    with pytest.raises(TransferError, match=r"test removal: access is denied"):
        resharded(SOURCE, f"{box}/m", "4", overwrite=True)
    assert stored(box) == before


def test_who_may_not_throw_away_an_upload_writes_no_checkpoint(
    box: str, emulator: Emulator, out: Path
) -> None:
    """Of Google, where that is a request."""
    source = big(out, 3)
    emulator.proxy.fail(emulator.refuse(*DENIED), "WRITE", key="__0_0", start=3)
    emulator.proxy.fail(emulator.refuse(*DENIED), "DELETE", key="upload")
    with pytest.raises(TransferError, match="access is denied"):
        resharded(source, f"{box}/m", "1")
    emulator.proxy.heal()
    assert not {".metadata", "__0_0.distcp"} & stored(f"{box}/m").keys()
    resharded(source, f"{box}/m", "1", resume=True)
    resharded(source, out / "m", "1")
    assert stored(f"{box}/m") == files_of(out / "m")


def test_a_file_that_is_listed_and_gone(box: str, emulator: Emulator, out: Path) -> None:
    put(SOURCE, box)
    at = place(box)
    prepared = prepare(at, out / "m", ConvertOptions("dcp"))
    at.store.client.remove(f"{at.key}/__0_0.distcp")
    at.store.blocks.clear()
    with pytest.raises((Changed, NotFound), match=r"__0_0.distcp: (cannot be read|it was changed)"):
        prepared.run()
    assert not (out / "m").exists()


@pytest.mark.parametrize("kind", ["WRITE", "DELETE"])
def test_any_lost_answer_changes_nothing(
    kind: str, box: str, emulator: Emulator, out: Path
) -> None:
    resharded(SOURCE, f"{box}/m", "2")
    lose_once(emulator, kind, "")
    resharded(SOURCE, f"{box}/m", "1", overwrite=True)
    resharded(SOURCE, out / "m", "1")
    assert stored(f"{box}/m") == files_of(out / "m")


def test_a_lost_answer_to_the_last_request_is_settled(
    box: str, emulator: Emulator, out: Path
) -> None:
    source = big(out, 3)
    resharded(source, out / "m", "1")
    nbytes = (out / "m" / "__0_0.distcp").stat().st_size
    seen = lose_once(emulator, "WRITE", "__0_0", lambda: is_there(box, nbytes))
    resharded(source, f"{box}/m", "1")
    assert len(seen) == 1
    assert stored(f"{box}/m") == files_of(out / "m")


def lose_once(
    emulator: Emulator, kind: str, key: str, is_due: Callable[[], bool] = lambda: True
) -> list[Asked]:
    """Carry out what is asked and say that the store is busy, once; return that request."""
    lost: list[Asked] = []

    def fault(asked: Asked, ask: Callable[[Asked], Said]) -> Said:
        said = ask(asked)
        if lost or not is_due():
            return said
        lost.append(asked)
        return emulator.refuse(*BUSY)(asked, ask)

    emulator.proxy.fail(fault, kind, key=key)
    return lost


def is_there(box: str, nbytes: int) -> bool:
    """Return whether the file of rank 0 is whole."""
    return len(stored(f"{box}/m").get("__0_0.distcp", b"")) == nbytes


@pytest.mark.parametrize("kind", ["LIST", "READ"])
def test_no_answer_ends(kind: str, clock: Clock, box: str, emulator: Emulator) -> None:
    put(SOURCE, box)
    rule = emulator.proxy.fail(emulator.refuse(*BUSY), kind)
    with pytest.raises(NoAnswer, match="no answer after"):
        open_checkpoint(location(box))
    assert clock.now <= (60 if kind == "LIST" else RetryPolicy().total)
    assert 2 <= rule.seen <= RetryPolicy().attempts


def test_nobody_who_listens_is_found_out_within_ten_seconds(
    clock: Clock, box: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in emulator.environment.items():
        monkeypatch.setenv(name, text.replace(emulator.proxy.endpoint, "http://127.0.0.1:9"))
    with pytest.raises(NoAnswer, match="no answer after"):
        open_checkpoint(location(f"{box}/nobody"))
    assert 1 < clock.now <= 10
