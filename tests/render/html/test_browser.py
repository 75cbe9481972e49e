"""A browser draws the pages, hostile names too, and reports no error: ``make pages``.

Pictures are in the folder that ``CKPTOOL_PAGES`` names: light and dark, wide and narrow, printed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from bench.bench_samples import measured
from bench.bench_samples import report as bench_report
from conftest import case
from large_checkpoint import large_report
from msgspec.structs import replace

import ckptool
from ckptool.commands.inspect.report import report
from ckptool.render.html.page import inspect_page, page

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or ""
PICTURES = os.environ.get("CKPTOOL_PAGES", "")
DARK = ["--blink-settings=preferredColorScheme=0"]
pytestmark = pytest.mark.skipif(not PICTURES or not BROWSER, reason="make pages, with chromium")


def pages() -> dict[str, tuple[bytes, list[str]]]:
    """Each page, with texts that must be on it."""
    large = large_report()
    hostile = {"</script><img src=x onerror=alert(1)>": "w", "__proto__.x": "w", "\u202ea": "w"}
    first = next(iter(large.catalog.tensors.values()))
    tensors = {name: replace(first, name=name) for name in hostile}
    odd = replace(large.opened, catalog=replace(large.catalog, tensors=tensors))
    a, b = (case(name).path for name in ("dcp_fsdp2_tp", "dcp_base"))
    benched = bench_report(measured("dcp-sync", 2.0, 2.5), measured("fast", 0.5, 3.0))
    return {
        "inspect": (inspect_page(large), ["1,008", "feed_forward", "rank 0", "layers.{0..36}"]),
        "hostile": (
            inspect_page(report(odd)),
            ["&lt;/script&gt;&lt;", "__proto__", r"\u202ea"],
        ),
        "diff": (page(ckptool.diff(a, b, values=True).to_dict()), ["Only in A", "DIFFERENT"]),
        "verify": (page(ckptool.verify(a).to_dict()), ["verification", "OK"]),
        "compare": (page(ckptool.compare(a, b).to_dict()), ["comparison", "tensor-missing"]),
        "run": (page(ckptool.list_steps(a.parent).to_dict()), ["COMPLETE", "safetensors"]),
        "verify-run": (page(ckptool.verify_run(a.parent, every=True).to_dict()), ["newest good"]),
        "bench": (page(benched.to_dict()), ["training blocked", "best"]),
    }


def browse(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    line = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    line += ["--enable-logging=stderr", "--virtual-time-budget=4000", *options, file.as_uri()]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)


def test_a_browser_draws_every_page_without_an_error(tmp_path: Path) -> None:
    for name, (data, texts) in pages().items():
        file = tmp_path / f"{name}.html"
        file.write_bytes(data)
        drawn = browse(file, "--dump-dom")
        assert not re.search(r"CONSOLE|Refused", drawn.stderr), (name, drawn.stderr)
        body = drawn.stdout.split("<main")[1].split('id="report"')[0].replace("<wbr>", "")
        assert [text for text in texts if text not in body] == [], name
        assert "<img" not in body
        for look, wide in {"light": 1400, "dark": 1400, "narrow": 500}.items():
            picture = f"--screenshot={Path(PICTURES).absolute() / f'{name}-{look}.png'}"
            browse(file, picture, f"--window-size={wide},2200", *(DARK * (look == "dark")))
        browse(file, f"--print-to-pdf={Path(PICTURES).absolute() / f'{name}.pdf'}")


MEASURES = {
    "height": "page.documentElement.scrollHeight",
    "wide": "page.documentElement.scrollWidth",
    "names": "Math.min(...[...page.querySelectorAll('td .name')].map((n) => n.closest('td')"
    ".clientWidth))",
    "shifted": "[...page.querySelectorAll('.cell')].filter((cell) =>"
    " getComputedStyle(cell).marginTop !== '0px').length",
    "cut": "[...page.querySelectorAll('.scroll')].filter((each) =>"
    " each.scrollWidth > each.clientWidth).length",
    "scrolled": "Math.round(frame.contentWindow.scrollY)",
    "detail": "Math.round(page.querySelector('.detail').getBoundingClientRect().top)",
}


def measured_at(file: Path, wide: int, address: str = "") -> dict[str, int]:
    """Measure a page in a frame so wide, narrower than a window may be."""
    asked = ",".join(f"{name}:{each}" for name, each in MEASURES.items())
    around = file.with_name("frame.html")
    around.write_text(
        f"<iframe id=frame src='{file.name}{address}' style='width:{wide}px;height:900px;border:0'>"
        "</iframe><script>onload=()=>setTimeout(()=>{const page=frame.contentDocument;"
        f"document.title=JSON.stringify({{{asked}}})}},1500)</script>"
    )
    drawn = browse(around, "--dump-dom", "--allow-file-access-from-files")
    title = re.findall(r"<title>(.*?)</title>", drawn.stdout)[0]
    return dict(json.loads(title))


def test_a_narrow_page_has_whole_names_and_is_not_long(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_bytes(pages()["inspect"][0])
    for wide in (400, 1280):
        found = measured_at(file, wide)
        assert found["wide"] <= wide
        assert found["height"] < 6000
        assert found["names"] > 150
        assert found["shifted"] == 0
        assert found["cut"] == 0
        assert found["scrolled"] == 0


def test_the_address_of_a_name_shows_it(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_bytes(pages()["inspect"][0])
    for wide in (400, 1280):
        found = measured_at(file, wide, "#model.layers.3.attention.wq.weight")
        assert found["scrolled"] > 0
        assert 0 <= found["detail"] < 850


def test_a_run_with_one_killed_save_is_partly_complete(tmp_path: Path) -> None:
    for step in (1, 2):
        shutil.copytree(case("dcp_base").path, tmp_path / "run" / f"step-{step}")
    (tmp_path / "run" / "step-2" / ".metadata").unlink()
    file = tmp_path / "page.html"
    file.write_bytes(page(ckptool.list_steps(tmp_path / "run").to_dict()))
    drawn = browse(file, "--dump-dom").stdout
    assert '<p class="answer partly"><b>PARTLY COMPLETE</b>: 1 of 2 steps complete' in drawn
    assert "the newest of them step-1" in drawn
