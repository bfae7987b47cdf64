"""Gives every error that a user can meet a type.

A message names the value, the limit it broke, and the way out. `InvalidRequestError` and its children
are the caller's to mend (HTTP 400 unless said otherwise); `ModelLoadError` and `ConfigError` stop the engine before it
starts; `StepFailedError` fails one request and leaves the others running.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from pagemill.names_elsewhere import way_out

LONGEST_NAME = 128
"""Characters of an unknown name that a message shows."""


class PagemillError(Exception):
    """Base of all errors raised on purpose.

    `http_status` and `kind` are what an OpenAI-shaped HTTP error carries (`kind` is its `type`).
    `param` names the offending argument, where there is one.
    """

    http_status: ClassVar[int] = 500
    kind: ClassVar[str] = "internal_server_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(PagemillError, ValueError):
    """A request that cannot be served as it is, whatever the load."""

    http_status: ClassVar[int] = 400
    kind: ClassVar[str] = "invalid_request_error"


class UnknownArgumentError(InvalidRequestError, TypeError):
    """An argument that does not exist; the message suggests the nearest one that does."""

    @classmethod
    def of(cls, owner: str, name: str, known: Iterable[str]) -> UnknownArgumentError:
        names, name = sorted(set(known)), name[:LONGEST_NAME]
        return cls(f"{owner} has no argument {name!r}; {way_out(name, names)}", param=name)


class EmptyPromptError(InvalidRequestError):
    """A prompt without a single token."""


class PromptTooLongError(InvalidRequestError):
    """A prompt (plus the tokens asked for at least) over `max_model_len`."""


class TokenOutOfVocabularyError(InvalidRequestError):
    """A token id below 0 or not below the vocabulary's size."""


class SamplingParamsError(InvalidRequestError):
    """A sampling parameter out of its range, or two that contradict each other."""


class RequestTooLargeError(InvalidRequestError):
    """A request that needs more KV blocks than the pool has, or than its tenant may have: it could never run."""

    @classmethod
    def of_width(cls, name: str, count: int, limit: int) -> RequestTooLargeError:
        way_out = "ask for fewer or raise it"
        return cls(f"{name} is {count}, but max_num_seqs lets {limit} run at once; {way_out}", param=name)


class TooFewBlocksError(RequestTooLargeError):
    """A request that needs more KV blocks than it could have in the pool as it is."""

    def __init__(self, message: str, *, param: str | None = None, blocks: int = 0, limit: str = "") -> None:
        """blocks: how many it needs, beside pinned ones. limit: the tenant's limit that it is over; "" for what it can
        count on in the pool, beside what others are guaranteed."""
        super().__init__(message, param=param)
        self.blocks = blocks
        self.limit = limit


class PoolTooSmallError(TooFewBlocksError):
    """A request that needs more KV blocks than the whole pool has, whatever its tenant may have."""


class TenantShareTooSmallError(TooFewBlocksError):
    """A request that needs more KV blocks than its tenant may have."""


class UnknownTenantError(InvalidRequestError):
    """A tenant that the engine was told nothing of."""

    @classmethod
    def of(cls, name: str, known: Iterable[str]) -> UnknownTenantError:
        names = ", ".join(sorted(known))
        return cls(f"there is no tenant {name!r}; known: {names}; name it among the tenants, or set it", param="tenant")


class TooManyWaitingError(InvalidRequestError):
    """A request of a tenant that has as many waiting, or as large bodies, as it may; it can be sent again."""

    http_status: ClassVar[int] = 429
    kind: ClassVar[str] = "rate_limit_error"


class RateLimitError(InvalidRequestError):
    """More requests, tokens or wrong API keys in a minute than are allowed; it can be sent again later.

    `retry_after_s` says when; after a minute where nobody has said, since limits are of a minute.
    """

    http_status: ClassVar[int] = 429
    kind: ClassVar[str] = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: float = 60.0, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class AuthenticationError(InvalidRequestError):
    """An HTTP request without a known API key, where the server has keys."""

    http_status: ClassVar[int] = 401


class PermissionDeniedError(InvalidRequestError):
    """An HTTP request for what only an admin's key may do."""

    http_status: ClassVar[int] = 403
    kind: ClassVar[str] = "permission_error"


class HostNotAllowedError(InvalidRequestError):
    """An HTTP request under a name, or from a web page of a site, that the server does not know."""

    http_status: ClassVar[int] = 403
    kind: ClassVar[str] = "permission_error"


class BodyTooLargeError(InvalidRequestError):
    """An HTTP request whose body is longer than the server takes."""

    http_status: ClassVar[int] = 413


class EncodedBodyError(InvalidRequestError):
    """An HTTP request whose body is compressed, or encoded in another way."""

    http_status: ClassVar[int] = 415


class SlowBodyError(InvalidRequestError):
    """An HTTP request whose body did not come in time."""

    http_status: ClassVar[int] = 408


class RequestTimeoutError(InvalidRequestError):
    """A request whose answer had not ended when its `timeout` was over; all that it held is given back."""

    http_status: ClassVar[int] = 408
    kind: ClassVar[str] = "timeout_error"

    @classmethod
    def after(cls, timeout_s: float) -> RequestTimeoutError:
        return cls(
            f"timeout is {timeout_s:g} s, and the answer had not ended by then; raise it, ask for fewer tokens, or "
            "send this again when there is less to do",
            param="timeout",
        )


class ServerBusyError(InvalidRequestError):
    """A connection or a body for which the server has no room now; it can be sent again."""

    http_status: ClassVar[int] = 503
    kind: ClassVar[str] = "service_unavailable_error"


class PoolShrunkError(ServerBusyError):
    """A request for which the KV pool has no room since it gave its memory back; it can be sent again."""


class NotFoundError(InvalidRequestError):
    """Something that a request names and that is not there."""

    http_status: ClassVar[int] = 404
    kind: ClassVar[str] = "not_found_error"


class ModelNotServedError(NotFoundError):
    """An HTTP request for a model that this server does not serve."""


class RequestNotFoundError(NotFoundError):
    """No request of this id is running, in this namespace."""


class SessionNotFoundError(NotFoundError):
    """No session of this name in this namespace."""


class ResponseNotFoundError(SessionNotFoundError):
    """No response of this id in this namespace, or none any more."""


class SessionBusyError(InvalidRequestError):
    """A session that another request is using, or that another process has changed meanwhile."""

    http_status: ClassVar[int] = 409
    kind: ClassVar[str] = "conflict_error"


class SessionLimitError(InvalidRequestError):
    """One session more than `max_sessions`, the engine's or the tenant's."""


class PinLimitError(InvalidRequestError):
    """A pin that would leave too little of the pool."""


class PinNotFoundError(NotFoundError):
    """No pin of this name in this namespace."""


class ConfigError(PagemillError, ValueError):
    """An engine setting out of its range, or two that contradict each other."""

    kind: ClassVar[str] = "configuration_error"


class KVMemoryError(ConfigError):
    """A KV pool that cannot be made: too small for one sequence, or more than the machine has."""


class StaleKernelsError(PagemillError):
    """Compiled kernels of another version than the Python files that call them."""


class KVStoreError(PagemillError):
    """A KV store on disk that cannot be used, or that takes no more blocks."""

    kind: ClassVar[str] = "kv_store_error"


class SessionStoreError(PagemillError):
    """A file of sessions that cannot be used."""

    kind: ClassVar[str] = "session_store_error"


class MemoryInvariantError(PagemillError, AssertionError):
    """The memory manager's recount disagrees with its books: a bug. The message names the broken invariant."""


class ModelLoadError(PagemillError):
    """A model that cannot be loaded. Its children say why."""

    kind: ClassVar[str] = "model_load_error"


class ModelNotFoundError(ModelLoadError):
    """No model under this path or name."""


class ModelConfigError(ModelLoadError):
    """A model's configuration that cannot be read, or that lacks or contradicts itself in something."""


class PullError(ModelLoadError):
    """A model that exists but cannot be fetched: no network, no space, or not the right bytes."""


class UnsupportedModelError(ModelLoadError):
    """A model family, or a feature of one, that is not tested and therefore refused."""


class AdapterError(ModelLoadError):
    """A LoRA adapter that cannot be loaded, or not for this model."""


class CorruptWeightsError(ModelLoadError):
    """Weights that are truncated, of a wrong shape, missing, or not finite."""


class TokenizerError(ModelLoadError):
    """A tokenizer or chat template that is missing or cannot be read."""


class StepFailedError(PagemillError):
    """The forward pass failed for this request alone; the others went on."""


class ResizeFailedError(PagemillError):
    """The device failed while the KV pool was resized: it keeps its size, and what was to be moved is lost."""


class DriverError(PagemillError, RuntimeError):
    """A call of a GPU's driver that failed. The message names it, its arguments, and the driver's reason."""


class NonFiniteLogitsError(StepFailedError):
    """The model gave NaN or infinite logits, or hidden states, for this request."""

    @classmethod
    def of(cls, what: str) -> NonFiniteLogitsError:
        return cls(
            f"the model's {what} for this request are not finite (NaN or infinite); its weights may be damaged, or "
            f"dtype too narrow for them: try dtype='float32'"
        )


class EngineDeadError(PagemillError):
    """The engine process is gone; every request it held has failed."""

    http_status: ClassVar[int] = 503
    kind: ClassVar[str] = "service_unavailable_error"


class RankLostError(EngineDeadError):
    """A process that held a part of the model is gone, and with it the engine: no other has its part."""


class DeviceLostError(EngineDeadError):
    """A device that does no more work in this process, such as a GPU after an illegal address: what it held is lost."""

    @classmethod
    def of(cls, device: object, error: BaseException) -> DeviceLostError:
        return cls(
            f"the device {device} does no more work ({type(error).__name__}: {error}); the engine has to start anew"
        )


class EngineStoppedError(EngineDeadError):
    """The engine was told to stop before it had done what was asked; that can be sent again, to another one."""

    def __init__(
        self,
        message: str = "the engine was shut down before this had ended; send it again when it has started anew, or to "
        "another one",
        *,
        param: str | None = None,
    ) -> None:
        super().__init__(message, param=param)


class EngineRestartingError(EngineDeadError):
    """The engine process has died, and another is being started; the request can be sent again."""


class TraceError(PagemillError, ValueError):
    """A trace of requests that is missing, cannot be read, or has nothing in the part asked for."""


class RemoteServerError(PagemillError):
    """A server that a command in the terminal asks, and that does not answer, or refuses."""


class BenchmarkError(PagemillError):
    """A server that does not answer, or not as OpenAI's API does, while it is measured."""


class CalibrationError(PagemillError, ValueError):
    """Step times that cannot be read, or too few steps to fit them to."""


def error_of(type_name: str, message: str, param: str | None = None) -> PagemillError:
    """Returns an error from what a message carries of it. An unknown type becomes a `PagemillError`."""
    cls = globals().get(type_name)
    if not isinstance(cls, type) or not issubclass(cls, PagemillError):
        cls = PagemillError
    return cls(message, param=param)


def shown(value: object) -> str:
    """Returns a value as a message shows it: at most 200 characters."""
    try:
        text = repr(value)
    except Exception:  # a caller's own class may raise anything, and an integer may have too many digits
        return f"of type {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}…"
