"""The routes, and what stands before them: host, key, content type, size."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from llama_artifacts.errors import LlamaExportError
from llama_runtime.server import page
from llama_runtime.server.errors import SERVER, ApiError, api_error
from llama_runtime.server.hosts import HostCheck
from llama_runtime.server.jobs import Job, Served, chat_job, completion_job
from llama_runtime.server.metrics import Counting, Metrics
from llama_runtime.server.replies import ChatKind, CompletionKind, Kind, Reply
from llama_runtime.server.schema import ChatRequest, CompletionRequest, Sampling, parse
from llama_runtime.server.stream import (
    ClientGoneError,
    EventStream,
    pieces,
    while_connected,
    whole,
)
from llama_runtime.server.worker import Worker

_LOG = logging.getLogger(__name__)
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CLIENT_GONE = 499

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True)
class Limits:
    """What the server grants.

    Attributes:
        num_rows: requests that run at the same time.
        max_queue: requests that may wait besides.
        max_body_bytes: of a request.
        api_key: the key that `/v1` asks for; None: no key.
        hosts: names by which the server may be called; None: any.
    """

    num_rows: int
    max_queue: int
    max_body_bytes: int
    api_key: str | None = None
    hosts: frozenset[str] | None = None


@dataclass(frozen=True)
class _Server:
    """What the routes share."""

    served: Served
    worker: Worker
    metrics: Metrics
    limits: Limits


def create_app(served: Served, worker: Worker, limits: Limits) -> FastAPI:
    """The application; while it is up the worker's thread runs."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await worker.close()

    # FastAPI's own documentation pages load scripts from elsewhere.
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    metrics = Metrics(worker, num_rows=limits.num_rows)
    server = _Server(served, worker, metrics, limits)
    routers = (_open_routes(server), _api_routes(server))
    for router in routers:
        app.include_router(router)
    paths = frozenset(getattr(route, "path", "") for router in routers for route in router.routes)
    if limits.hosts is not None:
        app.add_middleware(HostCheck, hosts=limits.hosts)
    # The one that is added last comes first, and counts refusals, too.
    app.add_middleware(Counting, metrics=metrics, paths=paths)
    _handle_errors(app)
    return app


def _open_routes(server: _Server) -> APIRouter:
    router = APIRouter()

    @router.get("/")
    async def show_page() -> Response:
        return Response(page.CONTENT, media_type="text/html", headers=page.HEADERS)

    @router.get("/health")
    async def health() -> JSONResponse:
        fault = server.worker.fault if server.worker.is_alive else "the engine is not running"
        content = {"status": "ok"} if fault is None else {"status": "failing", "fault": fault}
        return JSONResponse(content, 200 if fault is None else 503)

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type=_METRICS_TYPE)

    return router


def _api_routes(server: _Server) -> APIRouter:
    router = APIRouter(prefix="/v1", dependencies=[Depends(_key_check(server.limits.api_key))])
    tokenizer = server.served.tokenizer

    @router.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(server.served)]}

    @router.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _check_model(server.served, name)
        return _model(server.served)

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        body = parse(CompletionRequest, await _read(request, server.limits.max_body_bytes))
        kind = CompletionKind(tokenizer, has_logprobs=body.logprobs is not None)
        return await _answer(server, request, body, completion_job, kind)

    @router.post("/chat/completions")
    async def chat(request: Request) -> Response:
        body = parse(ChatRequest, await _read(request, server.limits.max_body_bytes))
        kind = ChatKind(tokenizer, has_logprobs=bool(body.logprobs))
        return await _answer(server, request, body, chat_job, kind)

    return router


SamplingBody = TypeVar("SamplingBody", bound=Sampling)


async def _answer(
    server: _Server,
    request: Request,
    body: SamplingBody,
    make_job: Callable[[Served, SamplingBody], Job],
    kind: Kind,
) -> Response:
    _check_model(server.served, body.model)
    # In another thread: long text and templates of others' making take their time.
    job = await asyncio.to_thread(make_job, server.served, body)
    _check_choices(server.limits, len(job.requests))
    reply = Reply(server.served, body, job, kind)
    call = await server.worker.submit(job.requests)
    parts = pieces(server.worker, call, job, server.metrics)

    def end() -> None:
        server.worker.cancel(call)

    if body.stream:
        return EventStream(parts, reply, at_end=end)
    try:
        return JSONResponse(await while_connected(request.receive, whole(parts, reply)))
    except ClientGoneError:
        return Response(status_code=_CLIENT_GONE)
    finally:
        end()


async def _read(request: Request, max_bytes: int) -> bytes:
    """The body, which must be JSON: what a page of another site can send without asking is not."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"expected content of type application/json, got `{kind or 'none'}`")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            message = f"expected a body of at most {max_bytes} bytes, got more"
            raise ApiError(413, message, code="body_too_large", headers={"connection": "close"})
    return bytes(body)


def _key_check(key: str | None) -> Callable[[Request], None]:
    """Compares digests, so that the time taken tells neither the key nor its length."""
    wanted = None if key is None else _digest(f"Bearer {key}")

    def check(request: Request) -> None:
        if wanted is None:
            return
        given = _digest(request.headers.get("authorization", ""))
        if not hmac.compare_digest(given, wanted):
            message = "expected this server's API key as a bearer token"
            raise ApiError(
                401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )

    return check


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


def _check_model(served: Served, name: str) -> None:
    if name != served.name:
        message = f"expected the model `{served.name}`, got `{name[:100]}`"
        raise ApiError(404, message, param="model", code="model_not_found")


def _check_choices(limits: Limits, num_choices: int) -> None:
    most = limits.num_rows + limits.max_queue
    if num_choices > most:
        message = f"expected at most {most} choices, of all prompts together, got {num_choices}"
        raise ApiError(400, message, param="n")


def _model(served: Served) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "llama-export",
        "max_model_len": served.capacity,
    }


def _handle_errors(app: FastAPI) -> None:
    """Every failure has OpenAI's shape, those of the framework, too."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.to_dict(), error.status, error.headers)

    @app.exception_handler(LlamaExportError)
    async def failed(request: Request, error: LlamaExportError) -> JSONResponse:
        return await refused(request, api_error(error))

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        """The client left before its request was whole."""
        return Response(status_code=_CLIENT_GONE)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        headers = dict(error.headers or {})
        return await refused(request, ApiError(error.status_code, error.detail, headers=headers))

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> JSONResponse:
        _LOG.error("%s failed", request.url.path, exc_info=error)
        return await refused(request, ApiError(500, "the server failed", kind=SERVER))
