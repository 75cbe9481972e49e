"""URLs and errors as users meet them: the right exit code, and no secret."""

from __future__ import annotations

import http.server
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import case
from fault_server import DENIED
from safetensors.torch import save_file
from store_server import S3, s3, server
from test_s3 import files_of

from ckptool.commands.convert import prepare
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.target import ConvertOptions
from ckptool.errors import CkptoolError, Unsupported, UsageError, error_text
from ckptool.storage.clients.schemes import redact_url
from ckptool.storage.url import location, may_contain

SOURCE = case("dcp_fsdp2_tp").path


SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "safe"),
    [
        ("s3://bucket/run/step-5", "s3://bucket/run/step-5"),
        ("s3://bucket/run/", "s3://bucket/run"),
        (f"https://user:{SECRET}@host/m.safetensors", "https://host/m.safetensors"),
        (f"https://{SECRET}@host/m", "https://host/m"),
        (f"https://host/m?X-Amz-Signature={SECRET}&x=1", "https://host/m"),
        (f"ftp://user:{SECRET}@host:21/m", "ftp://host:21/m"),
        ("abfs://container@account.dfs.core.windows.net/m", None),
        ("s3://bucket/really?", None),
    ],
)
def test_urls_are_shown_without_secrets(url: str, safe: str | None) -> None:
    assert redact_url(url.rstrip("/")) == (safe or url)


def test_errors_are_told_without_secrets() -> None:
    error = OSError(
        f"404, url=https://me:{SECRET}@host/m?sig={SECRET}\n for https://host/m?b={SECRET}"
    )
    assert error_text(error) == "404, url=https://host/m for https://host/m"


@pytest.mark.parametrize(
    ("url", "parts", "parents"),
    [
        (
            "memory://run/step-5/m.safetensors",
            ("m.safetensors", "m", ".safetensors"),
            ["memory://run/step-5", "memory://run"],
        ),
        ("memory://run", ("run", "run", ""), []),
    ],
)
def test_parts_of_a_url(url: str, parts: tuple[str, str, str], parents: list[str]) -> None:
    place = location(url)
    assert (place.name, place.stem, place.suffix) == parts
    assert str(place) == url
    assert str(place / "a" / "b") == f"{url}/a/b"
    assert (place / "a").parent == place
    assert str(place.with_name("x")) == url.rpartition("/")[0] + "/x"
    assert list(map(str, place.parents)) == parents


def test_schemes_are_written_in_any_case(s3: S3) -> None:
    url = s3.put(SOURCE, "m")
    assert location("S3" + url.removeprefix("s3")) == location(url)
    assert location("c://models/m") == Path("c://models/m")


@pytest.mark.parametrize("folder", ["", "a/b", "a b#1%20+ü"])
@pytest.mark.parametrize("end", ["", "/"])
def test_a_checkpoint_lies_under_any_name(folder: str, end: str, s3: S3) -> None:
    for file in SOURCE.iterdir():
        s3.write("/".join(filter(None, (folder, file.name))), file.read_bytes())
    place = location(f"s3://{'/'.join(filter(None, (s3.bucket, folder)))}{end}")
    assert open_checkpoint(place).catalog.tensors == open_checkpoint(SOURCE).catalog.tensors


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    assert location(f"file://{tmp_path}") == tmp_path
    assert location(tmp_path) == tmp_path


def test_a_file_url_names_this_machine(tmp_path: Path) -> None:
    for scheme in ("file", "FILE", "local"):
        assert location(f"{scheme}://localhost{tmp_path}") == tmp_path
    assert location("file://./m") == Path("m")
    for url, hint in (("file://elsewhere/m", "file:///elsewhere/m"), ("file://m", "file:///m")):
        with pytest.raises(UsageError, match="another machine, or half a path") as caught:
            location(url)
        assert hint in (caught.value.hint or "")
    with pytest.raises(UsageError) as caught:
        location(f"file:{tmp_path}")
    assert caught.value.hint == f"did you mean file://{tmp_path}?"


@pytest.mark.parametrize("text", ["~/m", "~", "file://~/m"])
def test_the_home_folder_has_no_sign_here(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="only a shell expands ~") as caught:
        location(text)
    assert f"did you mean {tmp_path}" in (caught.value.hint or "")
    (tmp_path / "~").mkdir()
    assert location(text) == Path(text.removeprefix("file://"))
    assert location("~user/m") == Path("~user/m")


@pytest.mark.parametrize("data", [b"", b"dear"])
@pytest.mark.parametrize("key", ["m", "m/"])
def test_a_folder_has_the_name_of_an_object(key: str, data: bytes, s3: S3, out: Path) -> None:
    url = s3.put(SOURCE, "m")
    s3.write(key, data)
    for written in (url, f"{url}/"):
        found = open_checkpoint(location(written)).catalog
        assert found.tensors == open_checkpoint(SOURCE).catalog.tensors
    prepare(location(url), out / "m", ConvertOptions("dcp")).run()
    prepare(location(url), location(s3.url("n")), ConvertOptions("dcp")).run()
    assert s3.get("n") == files_of(out / "m")
    assert s3.server.buckets[s3.bucket][key].data == data


def test_a_file_has_the_name_of_a_folder(s3: S3, tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "m.safetensors")
    url = s3.put(tmp_path / "m.safetensors", "m.safetensors")
    s3.put(SOURCE, "m.safetensors")
    assert list(open_checkpoint(location(url)).catalog.tensors) == ["a"]
    s3.remove("m.safetensors")
    found = open_checkpoint(location(url)).catalog
    assert found.tensors == open_checkpoint(SOURCE).catalog.tensors


def test_a_file_by_itself_costs_no_listing(s3: S3, tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "m.safetensors")
    open_checkpoint(location(s3.put(tmp_path / "m.safetensors", "m.safetensors")))
    assert [one.name for one in s3.of("HeadObject")] == ["m.safetensors", "m.extra.pt"]
    assert [one.name for one in s3.of("GetObject")] == ["m.safetensors"]


def test_ten_thousand_keys_beside(s3: S3) -> None:
    for number in range(5_000):
        s3.write(f"m-{number}/x", b"")
        s3.write(f"m{number}", b"")
    url = s3.put(SOURCE, "m")
    found = open_checkpoint(location(url)).catalog
    assert found.tensors == open_checkpoint(SOURCE).catalog.tensors
    assert len(s3.of("ListObjectsV2")) == 1
    with pytest.raises(CkptoolError, match="already exists"):
        prepare(SOURCE, location(url), ConvertOptions("dcp")).run()


def test_a_path_needs_no_fsspec() -> None:
    import subprocess

    code = (
        "import sys; from ckptool.storage.url import location;"
        "from ckptool.commands.open import open_checkpoint;"
        f"open_checkpoint(location({str(case('hf_shards').path)!r}));"
        "print('fsspec' in sys.modules or 'ckptool.storage.store' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"


def end(*arguments: object) -> tuple[int, str]:
    """The exit code of a command, and what it says."""
    import subprocess

    command = [sys.executable, "-m", "ckptool", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stderr


ENDS: dict[str, tuple[list[Any], int, list[str]]] = {
    "a bucket that is not": (["inspect", "s3://no-such-bucket-here/m"], 3, ["s3://no-such-bucket"]),
    "a key that is not": (["inspect", "s3://BUCKET/no"], 3, ["no such file or folder"]),
    "half a URL": (["inspect", "s3:/bucket/m"], 2, ["did you mean s3://bucket/m?"]),
    "half a URL as target": (["convert", SOURCE, "s3:/b/m", "--to", "dcp"], 2, ["s3://b/m?"]),
    "no bucket": (["inspect", "s3://"], 2, ["s3://: names no bucket"]),
    "no bucket but a key": (["inspect", "s3:///m"], 2, ["names no bucket", "s3://NAME"]),
    "a version": (["inspect", "s3://b/m.pt?versionId=3"], 2, ["versions of objects", "copy"]),
    "no such store": (["inspect", "sb://bucket/m"], 2, ["unknown store sb://"]),
    "a chained URL": (["inspect", "simplecache::s3://b/m"], 2, ["chained"]),
    "a target bucket that is not": (
        ["convert", SOURCE, "s3://no-such-bucket-here/m", "--to", "dcp"],
        4,
        ["s3://no-such-bucket-here/m: cannot be written to"],
    ),
    "a target on the web": (
        ["convert", SOURCE, "http://127.0.0.1:1/m", "--to", "dcp"],
        4,
        ["cannot be written to"],
    ),
    "bench with a picture in a store": (
        ["bench", "--plot", "s3://b/m"],
        2,
        ["--plot s3://b/m: needs"],
    ),
    "bench on the web": (
        ["bench", "--out", "http://127.0.0.1:1/m"],
        4,
        ["servers are read-only"],
    ),
    "bench in memory": (["bench", "--out", "memory://m"], 4, ["its own memory://"]),
    "bench killed in a store": (["bench", "--out", "s3://b/m", "--abort"], 2, ["--out is a URL"]),
    "bench against a URL": (["bench", "--compare", "s3://b/m"], 2, ["--compare s3://b/m: n"]),
    "bench like a key that is not": (
        ["bench", "--like", "s3://BUCKET/no"],
        3,
        ["no such file or folder"],
    ),
    "no checkpoint": (["inspect", "s3://BUCKET/letters"], 3, ["letter.txt"]),
}


@pytest.mark.parametrize("row", ENDS)
def test_errors_have_the_right_exit_code_and_no_traceback(row: str, s3: S3) -> None:
    s3.write("letters/letter.txt", b"dear")
    arguments, code, words = ENDS[row]
    ended, told = end(*(str(one).replace("BUCKET", s3.bucket) for one in arguments))
    assert [word for word in words if word not in told] == []
    assert (ended, "Traceback" in told) == (code, False), told
    assert "very-secret" not in told
    assert "AKIAEXAMPLE" not in told


def test_access_that_is_denied(s3: S3) -> None:
    url = s3.put(SOURCE, "m")
    s3.fail(DENIED)
    ended, told = end("inspect", url)
    assert (ended, "access is denied" in told) == (5, True), told
    ended, told = end("convert", SOURCE, s3.url("other"), "--to", "dcp")
    assert (ended, "access is denied" in told) == (5, True), told


def test_credentials_that_are_missing(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    url = s3.put(SOURCE, "m")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", "/nowhere")
    s3.fail(DENIED)
    ended, told = end("inspect", url)
    assert (ended, "Traceback" in told) == (5, False), told


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(Unsupported) as caught:
        location("abfss://box@account/m")
    assert caught.value.hint == "pip install 'ckptool[azure]'"


@pytest.mark.parametrize(
    ("one", "other", "is_same", "may_be"),
    [
        ("s3://bucket/m", "s3a://bucket/m", True, True),
        ("s3://bucket/m", "s3://bucket/m/x", False, True),
        ("s3://bucket/m", "s3://bucket/mm", False, False),
        ("s3://bucket/m", "gs://bucket/m", False, False),
        (
            "abfss://c@one.dfs.core.windows.net/m",
            "abfss://c@two.dfs.core.windows.net/m",
            False,
            False,
        ),
        ("abfss://c@one.dfs.core.windows.net/m", "az://c/m", False, True),
        ("memory://bucket/m", "memory://bucket/m", True, True),
    ],
)
def test_places_of_two_stores_are_two(one: str, other: str, is_same: bool, may_be: bool) -> None:
    first, second = location(one), location(other)
    assert (first == second) == is_same
    assert may_contain(first, second) == may_be
    assert not is_same or hash(first) == hash(second)
