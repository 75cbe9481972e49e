"""verify --against, between element types: casts, causes and tolerances."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import case, convert_to
from hypothesis import given
from hypothesis import strategies as st
from recipes.damage import DAMAGE
from safetensors.torch import save_file
from verify.compare.compared import against, codes, state

from ckptool.commands.options.question import Question
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.compare.against import against as run_against
from ckptool.core.box import Box, row_major_strides
from ckptool.core.casts import Casts
from ckptool.core.catalog import Chunk, Extent, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.engine.check.difference import Tolerance
from ckptool.engine.check.pairs import TensorPair
from ckptool.engine.check.tensors import compare
from ckptool.engine.read.tensors import CheckedSource
from ckptool.storage.local import LocalSource


def test_a_cast_copy_is_the_same_once_cast(out: Path) -> None:
    source = case("dcp_fsdp2").path
    convert_to("safetensors", source, out / "m", casts=Casts(BY_NAME["bfloat16"]), model_only=True)
    assert codes(against(source, out / "m", model_only=True)) == {"dtype-differs", "excluded"}
    assert against(source, out / "m", model_only=True, cast=True).verify.ok


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_a_cast_copy_is_the_same_whichever_side_it_is_on(dtype: str, out: Path) -> None:
    save_file({"w": torch.randn(300)}, out / "a.safetensors")
    convert_to("torch-save", out / "a.safetensors", out / "b.pt", casts=Casts(BY_NAME[dtype]))
    sides = out / "a.safetensors", out / "b.pt"
    assert all(against(*each, cast=True).verify.ok for each in (sides, sides[::-1]))
    values = torch.load(sides[1])
    values["w"].view(torch.uint8)[0] ^= 1
    torch.save(values, sides[1])
    for each in (sides, sides[::-1]):
        assert codes(against(*each, cast=True)) == {"tensor-differs"}


def test_what_a_cast_makes_infinite_is_counted(out: Path) -> None:
    wide = torch.tensor([1.0, 1e5, torch.inf, -1e5])
    save_file({"w": wide}, out / "a.safetensors")
    save_file({"w": wide.half()}, out / "b.safetensors")
    sides = out / "a.safetensors", out / "b.safetensors"
    for each in (sides, sides[::-1]):
        summary = against(*each, cast=True).verify.summary
        assert "1 of them cast to the coarser type of both (2 values beyond its range)" in summary


def widened(tensors: dict[str, torch.Tensor]) -> None:
    tensors |= {"wide": tensors["wide"].double(), "nan": tensors["nan"].double()}


def transposed(tensors: dict[str, torch.Tensor]) -> None:
    tensors |= {name: tensors[name][None] for name in ("nan", "flag")}


def increased(tensors: dict[str, torch.Tensor]) -> None:
    tensors |= {name: tensors[name] + 1 for name in ("wide", "half", "count")}


def dropped(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["wide"], tensors["scalar"]


@pytest.mark.parametrize(
    ("change", "code", "count"),
    [
        (widened, "dtype-differs", 2),
        (increased, "tensor-differs", 3),
        (dropped, "tensor-missing", 2),
    ],
)
def test_a_cause_is_one_finding_with_all_tensors_that_differ(
    change: Callable[[dict[str, torch.Tensor]], None],
    code: str,
    count: int,
    saved: Callable[..., tuple[Path, Path]],
) -> None:
    report = against(*saved(change)).verify
    (finding,) = report.findings
    assert (finding.code, finding.count) == (code, count)
    assert report.summary == f"DIFFERENT: {count} differences"


def test_tensors_of_other_shapes_differ_for_reasons_of_their_own(
    saved: Callable[..., tuple[Path, Path]],
) -> None:
    assert [f.tensor for f in against(*saved(transposed)).verify.findings] == ["nan", "flag"]


def test_a_damaged_file_of_one_side_is_one_finding(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("dcp_base")
    DAMAGE["file_zeroed"].apply(folder)
    good = case("dcp_base").path
    for one, other, side in ((folder, good, "A"), (good, folder, "B")):
        findings = against(one, other).verify.findings
        (finding,) = [finding for finding in findings if finding.code == "item-mismatch"]
        assert finding.message.startswith(f"{side}: ")
        assert finding.count > 1


def test_what_is_ignored_is_not_equal_to_anything(saved: Callable[..., tuple[Path, Path]]) -> None:
    one, other = saved(increased)
    question = Question(check=VerifyOptions(ignore=("tensor-differs",)))
    summary = run_against(one, other, question).verify.summary
    assert summary.startswith(f"EQUAL: {len(state()) - 3} tensors ")
    assert summary.endswith("; 1 error ignored: tensor-differs (one.safetensors)")


@pytest.mark.parametrize(
    ("rtol", "atol", "same"),
    [(0.01, 0, True), (0, 0.02, True), (1e-9, 0, False), (0, 1e-9, False), (1e-9, 1, True)],
)
def test_a_copy_in_another_type_is_the_same_within_a_tolerance(
    rtol: float, atol: float, same: bool, saved: Callable[..., tuple[Path, Path]]
) -> None:
    def halved(tensors: dict[str, torch.Tensor]) -> None:
        tensors["wide"] = tensors["wide"].bfloat16()

    report = against(*saved(halved), rtol=rtol, atol=atol)
    assert report.verify.ok == same


FLOATS = ["float64", "float32", "float16", "bfloat16", "complex64", "int64", "uint8", "bool"]


def random_tensor(seed: int, dtype: str) -> torch.Tensor:
    """Numbers close to one another, with NaN and infinities among them."""
    generator = torch.Generator().manual_seed(seed % 3)
    kind = getattr(torch, dtype)
    if not (kind.is_floating_point or kind.is_complex):
        return torch.randint(0, 2 + seed % 3, (40,), generator=generator).to(kind)
    values = torch.randn(40, generator=generator, dtype=torch.float64)
    values[seed % 7] = float("nan")
    values[seed % 5] = float("inf")
    values += 10.0 ** -(seed % 11)
    return values.to(kind)


@given(
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.sampled_from(FLOATS),
    st.sampled_from(FLOATS),
    st.sampled_from([0, 1e-6, 1e-3, 0.1]),
    st.sampled_from([0, 1e-6, 1e-3, 0.5]),
)
def test_tolerance_means_what_torch_means(
    seed: int, other: int, first: str, second: str, rtol: float, atol: float
) -> None:
    one, two = random_tensor(seed, first), random_tensor(other, second)
    found = compared(one, two, Tolerance(rtol, atol))
    wide = torch.complex128 if "complex64" in (first, second) else torch.float64
    a, b = one.to(wide), two.to(wide)
    if wide is torch.complex128:
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    near = torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True).reshape(40, -1).all(dim=1)
    assert found == int((~near).sum())


def compared(one: torch.Tensor, other: torch.Tensor, tolerance: Tolerance) -> int:
    """How many elements of two tensors differ, compared as files."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        entries = []
        for name, tensor in (("one", one), ("other", other)):
            Path(folder, name).write_bytes(tensor.view(torch.uint8).numpy().tobytes())
            dtype = BY_NAME[str(tensor.dtype).removeprefix("torch.")]
            shape = tuple(tensor.shape)
            place = Extent(name, 0, row_major_strides(shape, dtype.itemsize))
            entries.append(
                TensorEntry("t", ("t",), dtype, shape, (Chunk(Box.whole(shape), place),))
            )
        source = LocalSource(Path(folder), {})
        reads = CheckedSource(source), CheckedSource(source)
        found = compare([TensorPair(entries[0], entries[1])], reads, tolerance, 1)
        return found.differences["t"].elements if found.differences else 0
