"""A coverage-guided fuzzer for one parser: ``python fuzz_target.py NAME [libFuzzer options]``.

Whatever the bytes are, a parser returns or raises a ``CkptoolError``. The corpus to start from is
made of the fixtures at run time. ``make fuzz`` runs each target for a minute.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptool.storage.virtual.memory import MemoryFiles

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
SMALL = 16 << 10


def one_file(data: bytes, name: str) -> MemoryFiles:
    """Return one file in memory, as formats read it."""
    from ckptool.storage.virtual.memory import MemoryFiles

    return MemoryFiles({name: memoryview(data)})


def fuzz_pickle(data: bytes) -> None:
    from ckptool.serialization.pickle.load import find_globals, read_pickle

    find_globals(data, pickles=5)
    read_pickle(data, what="fuzz")


def fuzz_metadata(data: bytes) -> None:
    from ckptool.formats.dcp.metadata import parse

    parse(data, "fuzz")


def fuzz_zip(data: bytes) -> None:
    from ckptool.serialization.archive.read import read_torch_zip
    from ckptool.serialization.archive.recover import find_archives
    from ckptool.serialization.source import NearReads
    from ckptool.serialization.zip import Region, read_directory
    from ckptool.serialization.zip_headers import check_headers

    source = one_file(data, "fuzz.pt")
    list(find_archives(source, "fuzz.pt"))
    region = Region(NearReads(source), "fuzz.pt", 0, len(data))
    check_headers(region, read_directory(region).values())
    read_torch_zip(region)


def fuzz_safetensors(data: bytes) -> None:
    from ckptool.serialization.safetensors import read_safetensors

    read_safetensors(one_file(data, "fuzz.safetensors"), "fuzz.safetensors")


def fuzz_index(data: bytes) -> None:
    from ckptool.formats.shards import read_index

    read_index(one_file(data, "fuzz.index.json"), "fuzz.index.json")


TARGETS: dict[str, tuple[Callable[[bytes], None], tuple[str, ...]]] = {
    "pickle": (fuzz_pickle, ("**/.metadata", "**/metadata.pkl", "**/*.metadata")),
    "metadata": (fuzz_metadata, ("**/.metadata", "**/*.metadata")),
    "zip": (fuzz_zip, ("**/*.pt", "**/*.pth", "**/*.bin", "**/*.distcp")),
    "safetensors": (fuzz_safetensors, ("**/*.safetensors",)),
    "index": (fuzz_index, ("**/*.index.json",)),
}
"""Parser to its target and the fixtures that are its first inputs."""


def seeds(name: str) -> Iterator[bytes]:
    """The small fixture files that the parser reads."""
    for pattern in TARGETS[name][1]:
        for path in sorted(FIXTURES.glob(pattern)):
            if 0 < path.stat().st_size <= SMALL:
                yield path.read_bytes()


def one_input(name: str) -> Callable[[bytes], None]:
    """The target, with the errors that are its right answer taken away."""
    from ckptool.errors import CkptoolError

    target = TARGETS[name][0]

    def run(data: bytes) -> None:
        try:
            target(data)
        except CkptoolError as error:
            str(error).encode("utf-8", "surrogatepass")

    return run


def main() -> None:
    import atheris

    name, *options = sys.argv[1:]
    with atheris.instrument_imports(include=["ckptool"]):
        import ckptool.formats.dcp.metadata
        import ckptool.formats.shards
        import ckptool.serialization.archive.read
        import ckptool.serialization.archive.recover
        import ckptool.serialization.safetensors
        import ckptool.serialization.zip_headers  # noqa: F401
    with tempfile.TemporaryDirectory() as corpus:
        for number, data in enumerate(seeds(name)):
            Path(corpus, str(number)).write_bytes(data)
        atheris.Setup([sys.argv[0], *options, corpus], one_input(name))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
