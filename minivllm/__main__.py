"""`python -m minivllm`, and what run.py and the installed program start: the command line."""

from __future__ import annotations

import sys


def main() -> int:
    """The command line, which Ctrl-C ends quietly even while it is being imported."""
    try:
        from minivllm import cli

        return cli.main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
