"""Chat templates as families of models write them: which format they have, and that it reads what they write.

The templates in tests/data/templates are small ones that follow each family's documented form.
"""

import json
from pathlib import Path

import pytest
from small_tokenizers import byte_level

from pagemill import EngineConfig
from pagemill.errors import ConfigError, InvalidRequestError, TokenizerError
from pagemill.text.tokenizer import Tokenizer
from pagemill.text.tokenizer_files import TokenizerSettings

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
FORMATS = {
    "deepseek_v3": ("deepseek_v3", "qwen3"),
    "deepseek_v31": ("deepseek_v31", "qwen3"),
    "gemma3": ("gemma", None),
    "granite": ("granite", "granite"),
    "hermes": ("hermes", None),
    "llama3": ("llama3_json", None),
    "mistral": ("mistral", None),
    "phi4_mini": ("phi4_mini_json", None),
    "phi4_mini_own": ("phi4_mini_json", None),
    "pythonic": ("pythonic", None),
    "qwen3_coder": ("qwen3_coder", None),
    "reasoning": ("hermes", "qwen3"),
    "smollm3": ("hermes", "qwen3"),
}
ARGUMENTS = {"city": 'Paris, "the" city', "days": 3, "hours": [1, 2.5, None, True]}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
QUESTION = {"role": "user", "content": "Weather?"}


def tokenizer_of(source):
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(byte_level(), TokenizerSettings(fingerprint="", special_tokens=special, chat_template=source))


def called(call_id, arguments):
    call = {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def test_every_template_is_here():
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == {*FORMATS}


@pytest.mark.parametrize("name", FORMATS)
def test_a_template_tells_the_format_that_reads_what_it_writes(name):
    tokenizer = tokenizer_of((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))
    answers = tokenizer.answers
    assert (answers.tool_calls.name, answers.reasoning and answers.reasoning.name) == FORMATS[name]

    call_id = "x" * 9
    asked = tokenizer.apply_chat_template([QUESTION], tools=TOOLS)
    conversation = [QUESTION, called(call_id, json.dumps(ARGUMENTS))]
    closed = tokenizer.apply_chat_template(conversation, tools=TOOLS, add_generation_prompt=False)
    begin = next(at for at, pair in enumerate(zip(asked + "\0", closed, strict=False)) if len({*pair}) > 1)
    answer = answers.reader(TOOLS, prompt="", answer_id="a").read(closed[begin:])
    (call,) = answer.calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", ARGUMENTS)
    assert len(call.id) == (9 if name == "mistral" else 22)
    assert call.id.isalnum()

    result = {"role": "tool", "tool_call_id": call_id, "content": "Rain."}
    assert "Rain." in tokenizer.apply_chat_template([*conversation, result], tools=TOOLS)
    assert "get_weather" in asked


def test_the_prompt_says_whether_the_answer_begins_with_reasoning():
    source = (TEMPLATES / "deepseek_v3.jinja").read_text(encoding="utf-8")
    answers = tokenizer_of(source).answers
    prompt = tokenizer_of(source).apply_chat_template([QUESTION])
    assert answers.reader(None, prompt=prompt, answer_id="a").read("Hm.</think>Rain.").reasoning == "Hm."
    prompt = "What does <think> mean?"
    assert answers.reader(None, prompt=prompt, answer_id="a").read("Hm.</think>Rain.").reasoning == ""


@pytest.mark.parametrize("content", ["", "It rains."])
def test_a_session_goes_on_behind_a_call_or_reasoning(content):
    tokenizer = tokenizer_of((TEMPLATES / "hermes.jinja").read_text(encoding="utf-8"))
    answer = {**called("x", json.dumps(ARGUMENTS)), "content": content}
    result = {"role": "tool", "tool_call_id": "x", "content": "Rain."}
    assert tokenizer.render_turn([QUESTION, answer], [result], tools=TOOLS) == (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nRain.\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    tokenizer = tokenizer_of((TEMPLATES / "reasoning.jinja").read_text(encoding="utf-8"))
    answer["reasoning_content"] = "Hm."
    assert tokenizer.render_turn([QUESTION, answer], [result], tools=TOOLS) == (
        "<|im_end|>\n<|im_start|>tool\nRain.<|im_end|>\n<|im_start|>assistant\n"
    )
    # This family leaves the reasoning out once there is another question, so all is written anew.
    assert tokenizer.render_turn([QUESTION, answer], [result, QUESTION], tools=TOOLS) is None
    forgets = tokenizer_of((TEMPLATES / "hermes.jinja").read_text(encoding="utf-8"))
    assert forgets.render_turn([QUESTION, answer], [result], tools=TOOLS) is None


def test_arguments_are_objects_in_templates_and_wrong_ones_refused():
    tokenizer = tokenizer_of("{% for m in messages %}{{ m.tool_calls[0].function.arguments.city }}{% endfor %}")
    assert tokenizer.apply_chat_template([called("x", '{"city": "Rome"}')]) == "Rome"
    assert tokenizer.apply_chat_template([called("x", {"city": "Rome"})]) == "Rome"
    assert tokenizer.apply_chat_template([called("x", "")]) == ""
    for wrong in ("no", "[1]", '{"a": ' + "[" * 5000):
        with pytest.raises(InvalidRequestError, match="no JSON object") as error:
            tokenizer.apply_chat_template([called("x", wrong)])
        assert error.value.param == "messages"
    with pytest.raises(InvalidRequestError, match="has no place for them"):
        tokenizer_of("{{ messages[0].content }}").apply_chat_template([called("x", "{}")])


def test_tools_and_calls_are_put_where_a_template_looks_for_them():
    own = tokenizer_of((TEMPLATES / "phi4_mini_own.jinja").read_text(encoding="utf-8"))
    system = {"role": "system", "content": "Be brief."}
    asked = own.apply_chat_template([system, QUESTION], tools=TOOLS)
    assert asked.startswith("<|system|>Be brief.<|tool|>[" + json.dumps(TOOLS[0]["function"]) + "]<|/tool|><|end|>")
    call = {**called("x", json.dumps(ARGUMENTS)), "content": "Hm."}
    said = own.apply_chat_template([QUESTION, call], add_generation_prompt=False)
    written = json.dumps({"name": "get_weather", "arguments": ARGUMENTS})
    assert said.endswith(f"<|assistant|>Hm.\n<|tool_call|>[{written}]<|/tool_call|><|end|>")
    for wrong in ("f", {"function": "f"}, {"function": {"arguments": {}}}):
        with pytest.raises(InvalidRequestError, match="a tool call is") as error:
            own.apply_chat_template([{"role": "assistant", "tool_calls": [wrong]}])
        assert error.value.param == "messages"
    with pytest.raises(InvalidRequestError, match="tools is 'f'; it must be a list"):
        own.apply_chat_template([QUESTION], tools="f")


def test_calls_are_written_by_templates_that_write_them_of_messages_without_content_alone():
    """As the first template of DeepSeek R1 does: beside a text, and an empty one is one, it leaves calls out."""
    source = (
        "{% for m in messages %}{% if m['content'] is none %}{% for call in m['tool_calls'] %}"
        "[{{ call['function']['name'] + call['function']['arguments'] }}]{% endfor %}"
        "{% else %}({{ m['content'] }}){% endif %}{% endfor %}"
    )
    tokenizer, call = tokenizer_of(source), called("x", '{"city": "Rome"}')
    for content in (None, "", "\n"):
        text = tokenizer.apply_chat_template([QUESTION, {**call, "content": content}])
        assert text == '(Weather?)[get_weather{"city": "Rome"}]'
    with pytest.raises(InvalidRequestError, match="send the calls without the content") as error:
        tokenizer.apply_chat_template([QUESTION, {**call, "content": "Hm."}])
    assert error.value.param == "messages"
    marked = tokenizer_of(source + "{# <｜tool▁call▁begin｜>```json #}")
    assert marked.apply_chat_template([QUESTION, {**call, "content": "Hm."}]) == (
        "(Weather?)(Hm.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>)'
    )


def test_calls_that_a_template_leaves_out_are_refused():
    tokenizer = tokenizer_of("{% for m in messages if not m.tool_calls %}{{ m.content }}{% endfor %}")
    with pytest.raises(InvalidRequestError, match="has no place for them"):
        tokenizer.apply_chat_template([QUESTION, called("x", "{}")])
    with_tools = tokenizer_of("{% for m in messages if tools and m.tool_calls %}{{ m.tool_calls }}{% endfor %}")
    assert "get_weather" in with_tools.apply_chat_template([QUESTION, called("x", "{}")], tools=TOOLS)


def test_a_template_gets_arguments_as_it_takes_them():
    for source, written in (
        ("{{ m.tool_calls[0].function.arguments }}", '{"city": "é"}'),
        ("{{ 'a' + m.tool_calls[0].function.arguments }}", 'a{"city": "é"}'),
        ("{{ m.tool_calls[0].function.arguments | tojson }}", '{"city": "é"}'),
        (
            "{% for name, value in m.tool_calls[0].function.arguments | items %}{{ name }}{{ value }}{% endfor %}",
            "cityé",
        ),
    ):
        tokenizer = tokenizer_of("{% for m in messages if m.tool_calls %}" + source + "{% endfor %}")
        assert tokenizer.apply_chat_template([called("x", {"city": "é"})]) == written
    looks = tokenizer_of("{% for m in messages %}{{ '</think>' in m.content }}{{ m.tool_calls }}{% endfor %}")
    assert looks.apply_chat_template([called("x", {})]).startswith("False")


def test_a_chat_template_is_given_as_source_or_file(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("F{{ messages[0].content }}", encoding="utf-8")
    for given, text in ((file, "FWeather?"), ("S{{ messages[0].content }}", "SWeather?")):
        config = EngineConfig("smollm2-135m", chat_template=given)
        assert Tokenizer.load(config).apply_chat_template([QUESTION]) == text
    for wrong, error in ((tmp_path / "none", ConfigError), ("{% if %}", TokenizerError)):
        with pytest.raises(error, match="template"):
            Tokenizer.load(EngineConfig("smollm2-135m", chat_template=wrong))


def test_formats_are_chosen_by_settings():
    config = EngineConfig("smollm2-135m", tool_call_parser="mistral", reasoning_parser="deepseek_r1")
    answers = Tokenizer.load(config).answers
    assert (answers.tool_calls.name, answers.reasoning.name) == ("mistral", "deepseek_r1")
    hermes = (TEMPLATES / "reasoning.jinja").read_text(encoding="utf-8")
    config = EngineConfig("smollm2-135m", chat_template=hermes, reasoning_parser="off")
    assert Tokenizer.load(config).answers.reasoning is None


def test_marks_that_are_special_tokens_are_known():
    backend = byte_level()
    backend.add_special_tokens(["[TOOL_CALLS]"])
    source = (TEMPLATES / "mistral.jinja").read_text(encoding="utf-8")
    settings = TokenizerSettings(fingerprint="", special_tokens={}, chat_template=source)
    answers = Tokenizer(backend, settings).answers
    assert answers.needs_special_tokens(with_tools=True)
    assert not answers.needs_special_tokens(with_tools=False)
    assert not tokenizer_of(source).answers.needs_special_tokens(with_tools=True)
