"""task=serve: the engine behind OpenAI's and Anthropic's APIs, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
from typing import Any

from minivllm.errors import NotInstalled, install


def run(config: dict[str, Any]) -> int:
    """Serve the configured engine.

    Returns:
        Exit code: 0 after SIGTERM, 130 after Ctrl-C, 1 where the engine has stopped.

    Raises:
        BadInput: the engine cannot be built, or the address cannot be listened on.
        NotInstalled: the packages of the server are missing.
    """
    try:
        from minivllm.serving.server import serve
    except ImportError as error:
        raise NotInstalled(
            f"task=serve needs FastAPI and uvicorn ({error}): {install('serve')}"
        ) from error
    return asyncio.run(serve(config))
