"""obstore's settings match the requests of s3fs."""

from __future__ import annotations

from typing import Any

import pytest

from ckptool.storage.clients.obstore_s3 import s3_settings

SIGNED = "AWS4-HMAC-SHA256 Credential=AKIA/20260801/eu-west-1/s3/aws4_request, SignedHeaders=host"


def settings(url: str, **headers: str) -> dict[str, Any] | None:
    sent = {"authorization": SIGNED} | {n.replace("_", "-"): text for n, text in headers.items()}
    return s3_settings(url, {name: text for name, text in sent.items() if text}, "b", "run/m.pt")


@pytest.mark.parametrize(
    ("url", "endpoint", "virtual"),
    [
        ("https://b.s3.eu-west-1.amazonaws.com/run/m.pt", "b.s3.eu-west-1.amazonaws.com", True),
        ("https://s3.eu-west-1.amazonaws.com/b/run/m.pt", "s3.eu-west-1.amazonaws.com", False),
        ("https://ap-1.s3-accesspoint.eu.amazonaws.com/run/m.pt", "ap-1.s3-accesspoint", True),
        ("https://store.example/tenant/b/run/m.pt", "store.example/tenant", False),
        ("https://store.example:9000/b/run%2Fm.pt?x=1", "store.example:9000", False),
    ],
)
def test_it_asks_where_s3fs_asks(url: str, endpoint: str, virtual: bool) -> None:
    found = settings(url)
    assert found is not None
    assert found["endpoint"].startswith(f"https://{endpoint}")
    assert found["virtual_hosted_style_request"] is virtual
    assert found["region"] == "eu-west-1"
    assert not found["skip_signature"]


def test_it_asks_unsigned_where_s3fs_does_and_says_who_pays() -> None:
    found = settings("https://b.host/run/m.pt", authorization="", x_amz_request_payer="requester")
    assert found is not None
    assert found["skip_signature"]
    assert found["request_payer"]


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "AWS AKIA:signature"},
        {"authorization": SIGNED.replace("/s3/", "/s3express/")},
        {"authorization": "AWS4-ECDSA-P256-SHA256 Credential=AKIA/20260801/s3/aws4_request"},
        {"x_amz_server_side_encryption_customer_key": "c2VjcmV0"},
        {"x_amz_expected_bucket_owner": "1"},
    ],
)
def test_what_it_could_not_ask_alike_is_left_to_s3fs(headers: dict[str, str]) -> None:
    assert settings("https://b.host/run/m.pt", **headers) is None


def test_a_url_of_something_else_is_not_taken_for_the_object() -> None:
    assert settings("https://host/b/run/other.pt") is None
