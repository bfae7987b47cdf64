"""`pagemill generate`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated, Any

import typer

from pagemill.cli.options import ModelArgument, engine_options, sampling_options
from pagemill.sampling.params import SamplingParams


@sampling_options(temperature=0.0, max_tokens=128)
@engine_options
def generate(
    model: ModelArgument,
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="Texts to continue, all at the same time.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list instead of text.")] = False,
    *,
    settings: dict[str, Any],
    params: SamplingParams,
) -> None:
    """Continue one or more prompts."""
    try:
        asyncio.run(_generate(model, prompts, as_json, settings, params))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


async def _generate(
    model: str, prompts: list[str], as_json: bool, settings: dict[str, Any], params: SamplingParams
) -> None:
    from pagemill.cli.loading import loaded_engine

    async with loaded_engine(model, settings) as llm:
        streams = [await llm.submit(prompt, params) for prompt in prompts]
        results = []
        for prompt, stream in zip(prompts, streams, strict=True):
            if not as_json and len(prompts) > 1:
                sys.stdout.write(f"--- {prompt}\n")
            text, tokens, reason = "", 0, None
            async for output in stream:
                for new in output.outputs:
                    text, tokens, reason = text + new.text, tokens + len(new.token_ids), new.finish_reason
                    if not as_json:
                        sys.stdout.write(new.text)
                        sys.stdout.flush()
            results.append(
                {
                    "prompt": prompt,
                    "text": text,
                    "finish_reason": reason,
                    "prompt_tokens": len(stream.prompt_token_ids),
                    "completion_tokens": tokens,
                }
            )
            if not as_json:
                sys.stdout.write("\n")
        if as_json:
            sys.stdout.write(json.dumps(results, ensure_ascii=False, indent=2) + "\n")
