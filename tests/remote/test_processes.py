"""An open checkpoint in other processes: forked ones, and those that unpickle it."""

from __future__ import annotations

import gc
import pickle
import time
import weakref

import pytest
import torch
from conftest import case
from places import in_store
from store_server import S3, s3, server
from torch.utils.data import DataLoader, Dataset

import ckptool
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.verify import verify
from ckptool.errors import Changed
from ckptool.storage.url import RemotePath, location

SOURCE = case("dcp_fsdp2_tp").path


class Tensors(Dataset[torch.Tensor]):
    """A checkpoint's tensors as a data set that is open before its workers are."""

    def __init__(self, checkpoint: ckptool.Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.names = [n for n, entry in checkpoint.tensors.items() if entry.dtype.name == "float32"]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.checkpoint.read(self.names[index])


@pytest.mark.parametrize(
    ("kind", "method"),
    [("disk", "fork"), ("disk", "spawn"), ("store", "forkserver"), ("store", "spawn")],
)
def test_workers_of_a_data_loader(kind: str, method: str, s3: S3) -> None:
    checkpoint = ckptool.open(SOURCE if kind == "disk" else s3.put(SOURCE, "m"))
    data = Tensors(checkpoint)
    here = Tensors(ckptool.open(SOURCE))
    wanted = [here[index] for index in range(len(here))]
    assert torch.equal(data[0], wanted[0])  # threads and connections that a fork copies
    if isinstance(checkpoint.path, RemotePath):
        checkpoint.path.store.blocks.clear()
    workers = 2 if method == "fork" else 1  # others share nothing, and each imports torch
    loader = DataLoader(data, batch_size=None, num_workers=workers, multiprocessing_context=method)
    found = list(loader)
    assert len(found) > 1
    assert all(map(torch.equal, found, wanted))
    assert torch.equal(data[0], wanted[0])  # the parent's own connections still work


@pytest.mark.parametrize("kind", ["disk", "store"])
def test_a_copy_by_pickle_reads_as_it_was_opened(kind: str, s3: S3) -> None:
    checkpoint = ckptool.open(SOURCE if kind == "disk" else s3.put(SOURCE, "m"), model_only=True)
    copy = pickle.loads(pickle.dumps(checkpoint))
    assert list(copy.tensors) == list(checkpoint.tensors)
    name = next(iter(copy.tensors))
    assert torch.equal(copy.read(name), checkpoint.read(name))


def test_a_copy_of_what_was_changed_is_refused(s3: S3) -> None:
    written = pickle.dumps(ckptool.open(s3.put(SOURCE, "m")))
    s3.write("m/__0_0.distcp", s3.get("m")["__0_0.distcp"] + b"x")
    with pytest.raises(Changed, match="changed since it was opened"):
        pickle.loads(written)


def test_a_store_goes_with_who_used_it_and_its_connections_with_it(s3: S3) -> None:
    """Nothing waits for the garbage collector."""
    url = s3.put(SOURCE, "m")
    gc.collect()
    gc.disable()
    try:
        place = in_store(url)
        assert verify(place, VerifyOptions()).ok
        held = weakref.ref(place.store), weakref.ref(place.store.client)
        del place
        deadline = time.monotonic() + 30  # a thread that fetched ahead ends a little later
        while any(one() for one in held) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [one() for one in held] == [None, None]
    finally:
        gc.enable()
