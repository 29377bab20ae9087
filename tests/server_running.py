"""A server in this process, on a port of its own, with a tiny model: its engine can be looked at and slowed down."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import uvicorn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from conftest import byte_tokenizer, tiny_llama
from qbe.engine.engine import Engine
from qbe.records.ledger import Ledger
from qbe.server.app import make_app
from qbe.server.batches import routes
from qbe.server.connections import protocol
from qbe.server.health.settings import Health
from qbe.server.observe.traces import Traces
from qbe.server.service import Service
from qbe.server.settings_file import Watched

LIMIT_S = 60.0

# Files and batches of tests are not among the user's.
_FILES = tempfile.TemporaryDirectory(prefix="qbe-batches-")
routes.cache_dir = lambda: Path(tempfile.mkdtemp(dir=_FILES.name))  # type: ignore[attr-defined]


def tiny_parts() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A tiny model and tokenizer with an end-of-sequence token."""
    model, tokenizer = tiny_llama(), byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    model.config.max_position_embeddings = 4096
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


def tiny_engine(**options: Any) -> Engine:
    """An engine with it; the uniform policy needs no sensitivities."""
    model, tokenizer = tiny_parts()
    return Engine(model, tokenizer=tokenizer, **{"policy": "uniform", "records": False, "max_sequences": 4} | options)


class Running:
    """A server that runs, and ways to talk to it."""

    def __init__(self, url: str, service: Service) -> None:
        self.url, self.service = url, service
        plain = openai.DefaultHttpxClient(verify=False)  # certificates take longer to read than answers to come
        self.client = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0, http_client=plain
        )
        self.http = httpx2.Client(base_url=url, timeout=LIMIT_S, verify=False)

    @property
    def engine(self) -> Engine:
        return self.service.engine()

    def post(self, path: str, body: Any, **headers: str) -> httpx2.Response:
        return self.http.post(f"/v1/{path}", json=body, headers=headers)

    def metric(self, line: str) -> float:
        """The value of a line of /metrics that begins so."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(found.rsplit(" ", 1)[1]) for found in lines if found.startswith(line))


def until(condition: Callable[[], Any], what: str, every_s: float = 0.005) -> Any:
    """Wait for it, not for ever."""
    ends = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < ends, f"never: {what}"
        time.sleep(every_s)
    return found


@contextmanager
def running(
    make: Callable[[], Engine] = tiny_engine, config: Path | None = None, ledger: Path | None = None,
    traces: Traces | None = None,
) -> Iterator[Running]:  # fmt: skip
    """Start, wait until it is ready, stop. Its health is watched where the settings file says how."""
    failures: list[BaseException] = []
    services: list[Service] = []
    watched = Watched(config)
    if "health" not in watched.current.model_fields_set:  # random models do what it acts on, and steps are counted
        calm = Health(sample=0.0, ladder=False)
        watched.current = watched.current.model_copy(update={"health": calm})

    def service() -> Service:
        services.append(Service(make, watched, False, "tiny", failures.append, Ledger(ledger), traces))
        return services[0]

    server = uvicorn.Server(
        uvicorn.Config(make_app(service), host="127.0.0.1", port=0, log_level="error", ws="none",
                       http=protocol(lambda: watched.current, lambda: services[0].rates), timeout_graceful_shutdown=5)
    )  # fmt: skip
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until(lambda: failures or (server.started and services[0].ready), "the server is ready")
        assert not failures, failures
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Running(f"http://127.0.0.1:{port}", services[0])
    finally:
        server.should_exit = True
        thread.join(LIMIT_S)
        assert not thread.is_alive()
