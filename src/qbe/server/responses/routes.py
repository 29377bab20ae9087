"""What is kept of `/v1/responses`: read, listed, deleted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request

from qbe.server.messages import ContentPart
from qbe.server.pagination import Page, page_of
from qbe.server.responses.protocol import InputItem
from qbe.server.service import Service


def add_responses(app: FastAPI, service_of: Callable[[FastAPI], Service], about: dict[str, Any]) -> None:
    """Add the routes.

    Args:
        service_of: gives the service of the application.
        about: of each route, for the document.
    """

    @app.get("/v1/responses/{id}", **about)
    async def response(request: Request, id: str) -> dict[str, Any]:
        """A response that is kept."""
        return service_of(app).responses.get(request.state.client.name, id).response

    @app.get("/v1/responses/{id}/input_items", **about)
    async def input_items(request: Request, id: str, page: Page) -> dict[str, Any]:
        """What led to it."""
        kept = service_of(app).responses.get(request.state.client.name, id)
        items = [_item(item, f"{id}_{i}") for i, item in enumerate(kept.items[: kept.given])]
        return page_of(items, page, newest_first=True)

    @app.delete("/v1/responses/{id}", **about)
    async def delete(request: Request, id: str) -> dict[str, Any]:
        """Forget it."""
        service_of(app).responses.delete(request.state.client.name, id)
        return {"id": id, "object": "response", "deleted": True}


def _item(item: InputItem, id: str) -> dict[str, Any]:
    fields = item.model_dump(exclude_none=True)
    if item.type == "message":
        kind = "output_text" if item.role == "assistant" else "input_text"
        parts = [ContentPart(text=item.content)] if isinstance(item.content, str) else item.content or ()
        fields["content"] = [
            {"type": kind, "text": p.text}
            if p.image_url is None
            else {"type": "input_image", "image_url": p.image_url, "detail": "auto"}
            for p in parts
        ]
    return {"id": id, "status": "completed", **fields}
