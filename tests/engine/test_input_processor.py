"""Every form of prompt becomes the same request; everything that cannot be served is refused with its own error."""

import copy

import msgspec
import numpy as np
import pytest
import tokenizers

from pagemill import errors
from pagemill.engine.messages import EngineReady
from pagemill.frontend.input_processor import InputProcessor, as_list_of_prompts, one_per_prompt, size_of
from pagemill.sampling.params import BeamSearchParams, SamplingParams
from pagemill.sampling.pooling_params import PoolingParams
from pagemill.text.fill_in_the_middle import FillInTheMiddle, Form
from pagemill.text.tokenizer import Tokenizer

VOCAB_SIZE = 49152


@pytest.fixture(scope="module")
def inputs():
    ready = EngineReady(
        vocab_size=VOCAB_SIZE,
        max_model_len=32,
        max_num_seqs=8,
        longest_sequence=24,
        tenants=["default"],
        block_size=16,
        num_frames=4,
        kv_bytes=4096,
        kv_memory=4096,
        eos_token_ids=[2],
        hidden_size=576,
        model="",
        kv_format="",
    )
    return InputProcessor(Tokenizer.from_path("smollm2-135m"), lambda: ready)


def test_all_forms_of_a_prompt_mean_the_same(inputs):
    text = "The capital of France"
    ids = inputs.tokenizer.encode(text)
    for form in (text, {"prompt": text}):
        processed = inputs.process(form, SamplingParams(), "r")
        assert (processed.asked.prompt_token_ids, processed.whole().prompt) == (ids, text)
    for form in (ids, tuple(ids), np.array(ids), {"prompt_token_ids": ids}):
        processed = inputs.process(form, SamplingParams(), "r")
        assert (processed.asked.prompt_token_ids, processed.whole().prompt) == (ids, None)


def test_salt_and_priority_reach_the_request(inputs):
    request = inputs.process({"prompt": "x", "cache_salt": "s"}, SamplingParams(), "r", priority=-3).asked
    assert (request.cache_salt, request.priority) == ("s", -3)


def test_a_rendered_chat_gets_no_second_set_of_special_tokens(inputs):
    prompt = inputs.render_chat([{"role": "user", "content": "Hi"}], cache_salt="s")
    request = inputs.process(prompt, SamplingParams(max_tokens=1), "r").asked
    assert inputs.tokenizer.decode(request.prompt_token_ids) == prompt["prompt"]
    assert prompt["prompt"].endswith("<|im_start|>assistant\n")
    assert request.cache_salt == "s"


def test_a_model_without_a_head_only_makes_embeddings(inputs):
    processor = InputProcessor(inputs.tokenizer, lambda: msgspec.structs.replace(inputs.facts(), has_head=False))
    assert processor.process("x", None, "r", pooling=PoolingParams()).asked.pooling is not None
    for params in (SamplingParams(), BeamSearchParams(2, max_tokens=4)):
        with pytest.raises(errors.InvalidRequestError, match="embeddings only"):
            processor.process("x", params, "r")


def test_a_beam_too_wide_is_told_what_limits_it(inputs):
    facts = msgspec.structs.replace(inputs.facts(), vocab_size=10, max_num_seqs=20)
    processor = InputProcessor(inputs.tokenizer, lambda: facts)
    assert processor.process([5], BeamSearchParams(9, max_tokens=4), "r").asked.beam.beam_width == 9
    for width in (10, 21):
        with pytest.raises(errors.RequestTooLargeError, match=f"beam_width is {width}, but this model has 9 tokens"):
            processor.process([5], BeamSearchParams(width, max_tokens=4), "r")
    with pytest.raises(errors.RequestTooLargeError, match="beam_width is 9, but max_num_seqs lets 8"):
        inputs.process([5], BeamSearchParams(9, max_tokens=4), "r")


def test_no_maximum_is_left_to_the_engine_which_knows_what_is_free(inputs):
    params = SamplingParams(max_tokens=None)
    before = copy.deepcopy(params)
    assert inputs.process([5] * 20, params, "r").asked.params.max_tokens is None
    assert params == before


def test_parameters_that_were_changed_since_are_checked_again(inputs):
    params = SamplingParams()
    params.temperature = -1.0
    with pytest.raises(errors.SamplingParamsError, match="temperature"):
        inputs.process("x", params, "r")
    params = SamplingParams()
    params.stop = "END"
    assert inputs.process("x", params, "r").asked.params.stop == ["END"]


@pytest.mark.parametrize("priority", [2**70, 1.5, "high"])
def test_a_priority_is_an_integer_that_a_message_can_carry(inputs, priority):
    with pytest.raises(errors.InvalidRequestError, match="priority is"):
        inputs.process("x", SamplingParams(), "r", priority=priority)


def test_bad_words_become_tokens_in_a_copy(inputs):
    params = SamplingParams(bad_words=["cat"])
    request = inputs.process("x", params, "r").asked
    assert inputs.tokenizer.encode(" cat") in request.params.bad_words_token_ids
    assert params.bad_words_token_ids is None


@pytest.mark.parametrize(
    ("prompt", "params", "error", "words"),
    [
        ("", {}, errors.EmptyPromptError, ["no tokens"]),
        ([], {}, errors.EmptyPromptError, ["no tokens"]),
        ([5] * 32, {}, errors.PromptTooLongError, ["32 tokens", "max_model_len is 32", "31"]),
        ([5] * 20, {"max_tokens": 13}, errors.PromptTooLongError, ["20 tokens", "33", "(32)", "at most 12"]),
        ([5] * 20, {"max_tokens": None, "min_tokens": 13}, errors.PromptTooLongError, ["13", "20", "(32)"]),
        ([5, -1], {}, errors.TokenOutOfVocabularyError, ["-1", str(VOCAB_SIZE - 1)]),
        ([VOCAB_SIZE, 5], {}, errors.TokenOutOfVocabularyError, [str(VOCAB_SIZE)]),
        ("x", {"stop_token_ids": [VOCAB_SIZE]}, errors.TokenOutOfVocabularyError, ["stop_token_ids"]),
        ("x", {"allowed_token_ids": [VOCAB_SIZE]}, errors.TokenOutOfVocabularyError, ["allowed_token_ids"]),
        ("x", {"logit_bias": {VOCAB_SIZE: 1.0}}, errors.TokenOutOfVocabularyError, ["logit_bias"]),
        ({"promt": "x"}, {}, errors.UnknownArgumentError, ["promt", "did you mean 'prompt'"]),
        ({"cache_salt": "x"}, {}, errors.InvalidRequestError, ["prompt_token_ids"]),
        ({"prompt": "x", "cache_salt": 5}, {}, errors.InvalidRequestError, ["cache_salt"]),
        ({"prompt": "x", "cache_salt": "\ud800"}, {}, errors.InvalidRequestError, ["cache_salt"]),
        ("x", {"n": 9}, errors.RequestTooLargeError, ["n is 9", "max_num_seqs", "8"]),
        ("x", {"n": 2, "best_of": 9}, errors.RequestTooLargeError, ["best_of is 9", "max_num_seqs", "8"]),
        ({"prompt": 5}, {}, errors.InvalidRequestError, ["int"]),
        ([5, 1.5], {}, errors.InvalidRequestError, ["list of integers"]),
        (5, {}, errors.InvalidRequestError, ["list of integers"]),
        ("\ud800", {}, errors.InvalidRequestError, ["surrogate"]),
    ],
)
def test_what_can_not_be_served_is_refused(inputs, prompt, params, error, words):
    with pytest.raises(error) as caught:
        inputs.process(prompt, SamplingParams(**params), "r")
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)


@pytest.fixture(scope="module")
def form(inputs):
    """A form with the tokens 4 to 6, in which 0 ends a file."""
    names = inputs.tokenizer.names_of([4, 5, 6, 0, 2])
    return FillInTheMiddle(
        tokenizers.Tokenizer.from_str(inputs.tokenizer.to_json()), Form(*names[:3], tuple(names[3:]))
    )


@pytest.fixture
def infilling(inputs, form, monkeypatch):
    """A model that knows this form."""
    monkeypatch.setattr(inputs.tokenizer, "fill_in_the_middle", form)
    return inputs


def test_a_suffix_makes_a_prompt_for_the_middle(infilling):
    tokenizer, around = infilling.tokenizer, {"prompt": "a(", "suffix": ")"}
    request = infilling.process(around, SamplingParams(stop_token_ids=[9, 5]), "r")
    assert request.prompt_token_ids == [4, *tokenizer.encode("a("), 5, *tokenizer.encode(")"), 6]
    assert request.whole().prompt == "a("
    assert request.asked.params.stop_token_ids == [9, 5, 4, 6, 0]  # 2 ends every answer
    assert infilling.process(around, SamplingParams(ignore_eos=True), "r").asked.params.stop_token_ids == []
    fork = infilling.process([5], SamplingParams(), "r", ends=request.ends)
    assert fork.asked.params.stop_token_ids == [4, 5, 6, 0]
    for nothing in ("", None):
        plain = infilling.process({"prompt": "a(", "suffix": nothing}, SamplingParams(), "r")
        assert (plain.prompt_token_ids, plain.asked.params.stop_token_ids) == (tokenizer.encode("a("), [])


@pytest.mark.parametrize(
    ("prompt", "how", "words", "param"),
    [
        ({"prompt_token_ids": [5]}, {}, "here are token ids", "suffix"),
        ({"prompt": "x", "prompt_token_ids": [5]}, {}, "here are token ids", "suffix"),
        ({"prompt": "x", "suffix": ["y"]}, {}, "of type list; it must be text", "suffix"),
        ({"prompt": "x", "suffix": []}, {}, "of type list; it must be text", "suffix"),
        ({"prompt": "x", "suffix": "\udc00"}, {}, "half of a surrogate pair", "suffix"),
        ({"prompt": "\udc00"}, {}, "half of a surrogate pair", "prompt"),
        (
            {"prompt": "word " * 300_000, "suffix": "word " * 300_000},
            {},
            "prompt and its suffix have 3000000",
            "prompt",
        ),
        ({"prompt": "a b " * 8, "suffix": " c d" * 8}, {}, "context length", "prompt"),
        ({"prompt": "x"}, {"params": BeamSearchParams(2, max_tokens=4)}, "a beam search", "suffix"),
        ({"prompt": "x"}, {"pooling": PoolingParams()}, "an embedding", "suffix"),
        ({"prompt": "x"}, {"params": SamplingParams(stop_token_ids=list(range(7, 1031)))}, "1024", "stop_token_ids"),
    ],
)
def test_what_has_no_place_around_a_middle_is_refused(infilling, prompt, how, words, param):
    with pytest.raises(errors.InvalidRequestError, match=words) as refused:
        infilling.process({"suffix": "y", **prompt}, **{"params": SamplingParams(), **how}, request_id="r")
    assert refused.value.param == param


def test_a_suffix_needs_a_model_that_has_the_tokens(inputs, infilling):
    facts = msgspec.structs.replace(infilling.facts(), vocab_size=6)
    for processor in (
        InputProcessor(Tokenizer.from_path("smollm2-135m"), inputs.facts),
        InputProcessor(infilling.tokenizer, lambda: facts),
    ):
        with pytest.raises(errors.InvalidRequestError, match="no tokens for filling in the middle"):
            processor.process({"prompt": "x", "suffix": "y"}, SamplingParams(), "r")


def test_a_suffix_counts_where_work_is_shared_out():
    assert size_of({"prompt": "ab", "suffix": "cde"}) == 5


def test_the_longest_prompt_and_the_longest_answer_fit(inputs):
    assert len(inputs.process([5] * 31, SamplingParams(max_tokens=1), "r").asked.prompt_token_ids) == 31
    assert inputs.process([5], SamplingParams(max_tokens=31), "r").asked.params.max_tokens == 31


def test_a_list_of_integers_is_one_prompt():
    assert as_list_of_prompts([1, 2]) == [[1, 2]]
    assert as_list_of_prompts([[1], [2]]) == [[1], [2]]
    assert [list(prompt) for prompt in as_list_of_prompts(np.array([1, 2]))] == [[1, 2]]
    assert as_list_of_prompts("ab") == ["ab"]
    assert as_list_of_prompts({"prompt": "a"}) == [{"prompt": "a"}]
    assert as_list_of_prompts([]) == []


def test_as_many_values_as_prompts():
    assert one_per_prompt(3, 2, "priorities") == [3, 3]
    with pytest.raises(errors.InvalidRequestError, match="1 priorities were given for 2 prompts"):
        one_per_prompt([3], 2, "priorities")


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(inputs, monkeypatch):
    def encode(*_):
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(inputs.tokenizer, "encode", encode)
    for ask in (
        lambda: inputs.process("word " * 1_000_000, SamplingParams(), "r"),
        lambda: inputs.render_chat([{"role": "user", "content": "word " * 1_000_000}]),
    ):
        with pytest.raises(
            errors.PromptTooLongError, match=r"characters, at least \d+ tokens, .*: max_model_len is 32"
        ):
            ask()


def test_a_prompt_without_an_answer_may_take_the_whole_context(inputs):
    whole = [5] * 32
    for params, more in ((None, {"pooling": PoolingParams()}), (SamplingParams(max_tokens=0), {})):
        assert len(inputs.process(whole, params, "r", **more).asked.prompt_token_ids) == 32
        with pytest.raises(errors.PromptTooLongError, match="33 tokens, which is longer"):
            inputs.process([*whole, 5], params, "r", **more)
    with pytest.raises(errors.PromptTooLongError, match="32 tokens, which with one for the answer"):
        inputs.process(whole, SamplingParams(), "r")
