"""Measure ckptool's commands, and show a table or JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.loads import load_bench
from benchmarks.merges import merge_bench
from benchmarks.report import TransferBenchReport
from benchmarks.stores import store_bench
from benchmarks.table import show_transfer_bench
from benchmarks.transfer import transfer_bench
from ckptool.cli.process import end_on_signals
from ckptool.commands.options.declaration import parse_size
from ckptool.errors import CkptoolError
from ckptool.render.data import print_json
from ckptool.render.messages import show_step


def run() -> None:
    """Run the command line; SIGTERM ends it as Ctrl-C does, so that no folder is left."""
    end_on_signals()
    main()


def main(words: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for, and print the report."""
    options = _parser().parse_args(words)
    try:
        report = _measure(options)
    except CkptoolError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        sys.exit(f"error: {error}{hint}")
    if options.json:
        print_json(report.to_dict())
    else:
        show_transfer_bench(report)


def _measure(options: argparse.Namespace) -> TransferBenchReport:
    size = parse_size(options.size, "--size")
    if options.what == "stores":
        return store_bench(size, options.out, options.repeat, progress=show_step)
    if options.what == "merges":
        return merge_bench(size, options.out, options.repeat, progress=show_step)
    if options.what == "loads":
        device = options.device
        return load_bench(size, device, options.out, options.repeat, progress=show_step)
    return transfer_bench(options.source, size, options.out, options.repeat, progress=show_step)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    both = argparse.ArgumentParser(add_help=False)
    both.add_argument("--out", type=Path, default=Path(), help="the folder to work below")
    both.add_argument("--repeat", type=_count, default=5, metavar="N", help="rounds")
    both.add_argument("--json", action="store_true", help="print one JSON object")
    kinds = parser.add_subparsers(dest="what", required=True)
    transfer = kinds.add_parser("transfer", parents=[both], help="against cp and torch's tools")
    transfer.add_argument("source", nargs="?", type=Path, help="a checkpoint to measure with")
    transfer.add_argument("--size", default="2GB", help="of the checkpoint that is written")
    merges = kinds.add_parser("merges", parents=[both], help="against cp and convert")
    merges.add_argument("--size", default="2GB", help="of each model that is written")
    loads = kinds.add_parser("loads", parents=[both], help="against other loaders")
    loads.add_argument("--size", default="2GB", help="of the model that is written, three times")
    loads.add_argument("device", nargs="?", default="cpu", help="where to, such as cuda")
    stores = kinds.add_parser("stores", parents=[both], help="against clients of a store")
    stores.add_argument("--size", default="256MB", help="of the checkpoint that is written")
    return parser


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least one round is needed")
    return int(text)


if __name__ == "__main__":
    run()
