"""From a path to a decoder that is ready to run: `load_model`."""

from pagemill.models.loading.load import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]
