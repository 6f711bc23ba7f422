"""Parts of OpenAI's and Anthropic's APIs that this server has not, and what it says of them."""

from __future__ import annotations

from collections.abc import Collection

# Paths below which nothing is served, and the name of what they do elsewhere.
_ABSENT = {
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "reranking",
    "/v1/score": "scoring of pairs",
    "/v1/audio": "speech and transcription",
    "/v1/realtime": "realtime audio",
    "/v1/images": "images",
    "/v1/videos": "videos",
    "/v1/moderations": "moderation",
    "/v1/files": "files",
    "/v1/uploads": "files",
    "/v1/vector_stores": "vector stores",
    "/v1/containers": "containers",
    "/v1/batches": "batches",
    "/v1/messages/batches": "batches",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/evals": "evaluations",
    "/v1/assistants": "assistants",
    "/v1/threads": "assistants",
    "/v1/conversations": "stored conversations",
    "/v1/complete": "Anthropic's text completions",
}


def not_found(path: str, served: Collection[str] = ()) -> str:
    """What a client is told of a path without a route.

    Args:
        path: what it has asked for.
        served: the paths that are there, one of which it may have meant.
    """
    for absent, what in _ABSENT.items():
        if path == absent or path.startswith(f"{absent}/"):
            return f"there is no {path:.200}: this server generates text, and has no {what}"
    if path in ("/", "/v1", "/v1/"):
        return f"there is no {path}: the APIs are below /v1, such as /v1/models"
    # Clients of OpenAI's API take a base URL with /v1, those of Anthropic's one without.
    below = "/" + path.strip("/").removeprefix("v1/").removeprefix("v1/")
    for meant in (f"/v1{below}", below):
        if meant in served:
            return f"there is no {path:.200}; did you mean {meant}?"
    return f"there is no {path:.200}"
