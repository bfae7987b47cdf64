"""One file per engine, run in that engine's environment. Each has a class `Engine`:

Engine(model, settings)     loads; model: {"name", "gguf", "checkpoint", "openvino"}, what they are: `engines.py`
.description: str           version and configuration, for the report
.run(prompts, max_tokens)   starts all requests at once, greedily, ignoring stop tokens; yields (request, new tokens)
                            as they come
"""
