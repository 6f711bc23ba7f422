"""`python -m minivllm.evaluation ...`: lm-eval's command line, with `--model minivllm` known to it."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from minivllm.errors import BadInput


def main() -> int:
    """Register the model and hand over to lm-eval, which reads `sys.argv`.

    Returns:
        Exit code: 0, or 2 for bad input, told in one line.
    """
    try:
        if find_spec("lm_eval") is None:
            raise BadInput("lm-eval is not installed: pip install 'minivllm[eval]'")
        from lm_eval.__main__ import cli_evaluate

        import minivllm.evaluation.adapter  # noqa: F401  registers the model

        cli_evaluate()
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
