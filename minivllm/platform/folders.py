"""Temporary folders, which are removed even where the process that has made them is killed, and
folders that exist only when they are complete."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from minivllm.errors import BadInput
from minivllm.platform.untrusted import size

# Removes a folder once the process that has started this program is gone, however that ended.
# Processes that end a moment later may still write into the folder, so it tries for ten seconds.
CLEANUP = """
import os, shutil, sys, time
sys.stdin.read()
for _ in range(100):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.lexists(sys.argv[1]):
        break
    time.sleep(0.1)
"""


class TemporaryFolder:
    """A new folder that is removed when this process ends, even by SIGKILL: a second process waits
    for that end and removes the folder.

    Args:
        prefix: of its name.
        parent: where it is made; None: in the system's folder for temporary files.

    Raises:
        OSError: it cannot be made, or no process can be started.
    """

    def __init__(self, prefix: str, parent: str | None = None) -> None:
        self.path = tempfile.mkdtemp(prefix=prefix, dir=parent)
        try:
            self._cleanup = subprocess.Popen(
                (sys.executable, "-I", "-S", "-c", CLEANUP, self.path),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a signal to this process's group does not end it
            )
        except OSError:
            os.rmdir(self.path)
            raise

    def __enter__(self) -> str:
        """Its path."""
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder with all that is in it."""
        self._cleanup.communicate()


@contextlib.contextmanager
def new_folder(output: Path, what: str = "", needed: int = 0) -> Iterator[Path]:
    """A folder to fill, which becomes `output` when the block ends without an error; else nothing
    is left of it.

    Args:
        output: must not exist.
        what: how messages begin, such as "task.output=DIR"; the path where it is empty.
        needed: bytes that will be written.

    Raises:
        BadInput: `output` exists, there is not enough room, or it cannot be written. An OSError
            within the block becomes one; the BadInput of a file in the folder names it in `output`.
    """
    what = what or str(output)
    require_new(output, what)
    there = next(one for one in (output.absolute(), *output.absolute().parents) if one.exists())
    if (free := shutil.disk_usage(there).free) < needed:
        raise BadInput(f"{what}: {size(needed)} will be written, and {size(free)} are free there")
    made = output
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFolder(f".{output.name}.", str(output.parent)) as temporary:
            made = Path(temporary) / output.name
            made.mkdir()
            yield made
            os.replace(made, output)
    except BadInput as error:
        raise BadInput(str(error).replace(str(made), str(output))) from None
    except OSError as error:
        raise BadInput(f"{what} cannot be written: {error.strerror or error}") from None


def require_new(output: Path, what: str = "") -> None:
    """Raise BadInput, whose message begins with `what` or the path, where there is such a file or
    folder."""
    if output.exists():
        raise BadInput(f"{what or output} exists already: give a new folder")
