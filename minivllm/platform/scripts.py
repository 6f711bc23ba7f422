"""How the programs in scripts/ begin and end."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from minivllm.errors import BadInput


def exit_code(main: Callable[[], object]) -> int:
    """Run a program.

    Args:
        main: the program; its result is the exit code where that is a number.

    Returns:
        The exit code: 0, or 2 after bad input, which is one line.
    """
    try:
        code = main()
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return code if isinstance(code, int) else 0


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
