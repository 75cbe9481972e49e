"""S3 by obstore alone, without s3fs; and by s3fs if obstore has no answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import case
from fault_server import DENIED, EXPIRED, INTERNAL, Answer, Fault, Request, fewer, refuse, shifted
from store_server import S3, s3, server
from test_s3 import files_of

from ckptool.commands.convert import prepare
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.target import ConvertOptions
from ckptool.errors import Denied, NotFound
from ckptool.storage.block_cache import ObjectVersion
from ckptool.storage.url import RemotePath, location

pytest.importorskip("obstore")

SOURCE = case("dcp_fsdp2_tp").path
DATA = bytes(range(256)) * 40


def place(url: str) -> RemotePath:
    found = location(url)
    assert isinstance(found, RemotePath)
    return found


def clients(s3: S3) -> list[str]:
    """What sent each request, and what was asked."""
    kinds = {True: "obstore", False: "s3fs"}
    return [
        f"{kinds[one.query['client'].startswith('object_store')]} {one.operation}"
        for one in s3.requests
    ]


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
        ["extract", "SOURCE", "model.one"],
        ["diff", "SOURCE", "SOURCE"],
    ],
    ids=lambda words: words[0],
)
def test_what_only_reads_needs_no_s3fs(command: list[str], s3: S3, out: Path) -> None:
    names = {"SOURCE": s3.put(SOURCE, "m"), "OUT": str(out / "out")}
    words = json.dumps([names.get(word, word) for word in command])
    program = [sys.executable, "-c", RUN, words]
    done = subprocess.run(program, env=os.environ, capture_output=True, text=True)
    assert json.loads(done.stdout) == [0, "None", []]
    assert {one.partition(" ")[0] for one in clients(s3)} == {"obstore"}


def redirected(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
    """A bucket that is in another region, which obstore does not look for."""
    is_direct = request.query["client"].startswith("object_store")
    there = "us-east-1" if is_direct else "eu-central-1"
    answer = refuse(400, "AuthorizationHeaderMalformed")(request, carry_out)
    answer.headers["x-amz-bucket-region"] = "eu-central-1"
    return answer if f"/{there}/" in request.query["authorization"] else carry_out(request)


@pytest.mark.parametrize(
    "fault", [redirected, DENIED, INTERNAL, refuse(403, "SignatureDoesNotMatch")]
)
def test_before_obstore_has_an_answer_s3fs_is_asked_for_good(fault: Fault, s3: S3) -> None:
    url = s3.put(SOURCE, "m")
    s3.fail(fault, where=lambda one: "/us-east-1/" in one.query["authorization"], times=1)
    found = open_checkpoint(location(url)).catalog
    assert found.tensors == open_checkpoint(SOURCE).catalog.tensors
    assert clients(s3)[:3] == ["obstore ListObjectsV2", "s3fs ListObjectsV2", "s3fs GetObject"]


def test_once_it_has_a_refusal_is_asked_for_once(s3: S3) -> None:
    s3.write("m/a.bin", DATA)
    file = place(s3.url("m/a.bin"))
    version = ObjectVersion(file.key, file.listing[""].version)
    assert bytes(file.store.read(version, 5, 9)) == DATA[5:9]
    before = len(s3.requests)
    s3.fail(EXPIRED)
    with pytest.raises(Denied, match="the credentials have expired"):
        file.store.read(version, 10, 20)
    assert clients(s3)[before:] == ["obstore GetObject"]


@pytest.mark.parametrize("fault", [shifted, fewer, INTERNAL])
def test_bytes_that_were_not_asked_for_are_never_taken(fault: Fault, s3: S3) -> None:
    s3.write("m/a.bin", DATA)
    file = place(s3.url("m/a.bin"))
    version = ObjectVersion(file.key, file.listing[""].version)
    rule = s3.fail(fault, "GetObject", where=lambda one: "object_store" in one.query["client"])
    assert bytes(file.store.read(version, 100, 1100)) == DATA[100:1100]
    assert rule.seen


MARKS = {
    "an empty object of a folder's name": {"m/sub": b""},
    "the mark of a folder": {"m/": b"", "m/sub/": b""},
    "marks that hold something": {"m/": b"dear", "m/sub/": b"dear", "m/sub/x": b"x"},
    "a file that has the name of a folder": {"m/sub": b"file", "m/sub/": b"dear"},
    "a folder in a file's name": {"m/__0_0.distcp/x": b"x"},
    "keys with empty segments": {"m//a": b"x"},
    "pages": {f"m/more/{number}": b"x" for number in range(1100)},
}


@pytest.mark.parametrize("there", MARKS)
def test_it_lists_what_s3fs_lists(there: str, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    url = s3.put(SOURCE, "m")
    for key, data in MARKS[there].items():
        s3.write(key, data)
    ours = place(url).listing
    assert clients(s3)[0].startswith("obstore")
    monkeypatch.setenv("AWS_USE_DUALSTACK_ENDPOINT", "false")  # s3fs leads
    theirs = place(url).listing
    assert [(n, i.nbytes, i.version) for n, i in ours.items()] == [
        (n, i.nbytes, i.version) for n, i in theirs.items()
    ]


@pytest.mark.parametrize("inside", ["nothing", "nothing.safetensors", "nothing/.metadata"])
def test_what_is_not_there(inside: str, s3: S3) -> None:
    s3.put(SOURCE, "m")
    with pytest.raises(NotFound, match="no such file or folder"):
        place(s3.url(inside)).require_there()
    assert {one.partition(" ")[0] for one in clients(s3)} == {"obstore"}
    with pytest.raises(NotFound, match="no such file or folder"):
        place(f"s3://{s3.bucket}-2/{inside}").require_there()


def test_who_writes_after_reading_is_s3fs(s3: S3, out: Path) -> None:
    url = s3.put(SOURCE, "m")
    prepare(location(url), location(s3.url("n")), ConvertOptions("dcp")).run()
    prepare(SOURCE, out / "n", ConvertOptions("dcp")).run()
    assert s3.get("n") == files_of(out / "n")
    assert "obstore GetObject" in clients(s3)
    assert "s3fs PutObject" in clients(s3)
