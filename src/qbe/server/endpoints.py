"""The paths that text is written at. All of them end in `Service.begin`."""

from __future__ import annotations

from qbe.server import chat, completions
from qbe.server.anthropic import answer as messages
from qbe.server.anthropic.protocol import MessagesRequest
from qbe.server.endpoint import Endpoint
from qbe.server.protocol import ChatRequest, CompletionRequest
from qbe.server.responses import answer as responses
from qbe.server.responses.protocol import ResponsesRequest

ENDPOINTS = (
    Endpoint("/v1/chat/completions", ChatRequest, chat.begin, "The next message of a conversation."),
    Endpoint("/v1/completions", CompletionRequest, completions.begin, "What follows prompts."),
    Endpoint("/v1/responses", ResponsesRequest, responses.begin, "The next items of a conversation."),
    Endpoint("/v1/messages", MessagesRequest, messages.begin, "The next message, in Anthropic's form."),
)
