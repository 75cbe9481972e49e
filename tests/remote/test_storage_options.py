"""``--storage-option`` and ``storage_option=``: how the stores of a call's URLs are opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import case
from store_server import S3, s3, server
from typer.testing import CliRunner

import ckptool
from ckptool.cli.app import app
from ckptool.commands.options import STORAGE_OPTIONS
from ckptool.errors import UsageError

SOURCE = case("dcp_fsdp2_tp").path


@pytest.fixture
def elsewhere(s3: S3, monkeypatch: pytest.MonkeyPatch) -> tuple[S3, str]:
    """A store that nothing in the environment leads to, and where it is."""
    s3.put(SOURCE, "m")
    endpoint = s3.server.endpoint
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    s3.fs.clear_instance_cache()
    return s3, endpoint


def test_every_url_of_a_command_is_opened_with_them(elsewhere: tuple[S3, str], out: Path) -> None:
    s3, endpoint = elsewhere
    option = ["--storage-option", f"endpoint_url={endpoint}"]
    for words in (
        ["inspect", s3.url("m")],
        ["convert", s3.url("m"), s3.url("n"), "--to", "safetensors"],
        ["reshard", s3.url("m"), s3.url("o"), "--mesh", "2"],
        ["verify", s3.url("m"), "--against", s3.url("o")],
        ["verify", s3.url("m")],
    ):
        done = CliRunner().invoke(app, [*words, *option])
        assert done.exit_code == 0, done.output


def test_they_are_a_keyword_in_python(elsewhere: tuple[S3, str]) -> None:
    s3, endpoint = elsewhere
    options = {"endpoint_url": endpoint}
    opened = ckptool.open(s3.url("m"), storage_option=options)
    assert opened.tensors.keys() == ckptool.open(SOURCE).tensors.keys()
    assert ckptool.compare(s3.url("m"), s3.url("m"), storage_option=options).verify.ok
    ckptool.convert(s3.url("m"), s3.url("n"), to="dcp", storage_option=options)
    with pytest.raises(TypeError, match="takes Mapping"):
        ckptool.open(s3.url("m"), storage_option=["anon=true"])  # type: ignore[arg-type]


def test_an_option_that_the_client_does_not_know_is_a_mistake_of_use(s3: S3) -> None:
    s3.put(SOURCE, "m")
    done = CliRunner().invoke(app, ["inspect", s3.url("m"), "--storage-option", "annon=true"])
    assert isinstance(done.exception, UsageError)
    assert "storage options that s3:// does not accept: " in done.exception.message
    assert "annon" in done.exception.message


def test_what_is_not_an_option_is_a_mistake_of_use_and_not_repeated() -> None:
    with pytest.raises(UsageError, match="expected KEY=VALUE"):
        STORAGE_OPTIONS.parse(["anon"], "--storage-option")
    with pytest.raises(UsageError) as caught:
        STORAGE_OPTIONS.parse(["s3.key=secret"], "--storage-option")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("anon=true", True),
        ("token=null", None),
        ("max_concurrency=4", 4),
        ("endpoint_url=http://host:9000/a=b", "http://host:9000/a=b"),
        ("key=", ""),
        ("key=0123", "0123"),
        ('key="123"', "123"),
        ('client_kwargs={"region_name": "x"}', {"region_name": "x"}),
    ],
)
def test_json_is_read_as_json_and_all_else_is_text(written: str, value: Any) -> None:
    key = written.partition("=")[0]
    assert STORAGE_OPTIONS.parse([written], "--storage-option") == {key: value}
