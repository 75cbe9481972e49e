"""Real checkpoints with their truth, and the frameworks' own loaders."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from collection import (  # noqa: F401
    pytest_collection,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_make_collect_report,
    pytest_runtest_teardown,
    pytest_terminal_summary,
    pytest_xdist_make_scheduler,
)
from fork_server import Forked, share
from hypothesis import settings
from trials import trials

if TYPE_CHECKING:
    from ckptool.commands.inspect.report import InspectReport
    from ckptool.storage.url import Location

TESTS = Path(__file__).parent
FIXTURES = TESTS.parent / "fixtures"
sys.path.insert(0, str(FIXTURES))
# keep what is compiled, whatever the environment says: hundreds of processes import the package
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
settings.register_profile("ckptool", deadline=None, max_examples=trials(40))
settings.load_profile("ckptool")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-screens", action="store_true", help="keep what commands show now")


def pytest_configure(config: pytest.Config) -> None:
    """torch's own remarks on loading without a process group are not about this project.

    Processes that tests interrupt would inherit it if this one ignores Ctrl-C, as under nohup.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        share()
    config.addinivalue_line("markers", "trials: makes more of them where CKPTOOL_TRIALS says so")
    for category in ("UserWarning", "FutureWarning", "DeprecationWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{category}:torch")
        config.addinivalue_line("filterwarnings", f"ignore::{category}:recipes")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Threads of torch would spin while they wait for one another's few elements."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


Bits = tuple[str, tuple[int, ...], bytes]
"""Element type, shape and bytes: equal for equal values, NaN or not."""


@dataclass(frozen=True)
class Case:
    """A checkpoint of the ``fixtures`` folder, and what it must turn out to hold."""

    name: str

    @property
    def path(self) -> Path:
        return FIXTURES / self.name / "ckpt"

    @cached_property
    def facts(self) -> dict[str, Any]:
        return json.loads((FIXTURES / self.name / "truth.json").read_text())

    @property
    def expect(self) -> str:
        """``ok``, ``part`` (what is no plain tensor is named), ``conflict``, ``incomplete``, or an
        error class.
        """
        return self.facts["expect"]

    @property
    def unread(self) -> tuple[str, ...]:
        """The tensors of kinds that are not read, which a writing command refuses."""
        return UNREAD.get(self.name, ())

    @property
    def shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {n: (t["dtype"], tuple(t["shape"])) for n, t in self.facts["tensors"].items()}

    @cached_property
    def truth(self) -> dict[str, Bits]:
        from safetensors import safe_open

        with safe_open(FIXTURES / self.name / "truth.safetensors", "numpy") as file:
            return {n: (*self.shapes[n], file.get_tensor(n).tobytes()) for n in self.shapes}

    def __hash__(self) -> int:
        return hash(self.name)


UNREAD = {
    "odd_kinds": ("halves", "sparse", "compressed", "nested"),
    "rank_partial": ("addends",),
}
CASES = [Case(path.parent.name) for path in sorted(FIXTURES.glob("*/truth.json"))]
GOOD = [case for case in CASES if case.expect in ("ok", "part")]
READ = ("ok", "part", "conflict", "incomplete")
REFUSED = [case for case in CASES if case.expect not in READ]


def inspect_one(path: Any) -> InspectReport:
    """Inspect what is one checkpoint."""
    import ckptool
    from ckptool.commands.inspect.report import InspectReport

    report = ckptool.inspect(path)
    if not isinstance(report, InspectReport):
        raise TypeError(f"{path} is a run")
    return report


def case(name: str) -> Case:
    return next(one for one in CASES if one.name == name)


def by_name(one: Any) -> str:
    return one.name


def bits(tensor: Any) -> Bits:
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data


def flat(tree: Any, head: str = "") -> dict[str, Any]:
    """The tensors of a nested state dict by their dotted names."""
    import torch

    if isinstance(tree, torch.Tensor):
        return {head: tree}
    if not isinstance(tree, dict | list | tuple):
        return {}
    steps = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found: dict[str, Any] = {}
    for key, value in steps:
        found |= flat(value, f"{head}.{key}" if head else str(key))
    return found


def numpy_globals() -> list[Any]:
    """The functions that create numpy's arrays and scalars: data, but not on torch's own list."""
    import numpy as np

    multiarray, numeric = np._core.multiarray, np._core.numeric  # type: ignore[attr-defined]
    types = [getattr(np.dtypes, name) for name in np.dtypes.__all__]
    makers = [multiarray._reconstruct, multiarray.scalar, numeric._frombuffer]
    # bytes: protocol 2 writes the data of an empty array as a call of it
    return [*makers, bytes, np.ndarray, np.dtype, np.float32, *types]


def load_torch(path: Path) -> Any:
    import torch

    with torch.serialization.safe_globals(numpy_globals()):
        return torch.load(path, weights_only=True)


def load_dcp(path: Path) -> Any:
    """As ``dcp_to_torch_save`` loads: whole, nested, without a process group."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    _load_state_dict(
        state,
        storage_reader=dcp.FileSystemReader(path),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    return state


def _extra(folder: Path) -> dict[str, Any]:
    return {n: t for file in folder.glob("*.extra.pt") for n, t in flat(load_torch(file)).items()}


def _tensors_of_safetensors(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    folder = path if path.is_dir() else path.parent
    state = _extra(folder)
    for file in sorted(folder.rglob("*.safetensors")):
        component = "".join(f"{part}." for part in file.parent.relative_to(folder).parts)
        state |= {component + name: tensor for name, tensor in load_file(file).items()}
    return state


def _tensors_of_dcp_safetensors(path: Path) -> dict[str, Any]:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    tensors = {n: e for n, e in entries.items() if isinstance(e, TensorStorageMetadata)}
    state = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in tensors.items()}
    if state:
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    return state | _extra(path)


def _tensors_of_meta(path: Path) -> dict[str, Any]:
    """What Lightning keeps beside DCP's files."""
    return flat(load_torch(path), "meta") if path.exists() else {}


TENSORS_OF: dict[str, Callable[[Path], dict[str, Any]]] = {
    "safetensors": _tensors_of_safetensors,
    "torch-save": lambda path: flat(load_torch(path)),
    "dcp": lambda path: flat(load_dcp(path)) | _tensors_of_meta(path / "meta.pt"),
    "dcp-safetensors": _tensors_of_dcp_safetensors,
}
"""Target format to a loader that is not ours."""

SUFFIX = {"safetensors": "", "torch-save": ".pt", "dcp": "", "dcp-safetensors": ""}


def read_back(target: str, path: Path) -> dict[str, Bits]:
    """What the framework's own loader finds, by name."""
    return {name: bits(tensor) for name, tensor in TENSORS_OF[target](path).items()}


def truth_of(one: Case, target: str) -> dict[str, Bits]:
    """The truth by the names that tensors have in a target; Lightning's own file has others."""
    if (one.name, target) != ("dcp_lightning", "torch-save"):
        return one.truth
    return {
        name.removeprefix("meta.").replace("optimizer_0.", "optimizer_states.0."): value
        for name, value in one.truth.items()
    }


def taken(kind: Any, options: dict[str, Any]) -> Any:
    """The value whose fields are among the options, which lose them."""
    return kind(**{f: options.pop(f) for f in kind.__struct_fields__ if f in options})


def convert_to(target: str, source: Location, path: Location, **options: Any) -> Any:
    """Convert and return the report."""
    from ckptool.commands.convert import prepare
    from ckptool.commands.options.read import ReadOptions
    from ckptool.commands.options.rewrite import RewriteOptions, Selection
    from ckptool.commands.options.run import RunOptions
    from ckptool.commands.options.target import ConvertOptions, TransferOptions

    options["read"] = taken(ReadOptions, options)
    options["selection"] = taken(Selection, options)
    options["rewrite"] = taken(RewriteOptions, options)
    run = options.pop("run", RunOptions(workers=2, fsync=False))
    transfer = TransferOptions(overwrite=options.pop("overwrite", False), run=run)
    return prepare(source, path, ConvertOptions(to=target, transfer=transfer, **options)).run()


@dataclass(frozen=True)
class Ended:
    """How one rank ended, or a command."""

    code: int
    stdout: str
    stderr: str


def on_ranks(
    world: int,
    words: Sequence[str | Path],
    folders: Sequence[Path] | None = None,
    *,
    fresh: bool = False,
) -> list[Ended]:
    """Run a python command once a rank, with torchrun's environment.

    With ``folders`` each rank works in one, and the ranks of a node are those that share theirs.
    With ``fresh`` each rank starts a Python of its own, which takes seconds: nothing is shared
    then, not the seed of hashes either.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes: list[Any] = []
    for rank in range(world):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(folders[:rank].count(folders[rank]) if folders else rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        begin = _start if fresh else Forked
        place = folders[rank] if folders else Path.cwd()
        processes.append(begin([*map(str, words)], environment, place))
    try:
        found = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [Ended(p.returncode, *text) for p, text in zip(processes, found, strict=True)]


def _start(words: list[str], environment: dict[str, str], cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=cwd,
    )


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """A test's folder with nothing beside it: verify and prune follow every link beside a run.

    Beside pytest's own are a folder and a link for each test before.
    """
    folder = tmp_path / "own"
    folder.mkdir()
    return folder


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a fixture's checkpoint that a test may change."""

    def copy(name: str) -> Path:
        folder = tmp_path / "source" / name
        shutil.copytree(case(name).path, folder)
        return folder

    return copy


@pytest.fixture
def flipped(copy_of: Callable[[str], Path]) -> Path:
    """A DCP checkpoint of which one byte of data is another."""
    from recipes.damage import DAMAGE

    folder = copy_of("dcp_base")
    DAMAGE["data_flipped"].apply(folder)
    return folder


class Stream(TextIOWrapper):
    """What a pipe is given, or a terminal."""

    def __init__(self, *, terminal: bool) -> None:
        self._bytes = BytesIO()
        self._terminal = terminal
        super().__init__(self._bytes, encoding="utf-8", write_through=True)

    def isatty(self) -> bool:
        return self._terminal

    def getvalue(self) -> str:
        return self._bytes.getvalue().decode()


def run_command(*words: object, cwd: Path | None = None, terminal: bool = False) -> Ended:
    """Run ``ckptool`` in this process; a process of its own takes the time of its imports."""
    from ckptool.cli import _run

    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(Stream(terminal=terminal)) as said,
        redirect_stderr(Stream(terminal=terminal)) as complained,
    ):
        patch.setattr(sys, "argv", ["ckptool", *map(str, words)])
        patch.chdir(cwd or Path.cwd())
        code = _run()
    return Ended(code, said.getvalue(), complained.getvalue())


def run_verify(*words: str, env: dict[str, str] | None = None) -> Any:
    """Run ``ckptool verify`` in this process, away from GitHub unless ``env`` says otherwise."""
    from typer.testing import CliRunner

    from ckptool.cli.app import app

    return CliRunner().invoke(app, ["verify", *words], env={"GITHUB_ACTIONS": "", **(env or {})})


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An empty folder to write into."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def calls_of(work: Callable[[], object]) -> int:
    """How many functions ``work`` calls: a measure of cost that no busy machine changes."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls
