"""`pagemill ls`."""

from __future__ import annotations

import time

from rich.table import Table

from pagemill.cli.listing import AsJson, print_listing
from pagemill.cli.wording import ago
from pagemill.hub.local_models import local_models


def ls(as_json: AsJson = False) -> None:
    """List the models that are on this machine.

    Any other name is fetched when it is first used; a folder or file of your own needs no name.
    """
    found = local_models()
    rows = [
        {"name": model.name, "path": str(model.path), "bytes": model.bytes, "used_s": model.used_s} for model in found
    ]
    table = Table("model", "size", "last used", "path", box=None)
    for model in found:
        table.add_row(model.name, f"{model.bytes / 2**20:,.0f} MiB", ago(time.time() - model.used_s), str(model.path))
    print_listing(rows, table, "no model has been fetched; pagemill pull smollm2-135m fetches a small one", as_json)
