"""The items of an answer while it is read, and the events that tell of them."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from qbe.server.answer import Piece
from qbe.server.call_reader import Arguments, Begun, Text
from qbe.server.requests import Answer

Event = dict[str, Any]  # without its sequence number


class Output:
    """Builds the items of one answer.

    Attributes:
        items: so far, as they go into `output`.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = False  # whether the last of them goes on

    def push(self, pieces: Iterable[Piece], logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """Events of new pieces.

        Args:
            logprobs: of the tokens whose text has come, where they were asked for.
        """
        for piece in pieces:
            if isinstance(piece, Text):
                yield from self._text(piece.text, logprobs)
                logprobs = []
            elif isinstance(piece, Arguments):
                self.items[-1]["arguments"] += piece.text
                yield {"type": "response.function_call_arguments.delta", **self._place(), "delta": piece.text}
            elif isinstance(piece, Begun):
                call = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "in_progress",
                        "call_id": piece.id, "name": piece.name, "arguments": ""}  # fmt: skip
                yield from self._begin(call)
            else:
                call = {"id": f"ctc_{uuid.uuid4().hex}", "type": "custom_tool_call", "status": "in_progress",
                        "call_id": piece.id, "name": piece.name, "input": ""}  # fmt: skip
                yield from self._begin(call)
                self.items[-1]["input"] = piece.input
                yield {"type": "response.custom_tool_call_input.delta", **self._place(), "delta": piece.input}

    def close(self, status: str) -> Iterator[Event]:
        """Events of the end; without any piece there is an empty message.

        Args:
            status: of the last item, `completed` or `incomplete`.
        """
        if not self.items:
            yield from self._text("", [])
        yield from self._end(status)

    def answer(self) -> Answer:
        """Its text and calls."""
        text = "".join(i["content"][0]["text"] for i in self.items if i["type"] == "message")
        return text, [(i["name"], i["arguments"]) for i in self.items if i["type"] == "function_call"]

    def _text(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        if not self._open or self.items[-1]["type"] != "message":
            message = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "status": "in_progress",
                       "role": "assistant", "content": []}  # fmt: skip
            yield from self._begin(message)
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield {"type": "response.content_part.added", **self._place(), "content_index": 0, "part": {**part}}
            self.items[-1]["content"].append(part)
        part = self.items[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        if text or logprobs:
            yield {"type": "response.output_text.delta", **self._place(), "content_index": 0, "delta": text,
                   "logprobs": logprobs}  # fmt: skip

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._end("completed")
        self.items.append(item)
        self._open = True
        added = {k: [] if v == [] else v for k, v in item.items()}
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": added}

    def _end(self, status: str) -> Iterator[Event]:
        if not self._open:
            return
        self._open = False
        item, place = self.items[-1], self._place()
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            yield {"type": "response.output_text.done", **place, "content_index": 0, "text": part["text"],
                   "logprobs": part["logprobs"]}  # fmt: skip
            yield {"type": "response.content_part.done", **place, "content_index": 0, "part": part}
        elif item["type"] == "function_call":
            yield {"type": "response.function_call_arguments.done", **place, "name": item["name"],
                   "arguments": item["arguments"]}  # fmt: skip
        else:
            yield {"type": "response.custom_tool_call_input.done", **place, "input": item["input"]}
        yield {"type": "response.output_item.done", "output_index": place["output_index"], "item": item}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
