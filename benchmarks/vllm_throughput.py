"""Tokens a second of vLLM's server with QBE at 4 and 16 bits and without QBE, by vLLM's own `bench serve`, in one run.

    python benchmarks/vllm_throughput.py MODEL [--dtype float16] [--json FILE] [options of vllm serve]

MODEL is a folder that 'qbe quantize' wrote, or a 16-bit checkpoint, which QBE then nests while it is loaded. Both
servers get the options; on one GPU that has to be `--gpu-memory-utilization 0.4`, or so. --dtype is QBE's alone: what
it is compared with stays vLLM in bfloat16.
Both servers are started, and measured in turns for several rounds: while one is, the other is stopped (SIGSTOP), so
that each has the machine for itself and both meet its moods. Medians, and the ratios of the rounds. The same random
prompts are sent to both. Ends with an error if a request failed. Needs an environment with vLLM (`make setup-vllm`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm_agreement import plain_folder

PORT, START_S, ALONE = 8471, 900, "vLLM alone, bf16"
ASKED = {
    "QBE, 4 bits": {"qbe_bits": 4},
    "QBE, 4 bits, 8-bit activations": {"qbe_bits": 4, "qbe_activation_bits": 8},
    "QBE, 16 bits": {"qbe_bits": 16},
}
# The command `vllm` of the CPU wheel looks for a distribution called vllm and fails: this is `vllm bench serve`.
BENCH = """
import vllm.benchmarks.serve as serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""


@contextmanager
def serving(
    model: Path, quantization: str | None, dtype: str, port: int, more: list[str]
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port),
               "--served-model-name", "model", "--dtype", dtype, "--max-model-len", "1024", "--max-num-seqs", "16",
               "--kv-cache-memory-bytes", str(1 << 29), "--no-enable-prefix-caching", *more]  # fmt: skip
    command += ["--quantization", quantization] if quantization else []
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        end = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"the server of {model} does not start") from None
                time.sleep(1)
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


@contextmanager
def stopped(server: subprocess.Popen[bytes]) -> Iterator[None]:
    os.killpg(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(server.pid, signal.SIGCONT)


def bench(port: int, model: Path, prompts: int, extra: dict[str, object] | None) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-c", BENCH, "--base-url", url, "--model", "model", "--tokenizer", str(model),
                   "--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "64", "--ignore-eos",
                   "--num-prompts", str(prompts), "--max-concurrency", "8", "--num-warmups", "8", "--seed", "1",
                   "--temperature", "0", "--save-result", "--result-dir", folder,
                   "--result-filename", "r.json"]  # fmt: skip
        command += ["--extra-body", json.dumps(extra)] if extra else []
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"vLLM's bench serve failed:\n{done.stderr[-2000:]}")
        found = json.loads((Path(folder) / "r.json").read_text())
    if found["completed"] != prompts:
        raise SystemExit(f"{prompts - found['completed']} of {prompts} requests failed")
    names = ("completed", "output_throughput", "total_token_throughput", "mean_ttft_ms", "mean_tpot_ms")
    return {name: round(found[name], 1) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="QBE's")
    parser.add_argument("--eager", action="store_true", help="without torch.compile, which takes minutes to start")
    parser.add_argument("--json", type=Path)
    args, more = parser.parse_known_args()
    more += ["--enforce-eager"] * args.eager
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        plain = plain_folder(args.model, Path(folder))
        with (
            serving(plain, None, "bfloat16", PORT, more) as vllm,
            serving(args.model, "qbe", args.dtype, PORT + 1, more) as ours,
        ):
            for number in range(args.rounds):
                with stopped(ours):
                    found = {ALONE: bench(PORT, plain, args.prompts, None)}
                with stopped(vllm):
                    for name, asked in ASKED.items():
                        extra = {"vllm_xargs": {"qbe_policy": "uniform", **asked}}
                        found[name] = bench(PORT + 1, plain, args.prompts, extra)
                rounds.append(found)
                print(f"round {number + 1}:", {k: v["output_throughput"] for k, v in found.items()}, file=sys.stderr)
    rows = {what: summary(rounds, what) for what in rounds[0]}
    for what, row in rows.items():
        print(f"{what:31}", "  ".join(f"{k} {v}" for k, v in row.items()))
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "rounds": rounds}, indent=1) + "\n")


def summary(rounds: list[dict[str, dict[str, float]]], what: str) -> dict[str, object]:
    """Medians over the rounds, and the least, median and greatest ratio of output tokens a second to vLLM alone."""
    medians = {name: statistics.median(r[what][name] for r in rounds) for name in rounds[0][what]}
    ratios = sorted(r[what]["output_throughput"] / r[ALONE]["output_throughput"] for r in rounds)
    return {**medians, "ratio": [round(x, 2) for x in (ratios[0], statistics.median(ratios), ratios[-1])]}


if __name__ == "__main__":
    main()
