"""What LlamaIndex calls by default, with the package itself: `clients_llama_index.py URL` ends with 0 if all works.

A program of its own, since the package pins another openai than the tests' environment has (constraints-clients.txt).
"""

import asyncio
import sys
from enum import StrEnum

import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.program import FunctionCallingProgram, LLMTextCompletionProgram
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict

HI = [ChatMessage(role="system", content="be brief"), ChatMessage(role="user", content="hi")]


class City(StrEnum):
    paris, rome = "Paris", "Rome"


class Place(BaseModel):
    """A place."""

    model_config = ConfigDict(extra="forbid")
    city: City


def weather(city: City) -> str:
    """The weather of a city."""
    return "sunny"


def model(url: str, **options: object) -> OpenAILike:
    given = {"model": "model", "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 4, "max_retries": 0}
    return OpenAILike(**given | options)


def asks(url: str) -> None:
    for kind in (True, False):  # a chat model, and one of completions, which chats by a prompt
        llm = model(url, is_chat_model=kind)
        answer = llm.complete("hi")
        assert answer.raw.usage.completion_tokens == 4, answer
        assert list(llm.stream_complete("hi"))[-1].text is not None
        assert llm.chat(HI).message.role == "assistant"
        pieces = list(llm.stream_chat(HI))
        assert pieces[-1].message.content == "".join(p.delta or "" for p in pieces)


async def asks_async(url: str) -> None:
    for kind in (True, False):
        llm = model(url, is_chat_model=kind)
        assert (await llm.acomplete("hi")).raw.usage.completion_tokens == 4
        assert [p async for p in await llm.astream_complete("hi")]
        assert (await llm.achat(HI)).message.role == "assistant"
        assert [p async for p in await llm.astream_chat(HI)]


async def calls(url: str) -> None:
    llm = model(url, is_chat_model=True, is_function_calling_model=True, max_tokens=200)
    tool = FunctionTool.from_defaults(fn=weather)
    asked = {"tools": [tool], "chat_history": HI, "tool_required": True}
    answer = llm.chat_with_tools(**asked)
    (call,) = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "weather"
    assert call.tool_kwargs["city"] in ("Paris", "Rome")
    result = ChatMessage(role="tool", content=str(tool(**call.tool_kwargs)), additional_kwargs={
        "tool_call_id": call.tool_id, "name": "weather"})  # fmt: skip
    assert llm.chat_with_tools([tool], chat_history=[*HI, answer.message, result]).message.role == "assistant"
    *_, last = llm.stream_chat_with_tools(**asked)
    assert llm.get_tool_calls_from_response(last)[0].tool_name == "weather"
    assert llm.get_tool_calls_from_response(await llm.achat_with_tools(**asked))
    pieces = [p async for p in await llm.astream_chat_with_tools(**asked)]
    assert llm.get_tool_calls_from_response(pieces[-1])
    assert llm.predict_and_call([tool], user_msg="hi", chat_history=HI, tool_choice="required").response == "sunny"


async def structures(url: str) -> None:
    llm = model(url, is_chat_model=True, is_function_calling_model=True, max_tokens=200)
    assert isinstance(llm.as_structured_llm(Place).complete("where?").raw, Place)
    assert isinstance(llm.as_structured_llm(Place).chat(HI).raw, Place)
    assert isinstance((await llm.as_structured_llm(Place).achat(HI)).raw, Place)
    program = FunctionCallingProgram.from_defaults(output_cls=Place, prompt_template_str="where?", llm=llm)
    assert isinstance(program(llm_kwargs={"tool_required": True}), Place)
    # One without functions asks for a schema.
    form = model(url, is_chat_model=True, max_tokens=200, should_use_structured_outputs=True)
    schema = {"type": "json_schema", "json_schema": {"name": "Place", "schema": Place.model_json_schema()}}
    assert Place.model_validate_json(form.chat(HI, response_format=schema).message.content or "")
    assert LLMTextCompletionProgram.from_defaults(output_cls=Place, prompt_template_str="where?", llm=form)(
        llm_kwargs={"response_format": schema}
    )


def main() -> None:
    url = sys.argv[1]
    assert openai.__version__ < "3", "the version that LlamaIndex pins"
    asks(url)
    asyncio.run(asks_async(url))
    asyncio.run(calls(url))
    asyncio.run(structures(url))
    print("done")


if __name__ == "__main__":
    main()
