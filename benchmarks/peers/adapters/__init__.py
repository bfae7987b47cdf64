"""One file per engine, run in that engine's environment. Each has a class `Engine`:

Engine(model, settings)         loads; model: {"name", "gguf", "checkpoint", "openvino"}, what they are: `engines.py`
.description: str               version and configuration, for the report
.add(key, prompt, max_tokens)   a request arrives: greedy, stop tokens ignored; keys (integers) are used once
.has_work() -> bool             whether a request is unfinished
.step()                         works on; yields (key, new tokens) for what came of it, as soon as it is there
"""
