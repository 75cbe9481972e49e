"""Amazon S3, and stores that speak its protocol: the address and the credentials of a bucket."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ckptool.errors import UsageError, error_text
from ckptool.storage.clients.answers import Answer, NoCredentials
from ckptool.storage.clients.aws import find_signer
from ckptool.storage.clients.service import Service, Settings

_KEPT = timedelta(minutes=6)
"""Stated lifetime of credentials: obstore (0.12) renews them five minutes before its end."""
_ENCRYPTION = {
    "ServerSideEncryption": "server_side_encryption",
    "SSEKMSKeyId": "sse_kms_key_id",
    "RequestPayer": "request_payer",
}
"""obstore's settings for what s3fs takes as ``s3_additional_kwargs``."""


class _Bucket(NamedTuple):
    """How obstore addresses a bucket: its settings, signer, and settings of connections."""

    config: Mapping[str, Any]
    credentials: Callable[[], Any] | None
    client: Mapping[str, Any]


class Amazon(Service):
    """Buckets of S3. ``options`` are those of s3fs, or obstore's own settings of S3."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        super().__init__(url, options)
        self._regions: dict[str, str] = {}
        """The regions of buckets that are not where the environment says."""

    def open(self, bucket: str, settings: Settings) -> Any:
        """Return obstore's store for a bucket."""
        from obstore.store import S3Store

        place = self._by_environment(bucket) or self._by_botocore(bucket)
        endpoint = place.config["endpoint"]
        config: Any = {
            **place.config,
            "aws_endpoint_url_s3": endpoint,  # obstore prefers the one that the environment has
            "disable_bulk_delete": True,  # which not all stores know
            "s3_express": bucket.endswith("--x-s3"),
        }
        options = settings.options(endpoint, **place.client)
        return self.build(
            lambda: S3Store(bucket, config=config, credential_provider=place.credentials, **options)
        )

    def has_moved(self, bucket: str, answer: Answer, store: Any) -> bool:
        """Return whether S3 says that a bucket is in another region than it was asked in."""
        if not answer.is_elsewhere:
            return False
        region = answer.region or _find_region(store.config, bucket)
        if region in ("", store.config["region"]):
            return False
        self._regions[bucket] = region
        return True

    def _by_environment(self, bucket: str) -> _Bucket | None:
        """Return a bucket if its keys and address are plainly written down.

        botocore, which finds all others, takes a second to load.
        """
        signer = None if self.options else find_signer(os.environ)
        if signer is None:
            return None
        signer = signer._replace(region=self._regions.get(bucket, signer.region))
        config = signer.settings(bucket)
        credentials = _static(signer.key, signer.secret, signer.token)
        return None if config is None else _Bucket(config, credentials, {})

    def _by_botocore(self, bucket: str) -> _Bucket:
        """Return a bucket as botocore addresses it, with the credentials that it finds."""
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import ProfileNotFound

        options = dict(self.options)
        try:
            session = boto3.Session(profile_name=options.pop("profile", None))
        except ProfileNotFound as error:
            raise UsageError(f"{self.scheme}://{bucket}: {error_text(error)}") from None
        keywords, chosen = options.pop("client_kwargs", {}), options.pop("config_kwargs", {})
        if (endpoint := options.pop("endpoint_url", None)) is not None:
            keywords = {"endpoint_url": endpoint, **keywords}
        if bucket in self._regions:
            keywords = {**keywords, "region_name": self._regions[bucket]}
        keys = [
            options.pop(name, None) or keywords.get(keyword)
            for name, keyword in (
                ("key", "aws_access_key_id"),
                ("secret", "aws_secret_access_key"),
                ("token", "aws_session_token"),
            )
        ]
        unsigned = Config(**{**chosen, "signature_version": UNSIGNED})
        more = {"use_ssl": options.pop("use_ssl")} if "use_ssl" in options else {}
        ours = session.client("s3", config=unsigned, **more, **keywords)
        config = {
            **_address(ours, bucket),
            "region": ours.meta.region_name,
            "skip_signature": bool(options.pop("anon", False)),
            "request_payer": bool(options.pop("requester_pays", False)),
            **self._encryption(options.pop("s3_additional_kwargs", {})),
            **options,
        }
        credentials = None if config["skip_signature"] else _credentials(session, keys)
        proxies = (chosen.get("proxies") or {}).get(urlsplit(config["endpoint"]).scheme)
        verify = keywords.get("verify", session._session.get_config_variable("ca_bundle"))
        client = _trust(verify) | ({"proxy_url": proxies} if proxies else {})
        return _Bucket(config, credentials, client)

    def _encryption(self, options: Mapping[str, Any]) -> dict[str, Any]:
        if unknown := [name for name in options if name not in _ENCRYPTION]:
            raise self.unknown(f"s3_additional_kwargs: {', '.join(unknown)}")
        return {_ENCRYPTION[name]: value for name, value in options.items()}


def _find_region(config: Mapping[str, str], bucket: str) -> str:
    """Return the region of a bucket, which S3 tells anybody; empty if it does not.

    ``config`` is that of obstore's store, which holds texts.
    """
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    prefix = "" if config["virtual_hosted_style_request"] == "true" else f"/{bucket}"
    request = Request(f"{config['endpoint']}{prefix}", method="HEAD")
    headers: Any = {}
    with suppress(OSError):
        try:
            with urlopen(request, timeout=10) as answer:
                headers = answer.headers
        except HTTPError as error:
            headers = error.headers
    return str(headers.get("x-amz-bucket-region") or "")


class _Addressed(Exception):
    """The URL of a request that is not sent."""


def _address(client: Any, bucket: str) -> dict[str, Any]:
    """Return where botocore would send a request for a key, which is not sent."""

    def stop(request: Any, **_: object) -> None:
        raise _Addressed(request.url)

    client.meta.events.register("before-send.s3.HeadObject", stop)
    parts = urlsplit("")
    try:
        client.head_object(Bucket=bucket, Key="key")
    except _Addressed as error:
        parts = urlsplit(str(error))
    path = parts.path.removesuffix("/key")
    in_path = path.endswith(f"/{bucket}")
    return {
        "endpoint": f"{parts.scheme}://{parts.netloc}{path.removesuffix(f'/{bucket}')}",
        "virtual_hosted_style_request": not in_path,
    }


def _credentials(session: Any, keys: list[str | None]) -> Callable[[], Any]:
    """Return what gives obstore credentials: the keys if there are any, or what botocore finds."""
    key, secret, token = keys
    if key is not None:
        return _static(key, secret, token)
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        provider: Callable[[], Any] = Boto3CredentialProvider(session, ttl=_KEPT)
    except ValueError:
        raise NoCredentials("Unable to locate credentials") from None
    return provider


def _static(key: str, secret: str | None, token: str | None) -> Callable[[], Any]:
    """Return what gives obstore keys that do not expire."""
    keys = {"access_key_id": key, "secret_access_key": secret, "token": token}
    return lambda: {**keys, "expires_at": None}


def _trust(verify: str | bool | None) -> dict[str, Any]:
    """Return the trusted certificates, from botocore's setting."""
    if isinstance(verify, str):
        try:
            return {"root_certificate": Path(verify).read_bytes()}
        except OSError as error:
            message = f"the certificates to trust cannot be read: {error_text(error)}"
            raise UsageError(message, hint="set AWS_CA_BUNDLE to a file of certificates") from None
    return {"allow_invalid_certificates": True} if verify is False else {}
