"""Bodies of HTTP: OpenAI's requests and responses, with vLLM's extra fields."""
