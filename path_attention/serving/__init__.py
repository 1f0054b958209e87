"""A server of language models: an engine with continuous batching behind OpenAI's HTTP API."""
