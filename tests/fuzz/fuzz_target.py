"""A coverage-guided fuzzer for one parser: ``python fuzz_target.py NAME [libFuzzer options]``.

Whatever the bytes are, a parser returns or raises a ``CkptoolError``. The corpus to start from is
made of the fixtures at run time. ``make fuzz`` runs each target for a minute.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
SMALL = 16 << 10


class Bytes:
    """One file in memory, as formats read it."""

    root = "fuzz"

    def __init__(self, data: bytes, name: str) -> None:
        self._data = data
        self.files: Mapping[str, int] = {name: len(data)}

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        from ckptool.errors import Damaged

        data = self._data[max(0, offset) : offset + nbytes]
        if offset < 0 or len(data) != nbytes:
            raise Damaged(f"{file}: too short")
        return data

    def expect(self, spans: object) -> None:
        """All is at hand."""

    def narrowed(self, folder: str) -> Bytes:
        raise FileNotFoundError(folder)


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
    from ckptool.serialization.zip import Region, read_directory
    from ckptool.serialization.zip_headers import check_headers

    source = Bytes(data, "fuzz.pt")
    list(find_archives(source, "fuzz.pt"))
    region = Region(source, "fuzz.pt", 0, len(data))
    check_headers(region, read_directory(region).values())
    read_torch_zip(region)


def fuzz_safetensors(data: bytes) -> None:
    from ckptool.serialization.safetensors import read_safetensors

    read_safetensors(Bytes(data, "fuzz.safetensors"), "fuzz.safetensors")


def fuzz_index(data: bytes) -> None:
    from ckptool.formats.shards import read_index

    read_index(Bytes(data, "fuzz.index.json"), "fuzz.index.json")


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
        import ckptool.formats._archives
        import ckptool.formats._dcp_metadata

        import ckptool.formats.torch_save  # noqa: F401
    with tempfile.TemporaryDirectory() as corpus:
        for number, data in enumerate(seeds(name)):
            Path(corpus, str(number)).write_bytes(data)
        atheris.Setup([sys.argv[0], *options, corpus], one_input(name))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
