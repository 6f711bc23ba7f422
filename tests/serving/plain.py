"""Requests of HTTP without a client's package."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any


def call(url: str, body: Any = None, method: str | None = None) -> tuple[int, str]:
    """The status and the text of an answer.

    Args:
        url: of the endpoint.
        body: sent as JSON.
        method: by default POST with a body, GET without.
    """
    data = None if body is None else json.dumps(body).encode()
    headers = {} if data is None else {"content-type": "application/json"}
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def call_json(url: str, body: Any = None, method: str | None = None) -> tuple[int, Any]:
    """The status and the JSON of an answer."""
    status, text = call(url, body, method)
    return status, json.loads(text)
