"""The application: routes of every API, and errors in the form of the API that was called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from minivllm import __version__
from minivllm.serving import control, tokens, websocket
from minivllm.serving.anthropic import forms as anthropic_forms
from minivllm.serving.anthropic import messages
from minivllm.serving.errors import ApiError
from minivllm.serving.http import metrics
from minivllm.serving.http.calls import Calls
from minivllm.serving.http.limits import ApiKeys, Limits
from minivllm.serving.json_answer import JsonAnswer
from minivllm.serving.openai import chat, completions, models, responses
from minivllm.serving.openai import forms as openai_forms
from minivllm.serving.refusals import not_found
from minivllm.serving.service import Service

if TYPE_CHECKING:
    from starlette.types import Scope


def build_app(service: Service) -> FastAPI:
    """The ASGI application of a service."""
    app = FastAPI(title="minivllm", version=__version__)
    for module in (
        models,
        completions,
        chat,
        responses,
        messages,
        tokens,
        control,
        metrics,
        websocket,
    ):
        app.include_router(module.router(service))

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error_response(request, error)

    @app.exception_handler(RequestValidationError)
    async def wrong_body(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(request, _validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        absent = error.status_code == 404
        message = not_found(request.url.path) if absent else str(error.detail)
        kind = "not_found_error" if absent else "invalid_request_error"
        return error_response(request, ApiError(error.status_code, message, kind=kind))

    _add_middleware(app, service)
    return app


def _add_middleware(app: FastAPI, service: Service) -> None:
    """What every request passes, from the inside out."""
    options = service.options

    def respond(scope: Scope, error: ApiError) -> JSONResponse:
        return error_response(Request({**scope, "type": "http"}), error)

    app.add_middleware(
        Limits,
        options=options,
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
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(
        Calls,
        respond=respond,
        count=service.count,
        statuses=service.statuses,
        log_prompts=options.log_prompts,
    )


def _validation(errors: Any) -> ApiError:
    """The first error of a body that does not fit its model."""
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")[:200]
    message = str(first["msg"])[:500]
    return ApiError(400, f"{where}: {message}" if where else message, param=where or None)


def error_response(request: Request, error: ApiError) -> JSONResponse:
    """An error in the form of the API that was called."""
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s else None
    forms = anthropic_forms if anthropic_forms.is_path(request.url.path) else openai_forms
    return JsonAnswer(forms.error_body(error), error.status, headers)
