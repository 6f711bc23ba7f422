"""`python -m minivllm.evaluation ...`: lm-eval's command line with `--model minivllm`."""

from __future__ import annotations

import os
import sys
import threading
import urllib.error
import urllib.request
from importlib.util import find_spec

from minivllm.errors import BadInput, first_line, install

HUB = "https://huggingface.co"  # without HF_ENDPOINT
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
YES = ("1", "ON", "YES", "TRUE")  # the values that the hub's libraries take for true
ASK_S = 5.0


def main() -> int:
    """Register the model and hand over to lm-eval, which reads `sys.argv`.

    Returns:
        Exit code: 0, or 2 after a one-line error about bad input or an unreachable data set.
    """
    try:
        if find_spec("lm_eval") is None:
            raise BadInput(f"lm-eval is not installed: {install('eval')}")
        if (
            not any(os.environ.get(name, "").upper() in YES for name in OFFLINE)
            and not hub_answers()
        ):
            # The hub's libraries read this once, when they are imported; without it they would
            # retry each file for minutes.
            os.environ.update(dict.fromkeys(OFFLINE, "1"))
        from lm_eval.__main__ import cli_evaluate

        import minivllm.evaluation.adapter  # noqa: F401  registers the model

        try:
            cli_evaluate()
        except ConnectionError as error:
            raise BadInput(
                f"a task's data set cannot be reached ({first_line(error)}): connect to the hub, "
                "run the task once where it can be reached, whose cache then serves it, or use "
                "tasks over local files (--include_path)"
            ) from error
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def hub_answers() -> bool:
    """Whether the hub of the data sets answers anything within ASK_S seconds.

    A connection's time-out would apply to each address of the hub, and not to the DNS lookup.
    """
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(_ask()), daemon=True)
    thread.start()
    thread.join(ASK_S)
    return answers == [True]


def _ask() -> bool:
    request = urllib.request.Request(os.environ.get("HF_ENDPOINT") or HUB, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=ASK_S):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False


if __name__ == "__main__":
    sys.exit(main())
