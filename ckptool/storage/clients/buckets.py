"""What the stores of buckets have in common: keys, and settings by the names of fsspec."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ckptool.errors import UsageError
from ckptool.storage.clients.answers import Answer
from ckptool.storage.clients.schemes import AZURE, GOOGLE, S3, WEB, unaccepted

_NO_MATTER = (
    *("default_block_size", "default_cache_type", "default_fill_cache", "cache_regions"),
    *("use_listings_cache", "listings_expiry_time", "skip_instance_cache", "max_concurrency"),
    *("asynchronous", "block_size", "cache_type"),
)
"""Settings of fsspec's clients for what ckptool does in its own way."""


class Buckets:
    """Keys that are a bucket, or container, and a name in it; ``options`` are fsspec's."""

    pins = True

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.scheme = url.partition("://")[0]
        self.options = {name: value for name, value in options.items() if name not in _NO_MATTER}

    def key(self, url: str) -> str:
        """Return the bucket and name of a URL as one text."""
        return url.partition("://")[2].strip("/")

    def url(self, key: str) -> str:
        """Return the URL of a key."""
        return f"{self.scheme}://{key}"

    def split(self, key: str) -> tuple[str, str]:
        """Return the bucket, and the name in it."""
        bucket, _, name = key.partition("/")
        return bucket, name

    def has_moved(self, place: str, answer: Answer, asked: Any) -> bool:
        """Return False: buckets have one address."""
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
    named = any(name.startswith("FSSPEC_") for name in os.environ)
    if not named and "fsspec.config" not in sys.modules:
        folder = os.environ.get("FSSPEC_CONFIG_DIR") or os.path.expanduser("~/.config/fsspec")
        if not os.path.isdir(folder):
            return {}
    from fsspec.config import conf

    kind = next(kind for kind in (S3, GOOGLE, AZURE, WEB) if scheme in kind)
    return {name: value for one in kind for name, value in conf.get(one, {}).items()}
