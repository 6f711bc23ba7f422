"""Temporary folders, which are removed even where the process that has made them is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

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
