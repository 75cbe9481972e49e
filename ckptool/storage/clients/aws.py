"""AWS credentials and endpoint, as far as they are in the environment and in profiles.

Whatever botocore (1.43) finds in other ways, or changes its requests, is left to it: roles, SSO,
programs that give credentials, other certificates, other kinds of addresses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_UNDERSTOOD = {
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_CONFIG_FILE",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_CA_BUNDLE",
    "AWS_REGION",  # botocore ignores this one and the next
    "AWS_EXECUTION_ENV",
    "AWS_EC2_METADATA_DISABLED",
    "AWS_MAX_ATTEMPTS",
    "AWS_RETRY_MODE",
    "AWS_PAGER",
}
_KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
_IN_A_PROFILE = {*_KEYS, "region", "endpoint_url", "output", "cli_pager"}
_COMMERCIAL = re.compile(r"(?:us|ca|mx|sa|eu|il|af|me|ap)-(?!iso|gov)[a-z]+-\d")
"""Regions whose hosts are called ``s3.REGION.amazonaws.com``."""
_IN_A_HOST = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9](?<!--x-s3)")
"""Buckets that botocore names in the host; obstore addresses those of S3 Express differently."""


class Signer(NamedTuple):
    """The credentials, region and endpoint for S3; the endpoint is empty if it is AWS's own."""

    key: str
    secret: str
    token: str | None
    region: str
    endpoint: str

    def settings(self, bucket: str) -> dict[str, object] | None:
        """Return obstore's settings for a bucket; None if botocore would address it differently."""
        if not self.endpoint and not _IN_A_HOST.fullmatch(bucket):
            return None
        endpoint = self.endpoint or f"https://{bucket}.s3.{self.region}.amazonaws.com"
        return {
            "endpoint": endpoint,
            "region": self.region,
            "virtual_hosted_style_request": not self.endpoint,
        }


def find_signer(environment: Mapping[str, str]) -> Signer | None:
    """Return the signer that botocore would find; None if only botocore itself can tell."""
    names = {name for name, value in environment.items() if name.startswith("AWS_") and value}
    stored = None if names - _UNDERSTOOD else _profile(environment)
    if stored is None:
        return None
    variables = {name: environment.get(name.upper(), "") for name in _KEYS}
    keys = variables if any(variables[name] for name in _KEYS[:2]) else stored
    region = environment.get("AWS_DEFAULT_REGION") or stored.get("region", "us-east-1")
    places = (environment.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
    endpoint = next(filter(None, places), stored.get("endpoint_url", "")).rstrip("/")
    if not all(keys.get(name) for name in _KEYS[:2]):
        return None
    if not (endpoint or _COMMERCIAL.fullmatch(region)):
        return None
    if "AWS_CA_BUNDLE" in names and not endpoint.startswith("http:"):
        return None
    return Signer(keys[_KEYS[0]], keys[_KEYS[1]], keys.get(_KEYS[2]) or None, region, endpoint)


def _profile(environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return the settings of the profile in use; None if it is missing, or not understood.

    Keys of both files are not merged: which of them count is up to botocore.
    """
    name = environment.get("AWS_PROFILE") or "default"
    try:
        stored = _sections(environment.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials")
        config = _sections(environment.get("AWS_CONFIG_FILE") or "~/.aws/config")
    except (OSError, ValueError):
        return None
    if name == "default" and "profile default" in config:
        return None
    candidates = [stored.get(name), config.get(name if name == "default" else f"profile {name}")]
    sections = [section for section in candidates if section is not None]
    if not sections and "AWS_PROFILE" in environment:
        return None
    if any(section.keys() - _IN_A_PROFILE for section in sections):
        return None
    if sum(not section.keys().isdisjoint(_KEYS) for section in sections) > 1:
        return None
    return {key: value for section in reversed(sections) for key, value in section.items()}


def _sections(file: str) -> dict[str, dict[str, str]]:
    """Return the sections of a file, none if it is missing; ValueError if it is invalid."""
    path = Path(file).expanduser()
    if not path.exists():
        return {}
    from configparser import Error, RawConfigParser

    parser = RawConfigParser()
    try:
        parser.read_string(path.read_text())
    except Error as error:
        raise ValueError(str(error)) from None
    return {name: dict(parser.items(name)) for name in parser.sections()}
