"""Whether a peer engine is installed, checked before anything is started. Free of torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from minivllm.bench.records.provenance import peer_packages
from minivllm.config.support import support_of
from minivllm.errors import NotInstalled
from minivllm.platform.support import INSTALL


def require(config: Mapping[str, Any]) -> None:
    """Check that the engine of a resolved configuration can be built here at all.

    Raises:
        NotInstalled: with the command that installs what is missing.
    """
    support, engine = support_of(config), config["engine"]
    what = support.engine
    if support.package is not None and find_spec(support.package) is None:
        own = support.peer is None and support.program is None  # else `install` says the other
        raise NotInstalled(
            f"{what} needs {support.package}, which is not installed: "
            f"{support.install if own else INSTALL}"
        )
    if support.program is not None:
        program = str(engine.get(support.program))
        if shutil.which(os.path.expanduser(program)) is None:
            raise NotInstalled(
                f"engine.{support.program}={program}: there is no such program: {support.install}"
            )
    if support.peer is None:
        return
    if not (python := engine.get("python")):
        raise NotInstalled(
            f"{what} needs an interpreter that has {support.peer}, as "
            f"engine.python=$HOME/{support.peer.lower()}/bin/python or in "
            f"MINIVLLM_{support.peer.upper()}_PYTHON: {support.install}"
        )
    if (versions := peer_packages(python)) is None:
        raise NotInstalled(
            f"engine.python={python} is no Python interpreter that runs: {support.install}"
        )
    if not versions.keys() & {*support.peer_packages}:
        raise NotInstalled(f"engine.python={python} has no {support.peer}: {support.install}")
