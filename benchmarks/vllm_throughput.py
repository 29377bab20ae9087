"""Tokens a second of vLLM's server with QBE at 4 bits and without QBE, by vLLM's own `bench serve`, in one run.

    python benchmarks/vllm_throughput.py MODEL-QBE [--json FILE]     # a folder that 'qbe quantize' wrote

Each server runs alone; the same random prompts are sent to both. Ends with an error if a request failed. Needs an
environment with vLLM (`make setup-vllm`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_agreement import plain_folder

PORT, START_S = 8471, 900
# The command `vllm` of the CPU wheel looks for a distribution called vllm and fails: this is `vllm bench serve`.
BENCH = """
import vllm.benchmarks.serve as serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""


@contextmanager
def serving(model: Path, quantization: str | None, more: list[str]) -> Iterator[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(PORT),
               "--served-model-name", "model", "--dtype", "bfloat16", "--max-model-len", "1024", "--max-num-seqs", "16",
               "--kv-cache-memory-bytes", str(1 << 29), "--no-enable-prefix-caching", *more]  # fmt: skip
    command += ["--quantization", quantization] if quantization else []
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        end = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5)
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"the server of {model} does not start") from None
                time.sleep(1)
        yield f"http://127.0.0.1:{PORT}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def bench(url: str, model: Path, prompts: int, extra: dict[str, object] | None) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", BENCH, "--base-url", url, "--model", "model", "--tokenizer", str(model),
                   "--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "64", "--ignore-eos",
                   "--num-prompts", str(prompts), "--max-concurrency", "8", "--num-warmups", "8", "--seed", "1",
                   "--temperature", "0", "--save-result", "--result-dir", folder,
                   "--result-filename", "r.json"]  # fmt: skip
        command += ["--extra-body", json.dumps(extra)] if extra else []
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = json.loads((Path(folder) / "r.json").read_text())
    if found["completed"] != prompts:
        raise SystemExit(f"{prompts - found['completed']} of {prompts} requests failed")
    names = ("completed", "output_throughput", "total_token_throughput", "mean_ttft_ms", "mean_tpot_ms")
    return {name: round(found[name], 1) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--eager", action="store_true", help="without torch.compile, which takes minutes to start")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result, more = {}, ["--enforce-eager"] if args.eager else []
    with tempfile.TemporaryDirectory() as folder:
        plain = plain_folder(args.model, Path(folder))
        with serving(plain, None, more) as url:
            result["vLLM alone, bf16"] = bench(url, plain, args.prompts, None)
        with serving(args.model, "qbe", more) as url:
            for bits in args.bits:
                extra = {"vllm_xargs": {"qbe_bits": bits, "qbe_policy": "uniform"}}
                result[f"QBE, {bits} bits"] = bench(url, plain, args.prompts, extra)
    for name, numbers in result.items():
        print(f"{name:18}", "  ".join(f"{k} {v}" for k, v in numbers.items()))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
