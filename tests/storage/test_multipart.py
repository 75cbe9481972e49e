"""Files of a store that are written sequentially, with streams of any client."""

from __future__ import annotations

import io

import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from ckptool.errors import TransferError
from ckptool.storage.multipart import upload
from ckptool.storage.url import RemotePath, location


class Stream(io.BytesIO):
    """A file that is written, and does not say its path: as of sftp:// (paramiko's files)."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key

    def close(self) -> None:
        if not self.closed:
            fs = MemoryFileSystem()
            fs.store[self._key] = MemoryFile(fs, self._key, self.getvalue())
        super().close()


class Refusing(Stream):
    """One that may not be written."""

    def write(self, data: object) -> int:
        raise PermissionError("not yours")


class Losing(Stream):
    """One that keeps less than it took."""

    def close(self) -> None:
        self.truncate(2)
        super().close()


def written_by(kind: type[Stream], monkeypatch: pytest.MonkeyPatch) -> RemotePath:
    """Write three bytes to a stream of this kind."""

    def opened(fs: MemoryFileSystem, path: str, *words: object, **named: object) -> Stream:
        return kind(path)

    target = location(f"memory://streams/{kind.__name__}.bin")
    assert isinstance(target, RemotePath)
    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "open", opened)
        upload(target, 3, [b"abc"])
    return target


def test_a_stream_that_does_not_say_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written_by(Stream, monkeypatch).read_bytes() == b"abc"


def test_a_stream_that_is_refused_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransferError, match="access is denied") as caught:
        written_by(Refusing, monkeypatch)
    assert caught.value.message.code == "access-denied"


def test_a_file_that_appears_shorter_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransferError, match="has 2 bytes, not 3"):
        written_by(Losing, monkeypatch)
