"""Makes the files of this folder with version 0.1's own code; README.md says how it is run.

python make.py FOLDER    # with version 0.1 on PYTHONPATH
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROMPT = "Explain step by step how a nested weight is read at four, six and eight bits."
GREEDY = ("--greedy", "--max-tokens", "24", "--json")
ANSWERS = {
    "generate": (),
    "generate_6_bits": ("--bits", "6"),
    "generate_careful": ("--bits", "5", "--activation-bits", "8", "--careful-tokens"),
    "generate_kv_4_bits": ("--bits", "8", "--kv-bits", "4"),
}


def make_model(folder: Path) -> None:
    """A random Llama of two layers whose norms have outliers, so that smoothing folds them into weights."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokens = ["<|end|>", "<|start|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=False, bos_token_id=1, eos_token_id=0,
        initializer_range=0.25,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[5] = 40.0
            layer.post_attention_layernorm.weight[11] = 40.0
    model.to(torch.bfloat16).save_pretrained(folder)
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", bos_token="<|start|>")
    tokenizer.chat_template = "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"
    tokenizer.save_pretrained(folder)


def qbe(*args: str) -> Any:
    """Runs a command in this process; what it printed as JSON, or None."""
    from qbe.cli import main

    print("qbe", *args, file=sys.stderr)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            main(list(args))
        except SystemExit as end:
            if end.code:
                raise
    return json.loads(out.getvalue()) if "--json" in args else None


def save(name: str, value: Any) -> None:
    Path("json").mkdir(exist_ok=True)
    Path("json", f"{name}.json").write_text(json.dumps(value, indent=1) + "\n")


def commands() -> None:
    """Caches, records and what the commands print."""
    for name, options in ANSWERS.items():
        save(name, qbe("generate", PROMPT, "--model", "store", *options, *GREEDY))
    save("explain", qbe("explain", PROMPT, "--model", "store", "--json"))
    save("info", qbe("info", "--model", "store", "--json"))
    save("cache_warm", qbe("cache", "warm", "traffic.jsonl", "--model", "store", "--json"))
    save("cache_info", qbe("cache", "info", "--json"))
    save("records", qbe("records", "--json"))
    qbe("records", "--export", "records.jsonl")
    qbe("records", "--export", "records.parquet", "--format", "parquet")
    save("train_proxy", qbe("train", "proxy", "--model", "store", "--records", "past.jsonl", "--json"))


def past_records() -> None:
    """Sixty requests of the past for `qbe train proxy`: 0.1's own engine chose for them."""
    from qbe import Engine, Request, SamplingParams

    texts = [f"Question {i}: what is {i} times {i * 7 % 31}, and why?" for i in range(80)]
    with Engine("store", records=Path("past.sqlite")) as engine:
        engine.generate_batch([Request(text, SamplingParams(max_tokens=1, temperature=0.0)) for text in texts])
    before = os.environ["QBE_RECORDS"]
    os.environ["QBE_RECORDS"] = "past.sqlite"
    qbe("records", "--export", "past.jsonl")
    os.environ["QBE_RECORDS"] = before


def tuned_and_thresholds() -> None:
    """What a GPU's tuner and `qbe records --learn-refresh` keep, by the functions that they write it with."""
    from qbe.records.thresholds import Thresholds, save

    from qbe.kernels.tuning.store import TunedStore

    store = TunedStore()
    store.put("nested_linear 8x64x32", "a card", {"BN": 32, "DEQUANTISE": False}, 2e-6, 3e-6, 1.5, 0.25)
    save({"store": Thresholds(4.5, 1.25, 0.5, 2.0, 40)})


def served() -> None:
    """A server: what 0.1's clients sent, what they got, the ledger, the metrics' names and the log's fields."""
    bodies = json.loads(Path("http.json").read_text())
    command = [sys.executable, "-m", "qbe", "serve", "--model", "store", "--port", "0", "--config", "serve.toml",
               "--ledger", "ledger.sqlite"]  # fmt: skip
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        url = server.stdout.readline().split()[-1]
        head = {"Content-Type": "application/json", "Authorization": "Bearer a key of version 0.1"}

        def ask(path: str, body: Any = None) -> str:
            data = None if body is None else json.dumps(body).encode()
            return urllib.request.urlopen(urllib.request.Request(url + path, data, head), timeout=60).read().decode()

        while True:
            with contextlib.suppress(urllib.error.HTTPError):
                ask("/ready")
                break
        for one in bodies:
            one["answer"] = json.loads(ask(one["path"], one["body"]))
        save("http", bodies)
        save("models", json.loads(ask("/v1/models")))
        names = {line.split("{")[0].split(" ")[0] for line in ask("/metrics").splitlines() if line[:1] != "#"}
        save("metrics", sorted(names))
    finally:
        server.terminate()
    lines = [json.loads(x) for x in server.communicate(timeout=60)[1].splitlines() if x.startswith("{")]
    save("log", [x for x in lines if "tier" in json.dumps(x)][:2])
    save("ledger", qbe("ledger", "--file", "ledger.sqlite", "--json"))


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in ("serve.toml", "traffic.jsonl", "http.json"):
        shutil.copy(HERE / name, folder)
    os.chdir(folder)
    os.environ |= {"QBE_CACHE": "cache", "QBE_RECORDS": "records.sqlite", "QBE_BLUEPRINTS": "blueprints.sqlite",
                   "QBE_LEDGER": "ledger.sqlite", "QBE_CPU_KERNEL": "torch", "NO_COLOR": "1"}  # fmt: skip
    import qbe as package

    assert package.__version__ == "0.1.0", f"{package.__file__} is version {package.__version__}"
    make_model(Path("model"))
    save("quantize", qbe("quantize", "model", "-o", "store", "--json"))
    shutil.rmtree("model")
    past_records()
    commands()
    tuned_and_thresholds()
    served()
    for path in (*Path().glob("past.*"), *Path("cache", "kernels").glob("*.so")):
        path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
