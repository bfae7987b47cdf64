"""Grammars of answers that have a form or call tools: what each family would write is accepted, and nothing else."""

import json
import re

import pytest
from llguidance import LLMatcher, LLTokenizer

from pagemill.errors import InvalidRequestError, SamplingParamsError
from pagemill.namespace import Namespace
from pagemill.sampling.grammar import GrammarChecker
from pagemill.sampling.structured import StructuredOutputsParams
from pagemill.text.answer.formats import REASONING, TOOL_CALLS, ToolCallFormat
from pagemill.text.answer.grammar import Calls, grammar_of_call, grammar_of_form, grammar_of_text_and_calls
from pagemill.text.answer.reader import AnswerReader
from pagemill.text.tokenizer import Tokenizer

CITY = {"properties": {"city": {"$ref": "#/$defs/city"}}, "required": ["city"], "$defs": {"city": {"enum": ["Paris"]}}}
FUNCTIONS = {"get-weather": CITY, "other": {}}
WRITTEN = [name for name, form in TOOL_CALLS.items() if form.written is not None]


@pytest.fixture(scope="module")
def accepts():
    tokenizer = Tokenizer.from_path("smollm2-135m")
    vocabulary = LLTokenizer(tokenizer._backend.to_str())  # noqa: SLF001

    def accepts(grammar, text):
        """Returns whether a text follows a grammar to its end."""
        assert not LLMatcher.validate_grammar(grammar, vocabulary)
        matcher, ids = LLMatcher(vocabulary, grammar), tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return accepts


def plain(text):
    return [(text, None)] if text else []


def call_of(form, city="Paris", name="get-weather"):
    before, between, behind = form.written
    return before + name + between + json.dumps({"city": city}) + behind


@pytest.mark.parametrize("name", WRITTEN)
def test_an_answer_that_must_be_a_call_is_one(accepts, name):
    form = TOOL_CALLS[name]
    grammar, call = grammar_of_call(form, FUNCTIONS, plain, None), call_of(form)
    assert accepts(grammar, call)
    assert accepts(grammar, call_of(form, "Rome", "other"))
    for wrong in (call[:-1], call + "x", "Hm. " + call, call_of(form, "Rome"), call_of(form, name="third")):
        assert not accepts(grammar, wrong)
    reader = AnswerReader(form, FUNCTIONS, None, reasons_from_start=False, call_id=str)
    answer = reader.read(call)
    assert [(found.name, found.arguments) for found in answer.calls] == [("get-weather", '{"city": "Paris"}')]
    assert not answer.content


def test_reasoning_goes_before_a_call(accepts):
    grammar = grammar_of_call(TOOL_CALLS["hermes"], FUNCTIONS, plain, REASONING["qwen3"])
    call = call_of(TOOL_CALLS["hermes"])
    assert accepts(grammar, f"Hm, <tool_call>?\n</think>{call}")
    assert accepts(grammar, f"Hm.\n</think>\n\n{call}")
    assert not accepts(grammar, call)


@pytest.mark.parametrize("special", [False, True])
def test_reasoning_goes_before_a_form(accepts, special):
    def words(text):
        ids = {"<think>": 1, "</think>": 2} if special else {}
        return [(text, ids.get(text))]

    begin, end = ("<|im_start|>", "<|im_end|>") if special else ("<think>", "</think>")
    asked = StructuredOutputsParams(json={"const": {"a": 1}})
    begun = grammar_of_form(asked, words, REASONING["qwen3"], None, has_begun=True)
    for right in (f'Hm, {{"a": 2}}.\n{end}{{"a": 1}}', f'{end}\n\n{{"a": 1}}'):
        assert accepts(begun, right)
    for wrong in ('{"a": 1}', f"Hm.{end}", f'Hm.{end}{{"a": 2}}', f'Hm.{end}{{"a": 1}}.'):
        assert not accepts(begun, wrong)
    free = grammar_of_form(asked, words, REASONING["qwen3"], None, has_begun=False)
    for right in ('{"a": 1}', f'{begin}\nHm.{end}\n\n{{"a": 1}}'):
        assert accepts(free, right)
    for wrong in (f'Hm.{end}{{"a": 1}}', f"{begin}Hm."):
        assert not accepts(free, wrong)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_form_behind_marks_of_any_number_passes_the_check_of_grammars(has_begun):
    ids = {"<think>": 90_000, "</think>": 7}
    asked = StructuredOutputsParams(json={"const": "<[90001]>"})
    grammar = grammar_of_form(
        asked, lambda text: [(text, ids.get(text))], REASONING["qwen3"], None, has_begun=has_begun
    )
    checker = GrammarChecker(ids, lambda text: "")
    checker.check(StructuredOutputsParams(grammar=grammar), Namespace())
    with pytest.raises(SamplingParamsError, match="90001"):
        checker.check(StructuredOutputsParams(grammar="start: <[90001]>"), Namespace())


@pytest.mark.parametrize("name", [name for name, form in TOOL_CALLS.items() if not form.bare])
def test_an_answer_is_calls_or_has_a_form(accepts, name):
    form, asked = TOOL_CALLS[name], StructuredOutputsParams(json={"const": {"a": 1}})
    functions = {"get-weather": CITY if form.written else {}, "other": {}}

    def grammar(only_one):
        return grammar_of_form(asked, plain, None, Calls(form, functions, only_one), has_begun=False)

    call = call_of(form) if form.written else f"{form.begin[0]}\nget_weather(…)\n{form.end}"
    for right in (call, '{"a": 1}'):
        assert accepts(grammar(True), right)
        assert accepts(grammar(False), right)
    for several in (f"{call}\n{call}", call * 3):
        assert accepts(grammar(False), several)
        assert not accepts(grammar(True), several)
    for wrong in ("", '{"a": 2}', f'{call}{{"a": 1}}', f"Hm. {call}", f'{{"a": 1}}{call}'):
        assert not accepts(grammar(False), wrong)
    assert not form.written or not accepts(grammar(False), call_of(form, "Rome"))


@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "llama3_json"])
def test_arguments_follow_their_schema_in_any_text(accepts, name):
    form = TOOL_CALLS[name]
    grammar, call = grammar_of_text_and_calls(form, FUNCTIONS, plain), call_of(form)
    for right in ("", "Hm.", "Hm, <tool", call, f"Hm.\n{call}\n{call} Yes."):
        assert accepts(grammar, right)
    for wrong in (call_of(form, "Rome"), f"Hm. {call_of(form, name='third')}", call[:-8]):
        assert not accepts(grammar, wrong)


def test_special_tokens_are_tokens(accepts):
    form = ToolCallFormat(
        "special", "json", ("<|im_start|>",), written=('<|im_start|>{"name": "', '", "arguments": ', "}<|im_end|>")
    )

    def words(text):
        ids = {"<|im_start|>": 1, "<|im_end|>": 2}
        return [(part, ids.get(part)) for part in re.split(r"(<\|im_[a-z]*\|>)", text) if part]

    call = call_of(form, name="other")
    assert accepts(grammar_of_call(form, FUNCTIONS, words, None), call)
    free = grammar_of_text_and_calls(form, FUNCTIONS, words)
    assert accepts(free, f"Hm. {call} Yes.")
    assert not accepts(free, "Hm. <|im_start|> Yes.")


def test_what_no_grammar_can_say_is_refused():
    for name in TOOL_CALLS.keys() - WRITTEN:
        with pytest.raises(InvalidRequestError, match="no arguments in JSON"):
            grammar_of_call(TOOL_CALLS[name], FUNCTIONS, plain, None)
    with pytest.raises(InvalidRequestError, match="begin without a mark"):
        grammar_of_text_and_calls(TOOL_CALLS["llama3_json"], FUNCTIONS, plain)
    asked = StructuredOutputsParams(json_object=True)
    for name, functions, said in (
        ("llama3_json", {"f": {}}, "without a mark, so that tools do not go with structured_outputs; leave one"),
        ("pythonic", {"f": {}}, "without a mark"),
        ("qwen3_coder", FUNCTIONS, "no arguments in JSON"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            grammar_of_form(asked, plain, None, Calls(TOOL_CALLS[name], functions, False), has_begun=False)
    with pytest.raises(InvalidRequestError, match="'f' are of type 'array'"):
        grammar_of_call(TOOL_CALLS["hermes"], {"f": {"type": "array"}}, plain, None)
    with pytest.raises(InvalidRequestError, match="'f' have a number that is not finite"):
        grammar_of_call(TOOL_CALLS["hermes"], {"f": {"properties": {"a": {"minimum": float("inf")}}}}, plain, None)
