"""Pictures of report pages in tests, which take most of a page's time: each is painted once, and
those of every report only where a test looks at them.

tests/conftest.py and tests/report/conftest.py put `painted_if_own` in the place of `finish`; a test
with the fixture `painted_anew`, and a fixture of a whole file, has all pictures.
"""

from __future__ import annotations

import pickle
from functools import cache

from minivllm.report.figures.render import Described, Plot, finish
from minivllm.report.page import FIGURES

EMPTY_SVG = b'<svg xmlns="http://www.w3.org/2000/svg"/>'


def painted_if_own(described: Described) -> Plot:
    """What `finish` makes, but for the figures that every report has: their pictures show nothing,
    for tests of what is measured and told."""
    return unpainted(described) if described.name in FIGURES else painted_once(described)


def unpainted(described: Described) -> Plot:
    """What `finish` makes, with pictures that show nothing."""
    words = (described.name, described.title, described.alt, described.caption)
    return Plot(*words, b"\x89PNG", EMPTY_SVG, EMPTY_SVG)


def painted_once(described: Described) -> Plot:
    """What `finish` makes; a description that came before has the same pictures."""
    try:
        written = pickle.dumps(described)
    except Exception:  # a drawing with functions of its own
        return finish(described)
    return _painted(written)


@cache
def _painted(written: bytes) -> Plot:
    return finish(pickle.loads(written))
