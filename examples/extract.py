"""Takes facts out of free text: the answer is held to a schema, so it always parses.

Serve a model (`make serve`), then:

    python examples/extract.py "Ada Lovelace was born in London in 1815."
"""

from __future__ import annotations

import argparse
import sys
from typing import Literal

from openai import LengthFinishReasonError, OpenAI, OpenAIError
from pydantic import BaseModel, Field


class Person(BaseModel):
    """What is looked for. Lengths are bounded, because nothing else ends a text that a model goes on with."""

    name: str = Field(max_length=40)
    born: int | None = Field(ge=0, le=2100)
    place: str | None = Field(max_length=40)
    field: Literal["science", "arts", "politics", "other"]


class People(BaseModel):
    people: list[Person] = Field(max_length=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    asked = parser.parse_args()
    client = OpenAI(base_url=asked.url, api_key=asked.api_key)
    try:
        answer = client.chat.completions.parse(
            model=asked.model,
            messages=[
                {"role": "system", "content": "List the people that the text names, as JSON."},
                {"role": "user", "content": asked.text},
            ],
            response_format=People,
            temperature=0,
            max_tokens=asked.max_tokens,
        )
    except LengthFinishReasonError:
        raise SystemExit("the answer was cut at --max-tokens; allow more") from None
    found = answer.choices[0].message.parsed
    assert found is not None
    print(found.model_dump_json(indent=2))


if __name__ == "__main__":
    try:
        main()
    except OpenAIError as error:
        sys.exit(f"error: {error}")
