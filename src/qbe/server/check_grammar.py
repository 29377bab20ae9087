"""Compiles grammars in a process of its own, so that a hostile one costs no more than this process.

Run as a file, so that it imports nothing but llguidance. Reads lines of JSON: first the tokenizer, its size and its
end-of-sequence tokens, then grammars; answers each with a line, `null` or what is wrong with it.
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
        matcher = LLMatcher(tokenizer, json.loads(line), log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        print(json.dumps(matcher.get_error() or None), flush=True)


if __name__ == "__main__":
    main()
