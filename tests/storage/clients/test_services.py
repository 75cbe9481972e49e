"""Where obstore is told to ask, and with which credentials: no request is sent."""

from __future__ import annotations

from typing import Any

import pytest

from ckptool.errors import UsageError
from ckptool.storage.clients.amazon import Amazon
from ckptool.storage.clients.azure import Azure, _connection
from ckptool.storage.clients.google import Google
from ckptool.storage.clients.retry import RetryPolicy
from ckptool.storage.clients.service import Settings
from ckptool.storage.clients.web import Web, quoted_url, split_url

pytest.importorskip("obstore")

SETTINGS = Settings(RetryPolicy(attempts=1), 60.0)


@pytest.fixture(autouse=True)
def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")


@pytest.mark.parametrize(
    ("bucket", "options", "endpoint", "hosted"),
    [
        ("box", {}, "https://box.s3.eu-west-1.amazonaws.com", True),
        ("box", {"anon": True}, "https://box.s3.eu-west-1.amazonaws.com", True),
        ("a.box", {}, "https://s3.eu-west-1.amazonaws.com", False),
        ("box", {"endpoint_url": "http://h:9000"}, "http://h:9000", False),
        (
            "box",
            {"config_kwargs": {"s3": {"use_dualstack_endpoint": True}}},
            "https://box.s3.dualstack.eu-west-1.amazonaws.com",
            True,
        ),
        (
            "box",
            {"client_kwargs": {"region_name": "cn-north-1"}},
            "https://box.s3.cn-north-1.amazonaws.com.cn",
            True,
        ),
    ],
)
def test_the_address_of_a_bucket_is_botocores(
    bucket: str, options: dict[str, Any], endpoint: str, hosted: bool
) -> None:
    pytest.importorskip("boto3")
    config = Amazon("s3://box/m", options).open(bucket, SETTINGS).config
    assert config["endpoint"] == endpoint
    assert config["virtual_hosted_style_request"] == str(hosted).lower()


def test_options_of_s3fs_and_of_obstore() -> None:
    pytest.importorskip("boto3")
    options = {
        "anon": True,
        "requester_pays": True,
        "s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "k"},
        "unsigned_payload": True,
        "default_block_size": 1,
    }
    config = Amazon("s3://box/m", options).open("box", SETTINGS).config
    assert {config[n] for n in ("skip_signature", "request_payer", "unsigned_payload")} == {"true"}
    for wrong in ({"annon": True}, {"s3_additional_kwargs": {"annon": "x"}}):
        with pytest.raises(
            UsageError, match=r"storage options that s3:// does not accept: .*annon"
        ):
            Amazon("s3://box/m", wrong).open("box", SETTINGS)


@pytest.mark.parametrize(
    ("url", "key", "shown"),
    [
        ("az://box/run/m", "box/run/m", "az://box/run/m"),
        (
            "abfs://box@acme.dfs.core.windows.net/m",
            "box/m",
            "abfs://box@acme.dfs.core.windows.net/m",
        ),
    ],
)
def test_a_container_and_its_account(
    url: str, key: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
    service = Azure(url, {} if "@" in url else {"account_name": "acme"})
    assert (service.key(url), service.url(key)) == (key, shown)
    assert service.open("box", SETTINGS).config["endpoint"] == "https://acme.blob.core.windows.net"


def test_azure_without_an_account() -> None:
    with pytest.raises(UsageError, match="no account is named"):
        Azure("az://box/m", {}).open("box", SETTINGS)


def test_a_connection_string() -> None:
    said = _connection("AccountName=a;AccountKey=b==;EndpointSuffix=x.y")
    assert said == {"AccountName": "a", "AccountKey": "b==", "EndpointSuffix": "x.y"}
    assert _connection("UseDevelopmentStorage=true")["AccountName"] == "devstoreaccount1"


def test_google_is_asked_by_nobody_or_with_a_token() -> None:
    store = Google("gs://box/m", {"token": "anon"}).open("box", SETTINGS)
    assert store.config["skip_signature"] == "true"
    assert store.config["base_url"] == "https://storage.googleapis.com"
    store = Google("gs://box/m", {"token": "t", "requester_pays": "p"}).open("box", SETTINGS)
    assert store.client_options["default_headers"] == {"x-goog-user-project": b"p"}
    with pytest.raises(UsageError, match="gs:// does not accept"):
        Google("gs://box/m", {"token": "t", "tokken": "x"}).open("box", SETTINGS)


@pytest.mark.parametrize(
    ("url", "split"),
    [
        ("https://h/a/m.bin", ("https://h/a", "m.bin")),
        ("https://h/a/m.bin?sig=x", ("https://h/a/m.bin?sig=x", "")),
        ("https://h/a/.metadata", ("https://h/a/.metadata", "")),
        ("https://h/a b/./m.bin#x", ("https://h/a%20b", "m.bin")),
    ],
)
def test_the_folder_and_name_of_a_url(url: str, split: tuple[str, str]) -> None:
    assert split_url(quoted_url(url)) == split
    assert Web(url, {}).split(url) == split
