"""Files of a report appear whole or not at all."""

from __future__ import annotations

import tempfile
from pathlib import Path

from minivllm.errors import BadInput
from minivllm.platform import files


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
    """Write a file that can be made again after a power cut."""
    files.write_bytes(path, data, durable=False)


def write_or_remove(path: Path, data: bytes) -> None:
    """Write a file of a report, or remove that of an earlier one where there is nothing to
    write."""
    if data:
        write_bytes(path, data)
    else:
        path.unlink(missing_ok=True)
