"""Loads a model from a path: `load_model` returns a decoder that is ready to run."""

from pagemill.models.loading.load import LoadedModel, load_model, open_checkpoint, read_config

__all__ = ["LoadedModel", "load_model", "open_checkpoint", "read_config"]
