"""The route by which operators see and steer a rollout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict

from qbe.errors import QBEError
from qbe.server.errors import APIError
from qbe.server.rollout.controller import Act
from qbe.server.service import Service

ROLLOUT = "/v1/qbe/rollout"


class RolloutRequest(BaseModel):
    """What is done to the rollout.

    Attributes:
        action: `abort`: nothing more goes to the candidate; `promote`: everything does; `pause`: the weight stays;
            `resume`: time goes on, or after an abort it begins again at the first step.
    """

    model_config = ConfigDict(extra="forbid")

    action: Act


def add_rollout(app: FastAPI, service_of: Callable[[FastAPI], Service], about: dict[str, Any]) -> None:
    """Add the routes.

    Args:
        service_of: gives the service of the application.
        about: of each route, for the document.
    """
    takes = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/RolloutRequest"}}}}

    def described(request: Request) -> dict[str, Any]:
        return {"object": "rollout", "rollout": service_of(request.app).observer.rollout.describe()}

    def check(request: Request) -> None:
        if not request.state.client.oversees:
            raise APIError(403, f"{ROLLOUT} needs an operator's key", code="not_operator")

    @app.get(ROLLOUT, **about)
    async def rollout(request: Request) -> dict[str, Any]:
        """How the rollout stands, and what each of its metrics says; for operators."""
        check(request)
        return described(request)

    @app.post(ROLLOUT, **about | {"openapi_extra": {"requestBody": {"required": True, **takes}}})
    async def steer(request: Request) -> dict[str, Any]:
        """Abort, promote, pause or resume the rollout; for operators."""
        check(request)
        body: RolloutRequest = request.state.body
        service_of(app).rates.charge(request.state.client, 0)
        try:
            service_of(app).observer.rollout.act(body.action)
        except QBEError as error:
            raise APIError(409, str(error), param="action", code="rollout_state") from None
        return described(request)
