"""What is said of paths that do not exist: those that clients of other servers know get a hint."""

from __future__ import annotations

_TEXT_ONLY = "this server writes text, with one model"
_ABSENT = {
    "embeddings": f"{_TEXT_ONLY}, and makes no embeddings: ask a server of an embedding model",
    "rerank": f"{_TEXT_ONLY}, and ranks nothing: ask a server of a reranking model",
    "score": f"{_TEXT_ONLY}, and scores nothing: '/v1/completions' with 'echo' and 'logprobs' gives a prompt's own",
    "audio": f"{_TEXT_ONLY}: there is no speech",
    "images": f"{_TEXT_ONLY}: there are no images",
    "videos": f"{_TEXT_ONLY}: there are no videos",
    "realtime": f"{_TEXT_ONLY}: stream '/v1/responses' or '/v1/chat/completions' instead",
    "moderations": f"{_TEXT_ONLY}, and moderates nothing",
    "fine_tuning": "this server trains nothing: 'qbe train' and 'qbe quantize' do",
    "evals": "this server evaluates nothing: 'qbe eval' does",
    "assistants": "assistants are not here: use '/v1/responses'",
    "threads": "threads are not here: use '/v1/responses' with 'previous_response_id'",
    "conversations": "conversations are not here: use '/v1/responses' with 'previous_response_id'",
    "vector_stores": f"{_TEXT_ONLY}: search is up to its clients",
    "uploads": "uploads in parts are not here: send a file to '/v1/files'",
    "containers": f"{_TEXT_ONLY}, and runs no code",
    "organization": "there is no organization: keys and limits are in the settings file",
    "complete": "Anthropic's old completions are not here: use '/v1/messages'",
}


def hint(path: str) -> str:
    """One line about a path that does not exist."""
    said = f"there is no '{path[:200]}' here"
    first, _, rest = path.strip("/").partition("/")
    if first != "v1":
        known = first in (*_ABSENT, "chat", "completions", "messages", "models", "responses", "files", "batches")
        return f"{said}: the API's paths begin with '/v1/'" if known else f"{said}: '/openapi.json' has all paths"
    found = _ABSENT.get(rest.partition("/")[0])
    return f"{said}: '/openapi.json' has all paths" if found is None else f"{said}: {found}"
