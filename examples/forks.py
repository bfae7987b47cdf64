"""Tries several continuations of one conversation: a session is forked, and the forks share what they have in common.

Serve a model (`make serve`), then:

    python examples/forks.py "Begin a story." "Make it sad." "Make it funny."
"""

from __future__ import annotations

import argparse
import sys
import uuid
from typing import Any

from openai import OpenAI, OpenAIError


class Conversation:
    """A session of the server, by name."""

    def __init__(self, client: OpenAI, model: str, name: str, max_tokens: int) -> None:
        self._client, self._model, self.name, self._max_tokens = client, model, name, max_tokens

    def say(self, text: str) -> Any:
        """Returns the next answer, which the session keeps."""
        return self._client.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": text}],
            max_tokens=self._max_tokens,
            extra_body={"session_id": self.name},
        )

    def fork(self, name: str) -> Conversation:
        """Returns another session that begins as this one is now. Nothing is copied until the two differ."""
        self._client.post(f"/sessions/{self.name}/fork", cast_to=object, body={"session_id": name})
        return Conversation(self._client, self._model, name, self._max_tokens)

    def delete(self) -> None:
        self._client.delete(f"/sessions/{self.name}", cast_to=object)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("beginning")
    parser.add_argument("directions", nargs="+", help="what is said in each fork")
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    asked = parser.parse_args()
    client = OpenAI(base_url=asked.url, api_key=asked.api_key)
    story = Conversation(client, asked.model, f"story-{uuid.uuid4()}", asked.max_tokens)
    kept = [story]
    try:
        print(story.say(asked.beginning).choices[0].message.content)
        for number, direction in enumerate(asked.directions, start=1):
            kept.append(story.fork(f"{story.name}-{number}"))
            answer = kept[-1].say(direction)
            shared = answer.usage.prompt_tokens_details.cached_tokens
            print(f"\n--- {direction} ({shared} of {answer.usage.prompt_tokens} prompt tokens shared)")
            print(answer.choices[0].message.content)
    finally:
        for each in kept:
            each.delete()


if __name__ == "__main__":
    try:
        main()
    except OpenAIError as error:
        sys.exit(f"error: {error}")
