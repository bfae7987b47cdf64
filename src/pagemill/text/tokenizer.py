"""Turns text into tokens and back, and conversations into text, for one model.

It gives the tokens that the model's own files say, and imports neither transformers nor torch (except the first time it
sees a folder, see `tokenizer_files`).
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import tokenizers

from pagemill.errors import (
    ConfigError,
    InvalidRequestError,
    ModelLoadError,
    TokenizerError,
    UnknownArgumentError,
    shown,
)
from pagemill.hub.resolve import resolve_model
from pagemill.text.answer.of_model import AnswerFormats
from pagemill.text.chat_template import ChatTemplate
from pagemill.text.detokenizer import TokenTexts
from pagemill.text.fewest_tokens import FewestTokens
from pagemill.text.fill_in_the_middle import FillInTheMiddle
from pagemill.text.spelling import Spelling
from pagemill.text.tokenizer_files import TokenizerSettings, load_with_transformers, read_tokenizer

if TYPE_CHECKING:
    from pagemill.config import EngineConfig

_ANSWER = "\u2063answer\u2063"
OPTIONS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
)
"""Names that a chat template gets from arguments of their own."""


class Tokenizer:
    """The tokenizer of one model. Several threads may call its methods at once."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenizerSettings, path: Path | None = None) -> None:
        self._backend = backend
        self._backend.encode_special_tokens = settings.split_special_tokens
        self.bos_token_id, self.eos_token_id = settings.bos_token_id, settings.eos_token_id
        self.pad_token_id = settings.pad_token_id
        self.chat_template = settings.chat_template
        """The source of the model's template, or several by name, or None."""
        self.template_defaults: dict[str, Any] = {}
        """Variables that the chat template is given where a caller does not set them."""
        self.fingerprint = settings.fingerprint
        """A digest of the whole tokenizer: if it is equal, equal token ids mean equal texts."""
        self.answers = AnswerFormats(self, "auto", "auto")
        """How the model's answers are read."""
        self._special_tokens = settings.special_tokens
        self._path = path
        self._compiled = functools.lru_cache(maxsize=16)(self._compile)
        self._spelled = functools.lru_cache(maxsize=16)(self._spell)  # the prompts of a call share their bad words

    @classmethod
    def load(cls, config: EngineConfig) -> Tokenizer:
        """Returns an engine's tokenizer: `config.tokenizer`, else the model's own, with `config.chat_template`, if that
        is set, and the formats of answers that it asks for. Raises what `from_path` does, and `ConfigError` or
        `TokenizerError` for a chat template that is missing or wrong, or does not read what it shall be given."""
        tokenizer = cls.named(config.tokenizer) if config.tokenizer else cls.from_path(config.model)
        if config.chat_template is not None:
            tokenizer.chat_template = _template_of(config.chat_template, tokenizer.chat_template)
            tokenizer.check_chat_template()
        tokenizer.answers = AnswerFormats(tokenizer, config.tool_call_parser, config.reasoning_parser)
        if config.default_chat_template_kwargs:
            tokenizer.template_defaults = _checked_defaults(tokenizer, config.default_chat_template_kwargs)
        tokenizer.fewest_tokens("")  # is built here: it takes 20 ms in one piece, which running streams would notice
        return tokenizer

    @classmethod
    def named(cls, name: str) -> Tokenizer:
        """Returns the tokenizer of the setting `tokenizer`. Raises what `from_path` does, and names the setting."""
        try:
            return cls.from_path(name)
        except ModelLoadError as error:
            raise type(error)(f"tokenizer: {error.message}", param="tokenizer") from error

    @classmethod
    def from_path(cls, name_or_path: str | os.PathLike[str]) -> Tokenizer:
        """Returns the tokenizer of a Hugging Face folder, a GGUF file, or a name that `pagemill pull` knows.

        Raises `TokenizerError` if it is missing or cannot be read, `ModelNotFoundError` if there is nothing of this
        name.
        """
        path = resolve_model(name_or_path)
        if path.name == "tokenizer.json":
            path = path.parent
        return cls(*read_tokenizer(path), path)

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included. A model may have more logits than that."""
        return int(self._backend.get_vocab_size())

    def difference(self, other: Tokenizer) -> str | None:
        """Returns, in words, a token that has another number in another tokenizer, or none; None: there is no such."""
        if self.fingerprint == other.fingerprint:
            return None
        mine, others = self.vocabulary(), other.vocabulary()
        for token in sorted(mine.keys() | others.keys()):
            if mine.get(token) != others.get(token):
                numbers = ["none" if number is None else number for number in (mine.get(token), others.get(token))]
                return f"the numbers of token {token!r} are {numbers[0]} and {numbers[1]}"
        return None

    def vocabulary(self) -> dict[str, int]:
        """Returns the numbers of all tokens, added ones included."""
        return dict(self._backend.get_vocab())

    @property
    def special_tokens(self) -> dict[str, int]:
        """The special tokens: their ids by their texts, as grammars name them."""
        added = self._backend.get_added_tokens_decoder().items()
        return {token.content: token_id for token_id, token in added if token.special}

    def to_json(self) -> str:
        """Returns the whole tokenizer in Hugging Face's form."""
        return str(self._backend.to_str())

    @functools.cached_property
    def token_texts(self) -> TokenTexts:
        """The texts of single tokens, which the detokenizers of all sequences share."""
        return TokenTexts(self._backend)

    @functools.cached_property
    def hf(self) -> Any:
        """transformers' tokenizer for the same files, imported on first use."""
        if self._path is None:
            raise TokenizerError("this tokenizer was not loaded from files, so transformers cannot load it")
        return load_with_transformers(self._path)

    @functools.cached_property
    def fewest_tokens(self) -> Callable[[str], int]:
        """Returns a number of tokens that a text has at least, without tokenizing it."""
        return FewestTokens(self._backend).of

    @functools.cached_property
    def fill_in_the_middle(self) -> FillInTheMiddle | None:
        """What writes prompts with a suffix; None where the vocabulary has no tokens for that."""
        return FillInTheMiddle.of(self._backend)

    @functools.cached_property
    def missing_characters(self) -> Callable[[str], str]:
        """Returns the characters of a text that no tokens write, each once."""
        return Spelling(self._backend, self.token_texts.byte_level).missing

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`. Raises InvalidRequestError for text that is not Unicode (surrogates)."""
        check_unicode(text, "prompt")
        # A batch of one, because `encode` holds the interpreter's lock and `encode_batch_fast` lets other threads run.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Returns the text of tokens at the beginning of a text. Ids that the tokenizer does not have give nothing."""
        (text,) = self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)  # see `encode`
        return str(text)

    def names_of(self, token_ids: Sequence[int]) -> list[str]:
        """Returns each token as the vocabulary has it."""
        return [str(self._backend.id_to_token(token_id)) for token_id in token_ids]

    @functools.cached_property
    def text_of_token(self) -> Callable[[int], str]:
        """Returns what `decode` gives for a single token, which is remembered."""
        return functools.cache(lambda token_id: self.decode([token_id]))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> str:
        """Returns the text of a conversation, ready for `encode(text, add_special_tokens=False)`.

        chat_template: Jinja source, or the name of one of the model's own. Options: `add_generation_prompt` (default
        True), `continue_final_message`, `tools`, `documents`, and what the template itself knows (`enable_thinking`,
        …). `chat_template_kwargs` may hold these too, and others. Raises `UnknownArgumentError` for an option that the
        template does not know; `TokenizerError` if the model has no template, or a broken one; `InvalidRequestError` if
        it, or what the caller gave, refuses these messages, or does not read the tools or documents that are given.
        """
        if not isinstance(chat_template, (str, type(None))):
            raise InvalidRequestError(
                f"chat_template is {shown(chat_template)}; it must be Jinja source, or a name of one",
                param="chat_template",
            )
        compiled = self._compiled(chat_template, options.get("tools") is not None)
        known = OPTIONS | compiled.reads
        for name in options.keys() - known:
            raise UnknownArgumentError.of("the chat template", name, known)
        return compiled.render(
            messages, **{**self.template_defaults, **options, **_own_variables(chat_template_kwargs)}
        )

    def check_chat_template(self) -> None:
        """Raises `TokenizerError` if the chat template does not parse, or if there is none."""
        self._compiled(None, False)

    def template_reads(self, tools: bool) -> frozenset[str]:
        """Returns the variables that the chat template asks for. Raises what `check_chat_template` does."""
        return self._compiled(None, tools).reads

    def render_turn(
        self, history: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], **template: Any
    ) -> str | None:
        """Returns the text after the last answer of `history` once `new` messages follow, or None.

        The template is rendered twice: up to that answer, and as a whole. The second text must begin with the first,
        then hold the answer (apart from white space around it). If it does not, the template writes earlier turns
        differently from the last one (without their reasoning, for example), and the whole has to be tokenized: None.
        Raises what `apply_chat_template` does.
        """
        *asked, answer = history
        if "tool_calls" in answer or "reasoning_content" in answer:
            return self._render_behind_parts(asked, answer, new, **template)
        opening = {**template, "add_generation_prompt": True, "continue_final_message": False}
        before = self.apply_chat_template(asked, **opening)
        whole = self.apply_chat_template([*history, *new], **template)
        if not whole.startswith(before):
            return None
        rest, content = whole[len(before) :], answer["content"]
        if not rest.startswith(content):
            rest, content = rest.lstrip(), content.strip()
            if not rest.startswith(content):
                return None
        return rest[len(content) :]

    def _render_behind_parts(
        self,
        asked: Sequence[Mapping[str, Any]],
        answer: Mapping[str, Any],
        new: Sequence[Mapping[str, Any]],
        **template: Any,
    ) -> str | None:
        """Does what `render_turn` does for an answer with tool calls or reasoning, which the template writes in its own
        way: the text that ends an answer is what it writes behind a plain one."""
        closed = {**template, "add_generation_prompt": False, "continue_final_message": False}
        plain = self.apply_chat_template([*asked, {"role": "assistant", "content": _ANSWER}], **closed)
        before = self.apply_chat_template([*asked, answer], **closed)
        whole = self.apply_chat_template([*asked, answer, *new], **template)
        end = plain[plain.rfind(_ANSWER) + len(_ANSWER) :] if _ANSWER in plain else None
        if end is None or not before.endswith(end) or not whole.startswith(before):
            return None
        if answer.get("reasoning_content", "") not in before:
            return None
        return whole[len(before) - len(end) :]

    def has_special_token(self, text: str) -> bool:
        """Returns whether a text is written with a special token, which texts of answers leave out."""
        return any(token is not None for _, token in self.parts_of(text))

    def parts_of(self, text: str) -> list[tuple[str, int | None]]:
        """Returns a text cut into special tokens and what is between them: each part, with its id if it is one."""
        special = self.special_tokens
        if not special:
            return [(text, None)]
        longest_first = sorted(special, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
        return [(part, special.get(part)) for part in parts if part]

    def template_source(self, with_tools: bool) -> str | None:
        """Returns the source of the chat template that the model's conversations are written with."""
        own = self.chat_template
        if isinstance(own, dict):
            return (own.get("tool_use") if with_tools else None) or own.get("default")
        return own

    def bad_words_token_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Returns the token sequences that would write one of `words`, as it stands or after a space (as vLLM does).

        Each word is banned in these spellings only; a model may still write it with other tokens.
        """
        return [list(ids) for ids in self._spelled(tuple(words))]

    def _spell(self, words: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Returns the different token sequences of all spellings, in their order."""
        spellings = [spelling for word in words for spelling in (word.lstrip(), " " + word.lstrip())]
        sequences = dict.fromkeys(tuple(self.encode(spelling, add_special_tokens=False)) for spelling in spellings)
        return [ids for ids in sequences if ids]

    def _compile(self, given: str | None, with_tools: bool) -> ChatTemplate:
        named = self.chat_template if isinstance(self.chat_template, dict) else {}
        source = self.template_source(with_tools) if given is None else named.get(given, given)
        if not source:
            has = f"has only named chat templates ({', '.join(sorted(named))})" if named else "has no chat template"
            raise TokenizerError(
                f"this model {has}; pass --chat-template (chat_template=), or send a prompt instead of messages",
                param="chat_template",
            )
        try:
            return ChatTemplate(source, self._special_tokens)
        except (jinja2.TemplateSyntaxError, ValueError, RecursionError) as error:
            place = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            message = f"the chat template does not parse{place}: {error}"
            if given is not None:
                raise InvalidRequestError(f"{message}; correct it", param="chat_template") from error
            raise TokenizerError(f"{message}; pass --chat-template (chat_template=) with one that does") from error


def check_unicode(text: str, param: str) -> None:
    """Raises InvalidRequestError for text that is not Unicode (surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text has {text[error.start]!r} at character {error.start}, half of a surrogate pair; send valid "
            f"Unicode",
            param=param,
        ) from None


def _template_of(given: str, own: str | dict[str, str] | None) -> str:
    """Returns a template's source: given as it is, by the name of one of the model's own, or as a file."""
    return own[given] if isinstance(own, dict) and given in own else read_template(given)


def read_template(given: str) -> str:
    """Returns a template's source, given as it is or as a file. Raises ConfigError."""
    if "{%" in given or "{{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"chat_template is {shown(given)}, which is no Jinja source and no file that can be read ({error}); name a "
            f"file",
            param="chat_template",
        ) from error


def _checked_defaults(tokenizer: Tokenizer, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the setting `default_chat_template_kwargs`. Raises ConfigError for what the template does not read."""
    try:
        defaults = _own_variables(given)
        tokenizer.answers.check_options(defaults)
    except InvalidRequestError as error:
        name = "default_chat_template_kwargs"
        raise ConfigError(error.message.replace("chat_template_kwargs", name), param=name) from None
    return defaults


def _own_variables(given: Any) -> dict[str, Any]:
    """Returns `chat_template_kwargs` as a dict. Raises InvalidRequestError for another value, and for names that are
    arguments of their own."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidRequestError(
            f"chat_template_kwargs is {shown(given)}; it must be a dict of the template's variables by name",
            param="chat_template_kwargs",
        )
    for name in given:
        if name in OPTIONS:
            raise InvalidRequestError(
                f"chat_template_kwargs has {name!r}, which is an argument of its own; give it beside them",
                param="chat_template_kwargs",
            )
    return dict(given)
