"""Values whose parts point to their parent, as the nodes of omegaconf do, are shown; all end."""

from __future__ import annotations

import argparse
import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import attack_build as b
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from ckptool.cli.app import app
from ckptool.commands.inspect.values import Indescribable, describe
from ckptool.core.catalog import Catalog, ObjectEntry
from ckptool.render.inspect.listing import value_lines
from ckptool.serialization.pickle.records import Call, Global

DICT, NODE = ("omegaconf.dictconfig", "DictConfig"), ("omegaconf.nodes", "AnyNode")


def node(kind: tuple[str, str], parent: Call | None, held: Any) -> Call:
    """A node as omegaconf 2.4 pickles it."""
    key = "_content" if isinstance(held, dict) else "_val"
    metadata = Call(
        Global("omegaconf.base", "Metadata"), (), True, {"ref_type": Global("typing", "Any")}
    )
    state = {"_metadata": metadata, "_parent": parent, key: held}
    return Call(Global(*kind), (), True, state)


def config(parent: Call | None = None, /, **fields: Any) -> Call:
    made = node(DICT, parent, {})
    for key, value in fields.items():
        held = config(made, **value) if isinstance(value, dict) else node(NODE, made, value)
        made.state["_content"][key] = held
    return made


CONFIG = config(model={"encoder_embed_dim": 771}, task={"data": "/corpus/xyz", "none": None})


def shown(value: Any) -> list[str]:
    catalog = Catalog("torch-save", {}, {"cfg": ObjectEntry("cfg", ("cfg",), value)}, {})
    stream = io.StringIO()
    screen = Console(file=stream, width=200)
    for line in value_lines(catalog, screen):
        screen.print(line)
    return stream.getvalue().splitlines()


def test_what_the_nodes_of_omegaconf_hold_is_listed() -> None:
    rows = {words[0]: " ".join(words[2:]) for words in map(str.split, shown(CONFIG)[1:])}
    assert rows == {
        "cfg": "2 attributes",
        "cfg.model": "1 attribute",
        "cfg.model.encoder_embed_dim": "771",
        "cfg.task": "2 attributes",
        "cfg.task.data": "'/corpus/xyz'",
        "cfg.task.none": "None",
    }


def test_json_has_them_with_their_parents_named() -> None:
    found, _ = describe(CONFIG)
    model = found["_content"]["model"]
    assert model["_content"]["encoder_embed_dim"]["_val"] == 771
    assert model["_parent"] == {"$again": "omegaconf.dictconfig.DictConfig"}
    assert found["_metadata"]["ref_type"] == {"$name": "typing.Any"}
    json.dumps(found, allow_nan=False)


def test_so_has_a_file_with_any_other_class(tmp_path: Path) -> None:
    space = argparse.Namespace(a=1)
    space.child = argparse.Namespace(parent=space, b=2, raw=b"bytes")
    torch.save({"args": space, "w": torch.ones(1)}, tmp_path / "a.pt")
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "a.pt"), "--json"])
    (value,) = json.loads(done.stdout)["values"]
    child = {
        "$type": "argparse.Namespace",
        "parent": {"$again": "argparse.Namespace"},
        "b": 2,
        "raw": {"$type": "bytes"},
    }
    assert value["content"] == {"$type": "argparse.Namespace", "a": 1, "child": child}


def test_what_cannot_be_described_has_no_content() -> None:
    for value in (b"bytes", float("inf") * 1j, Call(Global("torch", "Generator"), ())):
        with pytest.raises(Indescribable):
            describe(value)


def chain(length: int) -> Call:
    deep = config()
    for _ in range(length):
        outer = config(inner=0)
        outer.state["_content"]["inner"] = deep
        deep = outer
    return deep


def wide(width: int, levels: int) -> Call:
    """Each level holds the next under many names."""
    deep = config()
    for _ in range(levels):
        outer = config()
        outer.state["_content"] = {f"k{i}": deep for i in range(width)}
        deep = outer
    return deep


def itself() -> Call:
    loop = config()
    loop.state["_content"] = loop
    return loop


def in_itself() -> Call:
    loop = config()
    loop.state["_content"] = {"me": loop}
    return loop


@pytest.mark.parametrize(
    "value", [chain(2000), wide(2, 12), itself(), in_itself()], ids=["deep", "wide", "it", "in it"]
)
def test_it_ends_whatever_points_to_what(value: Call) -> None:
    assert len(shown(value)) < 2000
    with suppress(Indescribable):
        json.dumps(describe(value)[0])


def test_a_pickle_of_a_loop_is_read(tmp_path: Path) -> None:
    loop = b.glob(*DICT) + b")\x81" + b.put(1) + b.dct(_content=b.dct(me=b.get(1))) + b"b"
    b.torch_file(tmp_path / "x.pt", b.beside(loop))
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "x.pt"), "--values"])
    assert done.exit_code == 0, done.output
