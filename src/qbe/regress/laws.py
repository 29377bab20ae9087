"""What every sampler keeps to, whatever the model: tried on a server, without knowing its weights.

Each law is an equality between answers of one server. Answers are asked for one after the other, so that nothing else
in the batch can move a rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from qbe.errors import QBEError
from qbe.regress.client import Client, Reply

TOKENS = 24
PROMPTS = (
    "Write two sentences about the sea.", "Why is the sky blue?", "List four animals.", "Describe a market in winter.",
    "What is a contract?", "Explain what a river does to its banks.", "Write a short letter to a friend.",
    "How is bread made?",
)  # fmt: skip
_HOT = {"temperature": 2.0, "seed": 11}
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0}  # OpenAI's
_ROUNDING = 0.05  # nats by which a token may be less likely than the likeliest, where two products round differently


@dataclass(frozen=True)
class Law:
    """Whether one was kept.

    Attributes:
        name: of the law. kept: None where it could not be tried.
        saw: what was seen.
    """

    name: str
    kept: bool | None
    saw: str


class Laws:
    """Tries them.

    Args:
        client: of the server.
        chats: whether it has a chat template.
        prompts: to try.
    """

    def __init__(self, client: Client, chats: bool, prompts: int) -> None:
        self._client, self._chats, self._prompts = client, chats, PROMPTS[:prompts]
        self._greedy = [self._answer(p, temperature=0.0) for p in self._prompts]

    @staticmethod
    def steps(speculates: bool) -> int:
        """How often `tick` is called."""
        return 7 if speculates else 6

    def run(self, tick: Callable[[], None], names: Collection[str] | None = None) -> list[Law]:
        """All of them, or those of these names."""
        laws = {
            "min_p": self._min_p, "top_k": self._top_k, "top_p": self._top_p, "stop": self._stop,
            "defaults": self._defaults, "likeliest": self._likeliest,
        }  # fmt: skip
        if speculates(self._client.request):
            laws["speculation"] = self._speculation
        found = []
        for name, law in laws.items():
            if names is None or name in names:
                found.append(law())
                tick()
        return found

    def _body(self, prompt: str) -> dict[str, Any]:
        if self._chats:
            return {"messages": [{"role": "user", "content": prompt}], "max_tokens": TOKENS}
        return {"prompt": f"Question: {prompt}\nAnswer:", "max_tokens": TOKENS}

    @property
    def _path(self) -> str:
        return "chat/completions" if self._chats else "completions"

    def _answer(self, prompt: str, **fields: Any) -> Reply:
        return self._client.ask(self._path, self._body(prompt) | fields)

    def _same(self, name: str, what: str, **fields: Any) -> Law:
        """Whether these fields leave nothing but the greedy answer."""
        for prompt, greedy in zip(self._prompts, self._greedy, strict=True):
            reply = self._answer(prompt, **fields)
            if reply.error or greedy.error:
                return Law(name, None, reply.error or greedy.error)
            if reply.text != greedy.text:
                return Law(name, False, f"{what} gives {_short(reply.text)}, greedy decoding {_short(greedy.text)}")
        return Law(name, True, f"{what} gives what greedy decoding gives, {len(self._prompts)} times")

    def _min_p(self) -> Law:
        return self._same("min_p", "min_p of 1 at temperature 2", min_p=1.0, **_HOT)

    def _top_k(self) -> Law:
        return self._same("top_k", "top_k of 1 at temperature 2", top_k=1, **_HOT)

    def _top_p(self) -> Law:
        return self._same("top_p", "top_p of 0.000001 at temperature 2", top_p=1e-6, **_HOT)

    def _stop(self) -> Law:
        """A text in `stop` ends the answer before it."""
        tried = 0
        for prompt, greedy in zip(self._prompts, self._greedy, strict=True):
            if greedy.error:
                return Law("stop", None, greedy.error)
            word = next((w for w in greedy.text.split()[2:] if len(w) > 1), None)
            if word is None:
                continue
            reply, tried = self._answer(prompt, temperature=0.0, stop=[word]), tried + 1
            if reply.error:
                return Law("stop", None, reply.error)
            if reply.text != greedy.text.partition(word)[0] or reply.finish != "stop":
                return Law("stop", False, f"with stop {word!r} the answer is {_short(reply.text)} ({reply.finish})")
        return Law("stop", True if tried else None, f"a stop text ended {tried} answers where it should")

    def _defaults(self) -> Law:
        """A request that says nothing is one at temperature 1 with all tokens, as OpenAI has it."""
        for prompt in self._prompts:
            said, again, silent = (
                self._answer(prompt, seed=7, **f) for f in (_DEFAULTS, _DEFAULTS, dict[str, float]())
            )
            if error := said.error or again.error or silent.error:
                return Law("defaults", None, error)
            if said.text != again.text:
                return Law("defaults", None, "a seed does not make answers repeatable here")
            if said.text != silent.text:
                return Law("defaults", False, "a request without temperature and top_p is answered otherwise than with "
                           f"1 and 1: {_short(silent.text)} and {_short(said.text)}")  # fmt: skip
        return Law("defaults", True, "the sampler's defaults are temperature 1 and top_p 1")

    def _likeliest(self) -> Law:
        """Each token of a greedy answer is the likeliest by its own logprobs."""
        wanted = {"logprobs": True, "top_logprobs": 5} if self._chats else {"logprobs": 5}
        worst, tokens = 0.0, 0
        for prompt in self._prompts:
            try:
                answer = self._client.post(self._path, self._body(prompt) | {"temperature": 0} | wanted)
                rows = _logprobs(answer["choices"][0]["logprobs"])
            except (QBEError, KeyError, IndexError, TypeError) as error:
                return Law("likeliest", None, str(error))
            tokens += len(rows)
            worst = max([worst, *(top - chosen for chosen, top in rows)])
            if worst > _ROUNDING:
                return Law("likeliest", False, f"a token of a greedy answer is {worst:.2f} nats less likely than the "
                           "likeliest")  # fmt: skip
        return Law("likeliest", True, f"each of {tokens} greedy tokens is the likeliest")

    def _speculation(self) -> Law:
        """Greedy and seeded answers are those without draft tokens."""
        own = dict(self._client.request["qbe"]) | {"speculate": False}
        plain = Client(self._client.url, self._client.key, {**self._client.request, "qbe": own})
        try:
            for prompt in self._prompts:
                body = self._body(prompt) | {"max_tokens": 4 * TOKENS}
                for fields in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 7}):
                    drafted, without = (c.ask(self._path, body | fields) for c in (self._client, plain))
                    if error := drafted.error or without.error:
                        return Law("speculation", None, error)
                    if drafted.text != without.text:
                        how = "greedy" if not fields["temperature"] else "seeded"
                        return Law("speculation", False, f"a {how} answer with draft tokens is {_short(drafted.text)}, "
                                   f"without {_short(without.text)}")  # fmt: skip
        finally:
            plain.close()
        return Law("speculation", True, f"{len(self._prompts)} greedy and as many seeded answers are those without it")


def speculates(request: Mapping[str, Any]) -> bool:
    """Whether requests with these fields ask for draft tokens."""
    return bool((request.get("qbe") or {}).get("speculate"))


def _logprobs(found: Mapping[str, Any]) -> list[tuple[float, float]]:
    """For each token its logarithm and the likeliest's, of either endpoint."""
    if "content" in found:
        rows = [(t["logprob"], [x["logprob"] for x in t["top_logprobs"]]) for t in found["content"]]
    else:
        tops = [list(x.values()) for x in found["top_logprobs"]]
        rows = list(zip(found["token_logprobs"], tops, strict=True))
    return [(float(chosen), float(max(top))) for chosen, top in rows if top]


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
