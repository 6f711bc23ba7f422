"""How the programs in this folder begin and end, and what a record of measured figures holds.

Imports nothing of the package before it is needed: scripts/step_cost.py starts programs in other
checkouts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

CPU = Path("reports/examples/cpu")  # where the records of a CPU lie


def new_parser(doc: str | None, **output: Any) -> argparse.ArgumentParser:
    """The parser of a program.

    Args:
        doc: its docstring.
        output: of the argument --output, a file to be written; nothing leaves it out.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if output:
        parser.add_argument("--output", type=output_file, **output)
    return parser


def output_file(text: str) -> Path:
    """The `type` of an argument that names a file to be written: that it can be is known before the
    work begins."""
    path = Path(text).expanduser()
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; give a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} may not be written")
    return path


def exit_code(main: Callable[[], object]) -> int:
    """Run a program.

    Args:
        main: the program; its result is the exit code where that is a number.

    Returns:
        The exit code: 0, or 2 after bad input, which is one line.
    """
    from minivllm.errors import BadInput

    try:
        code = main()
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return code if isinstance(code, int) else 0


def with_provenance(
    figures: dict[str, Any], *overrides: str, command: str | None = None
) -> dict[str, Any]:
    """A record: figures, the machine and the code that they are of, under a configuration, and the
    command that measures them."""
    from minivllm.bench.records.identity import code_hash
    from minivllm.bench.records.provenance import provenance
    from minivllm.config.compose import compose

    record = {**figures, "provenance": provenance(compose([*overrides]), code_hash())}
    return record if command is None else {**record, "command": f"python scripts/{command}"}


def write_figures(
    path: Path | None, figures: dict[str, Any], *overrides: str, command: str | None = None
) -> None:
    """Write figures as a record, see `with_provenance`, where there is a path."""
    if path is not None:
        write_record(path, with_provenance(figures, *overrides, command=command))


def write_record(path: Path | None, record: dict[str, Any]) -> None:
    """Write a record, where there is a path."""
    from minivllm.platform import files

    if path is not None:
        files.write_json(path, record)


def finish(path: Path, figures: dict[str, Any], command: str, *overrides: str) -> None:
    """Write figures as a record, see `with_provenance`, and print them."""
    write_figures(path, figures, *overrides, command=command)
    print(json.dumps(figures, indent=1))


def finish_table(path: Path, record: dict[str, Any], table: str) -> None:
    """Write a record and, beside it, its table in Markdown; and print the table."""
    from minivllm.platform import files

    files.write_json(path, record)
    files.write_text(path.with_suffix(".md"), table)
    print(table, end="")


def compared(logs: Sequence[float]) -> dict[str, Any]:
    """A ratio over blocks with its interval, from the logarithm of each block's, and the smallest
    effect that the blocks would have found: the method of `task=compare`."""
    from minivllm.analysis.statistics import minimum_detectable, paired

    return {**asdict(paired(logs)), "found_from": minimum_detectable(logs, tests=1)}
