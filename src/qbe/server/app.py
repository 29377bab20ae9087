"""The HTTP side: routes, errors, the OpenAPI document."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from qbe.server.absent import hint
from qbe.server.anthropic import answer as messages
from qbe.server.anthropic.protocol import CountTokensRequest
from qbe.server.batches.protocol import BatchRequest
from qbe.server.batches.routes import add_batches, begin_batches
from qbe.server.bodies import Bodies
from qbe.server.console import add_console
from qbe.server.cors import Cors
from qbe.server.endpoint import Answering, Endpoint
from qbe.server.endpoints import ENDPOINTS
from qbe.server.errors import APIError, ErrorBody, is_anthropic
from qbe.server.exchange import Exchange, while_connected
from qbe.server.guard import Guard
from qbe.server.health.feedback import FeedbackRequest
from qbe.server.health.routes import FEEDBACK, add_health
from qbe.server.observe import logs
from qbe.server.responses.routes import add_responses
from qbe.server.rollout.routes import ROLLOUT, RolloutRequest, add_rollout
from qbe.server.service import Service
from qbe.server.wire import dumps
from qbe.version import __version__

log = logging.getLogger(__name__)

_HUNG_UP = Response(status_code=499)
_BODIES: dict[str, type[BaseModel]] = {
    "/v1/messages/count_tokens": CountTokensRequest, "/v1/batches": BatchRequest, FEEDBACK: FeedbackRequest,
    ROLLOUT: RolloutRequest,
    **{e.path: e.body for e in ENDPOINTS},
}  # fmt: skip
_ERRORS: Any = {
    status: {"model": ErrorBody, "description": what}
    for status, what in (
        (400, "something in the body is wrong; `param` names the field"),
        (401, "the key is missing or unknown"),
        (403, "the key may not do this"),
        (404, "no such model"),
        (409, "it is in use, or over"),
        (408, "the body took too long"),
        (413, "the body is too large"),
        (429, "the queue is full or a limit is reached; see `Retry-After`"),
        (500, "the model failed"),
        (503, "not ready; see `Retry-After`"),
        (504, "the request took too long"),
    )
}
_STREAM: Any = {200: {"description": "the answer; with `stream`, server-sent events", "content": {
    "application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {}},
}}}  # fmt: skip


def make_app(make_service: Callable[[], Service], inside_port: int | None = None) -> FastAPI:
    """The application.

    Args:
        make_service: called once the event loop runs.
        inside_port: of those it is reached at, the only one with `/metrics` and `/openapi.json`; None: all of them.
    """
    bodies = Bodies(_BODIES)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = make_service()
        service_of(app).start()
        batches = app.state.batches = begin_batches(service_of(app))
        try:
            yield
        finally:
            await batches.stop()
            await service_of(app).stop()
            bodies.close()

    app = FastAPI(
        title="QBE", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        description="OpenAI's API and Anthropic's messages, with precision as part of the contract: `service_tier` and "
        "`qbe`.",
    )  # fmt: skip
    _add_routes(app)

    def counted(error: APIError, scope: Scope) -> None:
        service_of(app).observer.turned_away(error)
        logs.say("refused", {"status": error.status, "code": error.code, "param": error.param} | _who(scope))

    _add_error_handlers(app, counted)
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    app.add_middleware(
        Guard, settings=lambda: service_of(app).settings, refused=counted, bodies=bodies,
        rates=lambda: service_of(app).rates, inside_port=inside_port,
    )  # fmt: skip
    app.add_middleware(Cors, settings=lambda: service_of(app).settings)
    return app


def _add_routes(app: FastAPI) -> None:
    bearer = [Depends(HTTPBearer(auto_error=False))]  # for the document; `Guard` has looked before
    about: dict[str, Any] = {"responses": _ERRORS, "dependencies": bearer}

    @app.get("/health")
    async def health() -> Response:
        """Whether the process should go on living."""
        return _state(not service_of(app).broken)

    @app.get("/ready", responses={503: {"description": "not yet, or not any more"}})
    async def ready() -> Response:
        """Whether requests are taken."""
        return _state(service_of(app).ready)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(await service_of(app).scrape(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models", responses=_ERRORS, dependencies=bearer)
    async def models(request: Request) -> dict[str, Any]:
        """The one model, under each of its names."""
        names = service_of(app).names
        data = [_model(service_of(app), name, is_anthropic(request.scope)) for name in names]
        return {"object": "list", "data": data, "first_id": names[0], "last_id": names[-1], "has_more": False}

    @app.get("/v1/models/{name:path}", responses=_ERRORS, dependencies=bearer)
    async def model(request: Request, name: str) -> dict[str, Any]:
        """One of these names."""
        if name not in service_of(app).names:
            raise APIError(404, f"there is no model '{name[:200]}' here", param="model", code="model_not_found")
        return _model(service_of(app), name, is_anthropic(request.scope))

    for endpoint in ENDPOINTS:
        app.add_api_route(
            endpoint.path, _handler(endpoint), methods=["POST"], responses=_STREAM | _ERRORS, dependencies=bearer,
            openapi_extra=_takes(endpoint.body), description=endpoint.what, name=endpoint.path,
        )  # fmt: skip

    @app.post(
        "/v1/messages/count_tokens", responses=_ERRORS, dependencies=bearer, openapi_extra=_takes(CountTokensRequest)
    )
    async def count_tokens(request: Request) -> dict[str, int]:
        """How many tokens the prompt of a message has."""
        return await messages.count_tokens(request.state.body, request.state.client, service_of(app))

    add_batches(app, service_of, about)
    add_responses(app, service_of, about)
    add_console(app, service_of, bearer)
    add_health(app, service_of, about)
    add_rollout(app, service_of, about)


def _handler(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        service, body = service_of(request.app), request.state.body
        return await _answer(request, endpoint.begin(body, request.state.client, service), bool(body.stream))

    return handle


def _add_error_handlers(app: FastAPI, counted: Callable[[APIError, Scope], None]) -> None:
    def answer(error: APIError, request: Request) -> Response:
        counted(error, request.scope)
        return error.response(request.scope)

    @app.exception_handler(APIError)
    async def on_api_error(request: Request, error: APIError) -> Response:
        return answer(error, request)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        said = hint(request.scope["path"]) if error.status_code == 404 else str(error.detail)
        response = answer(APIError(error.status_code, said), request)
        response.headers.update(error.headers or {})  # of a 405: which methods there are
        return response

    @app.exception_handler(Exception)
    async def on_defect(request: Request, error: Exception) -> Response:
        return answer(APIError(500, "a defect of the server; its log says more", code="internal_error"), request)


def _who(scope: Scope) -> dict[str, Any]:
    """Who was refused, for a line of the log."""
    state, address = scope.get("state", {}), scope.get("client")
    client = state.get("client")
    return {
        "key": None if client is None else client.name, "address": None if address is None else address[0],
        "method": scope["method"], "path": scope["path"][:200], "request_id": state.get("request_id"),
    }  # fmt: skip


def _takes(body: type[BaseModel]) -> dict[str, Any]:
    """For the document: what `Guard` parses."""
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document. Whether a key is needed is up to the settings, so that none is allowed, too."""
    made = app.openapi_schema is None
    document = FastAPI.openapi(app)
    if made:
        _, found = models_json_schema(
            [(body, "validation") for body in _BODIES.values()], ref_template="#/components/schemas/{model}"
        )
        document["components"]["schemas"] |= found["$defs"]
    for operation in (one for path in document["paths"].values() for one in path.values() if made):
        if "security" in operation:
            operation["security"].append({})
    return document


def service_of(app: FastAPI) -> Service:
    """The service of a running application."""
    service: Service = app.state.service
    return service


async def _answer(request: Request, begun: Awaitable[Answering], streams: bool) -> Response:
    """Begin, and answer at once or in a stream; a client that hangs up cancels."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    async def all_of_it() -> Any:
        answering = await begun
        found = await answering.whole()
        await service_of(request.app).booked(answering.exchange)
        return found

    if streams:
        answering: Answering | None = await while_connected(gone, begun)
        if answering is None:
            return _HUNG_UP
        return _Stream(answering.stream(), answering.exchange)
    found = await while_connected(gone, all_of_it())
    return _HUNG_UP if found is None else Response(dumps(found), media_type="application/json")


class _Stream(StreamingResponse):
    """Server-sent events. However it ends, and be it before it began, so does the request."""

    def __init__(self, events: AsyncIterator[bytes], exchange: Exchange) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout_at(self._exchange.gone_at):  # a client may read too slowly, or not at all
                await super().__call__(scope, receive, send)
        except TimeoutError:
            log.warning("a client did not read its stream in time")
        finally:
            self._exchange.over()


def _state(good: bool) -> Response:
    return Response(dumps({"status": "ok" if good else "unavailable"}), 200 if good else 503, None, "application/json")


def _model(service: Service, name: str, anthropic: bool) -> dict[str, Any]:
    if anthropic:
        since = datetime.fromtimestamp(service.created, UTC).isoformat()
        return {"type": "model", "id": name, "display_name": name, "created_at": since, "lifecycle": "active"}
    return {"id": name, "object": "model", "created": service.created, "owned_by": "qbe"}
