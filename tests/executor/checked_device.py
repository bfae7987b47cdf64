"""CheckedDevice: a device of CPU tensors that checks the order of what it is told.

Work is done at once, but nobody may rely on that. Streams, events and the host have vector clocks (as in torch's CUDA
sanitizer). Every operation, seen by a dispatch mode, must come behind the writes of what it reads, and behind all uses
of what it writes. Copies to the host bring poison until the host has waited for them; memory of the host that is being
copied must stay as it is. Memory that ends must not be in use on a stream that its own does not know of. Graphs hold
the operations that were captured, and do them again.
"""

from __future__ import annotations

import functools
import random
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from divided_memory import DividedMemory
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from pagemill.executor.device import Captured
from pagemill.executor.interface import ExecutorMemory

POISON = 0x9B
"""A byte of memory that has not arrived: tokens of it are negative, and no code of the sampler."""
HOST = "host"
READS_BACK = {
    "tolist", "numpy", "item", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__",
}  # fmt: skip
"""Functions of tensors that wait for the device."""
WAITS = {
    "nonzero", "nonzero_numpy", "masked_select", "bincount", "equal", "item", "is_nonzero", "_local_scalar_dense",
    "_unique2", "unique_dim", "unique_consecutive",
}  # fmt: skip
"""Operations that do, mostly because the size of their result depends on contents."""


class OrderError(BaseException):
    """Says that something may happen before what it needs. No executor takes it for a fault of a step."""


class Clock(dict):
    """By stream, how much of its work is known to be done."""

    def join(self, other: Clock) -> None:
        for actor, tick in other.items():
            self[actor] = max(self.get(actor, 0), tick)

    def knows(self, use: tuple[str, int]) -> bool:
        return self.get(use[0], 0) >= use[1]


@dataclass
class Memory:
    """What was done to a piece of memory: who had it first, who wrote it last, and who has read it since."""

    owner: str
    writer: tuple[str, int]
    readers: dict[str, int] = field(default_factory=dict)
    pinned: bool = False

    def uses(self) -> list[tuple[str, int]]:
        return [self.writer, *self.readers.items()]


class CheckedEvent:
    def __init__(self, device: CheckedDevice, clock: Clock) -> None:
        self._device = device
        self.clock = clock

    def query(self) -> bool:
        """Says that it has come to pass when it must have, else perhaps."""
        done = all(self._device.host.knows(use) for use in self.clock.items()) or self._device.random.random() < 0.5
        if done:
            self.synchronize()
        return done

    def synchronize(self) -> None:
        self._device.let_host_know(self.clock)


class CheckedStream:
    def __init__(self, device: CheckedDevice, name: str) -> None:
        self._device = device
        self.name = name
        self.clock = Clock()

    def record_event(self) -> CheckedEvent:
        return CheckedEvent(self._device, Clock(self.clock))

    def wait_event(self, event: CheckedEvent) -> None:
        self.clock.join(event.clock)


@dataclass
class Copy:
    """A copy under way. arrives: what the host gets; None if it gives."""

    use: tuple[str, int]
    host: Tensor
    before: Tensor
    arrives: Tensor | None


@dataclass(frozen=True)
class Outside:
    """A tensor in memory that a graph uses and does not hold."""

    storage: weakref.ref
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        storage = self.storage()
        if storage is None:
            raise OrderError("a graph uses memory that is gone")
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


class CheckedGraph:
    def __init__(self, device: CheckedDevice) -> None:
        self._device = device
        self.tape: list[tuple[Callable[..., Any], Any, list[Any], list[bool]]] = []
        self.made: set[int] = set()
        """Storages that were made inside."""
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for func, inputs, outputs, fresh in self.tape:
            args, kwargs = tree_map(_inside, inputs)
            found = tree_flatten(self._device.operate(func, args, kwargs))[0]
            for new, old, is_fresh in zip(found, outputs, fresh, strict=True):
                if is_fresh:
                    old.copy_(new)


class CheckedDevice(TorchDispatchMode):
    """Implements `Device`. To be entered: `with CheckedDevice() as device`. waits: how often the host has waited for
    the stream of computations, by reading memory of the device."""

    where = torch.device("cpu")

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.nbytes = 1 << 20
        """Memory that it says to have."""
        self.peak_nbytes = 0
        """Memory that it says work takes, when asked to measure that."""
        self.idle_nbytes = 0
        """Memory that it says to hold for work to come."""
        self.graph_bytes = 0
        """Memory that it says a graph takes."""
        self.random = random.Random(seed)
        self.host = Clock()
        self.compute = CheckedStream(self, "compute")
        self.waits = 0
        self.told = 0
        """How often the host has learnt how far streams are."""
        self.captures = True
        """Whether graphs can be captured."""
        self.broken = False
        """Whether an error of its work is met by whoever waits for it."""
        self.graphs: list[CheckedGraph] = []
        self.collectives: Counter[str] = Counter()
        """Counts the collectives that have been done, by name."""
        self._done: dict[str, Any] = {}
        """By operation, what stands for a collective that is done."""
        self._current = self.compute
        self._streams = {"compute": self.compute}
        self._memory: dict[int, Memory] = {}
        self._divided: dict[int, tuple[DividedMemory, dict[int, Memory]]] = {}
        self._copies: list[Copy] = []
        self._late: list[str] = []
        self._graph: CheckedGraph | None = None
        self.driver: Any = None
        """Maps its memory, as a `CheckedDriver` does; None where nothing does."""
        self._saved: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._reads_back = _ReadsBack(self)

    def __enter__(self) -> CheckedDevice:
        super().__enter__()
        self._reads_back.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._reads_back.__exit__(*error)
        super().__exit__(*error)

    def stream(self) -> CheckedStream:
        stream = CheckedStream(self, f"stream {len(self._streams)}")
        self._streams[stream.name] = stream
        return stream

    @contextmanager
    def use(self, stream: CheckedStream):
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def pinned(self, nbytes: int) -> Tensor:
        with torch.inference_mode(False):
            memory = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self._memory[_key(memory)].pinned = True
        return memory

    def pinned_whole(self, nbytes: int) -> Tensor:
        return self.pinned(nbytes)

    def divide(self, tensor: Tensor, begin: int, nbytes: int) -> None:
        """Checks parts of a tensor's memory by themselves from now on, see `DividedMemory`."""
        memory = self._memory[_key(tensor)]
        divided = DividedMemory(tensor, begin, nbytes)
        self._divided[_key(tensor)] = divided, {part: replace(memory, readers={}) for part in divided.parts}

    def copy(self, source: Tensor, target: Tensor) -> None:
        to_host = self._is_pinned(target)
        if to_host == self._is_pinned(source):
            raise OrderError("a copy needs pinned memory on one side, and the device's on the other")
        host = target if to_host else source
        self._check_copies()
        if any(_overlap(copy.host, host) and (to_host or copy.arrives is not None) for copy in self._copies):
            raise OrderError("memory of the host is given to a copy before another one is done with it")
        use = self._begin(reads=[source] if to_host else [], writes=[] if to_host else [target])
        with _untold():
            if to_host:
                arrives = source.clone()
                host.fill_(POISON)
                self._copies.append(Copy(use, host, host.clone(), arrives))
            else:
                target.copy_(source)
                self._copies.append(Copy(use, host, host.clone(), None))

    def capture(self, run: Callable[[], Tensor]) -> Captured:
        run()
        if not self.captures:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        graph = self._graph = CheckedGraph(self)
        try:
            result = run()
        finally:
            self._graph = None
            with _untold():
                for memory, before in chain.from_iterable(self._saved.values()):  # nothing has been done
                    memory.copy_(before)
            self._saved.clear()
        with _untold():
            for _, _, outputs, fresh in graph.tape:
                for output, is_fresh in zip(outputs, fresh, strict=True):
                    if is_fresh and output.numel():
                        _bytes(output).fill_(POISON)
        self.graphs.append(graph)
        return Captured(graph, result, self.graph_bytes)

    def memory(self) -> ExecutorMemory:
        return ExecutorMemory(self.nbytes, self.nbytes)

    def peak(self, run: Callable[[], object]) -> int:
        run()
        self.synchronize()
        return self.peak_nbytes

    def idle(self) -> int:
        return self.idle_nbytes

    def synchronize(self) -> None:
        for stream in self._streams.values():
            self.let_host_know(stream.clock)

    def let_host_know(self, clock: Clock) -> None:
        if self._graph is not None:
            raise RuntimeError("CUDA error: the host waits while the stream is capturing")
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self._check_copies()
        self.told += not all(self.host.knows(use) for use in clock.items())
        self.host.join(clock)
        done = [copy for copy in self._copies if self.host.knows(copy.use)]
        self._copies = [copy for copy in self._copies if not self.host.knows(copy.use)]
        with _untold():
            for copy in done:
                if copy.arrives is not None:
                    copy.host.copy_(copy.arrives)

    def wait_for(self, tensor: Tensor, why: str) -> None:
        """Notes that the host reads memory of the device, which waits for the stream in use."""
        memory = self._memory.get(_key(tensor))
        if self._graph is not None and (memory is not None or _key(tensor) in self._graph.made):
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({why})")
        if memory is None or memory.pinned:
            return
        self.waits += 1
        self.let_host_know(self._current.clock)
        if not self.host.knows(memory.writer):
            raise OrderError(f"the host reads ({why}) what {memory.writer[0]} may not have written yet")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._graph is None:
            return self.operate(func, args, kwargs)
        inputs = tree_map(self._spec, (args, kwargs))
        before = {_key(each) for each in _tensors((args, kwargs))}
        result = self.operate(func, args, kwargs)
        outputs = tree_flatten(result)[0]
        fresh = [isinstance(each, Tensor) and _key(each) not in before for each in outputs]
        self._graph.made |= {_key(each) for each, is_fresh in zip(outputs, fresh, strict=True) if is_fresh}
        self._graph.tape.append((func, inputs, [self._spec(each) for each in outputs], fresh))
        return result

    def operate(self, func, args, kwargs):
        """Does an operation, if its order allows it."""
        if self._late:
            raise OrderError(self._late.pop())
        name, inputs = func.__name__.split(".")[0], _tensors((args, kwargs))
        known = [each for each in inputs if _key(each) in self._memory]
        if name in WAITS or _picks_by_contents(name, args, kwargs):
            for each in inputs:
                self.wait_for(each, name)
        written = _written(func, args, kwargs)
        if self._graph is not None:
            self._save(written)
        result = self._collective(func, args, kwargs) if func.namespace == "c10d" else func(*args, **kwargs)
        keys = {_key(each) for each in inputs}
        fresh = [each for each in _tensors(result) if _key(each) not in keys]
        if not fresh and not written and _tensors(result):
            return result  # a view
        if any(self._is_pinned(each) for each in known):
            raise OrderError(f"{name} uses pinned memory of the host as if it were the device's")
        if self._graph is None:
            use = self._begin(known, written, name, args)
            for each in fresh:
                self._note(each, use)
        return result

    def _collective(self, func, args, kwargs):
        """Does what other devices take part in, as work of the stream in use; not while it is captured."""
        name = func.__name__
        if self._graph is not None:
            return args[0], self._done[name]
        result = func(*args, **kwargs)
        Work.unbox(result[1]).wait()
        self._done[name] = result[1]
        self.collectives[name.split(".")[0]] += 1
        return result

    def _begin(self, reads: list[Tensor], writes: list[Tensor], name: str = "", args: Any = ()) -> tuple[str, int]:
        """Begins an operation on the stream in use, behind what it needs."""
        stream = self._current
        stream.clock.join(self.host)
        of_reads = [memory for each in reads for memory in self._pieces(each, name, args)]
        of_writes = [memory for each in writes for memory in self._pieces(each, name, args)]
        for memory in of_reads:
            if not stream.clock.knows(memory.writer):
                raise OrderError(f"{stream.name} reads what {memory.writer[0]} may not have written yet")
        for memory in of_writes:
            for use in memory.uses():
                if not stream.clock.knows(use):
                    raise OrderError(f"{stream.name} writes what {use[0]} may still use")
        use = (stream.name, stream.clock.get(stream.name, 0) + 1)
        stream.clock[stream.name] = use[1]
        for memory in of_reads:
            memory.readers[stream.name] = use[1]
        for memory in of_writes:
            memory.writer, memory.readers = use, {}
        return use

    def _pieces(self, tensor: Tensor, name: str, args: Any) -> list[Memory]:
        """Returns what is known of the memory of a tensor that an operation uses; nothing if it is the host's."""
        memory = self._memory.get(_key(tensor))
        if memory is None or _key(tensor) not in self._divided:
            return [] if memory is None else [memory]
        divided, parts = self._divided[_key(tensor)]
        return [parts[part] for part in divided.touched(name, tensor, args)]

    def _note(self, tensor: Tensor, use: tuple[str, int]) -> None:
        """Notes new memory. It may be what the stream's own work, and nobody else's, has finished with."""
        key = _key(tensor)
        if key not in self._memory:
            self._memory[key] = Memory(self._current.name, use)
            weakref.finalize(tensor.untyped_storage(), self._end, key)

    def _end(self, key: int) -> None:
        memory = self._memory.pop(key)
        knows = Clock(self._streams[memory.owner].clock)
        knows.join(self.host)
        _, parts = self._divided.pop(key, (None, {}))
        for use in [use for each in (memory, *parts.values()) for use in each.uses()]:
            if not knows.knows(use):
                self._late.append(f"memory of {memory.owner} ends while {use[0]} may still use it")

    def _is_pinned(self, tensor: Tensor) -> bool:
        memory = self._memory.get(_key(tensor))
        return memory is not None and memory.pinned

    def _check_copies(self) -> None:
        with _untold():
            for copy in self._copies:
                if not torch.equal(copy.host, copy.before):
                    raise OrderError("memory of the host was written while it was being copied")

    def _spec(self, value: Any) -> Any:
        """Returns how a graph keeps a value: memory that was made outside is not held."""
        if not isinstance(value, Tensor) or _key(value) in self._graph.made or value.untyped_storage().nbytes() == 0:
            return value
        if _key(value) not in self._memory and value.dim() == 0:
            return value.clone()  # a number of the host's
        storage = value.untyped_storage()
        return Outside(weakref.ref(storage), value.dtype, value.size(), value.stride(), value.storage_offset())

    def _save(self, written: list[Tensor]) -> None:
        for each in written:
            if (key := _key(each)) not in self._graph.made and key not in self._saved:
                with _untold():
                    pieces = [_bytes(each)] if self.driver is None else self.driver.pieces(_bytes(each))
                    self._saved[key] = [(piece, piece.clone()) for piece in pieces]


class _ReadsBack(TorchFunctionMode):
    def __init__(self, device: CheckedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in READS_BACK and args and isinstance(args[0], Tensor):
            self._device.wait_for(args[0], name)
        return func(*args, **(kwargs or {}))


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # noqa: SLF001


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Returns whether two runs of bytes have some in common."""
    first, second = one.storage_offset(), other.storage_offset()
    return _key(one) == _key(other) and first < second + len(other) and second < first + len(one)


def _bytes(tensor: Tensor) -> Tensor:
    """Returns all of the memory that a tensor lies in."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _tensors(values: Any) -> list[Tensor]:
    """Returns the tensors in values, which operations have in lists at most."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [each for value in values for each in _tensors(value)]
    return _tensors([*values.values()]) if isinstance(values, dict) else []


def _inside(value: Any) -> Any:
    return value.tensor() if isinstance(value, Outside) else value


@functools.cache
def _targets(func) -> list[tuple[int, str]]:
    """Returns place and name of the arguments that an operation writes. Collectives do not say it of theirs."""
    if func.namespace == "c10d":
        return [(0, func._schema.arguments[0].name)]  # noqa: SLF001
    arguments = enumerate(func._schema.arguments)  # noqa: SLF001
    return [(at, one.name) for at, one in arguments if one.alias_info is not None and one.alias_info.is_write]


def _written(func, args, kwargs) -> list[Tensor]:
    return _tensors([args[at] if at < len(args) else kwargs.get(name) for at, name in _targets(func)])


def _picks_by_contents(name: str, args, kwargs) -> bool:
    """Returns whether the size of the result depends on contents, though that of others of this name does not."""
    if name in ("index", "index_put", "index_put_"):
        return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    return name == "repeat_interleave" and kwargs.get("output_size") is None


@contextmanager
def _untold():
    """Lets the device's own doings go unseen."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():  # noqa: SLF001
        yield
