"""Holds decode steps whose answers all follow a JSON schema against steps of as many free answers.

    python -m benchmarks.structured [--model smollm2-135m] [--dtype bfloat16] [--running 64] [--rounds 5]
                                  [--choices drawn greedy]

Two engines take turns of six steps, with equal prompts and lengths. Figures are the times of steps in which all
sequences generate, medians, and the ratio of neighbouring turns, its median and quartiles; for drawn tokens
(temperature 1) and for greedy ones.
"""

from __future__ import annotations

import argparse

from benchmarks.in_turns import ratios_of, turns_of_steps

from pagemill.config import EngineConfig
from pagemill.doctor import cpu_model
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest
from pagemill.sampling.params import SamplingParams

LINE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["sku", "text", "quantity", "price"],
    "properties": {
        "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
        "text": {"type": "string", "maxLength": 80},
        "quantity": {"type": "integer", "minimum": 1, "maximum": 1000},
        "price": {"type": "number", "minimum": 0, "maximum": 100000},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
    },
}
INVOICE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["id", "customer", "currency", "due", "paid", "lines", "total"],
    "properties": {
        "id": {"type": "string", "pattern": "^INV-[0-9]{6}$"},
        "customer": {
            "type": "object",
            "additionalProperties": False,
            "required": ["name", "address"],
            "properties": {
                "name": {"type": "string", "maxLength": 60},
                "email": {"anyOf": [{"type": "string", "format": "email"}, {"type": "null"}]},
                "address": {"$ref": "#/$defs/address"},
            },
        },
        "currency": {"enum": ["EUR", "USD", "GBP", "CHF", "JPY"]},
        "due": {"type": "string", "format": "date"},
        "paid": {"type": "boolean"},
        "lines": {"type": "array", "items": LINE, "minItems": 1, "maxItems": 20},
        "total": {"type": "number"},
    },
    "$defs": {
        "address": {
            "type": "object",
            "additionalProperties": False,
            "required": ["street", "city", "country"],
            "properties": {
                "street": {"type": "string", "maxLength": 60},
                "city": {"type": "string", "maxLength": 40},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                "country": {"enum": ["DE", "FR", "US", "GB", "CH", "JP"]},
            },
        }
    },
}
INVOICES = {"type": "array", "items": {"$ref": "#/$defs/invoice"}, "minItems": 100}
INVOICES["$defs"] = {**INVOICE["$defs"], "invoice": {name: INVOICE[name] for name in INVOICE if name != "$defs"}}
"""So many that no answer ends."""
PROMPT_LEN = 64
TEMPERATURES = {"drawn": 1.0, "greedy": 0.0}


def add(core: EngineCore, running: int, params: SamplingParams, seed: int) -> None:
    for i in range(running):
        prompt = [(7 * i + 3 * j + seed) % 40000 + 100 for j in range(PROMPT_LEN)]
        core.add_request(EngineRequest(request_id=str(i), prompt_token_ids=prompt, params=params, arrival_s=0.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--choices", nargs="+", choices=TEMPERATURES, default=[*TEMPERATURES])
    given = parser.parse_args()
    config = EngineConfig(
        model=given.model,
        dtype=given.dtype,
        quantization=given.quantization,
        max_model_len=PROMPT_LEN + given.tokens + 1,
        max_num_seqs=given.running,
        kv_memory="1GiB",
        enable_prefix_caching=False,
        speculative_config="off",
    )
    cores = [EngineCore(config), EngineCore(config)]
    print(f"{cpu_model()}; {cores[0].ready.model}; {given.running} running, {given.tokens} tokens each")
    print("choice | free, ms | structured, ms | structured / free")
    for name in given.choices:
        common = {"temperature": TEMPERATURES[name], "max_tokens": given.tokens, "ignore_eos": True}
        free, structured = SamplingParams(**common), SamplingParams(**common, structured_outputs={"json": INVOICES})
        turns = []
        for number in range(given.rounds + 1):
            for core, params in zip(cores, (free, structured), strict=True):
                add(core, given.running, params, number)
            found = turns_of_steps(cores, given.running)
            turns += found if number else []  # the first compiles and warms up
        print(f"{name} | {ratios_of(turns)}", flush=True)
    for core in cores:
        core.close()


if __name__ == "__main__":
    main()
