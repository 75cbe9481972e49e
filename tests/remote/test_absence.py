"""What a web server does not show is not absent: only 404 and 410 say so."""

from __future__ import annotations

import http.server
import json
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from conftest import convert_to
from safetensors.torch import load_file, save_file
from web_server import serving

from ckptool.commands.convert import prepare
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.target import ConvertOptions
from ckptool.core.casts import Casts
from ckptool.core.dtype import BY_NAME
from ckptool.errors import Damaged, Denied, NoAnswer, NotFound
from ckptool.storage.clients.retry import RetryPolicy
from ckptool.storage.store import Store
from ckptool.storage.url import RemotePath, location

CUT, LOOP = -1, 302
STATUSES = [401, 403, 405, 429, 500, 501, 503, CUT, LOOP]
FP32 = Casts(BY_NAME["float32"])


class Web(http.server.BaseHTTPRequestHandler):
    """Answers with the ``status`` of a file, if it has one, to these ``methods``."""

    root = Path()
    status: ClassVar[dict[str, int]] = {}
    methods: tuple[str, ...] = ("GET", "HEAD")

    def log_message(self, *said: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self.root / self.path.partition("?")[0].lstrip("/")
        status = self.status.get(path.name, 0) if self.command in self.methods else 0
        if status > 0 or not path.is_file():
            self.send_response(status if status > 0 else 404)
            self.send_header("Location", self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data, asked = path.read_bytes(), self.headers.get("Range")
        start, _, last = (asked or "bytes=0-").removeprefix("bytes=").partition("-")
        stop = min(int(last) + 1 if last else len(data), len(data))
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header("Content-Length", str(stop - int(start)))
        self.end_headers()
        if self.command == "GET":
            piece = data[int(start) : stop]
            self.wfile.write(piece[: len(piece) // 2] if status == CUT else piece)

    def do_HEAD(self) -> None:
        self.do_GET()


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(Web, "root", tmp_path)
    monkeypatch.setattr(Web, "status", {})
    monkeypatch.setattr(Web, "methods", ("GET", "HEAD"))
    monkeypatch.setattr(Store, "policy", RetryPolicy(attempts=2, pause=0.01))
    with serving(Web) as base:
        yield base


def at(url: str) -> RemotePath:
    place = location(url)
    assert isinstance(place, RemotePath)
    return place


def error_of(status: int) -> type[NoAnswer]:
    return Denied if status in (401, 403) else NoAnswer


def model(folder: Path) -> Path:
    """A model with everything beside it."""
    folder.mkdir()
    save_file({"w": torch.ones(2, 2)}, folder / "model.safetensors")
    for name in BESIDE:
        (folder / name).write_text("{}")
    return folder


BESIDE = [
    *("config.json", "generation_config.json", "tokenizer.json", "hf_quant_config.json"),
    *("quantize_config.json", "tokenizer_config.json"),
]


ASKED = ["model.safetensors", "model.extra.pt", "adapter_config.json", ".metadata", *BESIDE]
REFUSALS = [
    *zip(ASKED, cycle([401, 403, 429, 503]), strict=False),
    *(("config.json", status) for status in STATUSES if status != CUT),
]


@pytest.mark.parametrize(("name", "status"), REFUSALS)
def test_a_refusal_is_no_answer_about_any_file(
    name: str, status: int, web: str, tmp_path: Path
) -> None:
    model(tmp_path / "m")
    Web.status = {name: status}
    with pytest.raises(error_of(status)) as caught:
        open_checkpoint(at(f"{web}/m"))
    assert name in str(caught.value)


@pytest.mark.parametrize("status", [404, 410])
def test_what_is_said_to_be_absent_is(status: int, web: str, tmp_path: Path) -> None:
    model(tmp_path / "m")
    Web.status = dict.fromkeys(BESIDE, status)
    assert open_checkpoint(at(f"{web}/m")).catalog.companions == {}
    Web.status = {"model.safetensors": status}
    with pytest.raises(NotFound):
        open_checkpoint(at(f"{web}/m/model.safetensors"))


@pytest.mark.parametrize("status", [403, 405, 503])
def test_who_answers_no_head_is_asked_for_the_file(status: int, web: str, tmp_path: Path) -> None:
    wanted = open_checkpoint(model(tmp_path / "m")).catalog
    names = [*BESIDE, "model.safetensors"]
    Web.status, Web.methods = dict.fromkeys(names, status), ("HEAD",)
    found = open_checkpoint(at(f"{web}/m")).catalog
    assert (found.tensors, found.companions) == (wanted.tensors, wanted.companions)


@pytest.mark.parametrize("status", [401, 403, 503, CUT])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_is_listed_and_not_given(
    name: str, status: int, web: str, tmp_path: Path
) -> None:
    model(tmp_path / "m")
    Web.status, Web.methods = {name: status}, ("GET",)
    with pytest.raises(error_of(status)):
        open_checkpoint(at(f"{web}/m"))


@pytest.mark.parametrize(("status", "is_index"), [(403, True), (503, False), (CUT, True)])
def test_an_index_and_its_shards(
    is_index: bool, status: int, web: str, copy_of: Any, tmp_path: Path
) -> None:
    folder, name = copy_of("hf_shards"), "model.safetensors.index.json"
    if not is_index:
        name = max(json.loads((folder / name).read_text())["weight_map"].values())
    Web.status = {name: status}
    with pytest.raises(error_of(status)):
        open_checkpoint(at(f"{web}/{folder.relative_to(tmp_path)}"))


@pytest.mark.parametrize(
    ("status", "name"),
    [(401, ".metadata"), (CUT, ".metadata"), (500, "__0_0.distcp"), (CUT, "__1_0.distcp")],
)
def test_dcp(name: str, status: int, web: str, copy_of: Any, tmp_path: Path, out: Path) -> None:
    folder = copy_of("dcp_base")
    Web.status = {name: status}
    place: Any = at(f"{web}/{folder.relative_to(tmp_path)}")
    with pytest.raises(error_of(status)):
        convert_to("safetensors", place, out / "m")
    assert not (out / "m").exists()


@pytest.fixture
def single(tmp_path: Path, web: str) -> str:
    """The URL of a safetensors file whose values are in a side file."""
    source = tmp_path / "m.pt"
    torch.save({"w": torch.ones(4, 3), "step": 7}, source)
    prepare(source, tmp_path / "m.safetensors", ConvertOptions(to="safetensors")).run()
    assert (tmp_path / "m.extra.pt").exists()
    return f"{web}/m.safetensors"


@pytest.mark.parametrize("status", STATUSES)
def test_a_side_file_that_belongs_to_it(status: int, single: str, out: Path) -> None:
    assert open_checkpoint(at(single)).catalog.objects["step"].value == 7
    Web.status = {"m.extra.pt": status}
    with pytest.raises(error_of(status), match=r"m\.extra\.pt"):
        convert_to("torch-save", at(single), out / "m.pt")
    assert not (out / "m.pt").exists()


@pytest.mark.parametrize("status", [401, 403])
def test_a_side_file_that_none_is_said_to_be(status: int, web: str, tmp_path: Path) -> None:
    """A signature, or S3 without permission to list, shows one file alone."""
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    Web.status = {"m.extra.pt": status}
    catalog = open_checkpoint(at(f"{web}/m.safetensors")).catalog
    assert catalog.tensors.keys() == {"w"}
    assert any("m.extra.pt: " in note and "access is denied" in note for note in catalog.notes)
    Web.status = {"m.extra.pt": 503}
    with pytest.raises(NoAnswer):
        open_checkpoint(at(f"{web}/m.safetensors"))


BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [100, 100]}}


def in_blocks(folder: Path) -> torch.Tensor:
    """A weight in blocks that only its config.json says, which are also fewer of the usual size."""
    weight, scales = torch.ones(200, 200), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    stored = {"a.weight": weight.to(torch.float8_e4m3fn), "a.weight_scale_inv": scales}
    folder.mkdir()
    for name in ("model.safetensors", "other.safetensors"):
        save_file(stored, folder / name)
    (folder / "config.json").write_text(json.dumps(BLOCKS))
    return scales.repeat_interleave(100, 0).repeat_interleave(100, 1)


@pytest.mark.parametrize("file", ["", "/model.safetensors", "/other.safetensors"])
@pytest.mark.parametrize("is_remote", [True, False])
def test_the_config_beside_one_file_says_its_blocks(
    file: str, is_remote: bool, web: str, tmp_path: Path, out: Path
) -> None:
    truth = in_blocks(tmp_path / "m")
    place: Any = at(f"{web}/m{file}") if is_remote else Path(f"{tmp_path / 'm'}{file}")
    convert_to("safetensors", place, out / "n", dequantize=True, casts=FP32)
    assert torch.equal(load_file(out / "n" / "model.safetensors")["a.weight"], truth)


@pytest.mark.parametrize("status", STATUSES)
def test_a_config_beside_one_file_that_is_not_given(
    status: int, web: str, tmp_path: Path, out: Path
) -> None:
    in_blocks(tmp_path / "m")
    Web.status = {"config.json": status}
    place: Any = at(f"{web}/m/model.safetensors")
    with pytest.raises(error_of(status)):
        convert_to("safetensors", place, out / "n", dequantize=True, casts=FP32)
    assert not (out / "n").exists()


@pytest.mark.parametrize("file", ["", "/other.safetensors"])
@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "quantize_config.json"])
@pytest.mark.parametrize("kind", ["cut", "mark", "folder", "link"])
def test_a_config_on_a_disk_that_cannot_be_read(
    file: str, name: str, kind: str, tmp_path: Path, out: Path
) -> None:
    in_blocks(tmp_path / "m")
    config = tmp_path / "m" / name
    if name != "config.json":
        (tmp_path / "m" / "config.json").unlink()
    config.unlink(missing_ok=True)
    if kind == "folder":
        config.mkdir()
    elif kind == "link":
        config.symlink_to("nowhere")
    else:
        text = json.dumps(BLOCKS)
        config.write_text(text[:-1] if kind == "cut" else f"\ufeff{text}")
    with pytest.raises((Damaged, NotFound), match=name.replace(".", r"\.")):
        convert_to(
            "safetensors",
            Path(f"{tmp_path / 'm'}{file}"),
            out / "n",
            dequantize=True,
            casts=FP32,
        )
    assert not (out / "n").exists()


def test_a_config_of_assets_that_cannot_be_read(tmp_path: Path, out: Path) -> None:
    from ckptool.commands.options.rewrite import MapOptions

    in_blocks(tmp_path / "m")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text(json.dumps(BLOCKS)[:-1])
    with pytest.raises(Damaged, match=r"config\.json: not a JSON object"):
        convert_to(
            "safetensors",
            tmp_path / "m",
            out / "n",
            dequantize=True,
            map=MapOptions(assets=tmp_path / "a"),
        )
