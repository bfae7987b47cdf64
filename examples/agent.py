"""Lets a model look things up: asks it, runs the tools that it calls, and gives it the results until it answers.

Serve a model whose chat template knows tools, then:

    python examples/agent.py --model NAME "What is 17 times 23?"
"""

from __future__ import annotations

import argparse
import json
import operator
import sys
from collections.abc import Callable
from typing import Any

from openai import OpenAI, OpenAIError

OPERATIONS = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}
MOST_TURNS = 4


def calculate(operation: str, left: int, right: int) -> str:
    return str(OPERATIONS[operation](left, right))


FUNCTIONS: dict[str, Callable[..., str]] = {"calculate": calculate}
NUMBER = {"type": "integer", "minimum": -1_000_000, "maximum": 1_000_000}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Calculates with two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {"operation": {"enum": [*OPERATIONS]}, "left": NUMBER, "right": NUMBER},
                "required": ["operation", "left", "right"],
                "additionalProperties": False,
            },
        },
    }
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    asked = parser.parse_args()
    client = OpenAI(base_url=asked.url, api_key=asked.api_key)
    messages: list[Any] = [{"role": "user", "content": asked.question}]
    for turn in range(MOST_TURNS):
        # The first answer must be a call, whose arguments follow the schema; then the model may choose.
        choice: Any = "required" if turn == 0 else "auto" if turn < MOST_TURNS - 1 else "none"
        answer = client.chat.completions.create(
            model=asked.model, messages=messages, tools=TOOLS, tool_choice=choice, temperature=0, max_tokens=200
        )
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            print(message.content)
            return
        for call in message.tool_calls:
            assert call.type == "function"
            result = run(call.function.name, call.function.arguments)
            print(f"{call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def run(name: str, arguments: str) -> str:
    """Returns what a function gives, or what is wrong with the call: the model may mend it."""
    try:
        return FUNCTIONS[name](**json.loads(arguments))
    except (ValueError, TypeError, KeyError) as error:
        return f"error: {error}"


if __name__ == "__main__":
    try:
        main()
    except OpenAIError as error:
        sys.exit(f"error: {error}")
