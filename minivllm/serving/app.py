"""The application: routes of every API, errors in the form of the API that was called, and what
clients hear of parts of these APIs that are not here."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from minivllm import __version__
from minivllm.bench.hardware.gpu import NullGpu
from minivllm.platform.plug_ins import make_own
from minivllm.serving import control, tokens, websocket
from minivllm.serving.anthropic import forms as anthropic_forms
from minivllm.serving.anthropic import messages
from minivllm.serving.errors import ApiError
from minivllm.serving.http import metrics
from minivllm.serving.http.access import Accesses, ApiKeys, RouteAccess, accesses
from minivllm.serving.http.answers import JsonAnswer
from minivllm.serving.http.calls import REQUEST_ID, Calls
from minivllm.serving.http.limits import Limits
from minivllm.serving.openai import chat, completions, models, responses
from minivllm.serving.openai import forms as openai_forms
from minivllm.serving.service import EngineService, Service
from minivllm.serving.view import routes

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Scope

# Types of pydantic's errors of a body that is empty, or JSON of another kind.
_NO_OBJECT = ("missing", "model_attributes_type", "model_type", "dict_type")
_IS_NAME = re.compile(r"\w+")
NO_ENDPOINT = "no endpoint: give it a `router(service)` that returns a fastapi.APIRouter"
_KINDS = ("str", "int", "float", "bool", "none")  # by which pydantic names a union's parts


def build_app(service: EngineService, gpu: NullGpu) -> FastAPI:
    """The ASGI application of the process that has the engines: every route, without limits. Its
    state has the routes `of_the_whole` server, which no API server can answer by itself, with the
    access that they declare.

    Args:
        service: answers.
        gpu: of the engine, or a null object.
    """
    whole = [control.router(service), metrics.router(service)]
    if service.options.view:
        whole.append(routes.router(service, gpu))
    app = _app([*_apis(service), *whole])
    pages = FastAPI().router  # with the description of the APIs
    app.state.of_the_whole = accesses(chain(pages.routes, *(one.routes for one in whole)))
    return app


def build_api_app(
    service: Service, relay: Callable[[ASGIApp], ASGIApp], relayed: Accesses
) -> FastAPI:
    """The ASGI application of an API server, without limits.

    Args:
        service: answers.
        relay: middleware that relays calls of some paths to another process.
        relayed: what the routes of these paths declare.
    """
    app = _app(_apis(service), relayed)
    app.add_middleware(cast(Any, relay))
    return app


@runtime_checkable
class Endpoint(Protocol):
    """Routes of a user's own, in `task.endpoints`."""

    def router(self, service: Service) -> APIRouter:
        """The routes, which answer by means of the service; each process that answers clients has
        them. A route declares with `access` who may call it."""


def _apis(service: Service) -> list[APIRouter]:
    """The routes of those who ask for answers of the model.

    Raises:
        BadInput: one of `task.endpoints` cannot be made, or has no routes.
    """
    modules = (models, completions, chat, responses, messages, tokens, websocket)
    own: list[Endpoint] = [
        make_own(f"task.endpoints[{number}]", node, Endpoint, NO_ENDPOINT)
        for number, node in enumerate(service.options.endpoints)
    ]
    return [one.router(service) for one in (*modules, *own)]


def _app(routers: Sequence[APIRouter], relayed: Accesses = MappingProxyType({})) -> FastAPI:
    """An application of these routes, with errors in the form of the API that was called. Its state
    has the `access` of its routes, and of those that are relayed."""
    app = FastAPI(title="minivllm", version=__version__, redirect_slashes=False)
    app.state.access = {**relayed, **accesses(chain(*(one.routes for one in routers)))}
    served = {path for _, path in app.state.access}
    for router in routers:
        paths = {route.path for route in router.routes if isinstance(route, APIRoute)}
        app.include_router(router, responses=_errors(paths))

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error_response(request, error)

    @app.exception_handler(RequestValidationError)
    async def wrong_body(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        is_openai = not anthropic_forms.is_path(request.url.path)
        return error_response(request, _validation(error.errors(), is_openai))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        path, headers = request.url.path, error.headers or {}
        status, kind, message = error.status_code, "invalid_request_error", str(error.detail)
        if status == 404:
            kind, message = "not_found_error", not_found(path, served)
        elif status == 405:
            message = f"{path:.200} takes {headers.get('Allow')}, not {request.method:.20}"
        answer = error_response(request, ApiError(status, message, kind=kind))
        answer.headers.update(headers)
        return answer

    return app


def _errors(paths: Collection[str]) -> dict[int | str, dict[str, Any]]:
    """What operations at these paths answer where something is wrong, for their description."""
    forms = anthropic_forms if any(map(anthropic_forms.is_path, paths)) else openai_forms
    content = {"application/json": {"schema": forms.ERROR_SCHEMA}}
    return {
        "4XX": {"description": "The request is wrong", "content": content},
        "5XX": {"description": "The server cannot answer", "content": content},
    }


def guard(app: FastAPI, service: Service) -> None:
    """Add what every request of a client passes, from the inside out."""
    options, routes = service.options, RouteAccess(app.state.access)

    def respond(scope: Scope, error: ApiError) -> JSONResponse:
        return error_response(Request({**scope, "type": "http"}), error)

    app.add_middleware(
        Limits,
        options=options,
        routes=routes,
        keys=ApiKeys(options.api_keys),
        respond=respond,
        count=service.count,
        admit=service.admit,
    )
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[*REQUEST_ID, "x-engine-request-id", "retry-after"],
        )
    app.add_middleware(
        Calls,
        respond=respond,
        routes=routes,
        count=service.count,
        statuses=service.statuses,
        log_prompts=options.log_prompts,
    )


def _validation(errors: Any, is_openai: bool) -> ApiError:
    """The first error of a body that does not fit its model; see `_path`."""
    first = errors[0]
    if first["type"] == "json_invalid":
        (_, at), why = first["loc"], first["ctx"]["error"]
        return ApiError(400, f"the body is not valid JSON: at character {at}: {why}"[:500])
    if first["loc"] == ("body",) and first["type"] in _NO_OBJECT:
        return ApiError(400, "the body must be a JSON object")
    where = _path(first["loc"], is_openai)[:200]
    message = str(first["msg"])[:500]
    code = "missing_required_parameter" if first["type"] == "missing" else None
    return ApiError(
        400, f"{where}: {message}" if where else message, param=where or None, code=code
    )


def _path(places: Sequence[str | int], is_openai: bool) -> str:
    """The path of a field: messages[0].role as OpenAI writes it, messages.0.role as Anthropic does.
    Kinds of a union are no parts of it."""
    path = ""
    for place in places[1:]:
        if isinstance(place, int):
            path += f"[{place}]" if is_openai else f".{place}"
        elif _IS_NAME.fullmatch(place) and place not in _KINDS:
            path += f".{place}" if path else place
    return path


def error_response(request: Request, error: ApiError) -> JSONResponse:
    """An error in the form of the API that was called."""
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s else None
    forms = anthropic_forms if anthropic_forms.is_path(request.url.path) else openai_forms
    return JsonAnswer(forms.error_body(error), error.status, headers)


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
    """What a client hears of a path without a route.

    Args:
        path: that it has called.
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
