"""The HTTP API of OpenAI: completions, chat, models, tokenizer. Imports `gateway.api.http` and what that may import."""
