"""Attacks on a server of its own on this machine, and what another client feels of each.

    OMP_NUM_THREADS=1 python benchmarks/attacks.py --seconds 20

A server with two keys is started; while one client attacks it, another asks for the same answer again and again, and
`/health` is asked ten times a second. The attackers, elsewhere other machines, are processes of this one: they have the
lowest priority (nice 19), and the seconds of CPU time that they and the server take in all are printed. Held is: all of
the other client's requests are answered, its 99th percentile is at most twice that without an attack, `/health` answers
within 0.2 s, and the memory of the server and its children is never more than 256 MB above that before. Where that does
not hold, the exit code is 1. Nothing leaves this machine, and each attack ends after `--seconds`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx2
import numpy as np
import psutil

from qbe.bench.serving import RunningServer, serving
from qbe.server.keys import new_key

P99, HEALTH_S, MEMORY_MB = 2.0, 0.2, 256
CONNECTIONS = 150  # of each attacker
_MB = 1 << 20


@dataclass(frozen=True)
class Target:
    """Where to, and the attacker's key."""

    host: str
    port: int
    key: str

    def connect(self) -> socket.socket:
        """A connection that gives up after a while."""
        return socket.create_connection((self.host, self.port), timeout=5)

    def head(self, path: str, *more: str, key: bool = False) -> bytes:
        """The headers of a POST."""
        lines = [f"POST {path} HTTP/1.1", f"Host: {self.host}", "Content-Type: application/json", *more]
        lines += [f"Authorization: Bearer {self.key}"] if key else []
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def post(self, path: str, body: bytes, key: bool = True) -> None:
        """Send a request and read what comes."""
        with suppress(OSError), self.connect() as connection:
            connection.sendall(self.head(path, f"Content-Length: {len(body)}", key=key))
            connection.sendall(body)
            while connection.recv(65536):
                pass


def _many(part: str, size: int = 3 * _MB) -> str:
    return ",".join([part] * (size // (len(part) + 1)))


def bodies(target: Target) -> None:
    """Invalid bodies of 3 MB."""
    chat = '{"messages":[{"role":"user","content":%s}]%s}'
    found = [
        ("completions", f'{{"prompt":[{_many("{}")}]}}'), ("completions", f'{{"prompt":[{_many("[1]")}]}}'),
        ("chat/completions", chat % (f"[{_many('{}')}]", "")),
        ("chat/completions", f'{{"messages":[{{"role":"assistant","tool_calls":[{_many("{}")}]}}]}}'),
        ("chat/completions", chat % ('"x"', f',"metadata":{{{_many(chr(34) + "a" + chr(34) + ":{}")}}}')),
        ("completions", f'{{"prompt":"x","logit_bias":{{{_many(chr(34) + "1" + chr(34) + ":[]")}}}}}'),
    ]  # fmt: skip
    for path, body in random.sample(found, len(found)):
        target.post(f"/v1/{path}", body.encode())


def _chunks(target: Target, path: str, key: bool) -> None:
    with suppress(OSError), target.connect() as connection:
        connection.sendall(target.head(path, "Transfer-Encoding: chunked", key=key))
        for _ in range(200):
            connection.sendall(b"1\r\n[\r\n" * 4096)


def chunks(target: Target) -> None:
    """Chunks of a byte, without a key, to any path."""
    _chunks(target, random.choice(["/v1/completions", "/metrics", "/health", "/x"]), key=False)


def keyed_chunks(target: Target) -> None:
    """The same with a key."""
    _chunks(target, "/v1/completions", key=True)


def half_open(target: Target) -> None:
    """Connections that never send a whole request."""
    held: list[socket.socket] = []
    with suppress(OSError):
        for number in range(CONNECTIONS):
            held.append(target.connect())
            if number % 2:
                held[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: ")
    time.sleep(1)
    for connection in held:
        connection.close()


def _large(target: Target, key: bool) -> None:
    held: list[socket.socket] = []
    piece = b"x" * 65536
    with suppress(OSError):
        for _ in range(CONNECTIONS):
            held.append(target.connect())
            held[-1].settimeout(0.05)
            held[-1].sendall(target.head("/v1/completions", "Content-Length: 4194304", key=key))
            with suppress(OSError):
                for _ in range(60):  # all but the end
                    held[-1].sendall(piece)
    time.sleep(1)
    for connection in held:
        connection.close()


def large(target: Target) -> None:
    """Bodies of 4 MB that do not end, without a key."""
    _large(target, key=False)


def keyed_large(target: Target) -> None:
    """The same with a key."""
    _large(target, key=True)


def schemas(target: Target) -> None:
    """Schemas that take long to compile."""
    schema: dict[str, Any] = {"type": "string", "pattern": f"^((a{{1,{random.randint(100, 300)}}}){{1,300}}){{1,300}}$"}
    for _ in range(random.randint(0, 9)):
        schema = {"anyOf": [{"type": "object", "properties": {"a": schema}}, schema]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "response_format": wanted}
    target.post("/v1/chat/completions", json.dumps(body).encode())


def flood(target: Target) -> None:
    """Long answers of the cheapest tier, more than there are places."""
    _ask_at_once(target, 16, letters=20, tokens=200)


def prompts(target: Target) -> None:
    """Long prompts of the cheapest tier."""
    _ask_at_once(target, 8, letters=4000, tokens=4)


def _ask_at_once(target: Target, requests: int, letters: int, tokens: int) -> None:
    threads = [threading.Thread(target=_ask, args=(target, letters, tokens)) for _ in range(requests)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _ask(target: Target, letters: int, tokens: int) -> None:
    text = "".join(random.choice("abcdefgh ") for _ in range(letters))
    body = {"prompt": text, "max_tokens": tokens, "service_tier": "flex", "ignore_eos": True}
    target.post("/v1/completions", json.dumps(body).encode())


ATTACKS: tuple[Callable[[Target], None], ...] = (
    bodies, chunks, keyed_chunks, half_open, large, keyed_large, schemas, flood, prompts,
)  # fmt: skip


def _attack(number: int, target: Target, seconds: float) -> None:
    os.nice(19)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        ATTACKS[number](target)


class Watch(threading.Thread):
    """Asks `/health` ten times a second, and looks at the memory.

    Attributes:
        worst: seconds of the slowest answer; infinite where one failed.
        most: MB that the server and its children had at most.
    """

    def __init__(self, served: RunningServer) -> None:
        super().__init__(daemon=True)
        self._served, self.worst, self.most, self._over = served, 0.0, memory_mb(served), threading.Event()

    def run(self) -> None:
        """Until `end`."""
        with httpx2.Client(timeout=60) as http:
            while not self._over.wait(0.1):
                began = time.monotonic()
                try:
                    http.get(f"{self._served.url}/health").raise_for_status()
                except httpx2.HTTPError:
                    self.worst = float("inf")
                self.worst = max(self.worst, time.monotonic() - began)
                with suppress(psutil.Error):  # a child that ends
                    self.most = max(self.most, memory_mb(self._served))

    def end(self) -> None:
        """Look no more."""
        self._over.set()
        self.join()


def asked(url: str, key: str, seconds: float, tokens: int) -> list[float]:
    """Seconds of each answer of the client that means no harm; infinite where there was none."""
    found, ends = list[float](), time.monotonic() + seconds
    body = {"prompt": "The capital of France is", "max_tokens": tokens, "service_tier": "priority", "ignore_eos": True,
            "temperature": 0}  # fmt: skip
    with httpx2.Client(timeout=120, headers={"Authorization": f"Bearer {key}"}) as http:
        while time.monotonic() < ends or not found:
            began = time.monotonic()
            try:
                http.post(f"{url}/v1/completions", json=body).raise_for_status()
                found.append(time.monotonic() - began)
            except httpx2.HTTPError as error:
                print(f"the other client: {error}", file=sys.stderr)
                found.append(float("inf"))
                time.sleep(0.1)
    return found


def slowest(found: list[float]) -> float:
    """The 99th percentile; infinite where a request was not answered."""
    return float(np.quantile(found, 0.99)) if np.isfinite(found).all() else float("inf")


def memory_mb(served: RunningServer) -> float:
    """Resident memory of the server and the process that checks its grammars."""
    server = psutil.Process(served.process.pid)
    return sum(p.memory_info().rss for p in (server, *server.children(recursive=True))) / _MB


def server_s(served: RunningServer) -> float:
    """CPU time of the server and the process that checks its grammars."""
    server = psutil.Process(served.process.pid)
    return sum(sum(p.cpu_times()[:2]) for p in (server, *server.children()))


def attackers_s() -> float:
    """CPU time of the attackers that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def warm(served: RunningServer, key: str, tokens: int) -> None:
    """Kernels, caches and the process that checks grammars, as in a running server."""
    asked(served.url, key, 3, tokens)
    body = {"prompt": "x", "max_tokens": 1, "response_format": {"type": "json_object"}}
    headers = {"Authorization": f"Bearer {key}"}
    httpx2.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=120).raise_for_status()


def main() -> bool:
    """Every attack, and a line for each; whether all bounds held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--policy", default="tiered")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--attackers", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=[a.__name__ for a in ATTACKS])
    args = parser.parse_args()
    (attacker, his), (client, its) = new_key("attacker"), new_key("client")
    print(
        f"{'attack':14}{'answers':>8}{'p50 s':>8}{'p99 s':>8}{'times':>7}{'health s':>10}{'MB more':>9}{'server':>8}"
        f"{'attackers':>10}  held"
    )
    with serving(args.model, "cpu", his + its, "--policy", args.policy) as served:
        host, port = served.url.removeprefix("http://").split(":")
        target = Target(host, int(port), attacker)
        warm(served, client, args.tokens)
        alone = asked(served.url, client, args.seconds, args.tokens)
        base, before = slowest(alone), memory_mb(served)
        print(f"{'none':14}{len(alone):8}{np.median(alone):8.3f}{base:8.3f}")
        broken: list[str] = [] if np.isfinite(base) else ["none"]
        for number, attack in enumerate(ATTACKS):
            if args.only and attack.__name__ not in args.only:
                continue
            server_before, attackers_before = server_s(served), attackers_s()
            arguments = (number, target, args.seconds + 1)
            attackers = [multiprocessing.Process(target=_attack, args=arguments) for _ in range(args.attackers)]
            watch = Watch(served)
            for each in (*attackers, watch):
                each.start()
            time.sleep(1)
            found = asked(served.url, client, args.seconds, args.tokens)
            for attacker_process in attackers:
                attacker_process.join()
            watch.end()
            more = watch.most - before
            server_took, attackers_took = server_s(served) - server_before, attackers_s() - attackers_before
            p99 = slowest(found)
            held = p99 <= P99 * base and watch.worst <= HEALTH_S and more <= MEMORY_MB
            broken += [] if held else [attack.__name__]
            print(f"{attack.__name__:14}{len(found):8}{np.median(found):8.3f}{p99:8.3f}{p99 / base:7.2f}"
                  f"{watch.worst:10.3f}{more:9.0f}{server_took:8.1f}{attackers_took:10.1f}  {'yes' if held else 'NO'}",
                  flush=True)  # fmt: skip
    print("all bounds held" if not broken else f"broken: {', '.join(broken)}")
    return not broken


if __name__ == "__main__":
    sys.exit(not main())
