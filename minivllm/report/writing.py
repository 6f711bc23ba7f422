"""Files of a report appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from minivllm.errors import BadInput


def make_folder(out_dir: Path) -> None:
    """Make the folder of a report, or of what is written beside it.

    Raises:
        BadInput: it cannot be made, or nothing can be written into it.
    """
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out_dir):
            pass
    except OSError as error:
        raise BadInput(
            f"reports_dir={out_dir.parent}: {out_dir} cannot be written to ({error})"
        ) from None


def write_bytes(path: Path, data: bytes) -> None:
    """Write through a temporary file in the same folder and a rename."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)  # mkstemp's 0600 would keep a web server or a colleague out
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_or_remove(path: Path, data: bytes) -> None:
    """Write a file of a report, or remove that of an earlier one where there is nothing to
    write."""
    if data:
        write_bytes(path, data)
    else:
        path.unlink(missing_ok=True)
