"""Compiles grammars in a process of its own, so that a hostile one costs no more than this process.

Run as a file, so that it imports nothing of QBE. Reads lines of JSON: first the tokenizer, its size and its
end-of-sequence tokens, then grammars, and schemas with texts; answers each grammar with a line, `null` or what is wrong
with it, and each schema with whether the text matches, `null` where that cannot be said.
"""

import json
import resource
import sys

from llguidance import LLMatcher, LLTokenizer

_MEMORY = 2 << 30


def main() -> None:
    """Until standard input ends."""
    tokenizer, vocabulary, eos = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(tokenizer, n_vocab=vocabulary, eos_token=eos)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    print("null", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(_matches(*asked) if isinstance(asked, list) else _wrong(tokenizer, asked)), flush=True)


def _wrong(tokenizer: LLTokenizer, grammar: str) -> str | None:
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error() or None


def _matches(schema: dict[str, object], text: str) -> bool | None:
    from jsonschema import Draft202012Validator  # only where something has to be checked
    from referencing import Registry

    try:
        value = json.loads(text)
    except ValueError:
        return False
    try:
        # Schemas are in this dialect by now, whatever `$schema` says; of references none leaves the schema.
        return bool(Draft202012Validator(schema, registry=Registry()).is_valid(value))
    except Exception:  # a schema that is none, or a reference to nowhere
        return None


if __name__ == "__main__":
    main()
