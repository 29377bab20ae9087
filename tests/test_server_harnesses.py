"""What LangChain, lm-evaluation-harness, LlamaIndex and guidellm call by default, against a server process.

All are there themselves. The last two pin older versions of what is installed, and run as processes that find theirs
first (constraints-clients.txt).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from server_running import LIMIT_S, tiny_parts

CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": False, "title": "place", "description": "a place"}  # fmt: skip


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def chain(request: pytest.FixtureRequest, tiny_server_url: str) -> Any:
    langchain = pytest.importorskip("langchain_openai")
    return langchain.ChatOpenAI(
        base_url=f"{tiny_server_url}/v1", api_key="none", model="model", max_tokens=200, timeout=LIMIT_S, max_retries=0,
        use_responses_api=request.param,
    )  # fmt: skip


def test_langchain_asks_and_streams(chain: Any) -> None:
    short = chain.model_copy(update={"max_tokens": 4})  # a call's own does not win for responses
    answer = short.invoke([("system", "be brief"), ("user", "hi")])
    assert answer.usage_metadata["output_tokens"] == 4
    assert isinstance(answer.content, str) or answer.content[0]["type"] == "text"
    pieces = list(short.stream("hi"))
    assert sum((p.usage_metadata or {}).get("output_tokens", 0) for p in pieces) in (0, 4)
    assert len(short.batch(["a", "b"])) == 2


def test_langchain_calls_tools_and_sends_results_back(chain: Any) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return "sunny"

    bound = chain.bind_tools([weather], tool_choice="weather", parallel_tool_calls=False)
    asked = HumanMessage("hi")
    answer = bound.invoke([asked])
    (call,) = answer.tool_calls
    assert call["name"] == "weather"
    assert isinstance(call["args"]["city"], str)
    back = [asked, answer, ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])]
    assert chain.bind_tools([weather]).invoke(back, max_tokens=4)
    whole = None
    for piece in bound.stream([asked]):
        whole = piece if whole is None else whole + piece
    assert whole is not None
    assert whole.tool_calls[0]["name"] == "weather"


def test_langchain_asks_for_structured_answers(chain: Any) -> None:
    for method in ("json_schema", "function_calling"):
        found = chain.with_structured_output(CITY, method=method).invoke("where?")
        assert found["city"] in ("Paris", "Rome")


def harness(url: str, path: str, model: str, folder: Path) -> Any:
    models = pytest.importorskip("lm_eval.models.openai_completions")
    _, tokenizer = tiny_parts()
    tokenizer.save_pretrained(folder)
    kind = {"completions": models.LocalCompletionsAPI, "chat/completions": models.LocalChatCompletion}[path]
    return kind(base_url=f"{url}/v1/{path}", model=model, tokenizer=str(folder), max_retries=1, max_length=512)


def instance(kind: str, *arguments: Any) -> Any:
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)  # type: ignore[arg-type]


def test_lm_eval_scores_and_generates(tiny_server_url: str, tmp_path: Path) -> None:
    api = harness(tiny_server_url, "completions", "model", tmp_path)
    asked = [("The capital", " of France"), ("One, two", ", three")]
    found = api.loglikelihood([instance("loglikelihood", *one) for one in asked])
    client = openai.OpenAI(base_url=f"{tiny_server_url}/v1", api_key="none", timeout=LIMIT_S)
    for (context, rest), (logprob, greedy) in zip(asked, found, strict=True):
        ids = api.tok_encode(context + rest)
        own = client.completions.create(model="model", prompt=ids, max_tokens=1, echo=True, logprobs=1, temperature=0)
        logprobs: Any = own.choices[0].logprobs
        assert logprob == pytest.approx(sum(logprobs.token_logprobs[len(api.tok_encode(context)) : -1]), abs=1e-3)
        assert greedy is False
    (rolling,) = api.loglikelihood_rolling([instance("loglikelihood_rolling", "some text of a page")])
    assert rolling < 0
    until = {"until": ["\n\n"], "max_gen_toks": 4, "do_sample": False, "temperature": 0.0}
    assert len(api.generate_until([instance("generate_until", "Q: 1+1?\nA:", until)])) == 1


def test_lm_eval_chats(tiny_server_url: str, tmp_path: Path) -> None:
    api = harness(tiny_server_url, "chat/completions", "model", tmp_path)
    from lm_eval.models.api_models import JsonChatStr

    asked = JsonChatStr(json.dumps([{"role": "user", "content": "1+1?"}]))
    until = {"until": ["\n\n"], "max_gen_toks": 4, "do_sample": False}
    assert len(api.generate_until([instance("generate_until", asked, until)])) == 1


ROOT = Path(__file__).parents[1]
CLIENTS = ROOT / ".venv" / "clients"  # made by `make setup`
ENDS_S = 300  # these import for most of their time


def client(*arguments: str | Path, cwd: Path) -> None:
    """A program that finds the packages of constraints-clients.txt first; it must end with 0."""
    if not CLIENTS.exists():
        pytest.skip(f"needs {CLIENTS.relative_to(ROOT)}: make setup")
    environment = dict(os.environ, PYTHONPATH=str(CLIENTS), HF_HUB_OFFLINE="1", NO_COLOR="1",
                       GUIDELLM__MAX_WORKER_PROCESSES="1", OMP_NUM_THREADS="1")  # fmt: skip
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, cwd=cwd, capture_output=True, text=True,
        timeout=ENDS_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_llama_index(tiny_server_url: str, tmp_path: Path) -> None:
    client(ROOT / "tests/clients_llama_index.py", tiny_server_url, cwd=tmp_path)


def test_guidellm_measures(tiny_server_url: str, tmp_path: Path) -> None:
    """Its profile `sweep` of size 2: requests one after the other, then all at once."""
    _, tokenizer = tiny_parts()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    client(
        "-m", "guidellm", "run", "--backend", f"kind=openai_http,target={tiny_server_url}",
        "--profile", "kind=sweep,sweep_size=2", "--constraint", "kind=max_requests,count=3",
        "--data", "kind=synthetic_text,prompt_tokens=8,output_tokens=5",
        "--tokenizer", f"kind=hf_auto,model={tmp_path / 'tokenizer'}",
        "--output", "kind=json,path=out.json", "--disable-console", cwd=tmp_path,
    )  # fmt: skip
    found = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert [b["config"]["strategy"]["type_"] for b in found] == ["synchronous", "throughput"]
    for one in found:
        assert not one["requests"]["errored"]
        assert not one["requests"]["incomplete"]
        assert [r["output_tokens"] for r in one["requests"]["successful"]] == [5, 5, 5]
        assert all(r["time_to_first_token_ms"] > 0 for r in one["requests"]["successful"])


GUIDE: Any = {"stop": None, "ignore_eos": True}
USAGE: Any = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize(("path", "body"), [
    ("completions", {"prompt": "some words", "max_tokens": 5, "stream_options": USAGE}),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "some words"}]}],
                   "max_output_tokens": 5}),
])  # fmt: skip
def test_guidellms_other_paths(tiny_server_url: str, path: str, body: dict[str, Any]) -> None:
    """What it sends where it is told to use another path than chats, as guidellm 0.8.1's source writes it."""
    assert httpx2.get(f"{tiny_server_url}/health", timeout=LIMIT_S).status_code == 200
    model = httpx2.get(f"{tiny_server_url}/v1/models", timeout=LIMIT_S).json()["data"][0]["id"]
    sent = {"model": model, "stream": True, **GUIDE, **body}
    answer = httpx2.post(f"{tiny_server_url}/v1/{path}", json=sent, timeout=LIMIT_S)
    assert answer.status_code == 200, answer.text
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    usage = events[-1].get("usage") or events[-1]["response"]["usage"]
    assert (usage.get("completion_tokens") or usage["output_tokens"]) == 5
