"""`/v1/responses`: OpenAI's newer form of chat completions, answered by the same code."""
