"""Turns text into tokens and back, and conversations into text, for one model.

It gives what transformers' AutoTokenizer gives for the same files, but imports neither transformers nor torch (except
the first time it sees a model, see `tokenizer_files`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import tokenizers

from pagemill.errors import InvalidRequestError, TokenizerError, shown
from pagemill.hub.resolve import resolve_model
from pagemill.text.chat_template import ChatTemplate
from pagemill.text.detokenizer import TokenTexts
from pagemill.text.fewest_tokens import FewestTokens
from pagemill.text.tokenizer_files import TokenizerSettings, load_with_transformers, read_tokenizer

if TYPE_CHECKING:
    from pagemill.config import EngineConfig


class Tokenizer:
    """The tokenizer of one model. Several threads may call its methods at once."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenizerSettings, path: Path | None = None) -> None:
        self._backend = backend
        self._backend.encode_special_tokens = settings.split_special_tokens
        self.bos_token_id, self.eos_token_id = settings.bos_token_id, settings.eos_token_id
        self.pad_token_id = settings.pad_token_id
        self.chat_template = settings.chat_template
        """The source of the model's template, or several by name, or None."""
        self.fingerprint = settings.fingerprint
        """A digest of the whole tokenizer: if it is equal, equal token ids mean equal texts."""
        self._special_tokens = settings.special_tokens
        self._path = path
        self._compiled = functools.lru_cache(maxsize=16)(self._compile)

    @classmethod
    def load(cls, config: EngineConfig) -> Tokenizer:
        """Returns an engine's tokenizer: `config.tokenizer`, else the model's own. Raises what `from_path` does."""
        return cls.from_path(config.tokenizer or config.model)

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

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`. Raises InvalidRequestError for text that is not Unicode (surrogates)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text has {text[error.start]!r} at character {error.start}, half of a surrogate pair; "
                f"send valid Unicode",
                param="prompt",
            ) from None
        # A batch of one, because `encode` holds the interpreter's lock and `encode_batch_fast` lets other threads run.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Returns the text of tokens at the beginning of a text. Ids that the tokenizer does not have give nothing."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def names_of(self, token_ids: Sequence[int]) -> list[str]:
        """Returns each token as the vocabulary has it."""
        return [str(self._backend.id_to_token(token_id)) for token_id in token_ids]

    @functools.cached_property
    def text_of_token(self) -> Callable[[int], str]:
        """Returns what `decode` gives for a single token, which is remembered."""
        return functools.cache(lambda token_id: self.decode([token_id]))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, chat_template: str | None = None, **options: Any
    ) -> str:
        """Returns the text of a conversation, ready for `encode(text, add_special_tokens=False)`.

        chat_template: Jinja source, or the name of one of the model's own. Options: `add_generation_prompt` (default
        True), `continue_final_message`, `tools`, `documents`, and what the template itself knows (`enable_thinking`,
        …). Raises `TokenizerError` if the model has no template, or a broken one; `InvalidRequestError` if it, or what
        the caller gave, refuses these messages, or does not read the tools or documents that are given.
        """
        if not isinstance(chat_template, (str, type(None))):
            raise InvalidRequestError(
                f"chat_template is {shown(chat_template)}; it must be Jinja source, or a name of one",
                param="chat_template",
            )
        return self._compiled(chat_template, options.get("tools") is not None).render(messages, **options)

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

    def bad_words_token_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Returns the token sequences that would write one of `words`, as it stands or after a space (as vLLM does).

        Each word is banned in these spellings only; a model may still write it with other tokens.
        """
        spellings = [spelling for word in words for spelling in (word.lstrip(), " " + word.lstrip())]
        sequences = dict.fromkeys(tuple(self.encode(spelling, add_special_tokens=False)) for spelling in spellings)
        return [list(ids) for ids in sequences if ids]

    def _compile(self, given: str | None, with_tools: bool) -> ChatTemplate:
        owner = repr(os.fspath(self._path or "this tokenizer"))
        own = self.chat_template
        named = own if isinstance(own, dict) else {}
        source = named.get(given, given) if given is not None else None
        if given is None:
            source = own if isinstance(own, str) else (with_tools and named.get("tool_use")) or named.get("default")
        if not source:
            has = f"has only named chat templates ({', '.join(sorted(named))})" if named else "has no chat template"
            raise TokenizerError(
                f"{owner} {has}; pass --chat-template (chat_template=), or send a prompt instead of messages",
                param="chat_template",
            )
        try:
            return ChatTemplate(source, self._special_tokens, owner)
        except (jinja2.TemplateSyntaxError, ValueError, RecursionError) as error:
            place = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            message = f"the chat template does not parse{place}: {error}"
            if given is not None:
                raise InvalidRequestError(f"{message}; correct it", param="chat_template") from error
            raise TokenizerError(f"{message}; pass --chat-template (chat_template=) with one that does") from error
