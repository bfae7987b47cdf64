"""Answers a file of prompts in one go, without a server: all run side by side, and equal beginnings are computed once.

    python examples/batch.py prompts.jsonl answers.jsonl

Each line of the first file is {"id": …, "prompt": …}, and may have a "system". The second file gets a line for each, in
the same order: {"id": …, "answer": …}, with an "error" where one failed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pagemill import LLM, PagemillError, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--kv-memory", default=None, help='memory for the KV cache, such as "1GiB"')
    parser.add_argument("--model", default="smollm2-135m")
    asked = parser.parse_args()
    try:
        with asked.prompts.open(encoding="utf-8") as file:
            lines = [task(asked.prompts, number, line) for number, line in enumerate(file, 1)]
        file = asked.answers.open("w", encoding="utf-8")
    except OSError as error:
        raise SystemExit(f"error: {error}") from None
    try:
        with LLM(asked.model, kv_memory=asked.kv_memory) as llm:
            outputs = llm.chat(
                [conversation(line) for line in lines], SamplingParams(temperature=0, max_tokens=asked.max_tokens)
            )
    except PagemillError as error:
        raise SystemExit(f"error: {error}") from None
    with file:
        for line, output in zip(lines, outputs, strict=True):
            (answer,) = output.outputs
            result = {"id": line["id"], "answer": answer.text, **({"error": str(answer.error)} if answer.error else {})}
            print(json.dumps(result, ensure_ascii=False), file=file)
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    print(f"{len(outputs)} answers in {asked.answers}; {cached} prompt tokens were shared")


def task(path: Path, number: int, line: str) -> dict[str, Any]:
    """Returns what a line of the file asks for."""
    try:
        found = json.loads(line)
        if isinstance(found, dict) and "id" in found and isinstance(found.get("prompt"), str):
            return found
    except ValueError:
        pass
    raise SystemExit(f'{path}, line {number} is no {{"id": …, "prompt": …}}; correct it')


def conversation(line: dict[str, Any]) -> list[dict[str, str]]:
    system = [{"role": "system", "content": line["system"]}] if "system" in line else []
    return [*system, {"role": "user", "content": line["prompt"]}]


if __name__ == "__main__":
    main()
