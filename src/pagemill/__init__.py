"""pagemill: an LLM inference and serving engine with a virtual-memory system for the KV cache."""

__version__ = "0.1.0"
