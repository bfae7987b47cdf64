"""Tokenizers and chat templates equal transformers' on the same files; missing or broken ones are typed errors."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import byte_fallback, byte_level, wrap

from pagemill.config import EngineConfig
from pagemill.errors import InvalidRequestError, ModelNotFoundError, TokenizerError
from pagemill.hub.registry import REGISTRY
from pagemill.text import tokenizer_files
from pagemill.text.tokenizer import Tokenizer

MODEL = "smollm2-135m"
TEXTS = [
    "",
    " ",
    "   leading and trailing   ",
    "The quick brown fox jumps over the lazy dog. It's 12:30, isn't it? $1,234.56 (≈ €1.130,99)",
    "def f(x):\n\treturn x ** 2  # tabs\r\n\r\n\n\n    pass\n",
    "emoji 🎉👩‍👩‍👧‍👦🏳️‍🌈 and flags 🇩🇪🇯🇵",
    "日本語のテキスト、中文字符，한국어 텍스트",
    "combining: e\u0301 a\u0308\u0323 \u1e69 vs s\u0323\u0307, ligature ﬁ, full width ＡＢＣ",
    "العربية עברית हिन्दी ไทย \u202ebidi\u202c zero\u200bwidth\ufeff",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_start|x <repo_name>",
    "\x00\x01\x7f\x80 control \u2028 \u2029 \x85",
    "𝕄𝕒𝕥𝕙 ∑∫√ \U0010ffff \ufffd \ufffe",
    "a" * 500 + " " * 100 + "\n" * 50,
]
MESSAGES = [
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": "Be short. <|im_end|> 🎉"},
        {"role": "user", "content": " 日本 "},
        {"role": "assistant", "content": "ok", "tool_calls": None},
        {"role": "user", "content": "and?"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "<&>'": "é"}}}]
FEATURES = """{{- bos_token }}{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.role == 'robot' %}{{ raise_exception('bad role ' + message.role) }}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- generation %}{{ message | tojson }}{% endgeneration %}
    {%- if ns.count == 3 %}{% break %}{% endif %}
    {%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{%- endfor %}
{{ messages[0] | tojson(true, 1, (',', ':'), true) }}
{{ strftime_now('%Y') }} {{ documents }} {{ custom is defined and custom.x }}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}{{ eos_token }}"""


@functools.cache
def real_tokenizer() -> Tokenizer:
    return Tokenizer.from_path(MODEL)


@pytest.fixture
def real() -> Tokenizer:
    return real_tokenizer()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    real_tokenizer().hf.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A Hugging Face folder with the real tokenizer, as transformers saves it."""
    return shutil.copytree(saved, tmp_path / "model")


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """An empty cache, so that nothing that other tests made is found. The pulled model stays where it is."""
    monkeypatch.setattr(tokenizer_files, "cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "tokenizers"


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_encodes_and_decodes_as_transformers(real, text, special):
    ids = real.encode(text, add_special_tokens=special)
    assert ids == real.hf.encode(text, add_special_tokens=special)
    for skip in (True, False):
        assert real.decode(ids, skip_special_tokens=skip) == real.hf.decode(ids, skip_special_tokens=skip)


@given(text=st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=50))
@settings(max_examples=200, deadline=None)
def test_encodes_any_text_as_transformers(text):
    assert real_tokenizer().encode(text) == real_tokenizer().hf.encode(text)


@pytest.mark.parametrize("messages", MESSAGES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_template_as_transformers(real, messages, add_generation_prompt):
    text = real.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
    options = {"add_generation_prompt": add_generation_prompt, "return_dict": False}
    assert text == real.hf.apply_chat_template(messages, tokenize=False, **options)
    assert real.encode(text, add_special_tokens=False) == real.hf.apply_chat_template(messages, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tools": TOOLS},
        {"documents": [{"title": "t", "text": "x"}], "custom": {"x": 3}},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
)
def test_template_features_as_transformers(real, options):
    messages = [
        {"role": "skip", "content": "nö"},
        {"role": "user", "content": "a < b & 'c' \" ü"},
        {"role": "assistant", "content": "x", "thinking": "hm"},
    ]
    options = {"add_generation_prompt": True, **options}
    expected = real.hf.apply_chat_template(messages, chat_template=FEATURES, tokenize=False, **options)
    assert real.apply_chat_template(messages, chat_template=FEATURES, **options) == expected


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_what_a_template_has_no_place_for_is_refused(real, name):
    """The pulled model's template renders neither: the caller would believe that the model has seen them."""
    with pytest.raises(
        InvalidRequestError, match=rf"{name} are given, but this model's chat template has no"
    ) as caught:
        real.apply_chat_template(MESSAGES[0], **{name: TOOLS})
    assert caught.value.param == name
    assert real.apply_chat_template(MESSAGES[0], **{name: []}) == real.apply_chat_template(MESSAGES[0])


def test_text_parts_are_one_text_and_others_are_refused(real):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    for options in ({}, {"add_generation_prompt": False, "continue_final_message": True}):
        given, joined = (
            real.apply_chat_template([{"role": "user", "content": content}], **options)
            for content in (parts, "Hel\nlo")
        )
        assert given == joined
    image = {"type": "image_url", "image_url": {"url": "http://x"}}
    for part in (image, "Hello", {"type": "text"}, {"type": "text", "text": 3}, {**parts[0], "image_url": 1}):
        with pytest.raises(InvalidRequestError, match=r"a part of a message's content is .* reads text only") as caught:
            real.apply_chat_template([{"role": "user", "content": [parts[0], part]}])
        assert caught.value.param == "messages"


def test_template_that_refuses_is_the_callers_error(real):
    with pytest.raises(InvalidRequestError, match="bad role robot") as caught:
        real.apply_chat_template([{"role": "robot", "content": ""}], chat_template=FEATURES)
    assert caught.value.param == "messages"
    with pytest.raises(InvalidRequestError, match=r"messages is \[\]; it must be a list of at least one"):
        real.apply_chat_template([])
    with pytest.raises(InvalidRequestError, match="must be a dict"):
        real.apply_chat_template(["hi"])


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": None}, r"messages\[1\] of role 'user' has no content; give it one"),
        ({"role": "assistant"}, r"messages\[1\] of role 'assistant' has no content; .* may have tool_calls instead"),
        ({"role": None, "content": "Hello"}, r"messages\[1\] has no role; give it one"),
        ("Hello", r"messages\[1\] is of type str; it must be a dict"),
    ],
)
def test_a_message_that_says_nothing_is_named(real, message, said):
    with pytest.raises(InvalidRequestError, match=said) as caught:
        real.apply_chat_template([*MESSAGES[0], message])
    assert caught.value.param == "messages"
    no_text = [*MESSAGES[0], {"role": "assistant", "thinking": "hm"}]
    assert real.apply_chat_template(no_text, chat_template="{{ messages[1].thinking }}") == "hm"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_templates_are_sandboxed(real, source):
    with pytest.raises(InvalidRequestError, match=r"unsafe|undefined|access|not allowed"):
        real.apply_chat_template(MESSAGES[0], chat_template=source)


def test_settings_come_with_the_tokenizer(real):
    assert (real.bos_token_id, real.eos_token_id, real.pad_token_id) == (1, 2, 2)
    assert real.vocab_size == len(real.hf) == 49152
    assert real.decode([2]) == "<|im_end|>"


def test_a_folder_and_a_gguf_file_of_the_same_model_agree(real, folder):
    tokenizer = Tokenizer.load(EngineConfig(model="unused", tokenizer=str(folder)))
    for text in TEXTS:
        assert tokenizer.encode(text) == real.encode(text)
    assert tokenizer.apply_chat_template(MESSAGES[1]) == real.apply_chat_template(MESSAGES[1])
    assert tokenizer.eos_token_id == real.eos_token_id


def test_a_tokenizer_that_is_not_there_is_named_by_its_setting():
    with pytest.raises(ModelNotFoundError, match=r"^tokenizer: there is no file or folder '/nosuch'") as caught:
        Tokenizer.load(EngineConfig(model="unused", tokenizer="/nosuch"))
    assert caught.value.param == "tokenizer"


def test_a_gguf_file_whose_architecture_transformers_refuses_has_its_tokenizer(real, tmp_path, own_cache):
    writer = gguf.GGUFWriter(tmp_path / "smollm3.gguf", "smollm3")
    for key, field in gguf.GGUFReader(REGISTRY[MODEL].file).fields.items():
        if key.startswith("tokenizer."):
            array = field.types[0] == gguf.GGUFValueType.ARRAY
            value = field.contents()
            writer.add_array(key, value) if array else writer.add_key_value(key, value, field.types[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = Tokenizer.from_path(tmp_path / "smollm3.gguf")
    assert tokenizer.fingerprint == real.fingerprint
    assert tokenizer.chat_template == real.chat_template
    assert tokenizer.eos_token_id == real.eos_token_id


@pytest.mark.parametrize("backend", [byte_fallback, byte_level])
def test_a_plain_folder_equals_transformers(tmp_path, own_cache, backend):
    """tokenizer.json with a post-processor of its own, and several named templates."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_object=backend())
    made.add_special_tokens({"bos_token": "<bos>", "eos_token": "<eos>"})
    made.chat_template = {"default": "D{{ bos_token }}{{ messages[0].content }}", "tool_use": "T{{ tools | length }}"}
    made.save_pretrained(tmp_path / "m")
    tokenizer, expected = Tokenizer.from_path(tmp_path / "m"), AutoTokenizer.from_pretrained(tmp_path / "m")
    for text in [*TEXTS, "<bos>Hello world<eos>", "Hello", "  a b"]:
        assert tokenizer.encode(text) == expected.encode(text)
    assert tokenizer.apply_chat_template(MESSAGES[0]) == "D<bos>Hello"
    assert tokenizer.apply_chat_template(MESSAGES[0], tools=TOOLS) == "T1"
    assert tokenizer.apply_chat_template(MESSAGES[0], chat_template="tool_use", tools=[]) == "T0"


def test_kept_form_is_used_checked_and_renewed(folder, own_cache):
    first = Tokenizer.from_path(folder).encode("Hello 🎉")
    (kept,) = own_cache.iterdir()
    settings_file = kept / "settings.json"
    made = settings_file.stat().st_mtime_ns
    assert Tokenizer.from_path(folder).encode("Hello 🎉") == first
    assert settings_file.stat().st_mtime_ns == made, "the second load should read what the first one kept"

    (kept / "tokenizer.json").write_text("{broken")
    assert Tokenizer.from_path(folder).encode("Hello 🎉") == first
    json.loads((kept / "tokenizer.json").read_text())

    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<|endoftext|>"}))
    assert Tokenizer.from_path(folder).eos_token_id == 0, "another configuration is another tokenizer"


def test_a_cache_that_can_not_be_written_is_no_obstacle(folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tokenizer_files, "cache_dir", lambda: tmp_path / "file")
    assert Tokenizer.from_path(folder).encode("Hello") == [19556]


def test_loading_again_imports_neither_torch_nor_transformers(real):
    code = (
        "import sys; from pagemill.text.tokenizer import Tokenizer; "
        f"print(Tokenizer.from_path({MODEL!r}).encode('Hello')); "
        "print([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[19556]", "[]"]


def test_missing_tokenizers_are_named(tmp_path, own_cache):
    with pytest.raises(ModelNotFoundError):
        Tokenizer.from_path(tmp_path / "nothing")
    with pytest.raises(TokenizerError, match=r"no tokenizer .*--tokenizer"):
        Tokenizer.from_path(tmp_path)


@pytest.mark.parametrize("content", ["", "{", '{"model": {}}', "\x00\x01"])
def test_corrupt_tokenizer_json(folder, own_cache, content):
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.from_path(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json"])
def test_an_id_that_would_take_gigabytes(folder, own_cache, name):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["far"] = 10**9
    (folder / "tokenizer.json").unlink()
    (folder / name).write_text(json.dumps(content if name == "tokenizer.json" else content["model"]["vocab"]))
    with pytest.raises(TokenizerError, match=r"gives token 'far' the id 1000000000, over 16777216; .*--tokenizer"):
        Tokenizer.from_path(folder)


def test_corrupt_gguf(tmp_path, own_cache):
    source = REGISTRY[MODEL].file
    with source.open("rb") as file:
        (tmp_path / "cut.gguf").write_bytes(file.read(100_000))
    with pytest.raises(TokenizerError, match=r"cannot be read.*--tokenizer"):
        Tokenizer.from_path(tmp_path / "cut.gguf")
    assert not own_cache.exists()


def test_missing_and_broken_chat_templates(folder):
    shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)
    (folder / "chat_template.jinja").unlink()
    tokenizer = Tokenizer.from_path(folder)
    with pytest.raises(TokenizerError, match=r"has no chat template; pass --chat-template"):
        tokenizer.apply_chat_template(MESSAGES[0])
    assert tokenizer.apply_chat_template(MESSAGES[0], chat_template="{{ messages[0].content }}") == "Hello"
    with pytest.raises(InvalidRequestError, match="line 2"):
        tokenizer.apply_chat_template(MESSAGES[0], chat_template="\n{% if %}")
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(TokenizerError, match="does not parse"):
        Tokenizer.from_path(folder).apply_chat_template(MESSAGES[0])


def test_lone_surrogates_are_the_callers_error(real):
    with pytest.raises(InvalidRequestError, match="character 1"):
        real.encode("a\ud800b")


def test_threads_encode_alike(real):
    expected = [real.encode(text) for text in TEXTS]
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: [real.encode(text) for text in TEXTS], range(40)):
            assert found == expected


def test_bad_words_with_and_without_a_space(real):
    sequences = real.bad_words_token_ids(["Paris", " the end"])
    texts = [real.decode(ids) for ids in sequences]
    assert texts == ["Paris", " Paris", "the end", " the end"]


def test_bad_words_cost_in_proportion_and_once_for_all_prompts_of_a_call(real, monkeypatch):
    """Before, 20,000 words took 12 s, four times as many sixteen times as long; each prompt of a call paid anew."""

    def seconds(count):
        words = [f"word{number}" for number in range(count)]
        began = time.process_time()
        sequences = real.bad_words_token_ids(words)
        taken = time.process_time() - began
        monkeypatch.setattr(real, "encode", None)
        assert real.bad_words_token_ids(words) == sequences
        monkeypatch.undo()
        return taken

    seconds(10)
    assert min(seconds(8000 + more) for more in range(3)) < 9 * min(seconds(2000 + more) for more in range(3))


def test_bad_words_of_a_sentencepiece_tokenizer():
    tokenizer = wrap(byte_fallback())
    sequences = tokenizer.bad_words_token_ids(["ab", "ab"])
    assert len(sequences) == len({tuple(ids) for ids in sequences})
    assert {tokenizer.decode(ids).strip() for ids in sequences} == {"ab"}


def test_a_templates_own_variables_may_come_as_one_dict(real):
    def rendered(**options):
        return real.apply_chat_template(MESSAGES[0], chat_template="{{ mood }}{{ add_generation_prompt }}", **options)

    assert rendered(chat_template_kwargs={"mood": "glad"}) == rendered(mood="glad") == "gladTrue"
    assert rendered(chat_template_kwargs=None, mood="sad") == "sadTrue"
    for wrong in ("mood", [("mood", 1)], {1: 2}, {"add_generation_prompt": False}, {"messages": []}):
        with pytest.raises(InvalidRequestError, match="chat_template_kwargs") as caught:
            rendered(chat_template_kwargs=wrong)
        assert caught.value.param == "chat_template_kwargs"
