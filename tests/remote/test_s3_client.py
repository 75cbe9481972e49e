"""S3 by obstore alone: addresses, credentials, listings, and answers that are refused."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.loopback.messages import Answer, Request
from conftest import case
from fault_server import (
    DENIED,
    EXPIRED,
    INTERNAL,
    SLOW_DOWN,
    Fault,
    cut,
    fewer,
    refuse,
    reset,
    shifted,
)
from store_server import S3, s3, server
from test_s3 import files_of

from ckptool.commands.convert import prepare
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.target import ConvertOptions
from ckptool.errors import Changed, Denied, NoAnswer, NotFound, Unsupported
from ckptool.storage.clients.client import ObjectVersion
from ckptool.storage.clients.retry import RetryPolicy
from ckptool.storage.store import Store
from ckptool.storage.url import RemotePath, location, storage_options

SOURCE = case("dcp_fsdp2_tp").path
DATA = bytes(range(256)) * 40


def place(url: str) -> RemotePath:
    found = location(url)
    assert isinstance(found, RemotePath)
    return found


def put(s3: S3, key: str = "m/a.bin") -> RemotePath:
    s3.write(key, DATA)
    return place(s3.url(key))


def read(there: RemotePath, start: int, end: int) -> bytes:
    return bytes(there.store.read(ObjectVersion(there.key, there.listing[""].version), start, end))


RUN = """
import json, sys
from typer.testing import CliRunner
from ckptool.cli.app import app
done = CliRunner().invoke(app, json.loads(sys.argv[1]))
loaded = {"s3fs", "fsspec", "botocore", "aiohttp"} & set(sys.modules)
print(json.dumps([done.exit_code, repr(done.exception), sorted(loaded)]))
"""


@pytest.mark.parametrize(
    "command",
    [
        ["inspect", "SOURCE"],
        ["verify", "SOURCE"],
        ["convert", "SOURCE", "OUT", "--to", "safetensors"],
        ["convert", "SOURCE", "S3", "--to", "dcp"],
        ["extract", "SOURCE", "model.one"],
        ["diff", "SOURCE", "SOURCE"],
    ],
    ids=lambda words: "-".join(words[::2]),
)
def test_keys_in_the_environment_need_no_other_client(
    command: list[str], s3: S3, out: Path
) -> None:
    names = {"SOURCE": s3.put(SOURCE, "m"), "OUT": str(out / "out"), "S3": s3.url("out")}
    words = json.dumps([names.get(word, word) for word in command])
    program = [sys.executable, "-c", RUN, words]
    done = subprocess.run(program, env=os.environ, capture_output=True, text=True)
    assert json.loads(done.stdout) == [0, "None", []]
    assert all(one.query["client"].startswith("object_store") for one in s3.requests)


def test_what_is_read_is_written(s3: S3, out: Path) -> None:
    url = s3.put(SOURCE, "m")
    prepare(location(url), location(s3.url("n")), ConvertOptions("dcp")).run()
    prepare(SOURCE, out / "n", ConvertOptions("dcp")).run()
    assert s3.get("n") == files_of(out / "n")


@pytest.mark.parametrize("key", ["a b#1%20+ü/ä.bin", "~a/*b?/c.bin"])
def test_any_plain_key_is_read(key: str, s3: S3) -> None:
    there = put(s3, key)
    for start, end in ((0, 10), (5, 5000), (10_200, 99_999)):
        assert read(there, start, end) == DATA[start:end]


@pytest.mark.parametrize("key", ["a//b.bin", "a/./b.bin", "a/../b.bin", "a/\tb.bin", "a/\n"])
def test_a_key_that_obstore_cannot_name_is_refused(key: str, s3: S3) -> None:
    s3.write(key, DATA)
    for url in (key, "a"):
        with pytest.raises(Unsupported, match="empty or dotted segments or control characters"):
            place(s3.url(url)).require_there()


# Credentials and addresses


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


def signs_as(s3: S3, key: str, token: str | None = None) -> bool:
    """Whether requests are signed as the owner of this key."""
    assert read(put(s3), 0, 10) == DATA[:10]
    signed = {one.query.get("authorization", "") for one in s3.requests}
    signers = {text.partition("Credential=")[2].partition("/")[0] for text in signed}
    return signers == {key} and {one.query.get("token") for one in s3.requests} == {token}


def test_a_profile(s3: S3, nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ini(nobody / "AWS_SHARED_CREDENTIALS_FILE", "mine", **KEYS, aws_session_token="t")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert signs_as(s3, "OTHER", "t")


def test_a_profile_by_botocore(s3: S3, nobody: Path) -> None:
    ini(nobody / "AWS_SHARED_CREDENTIALS_FILE", "mine", **KEYS, aws_session_token="t")
    with storage_options({"profile": "mine"}):
        assert signs_as(s3, "OTHER", "t")


def test_a_program_that_gives_credentials_which_expire(s3: S3, nobody: Path) -> None:
    said = {"Version": 1, "AccessKeyId": "MADE", "SecretAccessKey": "s", "SessionToken": "t"}
    (nobody / "said").write_text(json.dumps(said | {"Expiration": "2100-01-01T00:00:00Z"}))
    program = f"{sys.executable} -c 'print(open(\"{nobody / 'said'}\").read())'"
    ini(nobody / "AWS_CONFIG_FILE", "default", credential_process=program)
    assert signs_as(s3, "MADE", "t")


def test_nobody_gives_credentials(s3: S3, nobody: Path) -> None:
    with pytest.raises(Denied, match="no credentials were found"):
        read(put(s3), 0, 10)


@pytest.mark.parametrize(
    ("options", "key", "token"),
    [({"key": "FSSPEC", "secret": "s", "token": "t"}, "FSSPEC", "t"), ({"anon": True}, "", None)],
)
def test_the_settings_of_fsspec(
    options: dict[str, Any],
    key: str,
    token: str | None,
    s3: S3,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fsspec.config import conf

    monkeypatch.setitem(conf, "s3", options)
    assert signs_as(s3, key, token)


def elsewhere(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
    """A bucket that is in another region."""
    if "/eu-central-1/" in request.query.get("authorization", ""):
        return carry_out(request)
    answer = refuse(400, "AuthorizationHeaderMalformed")(request, carry_out)
    answer.headers["x-amz-bucket-region"] = "eu-central-1"
    return answer


@pytest.mark.parametrize("options", [{}, {"anon": False}])
def test_a_bucket_in_another_region_is_found(options: dict[str, Any], s3: S3) -> None:
    s3.fail(elsewhere)
    with storage_options(options):
        assert read(put(s3), 0, 10) == DATA[:10]
    assert "HeadBucket" in {one.operation for one in s3.requests}


# Answers


@pytest.mark.parametrize("fault", [shifted, fewer, cut])
def test_bytes_that_were_not_asked_for_are_never_taken(fault: Fault, s3: S3) -> None:
    there = put(s3)
    rule = s3.fail(fault, "GetObject", times=1)
    assert read(there, 100, 1100) == DATA[100:1100]
    s3.heal()
    s3.fail(fault, "GetObject")
    with pytest.raises(NoAnswer):
        read(there, 100, 1100)
    assert rule.seen


def without_condition(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
    """A store that does not know If-Match."""
    request.query.pop("if-match", None)
    return carry_out(request)


@pytest.mark.parametrize("knows", [True, False])
def test_an_object_that_was_replaced_is_not_read(knows: bool, s3: S3) -> None:
    there = put(s3)
    if not knows:
        s3.fail(without_condition)
    assert read(there, 0, 10) == DATA[:10]
    s3.write("m/a.bin", DATA[::-1])
    with pytest.raises(Changed):
        read(there, 0, 10)


def test_a_refusal_is_asked_for_once(s3: S3) -> None:
    there = put(s3)
    assert read(there, 5, 9) == DATA[5:9]
    before = len(s3.requests)
    s3.fail(EXPIRED)
    with pytest.raises(Denied, match="the credentials have expired"):
        read(there, 10, 20)
    assert len(s3.requests) == before + 1


class CountingPolicy(RetryPolicy, frozen=True):
    """Notes each pause."""

    pauses = 0

    def before(self, attempt: int) -> float:
        type(self).pauses += 1
        return 0.001


@pytest.mark.parametrize("fault", [SLOW_DOWN, INTERNAL, reset, cut])
def test_one_request_an_attempt_and_a_pause_after_each(
    fault: Fault, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "policy", CountingPolicy())
    monkeypatch.setattr(CountingPolicy, "pauses", 0)
    there = put(s3)
    assert there.listing
    s3.fail(fault, "GetObject", times=2)
    assert read(there, 20, 30) == DATA[20:30]
    assert len(s3.of("GetObject")) == 3
    assert CountingPolicy.pauses == 2


@pytest.mark.parametrize("fault", [DENIED, refuse(403, "SignatureDoesNotMatch")])
def test_a_refusal_at_first(fault: Fault, s3: S3) -> None:
    url = s3.put(SOURCE, "m")
    s3.fail(fault)
    with pytest.raises(Denied):
        open_checkpoint(location(url))
    assert len(s3.requests) <= 2


# Listings

MARKS: dict[str, tuple[dict[str, bytes], set[str]]] = {
    "an empty object of a folder's name": ({"m/sub": b""}, {"sub"}),
    "the mark of a folder": ({"m/": b"", "m/sub/": b""}, set()),
    "marks that hold something": ({"m/": b"dear", "m/sub/": b"dear", "m/sub/x": b"x"}, {"sub/x"}),
    "a file that has the name of a folder": ({"m/sub": b"file", "m/sub/": b"dear"}, {"sub"}),
    "a folder in a file's name": ({"m/__0_0.distcp/x": b"x"}, {"__0_0.distcp/x"}),
    "pages": (
        {f"m/more/{number}": b"x" for number in range(1100)},
        {f"more/{number}" for number in range(1100)},
    ),
}


@pytest.mark.parametrize("there", MARKS)
def test_marks_of_folders_are_no_files(there: str, s3: S3) -> None:
    url = s3.put(SOURCE, "m")
    added, seen = MARKS[there]
    for key, data in added.items():
        s3.write(key, data)
    listing = place(url).listing
    wanted = {file.name for file in SOURCE.iterdir()} | seen
    assert set(listing) == wanted
    assert all(info.nbytes == len(s3.get("m")[name]) for name, info in listing.items())


@pytest.mark.parametrize("inside", ["nothing", "nothing.safetensors", "nothing/.metadata"])
def test_what_is_not_there(inside: str, s3: S3) -> None:
    s3.put(SOURCE, "m")
    for url in (s3.url(inside), f"s3://{s3.bucket}-2/{inside}"):
        with pytest.raises(NotFound, match="no such file or folder"):
            place(url).require_there()


# Other processes


def test_a_forked_process_refuses_at_once_where_obstore_would_hang(s3: S3) -> None:
    there = put(s3)
    assert read(there, 0, 10) == DATA[:10]
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            read(there, 20, 30)
        except Unsupported as error:
            os._exit("forkserver" not in (error.hint or ""))
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert read(there, 20, 30) == DATA[20:30]


def test_a_place_that_was_pickled_opens_its_own_connections(s3: S3) -> None:
    there = put(s3)
    again: RemotePath = pickle.loads(pickle.dumps(there))
    assert (again, str(again)) == (there, str(there))
    assert again.store is not there.store
    assert read(again, 0, 10) + read(again, 10, 20) == DATA[:20]
