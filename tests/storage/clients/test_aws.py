"""S3 credentials and endpoint without botocore: botocore's result, or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptool.storage.clients.aws import Signer, find_signer

session = pytest.importorskip("botocore.session")

ENV = {"AWS_ACCESS_KEY_ID": "ENV", "AWS_SECRET_ACCESS_KEY": "e"}
KEYS = "aws_access_key_id = FILE\naws_secret_access_key = f\n"
AT = {"AWS_ENDPOINT_URL": "http://lab:9000/s3/"}


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of which the files named in the environment are all that is known."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "FSSPEC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", "~/config")
    return tmp_path


@contextmanager
def said(env: Mapping[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        yield


def found(alone: Path, env: Mapping[str, str], credentials: str, config: str) -> Signer | None:
    (alone / "credentials").write_text(credentials)
    (alone / "config").write_text(config)
    with said(env):
        return find_signer(os.environ)


def by_botocore(env: Mapping[str, str]) -> Signer:
    with said(env):
        opened = session.Session()
        keys = opened.get_credentials().get_frozen_credentials()
        client = opened.create_client("s3")
    region = client.meta.region_name.replace("aws-global", "us-east-1")
    endpoint = client.meta.endpoint_url
    endpoint = "" if endpoint.endswith(".amazonaws.com") else endpoint.rstrip("/")
    return Signer(keys.access_key, keys.secret_key, keys.token, region, endpoint)


@pytest.mark.parametrize(
    ("env", "credentials", "config"),
    [
        (ENV, "", ""),
        (ENV | {"AWS_SESSION_TOKEN": "t"}, "", ""),
        (ENV | AT, f"[default]\n{KEYS}aws_session_token = no\n", "[default]\nregion = eu-west-1\n"),
        (ENV | AT | {"AWS_ENDPOINT_URL_S3": "https://three"}, "", ""),
        (ENV | {"AWS_DEFAULT_REGION": "ap-south-1", "AWS_REGION": "eu-west-1"}, "", ""),
        ({"AWS_SESSION_TOKEN": "another's"}, f"[default]\n{KEYS}", ""),
        ({"AWS_PROFILE": "lab"}, f"[lab]\n{KEYS}aws_session_token = t\n[default]\nx = y\n", ""),
        (
            {"AWS_PROFILE": "lab"},
            "",
            f"[profile lab]\n{KEYS}region = sa-east-1\nendpoint_url = http://a:1\n",
        ),
        ({}, f"[default]\n{KEYS}region = us-west-2\n", "[default]\nregion = eu-west-1\n"),
    ],
)
def test_it_is_who_botocore_finds(
    env: dict[str, str], credentials: str, config: str, alone: Path
) -> None:
    assert found(alone, env, credentials, config) == by_botocore(env)


ROLE = "[profile lab]\nrole_arn = arn:aws:iam::1:role/x\nsource_profile = default\n"


@pytest.mark.parametrize(
    ("env", "credentials", "config"),
    [
        ({}, "", ""),
        ({"AWS_ACCESS_KEY_ID": "ENV"}, f"[default]\n{KEYS}", ""),
        (ENV | {"AWS_PROFILE": "nowhere"}, f"[default]\n{KEYS}", ""),
        ({"AWS_PROFILE": "lab"}, f"[default]\n{KEYS}", ROLE),
        ({}, "", "[default]\ncredential_process = program\n"),
        (ENV, "", "[default]\ns3 =\n  addressing_style = virtual\n"),
        (ENV, "", "[default]\nservices = mine\n[services mine]\ns3 =\n  endpoint_url = http://a\n"),
        ({}, f"[default]\n{KEYS}", f"[default]\n{KEYS}"),
        ({}, f"[default]\n{KEYS}", "[profile default]\nregion = eu-west-1\n"),
        (ENV, "no section\n", ""),
        (ENV | {"AWS_DEFAULT_REGION": "cn-north-1"}, "", ""),
        (ENV | {"AWS_DEFAULT_REGION": "us-iso-east-1"}, "", ""),
        (ENV | {"AWS_CA_BUNDLE": "/etc/own.pem"}, "", ""),
        (ENV | {"AWS_USE_FIPS_ENDPOINT": "true"}, "", ""),
        (ENV | {"AWS_WEB_IDENTITY_TOKEN_FILE": "/t"}, "", ""),
        (ENV | {"AWS_CREDENTIAL_EXPIRATION": "2100-01-01T00:00:00Z"}, "", ""),
    ],
)
def test_what_only_botocore_knows_is_left_to_it(
    env: dict[str, str], credentials: str, config: str, alone: Path
) -> None:
    assert found(alone, env, credentials, config) is None


def test_buckets_of_aws_are_asked_for_by_their_hosts() -> None:
    signer = Signer("k", "s", None, "eu-west-1", "")
    settings = signer.settings("my-bucket") or {}
    assert settings["endpoint"] == "https://my-bucket.s3.eu-west-1.amazonaws.com"
    for other in ("with.dots", "fast--use1-az4--x-s3", "arn:aws:s3:::x", "Large"):
        assert signer.settings(other) is None
    assert signer._replace(endpoint="http://lab").settings("with.dots") is not None
