"""A kind of store that obstore reads and writes: its places, and how they are asked."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from msgspec import Struct

from ckptool.errors import UsageError
from ckptool.storage.clients.answers import Answer
from ckptool.storage.clients.retry import RetryPolicy
from ckptool.storage.clients.schemes import AZURE, GOOGLE, S3, WEB, unaccepted

_NO_MATTER = (
    *("default_block_size", "default_cache_type", "default_fill_cache", "cache_regions"),
    *("use_listings_cache", "listings_expiry_time", "skip_instance_cache", "max_concurrency"),
    *("asynchronous", "block_size", "cache_type"),
)
"""Settings of fsspec's clients for what ckptool does in its own way."""


_CONNECT, _READ = timedelta(seconds=5), timedelta(seconds=15)
"""The time for a connection, and between bytes."""
UPLOAD = 600.0
"""Seconds for what is sent: some lines take a minute for a part."""


class Settings(Struct, frozen=True):
    """How requests are sent: the seconds for one, and the tries that obstore makes itself."""

    policy: RetryPolicy
    seconds: float

    def options(self, endpoint: str, **more: Any) -> dict[str, Any]:
        """Return obstore's options for a store at an endpoint."""
        policy, time = self.policy, timedelta(seconds=self.seconds)
        client = {
            "allow_http": endpoint.startswith("http:"),
            "connect_timeout": _CONNECT,
            "read_timeout": time if self.seconds == UPLOAD else _READ,
            "timeout": time,
            **more,
        }
        retry = {
            "max_retries": policy.attempts - 1,
            "retry_timeout": timedelta(seconds=policy.total),
            "backoff": {
                "init_backoff": timedelta(seconds=policy.pause),
                "max_backoff": timedelta(seconds=policy.longest_pause),
                "base": 2,
            },
        }
        return {"client_options": client, "retry_config": retry}


class Service:
    """A kind of store: where its places are, and the credentials for them.

    Keys are a place (a bucket, a container) and a name in it, as one text. ``options`` are those
    of fsspec's client.
    """

    pins = True
    """Whether each version of a file has an ETag of its own."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.scheme = url.partition("://")[0]
        self.options = {name: value for name, value in options.items() if name not in _NO_MATTER}

    def key(self, url: str) -> str:
        """Return the place and name of a URL as one text."""
        return url.partition("://")[2].strip("/")

    def url(self, key: str) -> str:
        """Return the URL of a key."""
        return f"{self.scheme}://{key}"

    def split(self, key: str) -> tuple[str, str]:
        """Return the place, and the name in it."""
        place, _, name = key.partition("/")
        return place, name

    def open(self, place: str, settings: Settings) -> Any:
        """Return obstore's store for a place."""
        raise NotImplementedError

    def has_moved(self, place: str, answer: Answer, store: Any) -> bool:
        """Return whether an answer tells that a place has another address, and note that.

        ``store`` is that of obstore which gave the answer.
        """
        return False

    def build(self, make: Callable[[], Any]) -> Any:
        """Return a store of obstore as made; UsageError if it does not know one of the options."""
        try:
            return make()
        except Exception as error:
            if type(error).__name__ != "UnknownConfigurationKeyError":
                raise
            raise self.unknown(str(error).partition("\n")[0]) from None

    def unknown(self, reason: str) -> UsageError:
        """Return the error for storage options that are not understood."""
        return unaccepted(f"{self.scheme}://", reason)


def fsspec_settings(scheme: str) -> dict[str, Any]:
    """Return what fsspec (2026.9) is set to for a kind of store, by any of its schemes.

    The settings are in variables, in files, or in memory.
    """
    has_variables = any(name.startswith("FSSPEC_") for name in os.environ)
    if not has_variables and "fsspec.config" not in sys.modules:
        folder = os.environ.get("FSSPEC_CONFIG_DIR") or os.path.expanduser("~/.config/fsspec")
        if not os.path.isdir(folder):
            return {}
    from fsspec.config import conf

    kind = next(kind for kind in (S3, GOOGLE, AZURE, WEB) if scheme in kind)
    return {name: value for one in kind for name, value in conf.get(one, {}).items()}
