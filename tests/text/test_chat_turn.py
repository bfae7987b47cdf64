"""The text of one more turn, under templates that leave earlier turns as they are, and under others."""

import pytest
from small_tokenizers import byte_fallback

from pagemill.errors import InvalidRequestError
from pagemill.text.tokenizer import Tokenizer
from pagemill.text.tokenizer_files import TokenizerSettings

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TRIMS = CHATML.replace("m.content", "m.content | trim")
SPACED = CHATML.replace("{{ m.content }}", " {{ m.content | trim }} ")
FORGETS = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content if loop.last or m.role != 'assistant' else m.content.split('</think>')[-1] }}",
)
COUNTS = "{{ messages | length }} messages\n" + CHATML


def text_of(template, answer, new=(("user", "And?"),), **options):
    tokenizer = Tokenizer(byte_fallback(), TokenizerSettings(fingerprint="", special_tokens={}, chat_template=template))
    history = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": answer}]
    messages = [{"role": role, "content": content} for role, content in new]
    return tokenizer.render_turn(history, messages, **options)


@pytest.mark.parametrize(
    ("template", "answer", "text"),
    [
        (CHATML, "Because.", "<|end|>\n<|user|>And?<|end|>\n<|assistant|>"),
        (CHATML, " Because.\n", "<|end|>\n<|user|>And?<|end|>\n<|assistant|>"),
        (CHATML, "", "<|end|>\n<|user|>And?<|end|>\n<|assistant|>"),
        (TRIMS, " Because.\n", "<|end|>\n<|user|>And?<|end|>\n<|assistant|>"),
        (SPACED, "Because.", " <|end|>\n<|user|> And? <|end|>\n<|assistant|>"),
        (FORGETS, "Because.", "<|end|>\n<|user|>And?<|end|>\n<|assistant|>"),
        (FORGETS, "hmm</think>Because.", None),
        (COUNTS, "Because.", None),
    ],
)
def test_the_rest_behind_the_last_answer(template, answer, text):
    assert text_of(template, answer) == text


def test_several_messages_and_the_templates_options():
    more = [("system", "Be brief."), ("user", "And?")]
    assert text_of(CHATML, "No.", more, add_generation_prompt=False) == (
        "<|end|>\n<|system|>Be brief.<|end|>\n<|user|>And?<|end|>\n"
    )


def test_what_the_template_refuses_is_refused():
    refuses = "{% if messages | length > 2 %}{{ raise_exception('too long') }}{% endif %}" + CHATML
    with pytest.raises(InvalidRequestError, match="too long"):
        text_of(refuses, "No.")
