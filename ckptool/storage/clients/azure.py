"""Azure Blob Storage: the address and the credentials of a container."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from ckptool.errors import UsageError
from ckptool.storage.clients.service import Service, Settings

_DEVELOPMENT = (
    "DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey=Eby8vdM02xNOcqFlqUwJPLlm"
    "EtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==;"
    "BlobEndpoint=http://127.0.0.1:10000/devstoreaccount1"
)
"""What ``UseDevelopmentStorage=true`` stands for, by Azure's documentation."""
_SECRETS = ("account_key", "sas_token", "client_id", "client_secret", "tenant_id")
_NO_MATTER = ("assume_container_exists", "max_concurrency", "version_aware", "request_session")
"""Settings of adlfs for what is not done here."""


class Azure(Service):
    """Containers of Azure. ``options`` are those of adlfs, or obstore's own settings of Azure."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        super().__init__(url, options)
        _, at, host = url.partition("://")[2].partition("/")[0].partition("@")
        self._host = f"{at}{host}"
        """The account's host if the URL names it: ``@ACCOUNT.dfs.core.windows.net``."""

    def key(self, url: str) -> str:
        """Return the container and name of a URL as one text."""
        container, slash, name = super().key(url).partition("/")
        return f"{container.partition('@')[0]}{slash}{name}"

    def url(self, key: str) -> str:
        """Return the URL of a key."""
        container, slash, name = key.partition("/")
        return f"{self.scheme}://{container}{self._host}{slash}{name}"

    def open(self, container: str, settings: Settings) -> Any:
        """Return obstore's store for a container."""
        from obstore.store import AzureStore

        options = {n: value for n, value in self.options.items() if n not in _NO_MATTER}
        if options.pop("location_mode", "primary") != "primary":
            raise self.unknown("location_mode: only primary locations are read")
        text = options.pop("connection_string", None) or _variable("connection_string")
        fields = _connection(text)
        account = fields.get("AccountName") or options.pop("account_name", None)
        account = account or self._host[1:].partition(".")[0] or _variable("account_name")
        keys = {name: options.pop(name, None) or _variable(name) for name in _SECRETS}
        keys["account_key"] = fields.get("AccountKey") or keys["account_key"]
        keys["sas_token"] = fields.get("SharedAccessSignature") or keys["sas_token"]
        host = options.pop("account_host", None)
        endpoint = options.pop("endpoint", None) or fields.get("BlobEndpoint")
        endpoint = endpoint or _endpoint(account, fields, host)
        if not account and "BlobEndpoint" not in fields:
            raise UsageError(
                f"{self.scheme}://{container}: no account is named",
                hint="set AZURE_STORAGE_ACCOUNT_NAME, or AZURE_STORAGE_CONNECTION_STRING",
            )
        anonymous = options.pop("anon", None)
        if anonymous is None:
            anonymous = (_variable("anon") or "false").lower() not in ("false", "0", "f")
        login = options.pop("credential", None)
        provider = None if fields and not any(keys.values()) else _provider(keys, login, anonymous)
        config: Any = {
            "account_name": account or urlsplit(endpoint).netloc.partition(".")[0],
            "endpoint": endpoint.rstrip("/"),
            "use_emulator": False,
            "use_fabric_endpoint": False,
            "skip_signature": provider is None,
            **options,
        }
        more = settings.options(endpoint)
        return self.build(
            lambda: AzureStore(container, config=config, credential_provider=provider, **more)
        )


def _variable(name: str) -> str | None:
    return os.environ.get(f"AZURE_STORAGE_{name.upper()}") or None


def _connection(text: str | None) -> dict[str, str]:
    """Return the settings in a connection string."""
    if text is not None and "UseDevelopmentStorage=true" in text:
        text = _DEVELOPMENT
    pairs = (pair.partition("=") for pair in (text or "").split(";") if pair)
    return {name: value for name, _, value in pairs}


def _endpoint(account: str | None, fields: Mapping[str, str], host: str | None) -> str:
    suffix = fields.get("EndpointSuffix", "core.windows.net")
    protocol = fields.get("DefaultEndpointsProtocol", "https")
    return f"{protocol}://{host or f'{account}.blob.{suffix}'}"


def _provider(
    keys: Mapping[str, str | None], login: Any, anonymous: bool
) -> Callable[[], Any] | None:
    """Return what gives obstore credentials; None for nobody."""
    if keys["account_key"] and login is None:
        key = keys["account_key"]
        return lambda: {"access_key": key, "expires_at": None}
    if keys["sas_token"] and login is None:
        signature = keys["sas_token"].lstrip("?")
        return lambda: {"sas_token": signature, "expires_at": None}
    if anonymous and login is None:
        return None
    from obstore.auth.azure import AzureCredentialProvider

    if login is None and keys["client_id"] and keys["client_secret"] and keys["tenant_id"]:
        from azure.identity import ClientSecretCredential

        login = ClientSecretCredential(keys["tenant_id"], keys["client_id"], keys["client_secret"])
    provider: Callable[[], Any] = AzureCredentialProvider(login)
    return provider
