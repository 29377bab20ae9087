"""The OpenAPI document as schemathesis reads it: whatever it makes of it, the server does not fail."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from server_running import LIMIT_S, running, tiny_engine

CASES = int(os.environ.get("QBE_TEST_CASES", "6"))
"""Of each operation; 1000 before a release."""


def test_no_case_makes_the_server_fail() -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

    checks = [not_a_server_error, content_type_conformance, response_schema_conformance]
    answered: set[tuple[str, int]] = set()
    with running(lambda: tiny_engine(kv_tokens=256)) as server:
        document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        operations = [found.ok() for found in document.get_all_operations()]
        for operation in operations:

            @settings(
                max_examples=CASES, derandomize=True, deadline=None, database=None,
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            @given(operation.as_strategy())
            def asked(case: Any) -> None:
                if isinstance(case.body, dict) and case.body.get("model") is not None:
                    case.body["model"] = "tiny"  # so that not every case ends at its name
                answer = case.call_and_validate(checks=checks, timeout=LIMIT_S)
                answered.add((case.path, answer.status_code))

            asked()
    assert {path for path, _ in answered} == {o.path for o in operations}
    assert {("/v1/completions", 200), ("/v1/chat/completions", 400), ("/metrics", 200)} <= answered
