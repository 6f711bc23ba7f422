"""Endpoints for those who operate the server: its health, version, replicas and prefix cache."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import Field

from minivllm import __version__
from minivllm.parallel.options import MOST_REPLICAS
from minivllm.serving.errors import ApiError, unavailable
from minivllm.serving.http.access import Access, access
from minivllm.serving.openai.forms import Body
from minivllm.serving.processes.engine_client import DIED
from minivllm.serving.service import EngineService

ENDING = "the server finishes what runs, and ends"


class ReplicasBody(Body):
    """How many replicas are to serve."""

    replicas: int = Field(ge=1, le=MOST_REPLICAS)


def router(service: EngineService) -> APIRouter:
    """The routes of this API."""
    routes = APIRouter()

    @routes.get("/health")
    @access(Access.OPEN | Access.QUIET)
    async def health() -> dict[str, str]:
        """Say whether the engine lives."""
        _require_engine(service)
        return {"status": "ok"}

    @routes.get("/ready")
    @access(Access.OPEN | Access.QUIET)
    async def ready() -> dict[str, str | int]:
        """Say whether new requests are taken; a load balancer sends none where they are not."""
        _require_engine(service)
        if service.is_draining:
            raise unavailable(ENDING)
        replicas = service.client.replicas
        if len(replicas.links) == 1:
            return {"status": "ready"}
        alive = len(replicas.serving)
        return {"status": "ready", "replicas": len(replicas.wanted), "alive": alive}

    _add_replicas(routes, service)

    @routes.get("/version")
    async def version() -> dict[str, str]:
        """Say which version of minivllm this is."""
        return {"version": __version__}

    @routes.post("/reset_prefix_cache")
    @access(Access.COMMAND)
    async def reset_prefix_cache() -> dict[str, bool]:
        """Empty the prefix cache."""
        if not await service.client.reset_prefix_cache():
            raise ApiError(409, "requests are running: the prefix cache was not emptied")
        return {"reset": True}

    return routes


def _require_engine(service: EngineService) -> None:
    if not service.client.is_alive:
        raise unavailable(DIED)


def _add_replicas(routes: APIRouter, service: EngineService) -> None:
    """Add what reads and changes the number of replicas."""

    @routes.get("/replicas")
    async def replicas() -> dict[str, int]:
        """Say how many replicas there are to be, and how many serve, start, drain or are given
        up."""
        return service.client.replicas.states()

    @routes.post("/replicas", status_code=202)
    @access(Access.COMMAND)
    async def set_replicas(body: ReplicasBody) -> dict[str, int]:
        """Add replicas, or take some away, and answer at once."""
        body.require_known()
        _require_engine(service)
        if service.is_draining:
            raise unavailable(ENDING)
        if not service.options.allows_commands:
            raise ApiError(403, "other machines reach this server, and it has no task.api_keys")
        if service.options.record:
            raise ApiError(409, "a record is of one number of replicas: see task.record")
        service.client.resize(body.replicas, service.options.drain_s)
        return service.client.replicas.states()
