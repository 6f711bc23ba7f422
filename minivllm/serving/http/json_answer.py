"""Answers in JSON that can hold whatever a client has sent."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse


class JsonAnswer(JSONResponse):
    """JSON in ASCII: half a surrogate pair, which a client may write as an escape and an answer
    repeat, cannot be encoded in UTF-8. NaN, which Python reads, is written as it was read."""

    def render(self, content: Any) -> bytes:
        """The bytes of the body."""
        return json.dumps(content, separators=(",", ":")).encode()
