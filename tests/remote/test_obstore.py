"""Reads of S3 by obstore if s3fs is in charge: the same bytes, with the same credentials."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_server import EXPIRED, SLOW_DOWN, Answer, Fault, Request, cut, refuse, reset
from store_server import S3, s3, server

from ckptool.errors import Changed, Denied
from ckptool.storage.block_cache import ObjectVersion
from ckptool.storage.clients import obstore_others
from ckptool.storage.retry import RetryPolicy
from ckptool.storage.store import Store
from ckptool.storage.url import RemotePath, location

pytest.importorskip("obstore")

DATA = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def in_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let s3fs lead, as wherever the environment says what only botocore knows."""
    monkeypatch.setenv("AWS_USE_DUALSTACK_ENDPOINT", "false")


def put(s3: S3, key: str = "m/a.bin") -> RemotePath:
    s3.write(key, DATA)
    place = location(s3.url(key))
    assert isinstance(place, RemotePath)
    return place


def clients(s3: S3) -> list[str]:
    """What sent each of the reads."""
    agents = [one.query["client"] for one in s3.of("GetObject") if one.range is not None]
    return ["obstore" if agent.startswith("object_store") else "s3fs" for agent in agents]


def read(place: RemotePath, start: int, end: int) -> bytes:
    return bytes(place.store.read(ObjectVersion(place.key, place.listing[""].version), start, end))


def test_s3fs_reads_first_and_obstore_then(s3: S3) -> None:
    place = put(s3)
    for start, end in ((0, 10), (5, 5000), (10_000, 10_240), (10_200, 99_999)):
        assert read(place, start, end) == DATA[start:end]
    assert clients(s3) == ["s3fs", "obstore", "obstore", "obstore"]
    assert all("AKIAEXAMPLE/" in one.query["authorization"] for one in s3.of("GetObject"))


def test_without_obstore_s3fs_reads_all(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstore_others, "is_available", lambda: False)
    place = put(s3)
    assert read(place, 0, 10) + read(place, 10, 20) == DATA[:20]
    assert clients(s3) == ["s3fs", "s3fs"]


@pytest.mark.parametrize("key", ["a b#1%20+ü/ä.bin", "~a/*b?/c.bin", "a//b.bin", "a/./b.bin"])
def test_any_key_is_read_by_one_of_them(key: str, s3: S3) -> None:
    place = put(s3, key)
    assert read(place, 0, 10) + read(place, 10, 20) == DATA[:20]
    plain = "//" not in key and "/./" not in key
    assert clients(s3)[-1] == ("obstore" if plain else "s3fs")


def test_an_object_that_was_replaced_is_not_read(s3: S3) -> None:
    place = put(s3)
    assert read(place, 0, 10) + read(place, 10, 20) == DATA[:20]
    s3.write("m/a.bin", DATA[::-1])
    with pytest.raises(Changed):
        read(place, 0, 10)


def without_condition(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
    """A store that does not know If-Match."""
    request.query.pop("if-match", None)
    return carry_out(request)


def test_nor_is_one_by_a_store_that_does_not_know_if_match(s3: S3) -> None:
    place = put(s3)
    s3.fail(without_condition)
    assert read(place, 0, 10) + read(place, 10, 20) == DATA[:20]
    s3.write("m/a.bin", DATA[::-1])
    with pytest.raises(Changed):
        read(place, 0, 10)


# Credentials: those of s3fs, wherever it has them from


def ini(path: Path, name: str, **values: str) -> None:
    path.write_text(f"[{name}]\n" + "".join(f"{key} = {text}\n" for key, text in values.items()))


@pytest.fixture
def nobody(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing in the environment, and empty files to name credentials in."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return tmp_path


KEYS = {"aws_access_key_id": "OTHER", "aws_secret_access_key": "s"}


def reads_as(s3: S3, key: str, token: str | None = None) -> bool:
    """Whether both clients sign as the owner of this key."""
    s3.fs.clear_instance_cache()
    place = put(s3)
    assert read(place, 0, 10) + read(place, 10, 20) == DATA[:20]
    assert clients(s3) == ["s3fs", "obstore"]
    signed = [one.query.get("authorization", "") for one in s3.of("GetObject")]
    tokens = [one.query.get("token") for one in s3.of("GetObject")]
    signers = [text.partition("Credential=")[2].partition("/")[0] for text in signed]
    return signers == [key] * 2 and tokens == [token] * 2


def test_a_profile(s3: S3, nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ini(nobody / "AWS_SHARED_CREDENTIALS_FILE", "mine", **KEYS, aws_session_token="t")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert reads_as(s3, "OTHER", "t")


def test_a_program_that_gives_credentials_which_expire(s3: S3, nobody: Path) -> None:
    said = {"Version": 1, "AccessKeyId": "MADE", "SecretAccessKey": "s", "SessionToken": "t"}
    (nobody / "said").write_text(json.dumps(said | {"Expiration": "2100-01-01T00:00:00Z"}))
    program = f"{sys.executable} -c 'print(open(\"{nobody / 'said'}\").read())'"
    ini(nobody / "AWS_CONFIG_FILE", "default", credential_process=program)
    assert reads_as(s3, "MADE", "t")


def test_the_settings_of_fsspec(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.config import conf

    monkeypatch.setitem(conf, "s3", {"key": "FSSPEC", "secret": "s", "token": "t"})
    assert reads_as(s3, "FSSPEC", "t")


def test_nobody(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.config import conf

    monkeypatch.setitem(conf, "s3", {"anon": True})
    assert reads_as(s3, "")


# Where obstore does not do


def test_a_store_that_never_answers_it_is_read_by_s3fs(s3: S3) -> None:
    place = put(s3)
    s3.fail(refuse(400, "InvalidRequest"), where=lambda one: "object_store" in one.query["client"])
    parts = [read(place, start, start + 10) for start in range(0, 100, 10)]
    assert b"".join(parts) == DATA[:100]
    assert clients(s3).count("obstore") == 3


def test_a_refusal_is_asked_for_once_and_said_as_s3fs_says_it(s3: S3) -> None:
    place = put(s3)
    assert read(place, 0, 10) + read(place, 10, 20) == DATA[:20]
    s3.fail(EXPIRED)
    with pytest.raises(Denied, match="the credentials have expired"):
        read(place, 20, 30)
    assert clients(s3) == ["s3fs", "obstore", "obstore"]


class CountingPolicy(RetryPolicy):
    """Notes each pause."""

    pauses = 0

    def before(self, attempt: int) -> float:
        type(self).pauses += 1
        return 0.001


@pytest.mark.parametrize("fault", [SLOW_DOWN, reset, cut])
def test_whoever_has_to_wait_is_told_so_by_s3fs(
    fault: Fault, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request an attempt, and a pause after each."""
    place = put(s3)
    assert read(place, 0, 10) + read(place, 10, 20) == DATA[:20]
    monkeypatch.setattr(Store, "policy", CountingPolicy())
    monkeypatch.setattr(CountingPolicy, "pauses", 0)
    s3.fail(fault, times=1)
    assert read(place, 20, 30) + read(place, 30, 40) == DATA[20:40]
    assert clients(s3) == ["s3fs", "obstore", "obstore", "s3fs", "obstore"]
    assert CountingPolicy.pauses == 1


def test_in_a_forked_process_where_it_would_hang_s3fs_reads(s3: S3) -> None:
    place = put(s3)
    assert read(place, 0, 10) + read(place, 10, 20) == DATA[:20]
    child = os.fork()
    if not child:
        signal.alarm(60)
        os._exit(read(place, 20, 30) + read(place, 30, 40) != DATA[20:40])
    assert os.waitpid(child, 0)[1] == 0
    assert read(place, 20, 30) == DATA[20:30]
    assert clients(s3) == ["s3fs", "obstore", "s3fs", "s3fs", "obstore"]


def test_a_place_that_was_pickled_opens_its_own_connections(s3: S3) -> None:
    place = put(s3)
    again: RemotePath = pickle.loads(pickle.dumps(place))
    assert (again, str(again)) == (place, str(place))
    assert again.store is not place.store
    assert read(again, 0, 10) + read(again, 10, 20) == DATA[:20]
