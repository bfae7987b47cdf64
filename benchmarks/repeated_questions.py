"""Makes the questions that several users ask an agent one after the other, so that answers repeat each other's.

again: all ask for the same edit of the same document. named: each gives a name before, so that the answers of a small
model soon differ. forms: each asks for the same form about another document, under a JSON schema.
"""

from __future__ import annotations

from typing import Any

from benchmarks.peers.workloads import TEXT

from pagemill.config import EngineConfig
from pagemill.hub import resolve_model
from pagemill.sampling.structured import StructuredOutputsParams
from pagemill.text.tokenizer import Tokenizer

NAMES = ["Ada Brown", "Ben Okafor", "Chiara Rossi", "Dmitri Petrov"]
WORDS = 90
"""A document's words."""
FORM = {
    "type": "object",
    "properties": {
        "document_classification": {"enum": ["narrative", "dialogue", "description"]},
        "principal_character": {"type": "string", "maxLength": 24},
        "place_of_the_action": {"type": "string", "maxLength": 24},
        "number_of_persons_present": {"type": "integer", "minimum": 0, "maximum": 99},
        "requires_editorial_review": {"type": "boolean"},
        "summary_in_one_sentence": {"type": "string", "maxLength": 60},
    },
    "required": [
        "document_classification",
        "principal_character",
        "place_of_the_action",
        "number_of_persons_present",
        "requires_editorial_review",
        "summary_in_one_sentence",
    ],
    "additionalProperties": False,
}


def questions(kind: str, model: str, round: int) -> list[list[int]]:
    """Returns each user's prompt; each round is about other documents."""
    tokenizer = Tokenizer.load(EngineConfig(model=str(resolve_model(model))))
    words = TEXT.read_text(encoding="utf-8").split()

    def document(number: int) -> str:
        begin = 500 + number * WORDS
        return " ".join(words[begin : begin + WORDS])

    prompts = []
    for index, name in enumerate(NAMES):
        if kind == "forms":
            asked = f"Fill in the form about this text:\n\n{document(4 * round + index)}"
        else:
            said = f"I am {name}. " if kind == "named" else ""
            asked = f"{said}Rewrite this text with the name Alice replaced by Maria:\n\n{document(round)}"
        chat = [{"role": "system", "content": "You work on documents for a publisher."}]
        prompt = tokenizer.apply_chat_template([*chat, {"role": "user", "content": asked}])
        prompts.append(tokenizer.encode(prompt, add_special_tokens=False))
    return prompts


def params_of(kind: str) -> dict[str, Any]:
    """Returns what the sampling parameters have beside a workload's."""
    if kind != "forms":
        return {}
    return {"structured_outputs": StructuredOutputsParams(json=FORM, disable_any_whitespace=True), "ignore_eos": False}
