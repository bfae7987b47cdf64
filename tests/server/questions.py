"""Questions that the tests of the HTTP API ask of a served model."""

MODEL = "smollm2-135m"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
GREEDY = {"temperature": 0, "max_tokens": 6}
