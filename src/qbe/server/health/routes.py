"""The routes of a server's health."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request

from qbe.server.errors import APIError
from qbe.server.health.feedback import FeedbackRequest
from qbe.server.service import Service

FEEDBACK = "/v1/qbe/feedback"


def add_health(app: FastAPI, service_of: Callable[[FastAPI], Service], about: dict[str, Any]) -> None:
    """Add the routes.

    Args:
        service_of: gives the service of the application.
        about: of each route, for the document.
    """
    takes = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/FeedbackRequest"}}}}

    @app.get("/v1/qbe/health", **about)
    async def health(request: Request) -> dict[str, Any]:
        """What each detector says, and which actions of the ladder are in force; for operators."""
        if not request.state.client.oversees:
            raise APIError(403, "/v1/qbe/health needs an operator's key", code="not_operator")
        return service_of(app).observer.health.describe()

    @app.post(FEEDBACK, **about | {"openapi_extra": {"requestBody": {"required": True, **takes}}})
    async def feedback(request: Request) -> dict[str, Any]:
        """Tell whether an answer was of use."""
        body: FeedbackRequest = request.state.body
        service_of(app).rates.charge(request.state.client, 0)
        service_of(app).observer.health.feedback(request.state.client, body)
        return {"id": body.id, "object": "feedback"}
