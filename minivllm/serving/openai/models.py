"""/v1/models: what is served, for clients of OpenAI's and of Anthropic's API."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter

from minivllm.serving.parsing.tool_forms import tool_form
from minivllm.serving.service import Service


def router(service: Service) -> APIRouter:
    """The routes of this API."""
    routes = APIRouter()
    form = None if service.tokenizer is None else tool_form(service.tokenizer)

    def card() -> dict[str, Any]:
        return {
            "id": service.model,
            "object": "model",
            "created": service.created,
            "owned_by": "minivllm",
            "max_model_len": service.info.max_model_len,
            "tool_call_form": form and form.name,
            "type": "model",
            "display_name": service.model,
            "created_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        }

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the model that is served."""
        ends = {"first_id": service.model, "last_id": service.model}
        return {"object": "list", "data": [card()], "has_more": False, **ends}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Describe the model that is served."""
        service.require_model(name)
        return card()

    return routes
