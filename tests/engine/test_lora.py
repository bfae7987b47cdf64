"""LoRA adapters through LLM on the real model: merged weights, mixed batches, prefixes, sessions and limits."""

import pytest
import torch
from safetensors.torch import load_file

from lora_adapters import PREFIX, save_adapter, shapes_of
from pagemill import LLM, LoRARequest, SamplingParams, errors
from pagemill.sampling import grammar_cache

PROMPT = "The tide comes in and goes out twice a day because the moon"
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


class Sizes:
    """Of SmolLM2-135M."""

    hidden_size, intermediate_size, num_hidden_layers = 576, 1536, 30
    num_attention_heads, num_key_value_heads = 9, 3


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    some = {name: shape for name, shape in shapes_of(Sizes).items() if "q_proj" in name or "up_proj" in name}
    made = []
    for number in range(1, 5):
        path = save_adapter(folder / str(number), some if number == 4 else shapes_of(Sizes), rank=4, seed=number)
        made.append(LoRARequest(f"adapter-{number}", number, path))
    return made


@pytest.fixture(scope="module")
def llm(adapters):
    settings = {"enable_lora": True, "max_loras": 4, "lora_modules": {"adapter-1": adapters[0].lora_path}}
    with LLM("smollm2-135m", dtype="float32", max_model_len=256, kv_memory="64MiB", max_num_seqs=8, **settings) as llm:
        yield llm


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_a_grammar_is_compiled_once_for_an_adapter(llm, adapters, monkeypatch):
    compiled, compile_grammar = [], grammar_cache.compile_grammar
    monkeypatch.setattr(grammar_cache, "compile_grammar", lambda *how: compiled.append(how) or compile_grammar(*how))
    params = SamplingParams(max_tokens=8, structured_outputs={"choice": ["one of an adapter's"]})
    for lora_request in (adapters[0], adapters[0], None):
        (output,) = llm.generate("Say", params, use_tqdm=False, lora_request=lora_request)
        assert output.outputs[0].text in "one of an adapter's"
    assert len(compiled) == 2, "the model itself has one of its own"


def test_log_probabilities_are_those_of_merged_weights(llm, adapters, reference):
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    output = llm.generate(PROMPT, scored, lora_request=adapters[1], use_tqdm=False)[0]
    ids = output.prompt_token_ids
    ours = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
    tensors = load_file(f"{adapters[1].lora_path}/adapter_model.safetensors")
    kept = {}
    with torch.no_grad():
        try:
            for name, a in tensors.items():
                if name.endswith("lora_A.weight"):
                    module = reference.get_submodule(name.removeprefix(PREFIX).removesuffix(".lora_A.weight"))
                    kept[module] = module.weight.data
                    b = tensors[name.replace("lora_A", "lora_B")]
                    module.weight.data = (kept[module].double() + 16 / 4 * b.double() @ a.double()).float()
            logits = reference(torch.tensor([ids])).logits[0, :-1]
        finally:
            for module, weight in kept.items():
                module.weight.data = weight
    theirs = torch.log_softmax(logits.double(), -1)[range(len(ids) - 1), ids[1:]]
    assert torch.allclose(torch.tensor(ours, dtype=torch.float64), theirs, atol=2e-3, rtol=0)


def test_a_mixed_batch_gives_each_what_it_gets_alone(llm, adapters):
    chosen = [None, *adapters, adapters[0]]
    prompts = [PROMPT] * 5 + ["Once upon a time"]
    alone = []
    for prompt, adapter in zip(prompts, chosen, strict=True):
        output = llm.generate(prompt, GREEDY, lora_request=adapter, use_tqdm=False)
        assert output[0].num_cached_tokens == 0  # whatever others have cached of the same tokens
        alone += tokens(output)
    assert len({tuple(each) for each in alone[:5]}) == 5
    assert llm.reset_prefix_cache()
    together = llm.generate(prompts, GREEDY, lora_request=chosen, use_tqdm=False)
    assert tokens(together) == alone
    cached = []
    for adapter in (adapters[2], adapters[3], adapters[2], None):
        again = llm.generate(PROMPT * 3, GREEDY, lora_request=adapter, use_tqdm=False)[0]
        cached.append(again.num_cached_tokens >= 16)
    assert cached == [False, False, True, False]


def test_several_answers_and_embeddings_have_adapters_too(llm, adapters):
    params = SamplingParams(n=3, temperature=0.8, seed=5, max_tokens=4)
    one, other = (llm.generate(PROMPT, params, lora_request=each, use_tqdm=False)[0] for each in adapters[:2])
    assert [a.token_ids for a in one.outputs] != [a.token_ids for a in other.outputs]
    vectors = [out.outputs.embedding for out in llm.embed([PROMPT] * 2, lora_request=[None, adapters[0]])]
    assert vectors[0] != vectors[1]


def test_sessions_belong_to_one_adapter(llm, adapters):
    with_adapter = llm.session("with")
    with_adapter.generate(PROMPT, GREEDY, lora_request=adapters[0])
    assert with_adapter.record.model == "adapter-1"
    assert with_adapter.kv_blocks["device"] > 0
    for wrong in (None, adapters[1]):
        with pytest.raises(errors.InvalidRequestError, match="begun with adapter-1") as caught:
            with_adapter.generate(" and", GREEDY, lora_request=wrong)
        assert caught.value.param == "session_id"
    fork = with_adapter.fork("forked")
    assert fork.generate(" and", GREEDY, lora_request=adapters[0]).num_cached_tokens > 0
    plain = llm.session("plain")
    plain.generate(PROMPT, GREEDY)
    with pytest.raises(errors.InvalidRequestError, match="another LoRA adapter"):
        plain.generate(" and", GREEDY, lora_request=adapters[0])
    assert plain.generate(" and", GREEDY).num_cached_tokens > 0


def test_wrong_requests_are_refused_and_the_engine_goes_on(llm, adapters, tmp_path):
    first = adapters[0]
    llm.generate([PROMPT] * 4, GREEDY, lora_request=adapters, use_tqdm=False)
    for wrong, words in [
        ("adapter-1", "must be None or LoRARequest"),
        (LoRARequest("adapter-1", 9, first.lora_path), "name and a number of its own"),
        (LoRARequest("other", 1, first.lora_path), "name and a number of its own"),
        (LoRARequest("fifth", 5, first.lora_path), r"max_loras \(4\)"),
    ]:
        with pytest.raises(errors.InvalidRequestError, match=words) as caught:
            llm.generate(PROMPT, GREEDY, lora_request=wrong, use_tqdm=False)
        assert caught.value.param == "lora_request"
    with pytest.raises(errors.PagemillError, match="2 lora_request were given for 3"):
        llm.generate([PROMPT] * 3, GREEDY, lora_request=adapters[:2], use_tqdm=False)
    for wrong in [("", 1, "x"), ("a", 0, "x"), ("a", True, "x"), ("a", 1, ""), ("a\n", 1, "x"), ("a", 1, None)]:
        with pytest.raises(errors.InvalidRequestError, match="it must be"):
            LoRARequest(*wrong)
    assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].finished
    assert "LoRA adapters: 4 in" in llm.client.facts.description


def test_settings_that_contradict_each_other_are_refused(adapters):
    with pytest.raises(errors.ConfigError, match="enable_lora is off"):
        LLM("smollm2-135m", lora_modules={"a": adapters[0].lora_path})
    with pytest.raises(errors.ConfigError, match="max_loras is 1"):
        LLM("smollm2-135m", enable_lora=True, max_loras=1, lora_modules={"a": "x", "b": "y"})
