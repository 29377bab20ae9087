"""`qbe serve`."""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib.util
import ipaddress
import re
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qbe.cli.options import (
    DEFAULT,
    Compile,
    Device,
    DeviceMemory,
    Dtype,
    KVTokens,
    Miss,
    Model,
    MostBits,
    Originals,
    Policy,
    Trust,
    Tune,
)
from qbe.errors import QBEError

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from qbe.engine.engine import Engine
    from qbe.server.service import Service
    from qbe.server.settings_file import Watched

_FILES = 65536  # open at once
_CUT_S = 5  # after `drain_s`, for what is cut to say so; then connections are closed whatever they do


def serve(
    model: Model = DEFAULT,
    host: Annotated[str, typer.Option(help="address to listen on; all but this machine's own need keys")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port; 0 takes a free one and prints it")] = 8000,
    metrics_port: Annotated[
        int | None, typer.Option(help="port of /metrics and /openapi.json; left out, they are with all the rest")
    ] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(help="certificate (PEM): serve HTTPS")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="its key, where the certificate's file has none")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of tiers, prices, limits and keys")] = None,
    keys: Annotated[Path | None, typer.Option(help="TOML file of more keys and nothing else")] = None,
    ledger: Annotated[Path | None, typer.Option(help="the ledger's file; left out, $QBE_LEDGER or the cache's")] = None,
    policy: Policy = "tiered", dtype: Dtype = "auto", device: Device = "auto", originals: Originals = None,
    max_sequences: Annotated[int, typer.Option(min=1, help="answers that are written at once")] = 16,
    most_bits: MostBits = None, device_memory: DeviceMemory = None, miss: Miss = None, trust: Trust = False,
    kv_tokens: KVTokens = None,
    rows: Annotated[
        str | None, typer.Option(help="exact: each request reads its own bits; shared (default): a step's highest")
    ] = None,
    compile: Compile = False,
    speculate: Annotated[
        bool, typer.Option("--speculate", help="with --compile: be ready for requests that ask for draft tokens")
    ] = False,
    tune: Tune = False,
    new_key: Annotated[str | None, typer.Option(help="print a new key for this name with its TOML, and end")] = None,
) -> None:  # fmt: skip
    """Serve a model over HTTP as OpenAI does; every request may say what precision, time and price it wants."""
    _check_installed()
    from qbe.records.ledger import Ledger
    from qbe.releases.alias import Alias
    from qbe.server.connections import protocol
    from qbe.server.draining import DrainingServer
    from qbe.server.observe import logs, traces
    from qbe.server.settings_file import Watched
    from qbe.store.shared_rows import check_rows

    check_rows("shared" if rows is None else rows)
    if new_key is not None:
        _print_key(new_key)
        return
    alias, watched = Alias(model), Watched(config, keys)
    if (public := not _loopback(host)) and not watched.current.keys:
        _refuse_without_keys(host)
    sending, book = traces.start(), Ledger(ledger)
    book.write([])  # now it is there, or says why it cannot be
    _check_tls(ssl_certfile, ssl_keyfile)
    listening = [_listen("--port", host, port)]
    listening += [] if metrics_port is None else [_listen("--metrics-port", host, metrics_port)]
    _raise_file_limit()
    from qbe.server.app import make_app  # seconds, with all of torch: only what can start takes them

    logs.start(lambda: watched.current)
    failures, services = list[BaseException](), list["Service"]()
    drain_s = watched.current.limits.drain_s

    def failed(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True

    def service() -> Service:
        from qbe.server.service import Service

        make = functools.partial(
            _engine, watched, alias.target, originals=originals, most_bits=most_bits, rows=rows,
            device_memory=device_memory, miss=miss, trust=trust, policy=policy, dtype=dtype, device=device,
            max_sequences=max_sequences, kv_tokens=kv_tokens, compile=compile, speculate=speculate, tune=tune,
        )  # fmt: skip
        services.append(Service(make, watched, public, Path(model).name, failed, book, sending, alias.look))
        return services[0]

    inside_port = None if metrics_port is None else listening[1].getsockname()[1]
    app = _ending(make_app(service, inside_port))
    http = protocol(lambda: watched.current, lambda: services[0].rates)
    server = DrainingServer(_uvicorn_config(app, http, drain_s, ssl_certfile, ssl_keyfile), services, drain_s)
    _print_addresses(listening, "http" if ssl_certfile is None else "https")
    for number in (signal.SIGINT, signal.SIGTERM):  # also before uvicorn listens to them, a moment later
        signal.signal(number, server.handle_exit)
    server.run(sockets=listening)
    if failures:
        raise failures[0]


def _uvicorn_config(app: Any, http: Any, drain_s: int, certfile: Path | None, keyfile: Path | None) -> uvicorn.Config:
    """How uvicorn runs the app, with this protocol of connections."""
    import uvicorn

    from qbe.server.guard import HEADER_BYTES

    return uvicorn.Config(
        app, log_level="error", access_log=False, ws="none", lifespan="on", http=http, server_header=False,
        h11_max_incomplete_event_size=HEADER_BYTES, timeout_graceful_shutdown=drain_s + _CUT_S,
        ssl_certfile=certfile, ssl_keyfile=keyfile,
    )  # fmt: skip


def _print_addresses(listening: Sequence[socket.socket], scheme: str) -> None:
    for purpose, each in zip(("listening", "metrics"), listening, strict=False):
        address, bound = each.getsockname()[:2]
        print(f"{purpose} on {scheme}://{f'[{address}]' if ':' in address else address}:{bound}", flush=True)


def _check_installed() -> None:
    for name in ("fastapi", "llguidance", "prometheus_client", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise QBEError(f"the server needs {name}: pip install 'qbe[serve]'")


def _engine(watched: Watched, model: str, **options: Any) -> Engine:
    """The engine, made in the thread that steps it; what the command does not say of its weights the settings do."""
    from transformers.utils import logging as advice

    from qbe.engine.engine import Engine
    from qbe.records import RecordStore, RecordWriter

    advice.set_verbosity_error()
    refresh = watched.current.refresh
    for name, value in watched.current.weights.model_dump().items():
        options[name] = value if options.get(name) is None else options[name]
    engine = Engine(
        model, records=RecordWriter(RecordStore()), progress=sys.stderr.isatty(), refresh_interval=refresh.interval,
        refresh_count=refresh.count, **options,
    )  # fmt: skip
    gc.collect()
    gc.freeze()  # it lives as long as the process: to look through it again and again holds all threads for 0.3 s
    return engine


def _print_key(name: str) -> None:
    from qbe.server.keys import new_key

    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise QBEError(f"--new-key '{name}': a name has letters, digits, - and _ only")
    key, lines = new_key(name)
    print(f"# the key, shown only now: {key}\n{lines}", end="")


def _refuse_without_keys(host: str) -> None:
    raise QBEError(
        f"--host {host} lets others connect, but there are no keys: make one with 'qbe serve --new-key NAME', put "
        "it into a file and give --keys FILE, or stay at --host 127.0.0.1"
    )


def _ending(app: ASGIApp) -> ASGIApp:
    """The application, with an answer to those who are still there when the server's end cancels them.

    That comes late, to a client that reads slowly or not at all, or with a second signal. uvicorn would print a
    traceback of each and say 500.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        begun: list[Message] = []
        done = False

        async def sent(message: Message) -> None:
            nonlocal done
            await send(message)
            if message["type"] == "http.response.start":
                begun.append(message)
            done = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await app(scope, receive, sent if scope["type"] == "http" else send)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            with suppress(TimeoutError):
                async with asyncio.timeout(_CUT_S / 10):
                    await _say_why(begun, done, scope, receive, send)

    return answer


async def _say_why(begun: list[Message], done: bool, scope: Scope, receive: Receive, send: Send) -> None:
    """That the server ends, to a client that has got these messages and may have got its whole answer."""
    from qbe.server.exchange import SHUTTING_DOWN

    if not begun:
        await SHUTTING_DOWN.response(scope)(scope, receive, send)
    elif not done:
        streams = any(b"text/event-stream" in value for _, value in begun[0]["headers"])
        await send({"type": "http.response.body", "body": SHUTTING_DOWN.stream_event(scope) if streams else b""})


def _loopback(host: str) -> bool:
    """Whether only this machine can connect to this address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_tls(certificate: Path | None, key: Path | None) -> None:
    """Raises QBEError for files that no TLS can be had with."""
    if certificate is None:
        if key is not None:
            raise QBEError("--ssl-keyfile is of no use alone: give --ssl-certfile, too")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
    except OSError as error:  # ssl.SSLError is one
        files = f"--ssl-certfile {certificate}" + ("" if key is None else f" --ssl-keyfile {key}")
        raise QBEError(f"{files}: no certificate and key in PEM that belong together ({error})") from None


def _raise_file_limit() -> None:
    """As many open files as the system lets this process have: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _FILES)), hard))


def _listen(option: str, host: str, port: int) -> socket.socket:
    if not 0 <= port < 65536:
        raise QBEError(f"{option} {port} is out of range; give 0 to 65535")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, proto)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(1024)
    except OSError as error:
        raise QBEError(f"--host {host} {option} {port} cannot be listened on: {error.strerror or error}") from None
    listening.setblocking(False)
    return listening
