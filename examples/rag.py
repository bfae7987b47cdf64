"""Answers questions from documents: embeddings find the document, and its pinned prefix is never computed twice.

Serve a model (`make serve`), then:

    python examples/rag.py notes/*.txt --ask "When is the bridge closed?"

Pins are limited to half of the KV memory (--max-pinned-share); give the server enough (--kv-memory).
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openai import OpenAI, OpenAIError

PIN_S = 3600
"""Seconds for which a document stays computed after it was last pinned."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", nargs="+", type=Path)
    parser.add_argument("--ask", action="append", required=True, help="a question; may be given several times")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    asked = parser.parse_args()
    client = OpenAI(base_url=asked.url, api_key=asked.api_key)
    texts = [path.read_text(encoding="utf-8") for path in asked.documents]
    places = vectors(client, asked.model, texts)
    for question, at in zip(asked.ask, vectors(client, asked.model, asked.ask), strict=True):
        best = max(range(len(texts)), key=lambda number: similarity(places[number], at))
        prefix = with_document(texts[best])
        pin(client, prefix)
        answer = client.chat.completions.create(
            model=asked.model,
            messages=[*prefix, {"role": "user", "content": question}],
            temperature=0,
            max_tokens=asked.max_tokens,
        )
        print(f"{question}\n  {answer.choices[0].message.content}")
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached = answer.usage.prompt_tokens_details.cached_tokens
        print(f"  from {asked.documents[best]}; {cached} of {answer.usage.prompt_tokens} prompt tokens were cached")


def with_document(text: str) -> list[Any]:
    """Returns how conversations about a document begin. It stands first, so that they share what is computed of it."""
    return [{"role": "system", "content": f"Answer from this document alone.\n\n{text}"}]


def vectors(client: OpenAI, model: str, texts: Sequence[str]) -> list[list[float]]:
    """Returns an embedding of length 1 for each text."""
    given = client.embeddings.create(model=model, input=list(texts), extra_body={"pooling_type": "MEAN"})
    return [each.embedding for each in given.data]


def similarity(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def pin(client: OpenAI, prefix: list[Any]) -> None:
    """Computes a prefix and keeps it, under a name of its content: pinning it again only prolongs its time."""
    name = hashlib.sha256(prefix[0]["content"].encode()).hexdigest()
    client.post("/pins", cast_to=object, body={"name": name, "messages": prefix, "expires_s": PIN_S})


if __name__ == "__main__":
    try:
        main()
    except OpenAIError as error:
        sys.exit(f"error: {error}")
