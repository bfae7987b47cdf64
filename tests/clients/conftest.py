"""What the suites of clients share. They run in an environment of their own (`make test-clients`) against a server with
the small default model and a chat template that knows tools; PAGEMILL_URL says its address."""

import os
import re

import pytest

MODEL = "smollm2-135m"
PARAMETERS = {
    "type": "object",
    "properties": {
        "operation": {"enum": ["add", "multiply"]},
        "left": {"type": "integer", "minimum": 0, "maximum": 999},
        "right": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["operation", "left", "right"],
    "additionalProperties": False,
}


@pytest.fixture(scope="session")
def url():
    return f"{os.environ['PAGEMILL_URL']}/v1"


@pytest.fixture
def session(request):
    """A name for a session of this test's own."""
    return re.sub(r"\W+", "-", f"{request.node.name} {os.getpid()}")


@pytest.fixture
def calculate():
    """What the tool does, by the arguments of a call; it fails for those that its schema does not allow. There may be
    more than its properties: litellm leaves additionalProperties out for hosted_vllm."""

    def run(arguments):
        left, right = arguments["left"], arguments["right"]
        assert all(type(number) is int and 0 <= number <= 999 for number in (left, right))
        return str({"add": left + right, "multiply": left * right}[arguments["operation"]])

    return run


@pytest.fixture
def tools():
    functions = {"calculate": PARAMETERS, "remember": {**PARAMETERS, "properties": {}, "required": []}}
    return [
        {"type": "function", "function": {"name": name, "description": f"Can {name}.", "parameters": parameters}}
        for name, parameters in functions.items()
    ]


@pytest.fixture(scope="session")
def model():
    return MODEL
