"""`python -m minivllm`, and what run.py and the installed program start: the command line."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """The command line, which Ctrl-C ends quietly even while it is being imported; or, where
    torchrun has started this process as another rank than 0, that rank."""
    try:
        if os.environ.get("RANK", "0") != "0" and "TORCHELASTIC_RUN_ID" in os.environ:
            from minivllm.processes.rank import follow_launched

            return follow_launched()
        try:
            from minivllm import cli
        except ModuleNotFoundError as error:
            print(
                f"error: {error.name} is not installed for {sys.executable}: take the environment "
                "that make run makes, .venv/bin/python, or install with pip install -e . -c "
                "constraints.txt",
                file=sys.stderr,
            )
            return 2
        return cli.main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
