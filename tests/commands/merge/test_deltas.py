"""Chains of weight deltas: those of slime and ModelExpress, and what is wrong with others."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from conftest import FIXTURES, bits
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner
from zstandard import ZstdCompressionParameters, ZstdCompressor

import ckptool
from ckptool.cli.app import app
from ckptool.engine.formulas.delta import ChangedBits
from ckptool.errors import CkptoolError

Tensors = dict[str, torch.Tensor]
DELTAS = FIXTURES / "deltas"
CHAINS = {
    "slime_xor": [f"weight_v{version:06d}" for version in range(1, 5)],
    "slime_overwrite": [f"weight_v{version:06d}" for version in range(1, 5)],
    "modelexpress": ["4f1a", "7be2", "91d0", "a6c3"],
}
Payload = Callable[[bytes], bytes]


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["merge", *map(str, words)])
    if isinstance(result.exception, CkptoolError):
        hints = getattr(result.exception, "__notes__", [])
        return result.exception.exit_code, " ".join([str(result.exception), *hints])
    return result.exit_code, " ".join(result.output.split())


def applied(out: Path, onto: Path, *deltas: Path) -> Tensors:
    code, said = run(out, "--apply-delta", *deltas, "--onto", onto)
    assert code == 0, said
    return {
        n: tensor for file in out.glob("*.safetensors") for n, tensor in load_file(file).items()
    }


def refused(tmp_path: Path, onto: Path, *deltas: Path) -> str:
    code, said = run(tmp_path / "out", "--apply-delta", *deltas, "--onto", onto)
    assert code in (3, 4), said
    assert not (tmp_path / "out").exists()
    return said


def require_same(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert bits(found[name]) == bits(tensor), name


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_chain_gives_what_its_trainer_had(chain: str, count: int, tmp_path: Path) -> None:
    deltas = [DELTAS / chain / name for name in CHAINS[chain][:count]]
    found = applied(tmp_path / "out", DELTAS / "base", *deltas)
    require_same(found, load_file(DELTAS / "truth" / str(count) / "model.safetensors"))


def test_a_chain_goes_on_from_what_was_applied(tmp_path: Path) -> None:
    first, *others = (DELTAS / "slime_xor" / name for name in CHAINS["slime_xor"])
    applied(tmp_path / "once", DELTAS / "base", first)
    found = applied(tmp_path / "all", tmp_path / "once", *others)
    require_same(found, load_file(DELTAS / "truth/4/model.safetensors"))


@pytest.mark.parametrize("to", ["torch-save", "dcp"])
def test_the_base_and_the_result_are_of_any_format(to: str, tmp_path: Path) -> None:
    base, out = tmp_path / ("base.pt" if to == "torch-save" else "base"), tmp_path / "out"
    ckptool.convert(DELTAS / "base", base, to=to)
    deltas = [DELTAS / "slime_overwrite" / name for name in CHAINS["slime_overwrite"]]
    code, said = run(out, "--apply-delta", *deltas, "--onto", base, "--to", "dcp")
    assert code == 0, said
    with ckptool.open(out) as opened:
        found = {name: torch.as_tensor(opened.read(name)) for name in opened}
    require_same(found, load_file(DELTAS / "truth/4/model.safetensors"))


def test_a_recipe_says_the_same(tmp_path: Path) -> None:
    shutil.copytree(DELTAS, tmp_path / "deltas")
    recipe = tmp_path / "deltas" / "merge.toml"
    recipe.write_text(
        "sources = ['slime_xor/weight_v000001', 'slime_xor/weight_v000002']\n"
        "apply-delta = true\nonto = 'base'\n[take]\n'model.norm' = 'truth/4/model.safetensors'\n"
    )
    code, said = run(tmp_path / "out", "--recipe", recipe)
    assert code == 0, said
    found = load_file(tmp_path / "out" / "model.safetensors")
    require_same(found, load_file(DELTAS / "truth/2/model.safetensors"))


def test_a_dry_run_says_which_deltas_change_a_tensor(tmp_path: Path) -> None:
    deltas = [DELTAS / "slime_xor" / name for name in CHAINS["slime_xor"]]
    words = ("--apply-delta", *deltas, "--onto", DELTAS / "base", "--dry-run")
    code, said = run(tmp_path / "out", *words)
    assert code == 0, said
    assert "= base with weight_v000001, weight_v000002, weight_v000004" in said
    assert "1 tensor = base model.norm.weight" in said


def test_tensors_that_are_dropped_need_not_be_changed(tmp_path: Path) -> None:
    first = DELTAS / "slime_xor" / "weight_v000001"
    words = ("--apply-delta", first, "--onto", DELTAS / "base", "--drop", "model.layers")
    code, said = run(tmp_path / "out", *words, "--dtype", "fp32")
    assert code == 0, said
    found = load_file(tmp_path / "out" / "model.safetensors")
    wanted = load_file(DELTAS / "truth/1/model.safetensors")
    require_same(found, {n: t.float() for n, t in wanted.items() if "layers" not in n})


def weights(seed: int) -> Tensors:
    random = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(700, 33, generator=random).bfloat16(),
        "norm": torch.randn(5, generator=random),
        "scale": torch.randn((), generator=random),
    }


VERSIONS = [weights(0)]
for version in range(1, 4):
    changed = {name: tensor.clone() for name, tensor in VERSIONS[-1].items()}
    changed["embed"][version::7] *= -1
    changed["norm"][version] += 1
    VERSIONS.append(changed)


def raw(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def change_of(old: torch.Tensor, new: torch.Tensor, encoding: str) -> bytes:
    """Encode a change as slime's writer does."""
    before, after = raw(old), raw(new)
    if encoding == "xor":
        return (before ^ after).tobytes()
    at = np.flatnonzero(before != after).astype("<u4")
    return np.array([at.size], "<u4").tobytes() + at.tobytes() + after[at].tobytes()


def publish(
    folder: Path, number: int, encoding: str = "xor", change: Payload | None = None, **said: Any
) -> Path:
    """Write the delta of a version; ``change`` is made to the payload of ``embed``."""
    old, new = said.pop("versions", VERSIONS)[number - 1 : number + 1]
    payloads, digests = {}, {}
    for name in old:
        decoded = change_of(old[name], new[name], encoding)
        if torch.equal(raw_tensor(old[name]), raw_tensor(new[name])):
            continue
        packed = ZstdCompressor(level=1).compress(decoded)
        if change is not None and name == "embed":
            packed = change(decoded)
        payloads[name] = np.frombuffer(packed, "u1")
        digests[name] = xxhash.xxh3_128(raw(new[name]).tobytes()).hexdigest()
    path = folder / f"weight_v{number:06d}"
    path.mkdir(parents=True)
    file = "model-00000-of-00001.safetensors"
    save_arrays(payloads, path / file, said.pop("digests", digests))
    metadata = {
        "version": f"{number:06d}",
        "base_version": f"{number - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }
    metadata = {key: text for key, text in (metadata | said).items() if text is not None}
    index = {"metadata": metadata, "weight_map": dict.fromkeys(payloads, file)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def raw_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def base_at(folder: Path, version: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(VERSIONS[version], folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("encodings", [("xor", "xor"), ("xor", "overwrite"), ("overwrite", "xor")])
def test_tiles_of_larger_tensors_are_changed(encodings: tuple[str, str], tmp_path: Path) -> None:
    deltas = [publish(tmp_path, at + 1, encoding) for at, encoding in enumerate(encodings)]
    require_same(applied(tmp_path / "out", base_at(tmp_path / "base"), *deltas), VERSIONS[2])


def test_decoders_count_within_the_budget(tmp_path: Path) -> None:
    deltas = [publish(tmp_path, version, "overwrite") for version in (1, 2, 3)]
    words = ("--apply-delta", *deltas, "--onto", base_at(tmp_path / "base"), "--budget")
    code, said = run(tmp_path / "out", *words, "33MiB")
    assert code == 4
    assert "one worker needs 35,651,584 hint: --budget 34MiB" in said
    assert run(tmp_path / "out", *words, "34MiB")[0] == 0


def test_a_tensor_is_decoded_twice_whatever_its_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To be checked and written; in each, one thread goes through all of it."""
    began = list[str]()

    def begin(self: Any, at: Any) -> Any:
        began.append(at.stored[0].name)
        return original(self, at)

    original = ChangedBits._begin
    monkeypatch.setattr(ChangedBits, "_begin", begin)
    old = {"embed": torch.randn(4000, 1000), "norm": torch.randn(3)}
    new = {"embed": old["embed"] + 1, "norm": old["norm"] * 2}
    new["embed"][0] = torch.inf  # such are computed again to count them
    delta = publish(tmp_path, 1, versions=[old, new])
    (tmp_path / "base").mkdir()
    save_file(old, tmp_path / "base" / "model.safetensors")
    require_same(applied(tmp_path / "out", tmp_path / "base", delta), new)
    assert sorted(began) == ["embed"] * 2 + ["norm"] * 2


def test_a_gap_is_refused(tmp_path: Path) -> None:
    first, third = publish(tmp_path, 1), publish(tmp_path, 3)
    said = refused(tmp_path, base_at(tmp_path / "base"), first, third)
    assert f"{third}: from version 000002 to 000003, but {first} is of version 000001" in said
    assert "give what leads from version 000001 to 000002 before it" in said


def test_a_wrong_order_is_refused(tmp_path: Path) -> None:
    one, two, three = (publish(tmp_path, version) for version in (1, 2, 3))
    said = refused(tmp_path, base_at(tmp_path / "base"), one, three, two)
    assert f"in order they are {one} {two} {three}" in said


def test_a_base_of_another_version_is_refused(tmp_path: Path) -> None:
    delta, base = publish(tmp_path, 2), base_at(tmp_path / "base")
    assert "after it the tensor has xxh3-128" in refused(tmp_path, base, delta)
    (base / ".weight_sync").mkdir()
    (base / ".weight_sync" / "state.json").write_text('{"version": "000003"}')
    assert f"but {base} is of version 000003" in refused(tmp_path, base, delta)
    full = base_at(tmp_path / "full" / "weight_v000005")
    assert f"but {full}/model.safetensors is of version 000005" in refused(tmp_path, full, delta)
    (base / ".weight_sync" / "state.json").write_text('{"version": "1"}')
    base_at(base, 1)
    require_same(applied(tmp_path / "out", base, delta), VERSIONS[2])


def positions(at: list[int], new: list[int], count: int | None = None) -> bytes:
    head = np.array([len(at) if count is None else count, *at], "<u4").tobytes()
    return ZstdCompressor().compress(head + bytes(new))


def wide(decoded: bytes) -> bytes:
    parameters = ZstdCompressionParameters(window_log=23)
    packer = ZstdCompressor(compression_params=parameters).compressobj()
    return packer.compress(decoded) + packer.flush()


SIZE = raw(VERSIONS[0]["embed"]).size


@pytest.mark.parametrize(
    ("encoding", "change", "wanted"),
    [
        ("xor", lambda d: ZstdCompressor().compress(d)[:-9], "decodes to less than the 46,200"),
        ("xor", lambda d: ZstdCompressor().compress(d[:-1]), "decodes to less than the 46,200"),
        ("xor", lambda d: ZstdCompressor().compress(d + b"\0"), "decodes to more than the 46,200"),
        ("xor", lambda d: ZstdCompressor().compress(d[::-1]), "after it the tensor has xxh3-128"),
        ("xor", lambda d: zlib.compress(d), "the zstd data is corrupt"),
        ("xor", lambda d: b"", "decodes to less than"),
        ("xor", wide, "too much memory"),
        ("overwrite", lambda d: ZstdCompressor().compress(d[:-1]), "ends before its last position"),
        ("overwrite", lambda d: ZstdCompressor().compress(d)[:-9], "ends before its count of pos"),
        ("overwrite", lambda d: ZstdCompressor().compress(d + b"\0"), "more than its count"),
        ("overwrite", lambda d: positions([], [])[:1], "ends before its count of positions"),
        ("overwrite", lambda d: positions([1], [2], 1 << 31), "ends before its last position"),
        ("overwrite", lambda d: positions([3, SIZE], [1, 1]), f"position {SIZE:,} is beyond"),
        ("overwrite", lambda d: positions([3, 3], [1, 2]), "position 3 is after 3: twice"),
        ("overwrite", lambda d: positions([9, 4], [1, 2]), "position 4 is after 9: twice, or out"),
        ("overwrite", lambda d: positions([3], [1]), "after it the tensor has xxh3-128"),
    ],
)
def test_a_damaged_payload_is_refused(
    encoding: str, change: Payload, wanted: str, tmp_path: Path
) -> None:
    delta = publish(tmp_path, 1, encoding, change)
    said = refused(tmp_path, base_at(tmp_path / "base"), delta)
    assert f"{delta}: embed: " in said
    assert wanted in said


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({"delta_encoding": "sum"}, "delta_encoding 'sum' is not one of xor, overwrite"),
        ({"compression_format": "lz4"}, "compression_format 'lz4' is not one of zstd"),
        ({"checksum_format": "md5"}, "checksum_format 'md5' is not one of xxh3-128, blake3"),
        ({"checksum_format": None}, "its metadata has no checksum_format"),
        ({"version": None}, "its metadata has no version"),
        ({"digests": {"norm": "00"}}, "embed has no checksum in the header of its file"),
        ({"digests": {"embed": "00", "norm": "00"}}, "recorded 00"),
    ],
)
def test_what_a_delta_says_of_itself_must_be_known(
    more: dict[str, Any], wanted: str, tmp_path: Path
) -> None:
    delta = publish(tmp_path, 1, **more)
    assert wanted in refused(tmp_path, base_at(tmp_path / "base"), delta)


@pytest.mark.parametrize("kept", [(), ("norm",)])
def test_an_index_that_does_not_list_all_is_refused(kept: tuple[str, ...], tmp_path: Path) -> None:
    delta, base = publish(tmp_path, 1), base_at(tmp_path / "base")
    path = delta / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    assert index["weight_map"].keys() > {*kept}
    index["weight_map"] = {name: index["weight_map"][name] for name in kept}
    path.write_text(json.dumps(index))
    missing = "embed" if kept else "model-00000-of-00001.safetensors"
    assert f"index.json does not list {missing}" in refused(tmp_path, base, delta)


def test_what_lies_in_a_folder_of_a_delta_is_not_of_it(tmp_path: Path) -> None:
    delta, base = publish(tmp_path, 1), base_at(tmp_path / "base")
    (delta / ".cache").mkdir()
    save_file({"old": torch.ones(2)}, delta / ".cache" / "old.safetensors")
    require_same(applied(tmp_path / "out", base, delta), VERSIONS[1])


def test_a_delta_that_leads_nowhere_or_is_given_twice_is_refused(tmp_path: Path) -> None:
    base, delta = base_at(tmp_path / "base"), publish(tmp_path, 1, version="0")
    assert "from version 0 to the same version" in refused(tmp_path, base, delta)
    delta = publish(tmp_path / "again", 1)
    assert f"{delta}: is given twice" in refused(tmp_path, base, delta, delta)


def test_tensors_of_another_model_are_refused(tmp_path: Path) -> None:
    delta, base = publish(tmp_path, 1), tmp_path / "base"
    base.mkdir()
    save_file({"norm": VERSIONS[0]["norm"]}, base / "model.safetensors")
    assert f"changes 1 tensor that {base}/model.safetensors lacks: embed" in refused(
        tmp_path, base, delta
    )
    save_file(VERSIONS[0] | {"embed": torch.zeros(9)}, base / "model.safetensors")
    assert "embed: decodes to more than the 36 bytes" in refused(tmp_path, base, delta)


def test_weights_are_no_delta_and_a_delta_is_no_base(tmp_path: Path) -> None:
    delta, base = publish(tmp_path, 1), base_at(tmp_path / "base")
    assert "weights, no weight delta" in refused(tmp_path, base, DELTAS / "base")
    assert "not weights" in refused(tmp_path, delta, publish(tmp_path, 2))
    save_file({"embed": torch.zeros(3)}, delta / "model-00000-of-00001.safetensors")
    assert "norm" in refused(tmp_path, base, delta)
    tensors = {"embed": torch.zeros(3), "norm": torch.zeros(3)}
    save_file(tensors, delta / "model-00000-of-00001.safetensors")
    assert "embed is float32, no compressed bytes" in refused(tmp_path, base, delta)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("--apply-delta", "{delta}"), "--apply-delta: needs --onto BASE"),
        (("--apply-delta", "--onto", "{base}"), "--apply-delta: needs a SRC or more"),
        (("--apply-delta", "{base}", "--onto", "{base}"), "is one of the deltas, too"),
        (("--apply-delta", "--average", "{delta}"), "one at a time"),
        (("--apply-delta", "{delta}", "--onto", "{base}", "--rename", "a=b"), "--rename: not with"),
        (("--apply-delta", "{delta}", "--onto", "{base}", "--map", "auto"), "--map: not with"),
        (("--average", "{delta}", "{delta}"), "ckptool merge OUT --apply-delta"),
    ],
)
def test_what_contradicts_itself_is_refused(
    words: tuple[str, ...], wanted: str, tmp_path: Path
) -> None:
    places = {"delta": publish(tmp_path, 1), "base": base_at(tmp_path / "base")}
    code, said = run(tmp_path / "out", *(word.format(**places) for word in words))
    assert code != 0
    assert wanted in said
