"""The routes of files and batches."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import FileResponse, Response

from qbe.files import cache_dir
from qbe.server.batches.protocol import Batch, BatchRequest
from qbe.server.batches.runner import BatchRunner
from qbe.server.batches.store import DAY_S, BatchStore
from qbe.server.batches.upload import FRAME_BYTES, Form, receive
from qbe.server.endpoints import ENDPOINTS
from qbe.server.errors import APIError
from qbe.server.pagination import Page, page_of
from qbe.server.service import Service

_BY_PATH = {endpoint.path: endpoint for endpoint in ENDPOINTS}
_MOST_ACTIVE = 64  # batches of a key


def begin_batches(service: Service) -> BatchRunner:
    """The runner of a server's batches; it has begun."""
    folder = service.settings.batches.folder
    store = BatchStore(Path(folder) if folder else cache_dir() / "batches", lambda: service.settings.batches)
    runner = BatchRunner(store, service, _BY_PATH)
    runner.start()
    return runner


def add_batches(app: FastAPI, service_of: Callable[[FastAPI], Service], about: dict[str, Any]) -> None:
    """Add the routes.

    Args:
        service_of: gives the service of the application.
        about: of each route, for the document.
    """

    def store_of(request: Request) -> tuple[BatchStore, str]:
        """The store, and whose part of it."""
        store: BatchStore = request.app.state.batches.store
        store.open()
        return store, request.state.client.name

    _add_files(app, service_of, store_of, about)

    @app.post("/v1/batches", **about | {"openapi_extra": _takes_batch()})
    async def create(request: Request) -> dict[str, Any]:
        """Begin a batch."""
        store, key = store_of(request)
        body: BatchRequest = request.state.body
        service_of(app).rates.charge(request.state.client, 0)
        if body.endpoint not in _BY_PATH:
            raise APIError(400, f"endpoint: it is one of {', '.join(_BY_PATH)}", param="endpoint", code="invalid_value")
        if store.file(key, body.input_file_id).purpose != "batch":
            raise APIError(400, "input_file_id: its purpose must be 'batch'", param="input_file_id")
        if sum(b.key == key and not b.over for b in store.batches.values()) >= _MOST_ACTIVE:
            raise APIError(429, f"this key has {_MOST_ACTIVE} batches that are not over: wait for one, or cancel it",
                           code="rate_limit_exceeded", retry_after=60)  # fmt: skip
        keep_s = store.settings.days * DAY_S if body.output_expires_after is None else body.output_expires_after.seconds
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}", key=key, endpoint=body.endpoint, input_file_id=body.input_file_id,
            completion_window=body.completion_window, metadata=body.metadata, created_at=store.now,
            expires_at=store.now + body.window_s(), keep_s=keep_s,
        )  # fmt: skip
        await asyncio.to_thread(store.put, batch)
        app.state.batches.wake()
        return batch.describe()

    @app.get("/v1/batches", **about)
    async def batches(request: Request, page: Page) -> dict[str, Any]:
        """The key's batches."""
        store, key = store_of(request)
        own = sorted((b for b in store.batches.values() if b.key == key), key=lambda b: (b.created_at, b.id))
        return page_of([b.describe() for b in own], page)

    @app.get("/v1/batches/{id}", **about)
    async def batch(request: Request, id: str) -> dict[str, Any]:
        """A batch as it is now."""
        store, key = store_of(request)
        return store.batch(key, id).describe()

    @app.post("/v1/batches/{id}/cancel", **about)
    async def cancel(request: Request, id: str) -> dict[str, Any]:
        """Answer nothing more of it; what was answered is kept."""
        store, key = store_of(request)
        batch = store.batch(key, id)
        if batch.over or batch.status == "finalizing":
            raise APIError(409, f"the batch is {batch.status} already", param="batch_id", code="batch_over")
        if batch.status != "cancelling":
            batch = batch.become("cancelling", store.now)
            store.put(batch)  # in the event loop: the runner must not end it meanwhile
            app.state.batches.wake()
        return batch.describe()


def _add_files(
    app: FastAPI, service_of: Callable[[FastAPI], Service],
    store_of: Callable[[Request], tuple[BatchStore, str]], about: dict[str, Any],
) -> None:  # fmt: skip
    uploading: set[str] = set()  # keys

    @app.post("/v1/files", **about | {"openapi_extra": _takes_form()})
    async def upload(request: Request) -> dict[str, Any]:
        """Keep a file for a batch."""
        store, key = store_of(request)
        rates, settings = service_of(app).rates, store.settings
        rates.check(request.state.client)
        rates.charge(request.state.client, 0)
        if key in uploading:
            raise APIError(429, "another file of this key is arriving: send one after the other", code="files_busy",
                           retry_after=1)  # fmt: skip
        most = min(settings.file_bytes, store.room(key))
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > most + FRAME_BYTES:
            raise APIError(413, f"file: it has more than {most} bytes, which is what this key may send now",
                           param="file", code="file_too_large")  # fmt: skip
        uploading.add(key)
        try:
            path = store.partial()
            kind = request.headers.get("content-type", "")
            form = await receive(_counted(request), kind, path, most, settings.upload_s)
            request.state.unread = False
            try:
                seconds = _checked(form)
                return store.add(key, path, form.filename or "file", "batch", seconds).describe()
            finally:
                path.unlink(missing_ok=True)
        finally:
            uploading.discard(key)

    @app.get("/v1/files", **about)
    async def files(request: Request, page: Page, purpose: str | None = None) -> dict[str, Any]:
        """The key's files."""
        store, key = store_of(request)
        own = sorted((f for f in store.files.values() if f.key == key), key=lambda f: (f.created_at, f.id))
        return page_of([f.describe() for f in own if purpose in (None, f.purpose)], page)

    @app.get("/v1/files/{id}", **about)
    async def file(request: Request, id: str) -> dict[str, Any]:
        """What is known of a file."""
        store, key = store_of(request)
        return store.file(key, id).describe()

    @app.get("/v1/files/{id}/content", response_class=Response, **about)
    async def content(request: Request, id: str) -> Response:
        """What is in it."""
        store, key = store_of(request)
        return FileResponse(store.content(store.file(key, id).id), media_type="application/jsonl")

    @app.delete("/v1/files/{id}", **about)
    async def delete(request: Request, id: str) -> dict[str, Any]:
        """Delete it."""
        store, key = store_of(request)
        store.delete(key, id)
        return {"id": id, "object": "file", "deleted": True}


async def _counted(request: Request) -> AsyncIterator[bytes]:
    """The body, whose bytes count against its key if it is refused."""
    request.state.body_bytes = 0
    async for chunk in request.stream():
        request.state.body_bytes += len(chunk)
        yield chunk


def _checked(form: Form) -> int:
    """Seconds that the file is kept; 0 where the form does not say. Raises APIError."""
    if form.fields.get("purpose") != "batch":
        raise APIError(400, "purpose: it must be 'batch', which is all that files are for here", param="purpose",
                       code="invalid_value")  # fmt: skip
    seconds = form.fields.get("expires_after[seconds]", "")
    if not seconds:
        return 0
    if not (seconds.isascii() and seconds.isdigit() and len(seconds) < 8 and 3600 <= int(seconds) <= 2592000):
        raise APIError(400, "expires_after.seconds: it is from 3600 to 2592000", param="expires_after.seconds",
                       code="invalid_value")  # fmt: skip
    return int(seconds)


def _takes_batch() -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{BatchRequest.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _takes_form() -> dict[str, Any]:
    fields = {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": ["batch"]}}
    schema = {"type": "object", "properties": fields, "required": ["file", "purpose"]}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}
