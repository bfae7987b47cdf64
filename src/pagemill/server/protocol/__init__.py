"""Bodies of HTTP: OpenAI's requests, responses, events and errors, with vLLM's extra fields."""
