"""The HTTP API of Anthropic: messages. Imports `gateway.api.openai` for the fields that both have."""
