"""KV events: applied in order, they give what can be found, whatever happens in the pool."""

from hypothesis import given
from hypothesis import strategies as st

from pagemill.memory.digest import extend_chain
from pagemill.memory.manager import MemoryManager

SIZE, FRAMES = 4, 12


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20), st.booleans()), max_size=40))
def test_events_say_what_can_be_found(prompts):
    memory, known = MemoryManager(FRAMES, SIZE, [None], records_events=True), set()
    for step, (first, length, ask) in enumerate(prompts):
        tokens, digests = [first] * length, []
        extend_chain(digests, b"root", tokens, SIZE)
        table, _ = memory.open(tokens, digests, b"root", float(step), length - 1)
        assert memory.reserve(table, length) is None
        memory.drain(step)
        memory.commit(table, length, tokens, digests)
        memory.retire(step)
        memory.close(table, float(step))
        if ask:
            stored, removed = memory.take_events()
            assert not {*stored} & {*removed}
            known = known - {*removed} | {*stored}
            assert known == {*memory.core.index.by_digest[0]}
    memory.check()


def test_nothing_is_recorded_unless_asked():
    memory = MemoryManager(FRAMES, SIZE, [None])
    assert memory.take_events() == ([], [])
