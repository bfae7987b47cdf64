"""What is asked of a served model in the tests of its HTTP API."""

MODEL = "smollm2-135m"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
GREEDY = {"temperature": 0, "max_tokens": 6}
