"""Write a report as one HTML page: its JSON, a style sheet and scripts; nothing is fetched.

Untrusted text is in the JSON, where it cannot end its element, and in the title, escaped. The
page's policy allows the one style sheet and script by their SHA-256, and no request.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from ckptool.commands.inspect.report import InspectReport
from ckptool.commands.inspect.stats import StatsReport
from ckptool.commands.verify.codes import CODES
from ckptool.core.mesh import Mesh
from ckptool.core.text import visible
from ckptool.render.html.holdings import holdings
from ckptool.version import __version__

MARK = b"<!doctype html>\n<!-- ckptool page -->\n"
"""The beginning of every page."""
_SCRIPTS = "base table fold tree treemap mesh inspect verify diff bench main".split()
_LONG = {"only_a": "name", "only_b": "name", "shape_differs": "tensor", "dtype_differs": "tensor"}
"""The lists of a diff that may be as long as the checkpoints, and the key that names a row."""


def page(report: Mapping[str, Any]) -> bytes:
    """Return the page of a report's ``to_dict``."""
    packed = {rows: _pack(report[rows], key) for rows, key in _LONG.items() if rows in report}
    codes = {finding["code"]: None for finding in _findings(report)}
    meanings = {"meanings": {code: CODES[code].meaning for code in codes}}
    return _fill({**report, **packed, **meanings})


def _findings(report: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from report.get("findings", ())
    for step in report.get("steps", ()):
        for part in step.get("reports", ()):
            yield from _findings(part)


def inspect_page(report: InspectReport, stats: StatsReport | None = None) -> bytes:
    """Return the page of a checkpoint, with the ranks that hold each tensor."""
    content = report.to_dict() | ({} if stats is None else {**stats.more()})
    holders = holdings(report.catalog)
    rows = [row | holders.of[row["name"]] for row in content["tensors"]]
    tables = {"boxes": holders.boxes, "ranks": holders.ranks, "order": _order(report.catalog.mesh)}
    return _fill(content | {"tensors": _pack(rows, "name"), "held": tables})


def _order(mesh: Mesh | None) -> tuple[int, ...] | None:
    """Return the ranks of a mesh by position if they do not count from 0."""
    return None if mesh is None or mesh.ranks == tuple(range(mesh.size)) else mesh.ranks


def _pack(rows: Iterable[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """Return rows in the form that the scripts read, many of which differ in only one key."""
    looks: dict[str, int] = {}
    pairs = []
    for row in rows:
        look = json.dumps({name: value for name, value in row.items() if name != key})
        pairs.append([row[key], looks.setdefault(look, len(looks))])
    return {"key": key, "looks": list(map(json.loads, looks)), "rows": pairs}


def _fill(content: Mapping[str, Any]) -> bytes:
    folder = files("ckptool.render.html")
    style = (folder / "page.css").read_text("utf-8")
    script = "\n".join((folder / f"{name}.js").read_text("utf-8") for name in _SCRIPTS)
    allowed = f"style-src {_hash(style)}; script-src {_hash(script)}"
    subject = content.get("path") or content.get("advice") or "diff"
    command = str(content["schema"]).removeprefix("ckptool.").partition("/")[0]
    text = Template((folder / "page.html").read_text("utf-8")).substitute(
        policy=f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none';"
        " require-trusted-types-for 'script'",
        title=escape(visible(f"{command} {subject}")),
        version=__version__,
        style=style,
        data=_inert(content),
        script=script,
    )
    return MARK + text.encode()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _inert(content: Mapping[str, Any]) -> str:
    """Return JSON in ASCII that no HTML parser takes for a tag, comment or entity."""
    text = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")
