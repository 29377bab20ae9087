"""`/v1/messages`: Anthropic's form of chat completions, answered by the same code."""
