"""Names of very many steps, and long texts: what looks through them ends soon, in little memory."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import attack_build as b
import pytest
from attack_harness import MEMORY, SECONDS

import ckptool
from ckptool.commands.runs.pointers.pointers import find_pointers
from ckptool.commands.runs.search import find_run
from ckptool.errors import CkptoolError

torch = pytest.importorskip("torch")


class TooLate(BaseException):
    """A command that takes more than its time."""


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    def too_late(*_: object) -> None:
        raise TooLate

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGPROF, too_late)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def files(folder: Path, *names: str) -> tuple[Path, Path]:
    """A safetensors file with tensors of these names, and one of a model."""
    paths = folder / "odd.safetensors", folder / "model.safetensors"
    for path, held in zip(paths, (names, ("model.layers.0.weight", "b")), strict=True):
        header = {name: b.entry(offsets=[24 * n, 24 * n + 24]) for n, name in enumerate(held)}
        path.write_bytes(b.safetensors(header, b.WEIGHT * len(held)))
    return paths


COMPARED: dict[str, Callable[[Path, Path], Any]] = {
    "diff": lambda odd, model: ckptool.diff(odd, model),
    "like": lambda odd, model: ckptool.verify(odd, like=model, quick=True),
    "of": lambda odd, model: ckptool.verify(model, like=odd, quick=True),
}


@pytest.mark.parametrize("how", COMPARED)
@pytest.mark.parametrize("step", ["a.", "layers.0."])
def test_names_are_compared(step: str, how: str, tmp_path: Path) -> None:
    odd, model = files(tmp_path, step * (300_000 // len(step)) + "weight", "c")
    assert not COMPARED[how](odd, model)


NUMBER = "9" * 5_000
"""More digits than Python parses."""
NUMBERED = (
    f"model.layers.{NUMBER}.self_attn.q_proj.weight",
    f"model.layers.{NUMBER}.eh_proj.weight",
    f"model.layers.0.mlp.experts.{NUMBER}.down_proj.weight",
    f"decoder.layers.{NUMBER}.mlp.linear_fc1.weight",
    f"fp32.layers.{NUMBER}.experts.experts.{NUMBER}.w",
    f"w@rank{NUMBER}",
)
MIXTRAL = '{"model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 2}'


@pytest.mark.parametrize("how", [*COMPARED, "verify", "hf", "mesh"])
@pytest.mark.parametrize("name", NUMBERED)
def test_numbers_of_thousands_of_digits_are_none(name: str, how: str, tmp_path: Path) -> None:
    odd, model = files(tmp_path, name, "c")
    (tmp_path / "m").mkdir()
    odd = odd.rename(tmp_path / "m" / "model.safetensors").parent
    (odd / "config.json").write_text(MIXTRAL)
    ways = COMPARED | {
        "verify": lambda odd, model: ckptool.verify(odd, quick=True),
        "hf": lambda odd, model: ckptool.convert(odd, tmp_path / "out", to="hf"),
        "mesh": lambda odd, model: ckptool.reshard(odd, tmp_path / "out", mesh="2", to="dcp"),
    }
    with suppress(CkptoolError):  # what the config says may not be there
        ways[how](odd, model)


@pytest.mark.parametrize("asked", [{"dtype": ["bf16"]}, {"dequantize": True}])
def test_scales_are_looked_for(asked: dict[str, Any], tmp_path: Path) -> None:
    odd, _ = files(tmp_path, "weight." * 40_000 + "weight_scale", "c")
    with suppress(CkptoolError):  # none fits
        ckptool.convert(odd, tmp_path / "out.pt", **asked)


@pytest.mark.parametrize("of", ["m.weight", "other"])
def test_the_state_of_a_parameter_is_looked_for(of: str, tmp_path: Path) -> None:
    key_map = tmp_path / "map.toml"
    key_map.write_text('[[rule]]\nfrom = "m.weight"\nto = "mm.weight"\n')
    state = {"x." * 1500 + of + ".y" * 1500: {"exp_avg": torch.ones(2, 2)}}
    whole = {"m": {"weight": torch.ones(2, 2)}, "optimizer": {"state": state}}
    torch.save(whole, tmp_path / "odd.pt")
    with pytest.raises(CkptoolError, match="cannot follow the parameters"):
        ckptool.convert(tmp_path / "odd.pt", tmp_path / "out.pt", map=str(key_map))


def test_a_map_is_looked_for(tmp_path: Path) -> None:
    names = ["model.layers." * 70_000 + f"weight{n}" for n in range(2)]
    odd, _ = files(tmp_path, *names, "model.norm.weight")
    with pytest.raises(CkptoolError, match="no built-in map matches all model tensors"):
        ckptool.convert(odd, tmp_path / "out.pt", map="auto")


TEXTS: dict[str, tuple[str, str]] = {
    "blanks": ("notes.txt", " " * 4000 + "!"),
    "empty lines": ("latest", "\n" * 60_000 + "!"),
    "slashes": ("latest", "/" * 60_000 + " !"),
    "names": ("latest", "step-1 " * 60_000),
    "names in one path": ("latest", "step-1/" * 30_000),
    "lists in lists": ("latest", "[" * 900 + "]" * 900),
}
"""Files of a run that may name its steps."""


@pytest.mark.parametrize("what", TEXTS)
def test_steps_are_looked_for(what: str, tmp_path: Path) -> None:
    for number in range(3):
        state = b.program(b.pairs((b.text("w"), b.tensor())))
        b.torch_file(tmp_path / f"step-{number}" / "model.pt", state)
    name, text = TEXTS[what]
    (tmp_path / name).write_text(text)
    assert len(find_pointers(find_run(tmp_path))) == ("step-1" in text)


def test_a_number_is_looked_for_among_many_steps(tmp_path: Path) -> None:
    state = b.program(b.pairs((b.text("w"), b.tensor())))
    for number in range(300):
        b.torch_file(tmp_path / f"step-{number}" / "model.pt", state)
    (tmp_path / "latest").write_text(str([*range(1000, 90_000), 7]))
    assert [path.name for path in find_pointers(find_run(tmp_path))] == ["step-7"]
