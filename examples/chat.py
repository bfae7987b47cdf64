"""Chats in the terminal: the server keeps the conversation, so each turn sends only what is new.

Serve a model (`make serve`), then:

    python examples/chat.py --session ada

Ctrl-D ends. The same command goes on where the conversation was left.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from openai import OpenAI, OpenAIError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--session", required=True, help="the conversation's name")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    asked = parser.parse_args()
    client = OpenAI(base_url=asked.url, api_key=asked.api_key)
    print("> ", end="", flush=True)
    for line in sys.stdin:
        if line.strip():
            try:
                for text in answer(client, asked.model, asked.session, line.strip(), asked.max_tokens):
                    print(text, end="", flush=True)
            except OpenAIError as error:
                print(f"\n{error}", file=sys.stderr)
        print("\n> ", end="", flush=True)
    print()


def answer(client: OpenAI, model: str, session: str, text: str, max_tokens: int) -> Iterator[str]:
    """Yields the pieces of the next answer in a session, as they come."""
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        max_tokens=max_tokens,
        stream=True,
        extra_body={"session_id": session},
    )
    for chunk in stream:
        for choice in chunk.choices:
            yield choice.delta.content or ""


if __name__ == "__main__":
    main()
