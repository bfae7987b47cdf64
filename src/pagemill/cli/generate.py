"""`pagemill generate`."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from pagemill.arguments import arguments_of
from pagemill.cli.options import SAMPLING_FLAGS, ModelArgument, engine_options, run, sampling_options
from pagemill.config import config_for
from pagemill.errors import EmptyPromptError, InvalidRequestError, SamplingParamsError, shown
from pagemill.sampling.params import BeamSearchParams, SamplingParams

PLAIN = SamplingParams()
"""Holds the value of each flag that is not given."""


@sampling_options(temperature=0.0, max_tokens=128)
@engine_options
def generate(
    model: ModelArgument,
    prompts: Annotated[
        list[str],
        typer.Argument(
            metavar="PROMPT", help="Texts to continue, all at the same time; - reads one from standard input."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list instead of text.")] = False,
    beam_width: Annotated[
        int | None, typer.Option(help="Search with this many beams, and print the best.", show_default=False)
    ] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(help="In a search, above 0 prefers longer beams.  [default: 1.0]", show_default=False),
    ] = None,
    *,
    settings: dict[str, Any],
    params: SamplingParams,
) -> None:
    """Continue one or more prompts."""
    asked = params if beam_width is None else _search_params(params, beam_width, length_penalty)
    if beam_width is None and length_penalty is not None:
        raise SamplingParamsError("length_penalty needs beam_width; give --beam-width too", param="length_penalty")
    if params.max_tokens == 0:
        raise SamplingParamsError("max_tokens is 0, and nothing would be generated; give 1 or more", param="max_tokens")
    prompts = _with_standard_input(prompts)
    if "" in prompts:
        _check_begin(model, settings)
    run(_generate(model, prompts, as_json, settings, asked))


def _with_standard_input(prompts: list[str]) -> list[str]:
    """Returns the prompts, with standard input for `-`, without the newline that ends it. Raises InvalidRequestError
    where that is closed, empty, no text, or asked for twice."""
    if "-" not in prompts:
        return prompts
    if prompts.count("-") > 1:
        raise InvalidRequestError("- is given twice; standard input can be read once", param="prompts")
    if sys.stdin is None:
        raise InvalidRequestError("standard input is closed; leave it open, with a text to continue", param="prompts")
    try:
        read = sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"standard input is no UTF-8 text: {error}", param="prompts") from error
    if not read:
        raise InvalidRequestError("standard input is empty; give it a text to continue", param="prompts")
    return [read if prompt == "-" else prompt for prompt in prompts]


def _check_begin(model: str, settings: dict[str, Any]) -> None:
    """Raises EmptyPromptError, before the model is loaded, unless it begins an empty prompt with a token of its own."""
    from pagemill.text.tokenizer import Tokenizer

    if not Tokenizer.load(config_for("pagemill generate", model, settings)).encode(""):
        raise EmptyPromptError(
            "a prompt is empty, and this model begins none with a token of its own; give it a text to continue",
            param="prompts",
        )


def _search_params(params: SamplingParams, beam_width: int, length_penalty: float | None) -> BeamSearchParams:
    assert params.max_tokens is not None
    for name in SAMPLING_FLAGS:
        if name not in arguments_of(BeamSearchParams) and (value := getattr(params, name)) != getattr(PLAIN, name):
            raise SamplingParamsError(
                f"{name} is {shown(value)}, which has no meaning with beam_width; leave one of them out", param=name
            )
    penalty = 1.0 if length_penalty is None else length_penalty
    return BeamSearchParams(beam_width, params.max_tokens, temperature=params.temperature, length_penalty=penalty)


async def _generate(
    model: str, prompts: list[str], as_json: bool, settings: dict[str, Any], params: SamplingParams | BeamSearchParams
) -> None:
    from pagemill.cli.loading import loaded_engine

    async with loaded_engine(model, settings) as llm:
        streams = [await llm.submit(prompt, params) for prompt in prompts]
        results = []
        for prompt, stream in zip(prompts, streams, strict=True):
            if not as_json and len(prompts) > 1:
                sys.stdout.write(f"--- {prompt}\n")
            async for new in stream:
                if not as_json:
                    sys.stdout.write(new.outputs[0].text)
                    sys.stdout.flush()
            answers = stream.whole().outputs
            result: dict[str, Any] = {
                "prompt": prompt,
                "text": answers[0].text,
                "finish_reason": answers[0].finish_reason,
                "prompt_tokens": len(stream.prompt_token_ids),
                "completion_tokens": len(answers[0].token_ids),
            }
            if isinstance(params, BeamSearchParams):
                result["beams"] = [
                    {"text": beam.text, "cumulative_logprob": beam.cumulative_logprob} for beam in answers
                ]
            results.append(result)
            if not as_json:
                sys.stdout.write("\n")
        if as_json:
            sys.stdout.write(json.dumps(results, ensure_ascii=False, indent=2) + "\n")
