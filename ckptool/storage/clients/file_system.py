"""The fsspec file system of a URL, with settings for many concurrent requests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

from ckptool.errors import Unsupported, UsageError, error_text
from ckptool.storage.clients.own_retries import end_own_retries
from ckptool.storage.clients.ranged_read import is_s3
from ckptool.storage.retry import unreachable
from ckptool.storage.url import redact_url

_EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
    "adl": "azure",
    "hf": "hf",
    "http": "http",
    "https": "http",
}
_CONNECTIONS = 64
_opened: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""File systems that were opened, by ``id``."""
_inherited: list[Any] = []
"""Those of the process that this one was forked from. When fsspec's clients are freed, they remove
their sockets from the event queue, which the processes share: the parent would wait for answers for
ever.
"""


def _keep_inherited() -> None:
    _inherited.extend(_opened.values())


os.register_at_fork(after_in_child=_keep_inherited)


def open_file_system(url: str, options: Mapping[str, Any]) -> Any:
    """Return the file system of a URL; Unsupported if a package for it is missing."""
    scheme = url.partition("://")[0].lower()
    try:
        from fsspec.core import url_to_fs

        fs = url_to_fs(url, **{**options, **_wide(scheme, options)})[0]
        if options and is_s3(fs):
            fs.connect()  # checks the options
    except ImportError as error:
        raise _missing(url, scheme, error) from None
    except TypeError as error:
        message = f"{redact_url(url)}: storage options that {scheme}:// does not accept"
        raise UsageError(f"{message}: {error_text(error)}") from None
    except ValueError as error:
        if "not known" not in str(error).lower():
            raise UsageError(f"{redact_url(url)}: {error_text(error)}") from None
        if scheme in _EXTRAS:  # fsspec knows abfss:// only from adlfs
            raise _missing(url, scheme, error) from None
        hint = "s3://, gs://, az://, hf://, https://, or another that fsspec knows"
        raise UsageError(f"{redact_url(url)}: unknown store {scheme}://", hint=hint) from None
    except Exception as error:  # noqa: BLE001 (each client of a store has errors of its own)
        raise unreachable(redact_url(url), error) from None
    end_own_retries(fs)
    _opened[id(fs)] = fs
    return fs


def _missing(url: str, scheme: str, error: Exception) -> Unsupported:
    extra = _EXTRAS.get(scheme)
    hint = f"pip install 'ckptool[{extra}]'" if extra else str(error)
    message = f"{redact_url(url)}: a package that reads {scheme}:// is missing"
    return Unsupported(message, hint=hint)


def _wide(scheme: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings for many concurrent requests to a store: botocore allows 10."""
    if _EXTRAS.get(scheme) != "s3":
        return {}
    from fsspec.config import conf

    theirs = options.get("config_kwargs", conf.get("s3", {}).get("config_kwargs", {}))
    once = {"retries": {"max_attempts": 0}}  # ``Store.ask`` retries
    return {"config_kwargs": {"max_pool_connections": _CONNECTIONS} | once | theirs}
