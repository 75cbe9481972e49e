"""The place in a store that a URL names, with the needed members of ``pathlib.Path``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ckptool.errors import NotFound, UsageError
from ckptool.storage.clients.schemes import BUCKETS, WEB, redact_url, require_supported

if TYPE_CHECKING:
    from ckptool.storage.clients.client import ObjectInfo
    from ckptool.storage.store import Store

_URL = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]+)://(?P<rest>.*)", re.DOTALL)
_HALF_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/[^/]")
_PATHS = ("file", "local")
"""Schemes of this machine's own files."""

_options: ContextVar[Mapping[str, Any]] = ContextVar(
    "storage options", default=MappingProxyType({})
)


@contextmanager
def storage_options(options: Mapping[str, Any]) -> Iterator[None]:
    """Open the stores of all URLs parsed in this context with these options of their clients."""
    token = _options.set(options)
    try:
        yield
    finally:
        _options.reset(token)


class RemotePath:
    """A file or folder in a store. ``str`` is its URL without any credential."""

    def __init__(self, store: Store, base: str, query: str = "") -> None:
        self.store = store
        self._base = base if base.endswith("://") else base.rstrip("/")
        self._query = query

    @classmethod
    def parse(cls, url: str) -> RemotePath:
        """Return the place that a URL names; UsageError for an unknown kind of store."""
        from ckptool.storage.store import Store

        scheme = url.partition("://")[0].lower()
        base, mark, query = url.partition("?") if scheme in WEB else (url, "", "")
        store = Store(url, _options.get())
        store.client  # noqa: B018 (what does not work is said now)
        return cls(store, base, mark + query)

    def __str__(self) -> str:
        return redact_url(self._base)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RemotePath):
            return NotImplemented
        return (self.store.account, self.key) == (other.store.account, other.key)

    def __hash__(self) -> int:
        return hash((self.store.account, self.key))

    def __truediv__(self, name: str) -> RemotePath:
        slash = "" if self._base.endswith("/") else "/"
        return RemotePath(self.store, f"{self._base}{slash}{name}", self._query)

    @property
    def key(self) -> str:
        """The store's own name for it."""
        return self.store.key(self._base + self._query)

    @property
    def url(self) -> str:
        """The URL as given, including credentials: for other libraries, not for messages."""
        return self._base + self._query

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self._base.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The suffix of the last part, with its dot."""
        return Path(self.name).suffix

    @property
    def stem(self) -> str:
        """The last part without its suffix."""
        return Path(self.name).stem

    @property
    def parent(self) -> RemotePath:
        """The folder around it; itself if it is the whole store."""
        if self._base.endswith("://"):
            return self
        head = self._base.rpartition("/")[0]
        head = f"{head}/" if head.endswith(":/") else head
        return RemotePath(self.store, head, self._query)

    @property
    def parents(self) -> Sequence[RemotePath]:
        """All folders around it, nearest first, up to the bucket, or the like, or the host."""
        folders, folder = [], self
        while not (folder := folder.parent)._base.endswith("://"):
            folders.append(folder)
        return folders

    def joinpath(self, *names: str) -> RemotePath:
        """Return the place below it that the names lead to."""
        return self / "/".join(names) if names else self

    def with_name(self, name: str) -> RemotePath:
        """Return the place beside it with this name."""
        return self.parent / name

    def resolve(self) -> RemotePath:
        """Return itself: stores have no links."""
        return self

    def is_symlink(self) -> bool:
        """Return False: stores have no links."""
        return False

    @cached_property
    def listing(self) -> dict[str, ObjectInfo]:
        """The files below by their relative paths, or the file itself under ``""``.

        Requested once; raises NotFound if there is neither.
        """
        return self.store.find(self.key, str(self))

    def file_now(self) -> ObjectInfo | None:
        """Return what the store knows of the file here; None if there is none."""
        with suppress(NotFound):
            return self.store.find(self.key, str(self), file_only=True).get("")
        return None

    def afresh(self) -> RemotePath:
        """Return the same place, with nothing listed yet."""
        return RemotePath(self.store, self._base, self._query)

    def require_there(self) -> None:
        """Raise NotFound if there is no such file or folder, or it cannot be listed."""
        self.listing  # noqa: B018 (asked for once, and kept)

    def is_dir(self) -> bool:
        """Return whether files lie below it; False if it cannot be listed."""
        try:
            return any(self.listing)
        except NotFound:
            return False

    def exists(self) -> bool:
        """Return whether a file or folder is there, and can be listed."""
        try:
            return bool(self.listing)
        except NotFound:
            return False

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield the entries of the folder."""
        yield from (self / name for name in dict.fromkeys(n.split("/")[0] for n in self.listing))

    def read_bytes(self) -> bytes:
        """Return all of a small file; NotFound if there is none."""
        return self.store.get(self.key, str(self))

    def write_bytes(self, data: bytes) -> None:
        """Make or replace a small file; NotFound if that is denied."""
        self.store.put(self.key, data, str(self))


Location = Path | RemotePath


def afresh(path: Location) -> Location:
    """Return the same place, of which nothing is known yet: its files are listed again."""
    return path if isinstance(path, Path) else path.afresh()


def may_contain(outer: Location, inner: Location) -> bool:
    """Return whether ``inner`` is ``outer``, or lies in it; also True if URLs leave that unknown.

    Raises OSError or RuntimeError for links that cannot be followed.
    """
    if not (isinstance(outer, RemotePath) and isinstance(inner, RemotePath)):
        folder, place = outer.resolve(), inner.resolve()
        return folder == place or folder in place.parents
    (kind, account), (other_kind, other_account) = outer.store.account, inner.store.account
    if kind != other_kind or (account and other_account and account != other_account):
        return False
    return inner.key == outer.key or inner.key.startswith(f"{outer.key}/")


def within(path: Location, folder: Location) -> PurePath:
    """Return the path of a place relative to a folder."""
    return PurePath(str(path)).relative_to(str(folder))


def location(text: str | Path) -> Location:
    """Return a path, or the place of a URL (``file://`` is a path); UsageError if invalid."""
    text = str(text)
    if "::" in text and "://" in text:
        raise UsageError(
            f"{redact_url(text)}: chained URLs are not read", hint="name the inner one"
        )
    match = _URL.match(text)
    if match is None:
        if _HALF_URL.match(text) and not Path(text.partition("/")[0]).exists():
            scheme, _, rest = text.partition(":/")
            slashes = ":///" if scheme.lower() in _PATHS else "://"
            raise UsageError(f"{text}: not a URL", hint=f"did you mean {scheme}{slashes}{rest}?")
        scheme, slashes, rest = text.partition("//")
        if slashes and scheme.lower() in BUCKETS and not os.path.lexists(scheme):
            raise UsageError(f"{text}: not a URL", hint=f"did you mean {scheme}://{rest}?")
        return _path(text, text)
    if match["scheme"].lower() in _PATHS:
        host, slash, path = match["rest"].partition("/")
        if host not in ("", ".", "..", "~", "localhost"):
            hint = f"{match['scheme']}:///{match['rest']} is a path of this machine"
            raise UsageError(f"{text}: {host} is another machine, or half a path", hint=hint)
        return _path(text, slash + path if host == "localhost" else match["rest"])
    return RemotePath.parse(require_supported(match["scheme"].lower(), match["rest"]))


def _path(text: str, path: str) -> Path:
    """Return a path; UsageError if it begins with ``~``, unless a folder here has that name."""
    if path.partition("/")[0] == "~" and not os.path.lexists("~"):
        hint = f"did you mean {os.path.expanduser(path)}?"
        raise UsageError(f"{text}: only a shell expands ~", hint=hint)
    return Path(path)
