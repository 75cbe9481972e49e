"""Every good checkpoint becomes every target, bit for bit, as the frameworks' loaders see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import (
    GOOD,
    SUFFIX,
    TENSORS_OF,
    Bits,
    Case,
    bits,
    by_name,
    case,
    convert_to,
    load_dcp,
    load_torch,
    read_back,
    truth_of,
)

OF_A_RANK = ("extra_state.", "random_states.")


def of_the_model(found: dict[str, Bits]) -> dict[str, Bits]:
    """Without the random states, which each rank has for itself."""
    return {name: value for name, value in found.items() if not name.startswith(OF_A_RANK)}


@pytest.mark.parametrize("target", TENSORS_OF)
@pytest.mark.parametrize("one", GOOD, ids=by_name)
def test_bit_equal(one: Case, target: str, out: Path) -> None:
    path = out / f"m{SUFFIX[target]}"
    convert_to(target, one.path, path, drop=one.unread)
    assert of_the_model(read_back(target, path)) == truth_of(one, target)


CHAINS = [
    ("dcp", "torch-save", "dcp", "safetensors"),
    ("torch-save", "dcp-safetensors", "torch-save"),
    ("safetensors", "dcp", "dcp-safetensors", "dcp"),
]


@pytest.mark.parametrize("chain", CHAINS, ids="-".join)
@pytest.mark.parametrize("name", ["dcp_fsdp2_tp", "rank_experimental", "zip_zoo", "hf_shards"])
def test_chains_stay_bit_equal(name: str, chain: tuple[str, ...], out: Path) -> None:
    source, expected = case(name).path, case(name).truth
    for number, target in enumerate(chain):
        folder = out / str(number)
        folder.mkdir()
        path = folder / f"m{SUFFIX[target]}"
        convert_to(target, source, path)
        assert read_back(target, path) == expected
        source = path


@pytest.mark.parametrize("one", GOOD, ids=by_name)
def test_dcp_of_one_rank(one: Case, out: Path) -> None:
    convert_to("dcp", one.path, out / "m", single_rank=True, drop=one.unread)
    assert [path.name for path in (out / "m").glob("*.distcp")] == ["__0_0.distcp"]
    assert of_the_model(read_back("dcp", out / "m")) == one.truth


def test_dcp_keeps_the_chunks_of_its_source(out: Path) -> None:
    convert_to("dcp", case("dcp_fsdp2_tp").path, out / "m")
    assert len(list((out / "m").glob("*.distcp"))) == 4


# Nesting


def normal(tree: Any) -> Any:
    """A state dict in a form that compares by value, containers' types included."""
    import torch

    if isinstance(tree, torch.Tensor):
        return bits(tree)
    if isinstance(tree, dict):
        return {"dict": {key: normal(value) for key, value in tree.items()}}
    if isinstance(tree, torch.Size):
        return ("Size", tuple(tree))
    if isinstance(tree, list | tuple):
        return [type(tree).__name__, *map(normal, tree)]
    if isinstance(tree, float) and tree != tree:
        return "nan"
    return (type(tree).__name__, tree)


@pytest.mark.parametrize("name", ["zip_zoo", "zip_protocol_4", "legacy_zoo", "module_state"])
def test_torch_save_keeps_nesting_and_values(name: str, out: Path) -> None:
    import torch

    one = case(name)
    convert_to("torch-save", one.path, out / "m.pt")
    source = next(one.path.iterdir())
    expected = torch.load(source, weights_only=name != "zip_protocol_4")
    assert normal(load_torch(out / "m.pt")) == normal(expected)


@pytest.mark.parametrize(
    "name", ["dcp_zoo", "dcp_zstd", "dcp_fsdp2_tp", "dcp_hsdp", "dcp_unflattened", "torch_2_1_dcp"]
)
def test_torch_save_of_dcp_is_what_dcp_loads(name: str, out: Path) -> None:
    convert_to("torch-save", case(name).path, out / "m.pt")
    assert normal(load_torch(out / "m.pt")) == normal(load_dcp(case(name).path))


@pytest.mark.parametrize("name", ["zip_zoo", "dcp_zoo", "rank_experimental"])
def test_dcp_keeps_nesting_and_values(name: str, out: Path) -> None:
    """As DCP keeps them: all keys as text, lists that hold no tensor whole."""
    convert_to("dcp", case(name).path, out / "dcp")
    convert_to("torch-save", case(name).path, out / "m.pt")
    assert with_text_keys(load_dcp(out / "dcp")) == with_text_keys(load_torch(out / "m.pt"))


def with_text_keys(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {str(key): with_text_keys(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple) and not hasattr(tree, "numel"):
        return [with_text_keys(value) for value in tree]
    return normal(tree)


def test_tied_tensors_share_a_storage_again(out: Path) -> None:
    convert_to("torch-save", case("zip_zoo").path, out / "m.pt")
    tied = load_torch(out / "m.pt")["tied"]
    assert tied["a"].data_ptr() == tied["b"].data_ptr()


def test_values_go_into_the_extra_file_of_safetensors(out: Path) -> None:
    import torch

    one = case("zip_zoo")
    report = convert_to("safetensors", one.path, out / "m.safetensors")
    assert sorted(path.name for path in out.iterdir()) == ["m.extra.pt", "m.safetensors"]
    assert any("m.extra.pt" in note for note in report.notes)
    source = torch.load(next(one.path.iterdir()), weights_only=True)
    extra = load_torch(out / "m.extra.pt")
    plain = {k: v for k, v in source.items() if not isinstance(v, dict | torch.Tensor)}
    assert normal({k: extra[k] for k in plain}) == normal(plain)


def test_companions_are_carried_into_folders(out: Path) -> None:
    source = case("hf_shards").path
    for target in ("safetensors", "dcp", "dcp-safetensors"):
        convert_to(target, source, out / target)
        for name in ("config.json", "tokenizer.json"):
            assert (out / target / name).read_bytes() == (source / name).read_bytes()


def test_values_that_are_not_plain_data_are_named(out: Path) -> None:
    one = case("odd_kinds")
    report = convert_to("torch-save", one.path, out / "m.pt", drop=one.unread)
    assert any("args" in note and "argparse.Namespace" in note for note in report.notes)
    assert list(load_torch(out / "m.pt")) == ["w", "quantized", "channels"]


@pytest.mark.parametrize("name", ["m", "m.safetensors"])
def test_the_extra_file_is_not_lost_in_silence(name: str, out: Path) -> None:
    """What an earlier conversion put beside the safetensors is carried on, or named."""
    one = case("zip_zoo")
    convert_to("safetensors", one.path, out / name)
    report = convert_to("torch-save", out / name, out / "again.pt")
    complete = read_back("torch-save", out / "again.pt") == one.truth
    assert complete or any("extra.pt" in note for note in report.notes)
