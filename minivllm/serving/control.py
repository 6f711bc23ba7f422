"""Endpoints for those who operate the server: its health, its version, its prefix cache."""

from __future__ import annotations

from fastapi import APIRouter

from minivllm import __version__
from minivllm.serving.errors import ApiError, unavailable
from minivllm.serving.processes.engine_client import DIED
from minivllm.serving.service import Service


def router(service: Service) -> APIRouter:
    """The routes of this API."""
    routes = APIRouter()

    def require_engine() -> None:
        if not service.client.is_alive:
            raise unavailable(DIED)

    @routes.get("/health")
    async def health() -> dict[str, str]:
        """Say whether the engine lives."""
        require_engine()
        return {"status": "ok"}

    @routes.get("/ready")
    async def ready() -> dict[str, str | int]:
        """Say whether new requests are taken; a load balancer sends none where they are not."""
        require_engine()
        if service.is_draining:
            raise unavailable("the server finishes what runs, and ends")
        client = service.client
        if client.num_replicas == 1:
            return {"status": "ready"}
        return {"status": "ready", "replicas": client.num_replicas, "alive": client.num_alive}

    @routes.get("/version")
    async def version() -> dict[str, str]:
        """Say which version of minivllm this is."""
        return {"version": __version__}

    @routes.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, bool]:
        """Empty the prefix cache."""
        if not await service.client.reset_prefix_cache():
            raise ApiError(409, "requests are running: the prefix cache was not emptied")
        return {"reset": True}

    return routes
