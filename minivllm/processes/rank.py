"""The process of a rank other than 0: `python -m minivllm.processes.rank PARENT FOLDER SIZE RANK`.

Rank 0 starts it, and says which engine's part to build and which calls to repeat. `torchrun` starts
it as `run.py` with the same arguments on every rank, see `follow_launched`.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence

from minivllm import redaction
from minivllm.assembly import build_part
from minivllm.errors import BadInput, Crashed
from minivllm.extras.ranked_steps import facts, follow
from minivllm.parallel.place import Launch, Place
from minivllm.platform.processes.children import die_with
from minivllm.processes.started import end_process


def serve(place: Place) -> None:
    """Build a part of each engine that rank 0 names, and repeat its calls, until rank 0 is gone."""
    heard = place.heard()
    with place.beating():
        for kind, arguments in heard:
            if kind != "build":
                continue
            (config,) = arguments
            redaction.learn(config)
            engine, drafting = build_part(config, place.join, place.local_rank)
            place.say(facts(engine))
            follow(engine, drafting, place.ranks, heard)
            engine.close()


def follow_launched() -> int:
    """Serve as a rank that `torchrun` has started; returns the exit code."""
    with redaction.console():
        return _served(lambda: Place.launched(Launch()), (signal.SIGINT, signal.SIGTERM))


def _served(join: Callable[[], Place], ignored: Sequence[int]) -> int:
    """Join the other ranks and serve; the exit code. Of some signals rank 0 decides: it may have
    requests to end, and then ends this one."""
    try:
        place = join()
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        serve(place)
    except (BadInput, Crashed) as error:
        print(error, file=sys.stderr, flush=True)
        return 2 if isinstance(error, BadInput) else 1
    return 0


def main(arguments: Sequence[str]) -> int:
    """Entry point; see the module's docstring."""
    parent, folder, size, rank = arguments
    die_with(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which ends this one
    return _served(lambda: Place.started(folder, int(size), int(rank)), ())


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
