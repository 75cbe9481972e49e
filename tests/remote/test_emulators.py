"""The same against emulators of other stores: Google Cloud Storage's, and Azure's (azurite).

Azure's runs where it is installed: ``make stores`` brings it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import case, convert_to
from emulators import box, emulator, place, stored
from test_s3 import big, files_of, resharded

from ckptool.commands.convert import prepare
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.target import ConvertOptions
from ckptool.errors import Changed, CkptoolError, NotFound
from ckptool.storage.clients.retry import RetryPolicy
from ckptool.storage.remote import RemoteSource
from ckptool.storage.store import Store

SOURCE = case("dcp_fsdp2_tp").path


def test_what_is_written_and_read_is_the_same(box: str, out: Path) -> None:
    convert_to("safetensors", SOURCE, out / "m")
    resharded(SOURCE, f"{box}/source", "4")
    resharded(SOURCE, f"{box}/source", "2", overwrite=True)
    resharded(SOURCE, out / "two", "2")
    assert stored(f"{box}/source") == files_of(out / "two")
    prepare(place(f"{box}/source"), place(f"{box}/m"), ConvertOptions("safetensors")).run()
    assert stored(f"{box}/m") == files_of(out / "m")
    found = open_checkpoint(place(f"{box}/source")).catalog
    assert found.tensors == open_checkpoint(out / "two").catalog.tensors


def test_uploads_in_parts(box: str, out: Path) -> None:
    source = big(out, 3)
    resharded(source, f"{box}/m", "1")
    resharded(source, out / "m", "1")
    assert stored(f"{box}/m") == files_of(out / "m")


def test_a_file_by_itself(box: str, out: Path) -> None:
    convert_to("safetensors", SOURCE, out / "m.safetensors")
    target = place(f"{box}/m.safetensors")
    prepare(SOURCE, target, ConvertOptions("safetensors")).run()
    assert stored(box) == {f.name: f.read_bytes() for f in out.iterdir()}
    found = open_checkpoint(target).catalog
    assert found.tensors == open_checkpoint(out / "m.safetensors").catalog.tensors


def test_what_is_not_there(box: str) -> None:
    scheme = box.partition("://")[0]
    for url in (f"{box}/no", f"{scheme}://no-such-bucket/m"):
        with pytest.raises(NotFound, match="no such file or folder"):
            open_checkpoint(place(url))


def test_a_name_that_none_can_have(box: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "policy", RetryPolicy(attempts=2, pause=0.01))
    target = place(f"{box.partition('://')[0]}://x/m")
    with pytest.raises(CkptoolError):
        prepare(SOURCE, target, ConvertOptions("dcp")).run()


def test_what_was_replaced_since_it_was_listed(box: str) -> None:
    target = place(f"{box}/m")
    resharded(SOURCE, f"{box}/m", "2")
    files = list(RemoteSource.folder(target).files)
    source = RemoteSource.folder(target)
    assert source.changed(files) == []
    data = (target / "__0_0.distcp").read_bytes()
    (target / "__0_0.distcp").write_bytes(bytes(len(data)))
    with pytest.raises(Changed):
        source.read("__0_0.distcp", 10, 10)
