"""Requests that are made of the served OpenAPI description: what it allows, and what it does not."""

from __future__ import annotations

import json

import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded

PATIENCE_S = 3.0
"""Seconds after which we hang up: what the description allows may be a long answer."""
ENDLESS = {"/v1/kv_map": 0.3}
"""Seconds for answers that never end."""
LEFT_OUT = ("/v1/kv_memory",)
"""Paths that would change what the rest of an attack is measured with."""


def wrong_answers(url: str, key: str, examples: int, seed: int) -> list[str]:
    """Asks every operation so many times, and returns each whose answer was a failure of the server, or an error in
    another shape than OpenAI's."""
    headers = {"Authorization": f"Bearer {key}"}
    description = requests.get(f"{url}/openapi.json", headers=headers, timeout=20).json()
    schema = schemathesis.openapi.from_dict(description)
    schema.config.update(base_url=url)
    schema.config.generation.update(with_security_parameters=False)
    wrong: list[str] = []
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path in LEFT_OUT:
            continue

        @seeded(seed)
        @settings(max_examples=examples, database=None, deadline=None, suppress_health_check=list(HealthCheck))
        @given(operation.as_strategy())
        def ask(case: schemathesis.Case) -> None:
            try:
                response = case.call(headers=headers, timeout=ENDLESS.get(case.path, PATIENCE_S))
            except requests.RequestException:
                return
            reason = _fault(response.status_code, response.text)
            if reason:
                wrong.append(f"{case.method} {case.path}: {reason}")

        ask()
    return wrong


def _fault(status: int, text: str) -> str:
    if status == 500:
        return f"status 500: {text[:300]}"
    if status < 400 or status == 503:
        return ""
    try:
        error = json.loads(text)["error"]
        return "" if error["message"] and error["type"] else f"an error without words: {text[:300]}"
    except (ValueError, KeyError, TypeError):
        return f"an error of another shape: {status} {text[:300]}"
