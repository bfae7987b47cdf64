"""Conversations by name: what a turn keeps, who may use one, and what restarts, crashes and other processes leave."""

import os
import random
import secrets
import signal
import stat
import subprocess
import sys
import threading
import time
import tracemalloc

import pytest

from pagemill import errors
from pagemill.config import EngineConfig
from pagemill.namespace import Namespace
from pagemill.sessions import store as stores
from pagemill.sessions.store import SessionStore
from pagemill.tenant_limits import TenantLimits

HERE = Namespace()
MINE = Namespace("default", "mine")
OF = {"model": "m", "tokenizer": "t"}


def store_of(path=None, max_sessions=4, timeout_s=None):
    return SessionStore(path, max_sessions, timeout_s)


def turn(store, name, token_ids, messages=None, space=HERE):
    store.commit(store.begin(name, space, **OF), token_ids, messages)


def test_a_turn_is_found_by_another_process_later(tmp_path):
    path = tmp_path / "new" / "sessions.sqlite"
    store = store_of(path)
    turn(store, "a", [1, 2, 2**31])
    turn(store, "a", [1, 2, 2**31, 4], [{"role": "user", "content": "é"}])
    turn(store, "b", [5])
    store.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = store_of(path)
    record = again.get("a", HERE)
    assert record.token_ids == [1, 2, 2**31, 4]
    assert record.messages == [{"role": "user", "content": "é"}]
    assert (record.num_turns, record.model, record.name) == (2, "m", "a")
    assert record.created_s <= record.used_s <= time.time()
    assert [found.name for found in again.list(HERE)] == ["b", "a"]
    assert again.begin("a", HERE, **OF).token_ids == record.token_ids


def test_a_turn_that_is_given_back_leaves_no_trace():
    store = store_of()
    begun = store.begin("a", HERE, **OF)
    assert begun.token_ids == []
    store.release(begun)
    with pytest.raises(errors.SessionNotFoundError, match="no session 'a'"):
        store.get("a", HERE)
    turn(store, "a", [1])
    store.release(store.begin("a", HERE, **OF))
    assert store.get("a", HERE).token_ids == [1]


def test_a_session_has_one_turn_at_a_time():
    store = store_of()
    begun = store.begin("a", HERE, **OF)
    for again in (lambda: store.begin("a", HERE, **OF), lambda: store.delete("a", HERE)):
        with pytest.raises(errors.SessionBusyError, match="'a' is in use") as caught:
            again()
        assert caught.value.http_status == 409
    store.release(store.begin("a", MINE, **OF))
    store.commit(begun, [1], None)
    turn(store, "a", [1, 2])


def test_who_finds_a_session_in_use_is_told_to_fork_what_can_be_forked():
    store = store_of()
    for expected in ("wait for its end$", "wait for its end, or fork the session$"):
        begun = store.begin("a", HERE, **OF)
        with pytest.raises(errors.SessionBusyError, match=expected):
            store.begin("a", HERE, **OF)
        store.commit(begun, [1], None)


def test_a_turn_that_has_ended_gives_back_no_other():
    """Who reads an answer may close it when the next turn has begun."""
    store = store_of()
    first = store.begin("a", HERE, **OF)
    store.commit(first, [1], None)
    second = store.begin("a", HERE, **OF)
    store.release(first)
    with pytest.raises(errors.SessionBusyError, match="in use by another request"):
        store.begin("a", HERE, **OF)
    store.release(second)
    store.begin("a", HERE, **OF)


@pytest.mark.parametrize(
    "yours", [Namespace("default", "yours"), Namespace("other", "mine"), Namespace("othermine", "")]
)
def test_namespaces_do_not_see_each_other(yours):
    store = store_of()
    turn(store, "a", [1], space=MINE)
    with pytest.raises(errors.SessionNotFoundError):
        store.get("a", yours)
    with pytest.raises(errors.SessionNotFoundError):
        store.delete("a", yours)
    with pytest.raises(errors.SessionNotFoundError):
        store.fork("a", yours, "b")
    assert store.begin("a", yours, **OF).token_ids == []
    assert store.list(yours) == []
    assert [record.space for record in store.list(None)] == [MINE]


def test_a_fork_goes_its_own_way():
    store = store_of()
    turn(store, "a", [1, 2], [{"role": "user", "content": "x"}])
    child = store.fork("a", HERE, "b")
    assert (child.token_ids, child.messages) == ([1, 2], [{"role": "user", "content": "x"}])
    assert store.get("b", HERE) == child
    turn(store, "b", [1, 2, 3])
    assert store.get("a", HERE).token_ids == [1, 2]
    with pytest.raises(errors.InvalidRequestError, match="there is a session 'b' already"):
        store.fork("a", HERE, "b")
    begun = store.begin("c", HERE, **OF)
    with pytest.raises(errors.InvalidRequestError, match="there is a session 'c' already"):
        store.fork("a", HERE, "c")
    store.release(begun)


def test_two_processes_fork_to_one_name_and_one_of_them_is_told(tmp_path, monkeypatch):
    mine, other = (store_of(tmp_path / "sessions.sqlite") for _ in range(2))
    turn(mine, "ada", [1, 2])
    refused: list[Exception] = []

    def forks_too():
        try:
            other.fork("ada", HERE, "child")
        except errors.PagemillError as error:
            refused.append(error)

    meanwhile = threading.Thread(target=forks_too)
    token_hex = secrets.token_hex

    def while_the_other_asks(size):
        if not meanwhile.ident:
            meanwhile.start()
            meanwhile.join(0.3)
        return token_hex(size)

    monkeypatch.setattr(secrets, "token_hex", while_the_other_asks)
    mine.fork("ada", HERE, "child")
    meanwhile.join()
    assert [type(error) for error in refused] == [errors.InvalidRequestError]
    assert "already" in str(refused[0])


def test_one_session_too_many_is_refused_and_counts_those_in_their_first_turn():
    store = store_of(max_sessions=3)
    turn(store, "a", [1])
    begun = store.begin("b", HERE, **OF)
    store.fork("a", HERE, "c")
    for more in (lambda: store.begin("d", HERE, **OF), lambda: store.fork("a", HERE, "d")):
        with pytest.raises(
            errors.SessionLimitError,
            match="one too many: max_sessions is 3, and tenant 'default' has 3 of them; delete one",
        ):
            more()
    store.release(begun)
    turn(store, "d", [1])
    turn(store, "a", [1, 2])


def test_a_tenant_has_a_limit_of_its_own_beside_that_of_all():
    store = store_of(max_sessions=4)
    wild, other = Namespace("wild", ""), Namespace("wild", "another salt")
    store.set_limit("wild", TenantLimits(max_sessions="50%"))
    turn(store, "a", [1], space=wild)
    begun = store.begin("a", other, **OF)
    for more in (lambda: store.begin("b", wild, **OF), lambda: store.fork("a", wild, "b")):
        with pytest.raises(errors.SessionLimitError, match="number 3, and max_sessions of tenant 'wild' is 2;"):
            more()
    turn(store, "a", [1])
    turn(store, "b", [1])
    store.release(begun)
    turn(store, "b", [1], space=wild)
    store.set_limit("wild", TenantLimits())
    with pytest.raises(
        errors.SessionLimitError, match="one too many: max_sessions is 4, and tenant 'wild' has 2 of them"
    ):
        store.begin("c", wild, **OF)


def test_a_session_that_nobody_uses_is_forgotten(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    store = store_of(timeout_s=60)
    turn(store, "a", [1])
    turn(store, "b", [1])
    now[0] += 59
    begun = store.begin("a", HERE, **OF)
    now[0] += 2
    assert [record.name for record in store.list(HERE)] == ["a"], "one in use is not idle"
    store.commit(begun, [1, 2], None)
    now[0] += 60
    assert store.get("a", HERE).token_ids == [1, 2]
    now[0] += 1
    with pytest.raises(errors.SessionNotFoundError):
        store.get("a", HERE)


def test_an_engines_settings_limit_its_sessions(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    tenants = {"wild": TenantLimits(max_sessions=1)}
    store = SessionStore.of(EngineConfig(model="m", max_sessions=2, session_timeout_s=60, tenants=tenants))
    turn(store, "a", [1], space=Namespace("wild", ""))
    with pytest.raises(errors.SessionLimitError, match="max_sessions of tenant 'wild' is 1"):
        store.begin("b", Namespace("wild", ""), **OF)
    turn(store, "b", [1])
    with pytest.raises(errors.SessionLimitError, match="max_sessions is 2"):
        store.begin("c", HERE, **OF)
    now[0] += 61
    assert store.list(None) == []


@pytest.mark.parametrize("name", ["", "a/b", "-a", "a b", "x" * 129, None, "é"])
def test_a_bad_name_is_refused(name):
    store = store_of()
    turn(store, "good.name:1@x-y_z", [1])
    for use in (lambda: store.begin(name, HERE, **OF), lambda: store.fork("good.name:1@x-y_z", HERE, name)):
        with pytest.raises(errors.InvalidRequestError, match="the session name"):
            use()


def test_another_tokenizer_is_refused():
    store = store_of()
    turn(store, "a", [1])
    with pytest.raises(errors.InvalidRequestError, match="begun with m, whose tokens are not those of n"):
        store.begin("a", HERE, model="n", tokenizer="u")
    turn(store, "a", [1, 2])


@pytest.mark.parametrize("meanwhile", ["changed", "deleted", "begun"])
def test_a_turn_that_another_process_overtook_is_not_kept(tmp_path, meanwhile):
    ours, theirs = (store_of(tmp_path / "s.sqlite") for _ in range(2))
    if meanwhile != "begun":
        turn(ours, "a", [1])
    begun = ours.begin("a", HERE, **OF)
    if meanwhile == "deleted":
        theirs.delete("a", HERE)
    else:
        turn(theirs, "a", [1, 5])
    with pytest.raises(errors.SessionBusyError, match="changed or deleted by another process"):
        ours.commit(begun, [1, 7], None)
    assert [info.num_tokens for info in ours.list(HERE)] == ([] if meanwhile == "deleted" else [2])
    turn(ours, "a", [1, 9])
    assert theirs.get("a", HERE).token_ids == [1, 9]


CHILD = """
import sys
from pagemill.namespace import Namespace
from pagemill.sessions.store import SessionStore
from pagemill.tenant_limits import TenantLimits
store = SessionStore(sys.argv[1], 100, None)
for turn in range(int(sys.argv[3])):
    store.commit(store.begin(sys.argv[2], Namespace(), model="m", tokenizer="t"), [turn] * 1000, None)
    print(turn, flush=True)
"""


def child(path, name, turns):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), name, str(turns)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_two_processes_write_at_once(tmp_path):
    processes = [child(tmp_path / "s.sqlite", name, 40) for name in "ab"]
    for process in processes:
        _, messages = process.communicate(timeout=60)
        assert process.returncode == 0, messages.decode()
    assert [record.num_turns for record in store_of(tmp_path / "s.sqlite").list(HERE)] == [40, 40]


def test_killed_at_any_moment_a_session_has_whole_turns(tmp_path):
    path, random_ = tmp_path / "s.sqlite", random.Random(1)
    for _ in range(8):
        process = child(path, "a", 100_000)
        said = int(process.stdout.readline())
        time.sleep(random_.uniform(0, 0.1))
        os.kill(process.pid, signal.SIGKILL)
        rest, _ = process.communicate()
        said = max([said, *map(int, rest.split(b"\n")[:-1])])
        (value,) = set(store_of(path).get("a", HERE).token_ids)
        assert value in (said, said + 1)


def response(store, name, space=HERE, after=None):
    begun = store.begin_response(name, space, after=after, keep=True, **OF)
    store.commit(begun, [*begun.token_ids, 1], [], response={"name": name})


def names(store, space=HERE):
    return {found.name for found in store.list(space)}


def test_responses_give_way_to_newer_ones_and_to_sessions():
    store = store_of(max_sessions=3)
    turn(store, "named", [1])
    response(store, "resp_1")
    response(store, "resp_2")
    response(store, "resp_3", after="resp_1")  # that is used now: the other one gives way
    assert names(store) == {"named", "resp_1", "resp_3"}
    assert store.get("resp_3", HERE).token_ids == [1, 1]
    turn(store, "another", [1])
    turn(store, "third", [1])
    assert names(store) == {"named", "another", "third"}
    with pytest.raises(errors.SessionLimitError, match="set store to false"):
        store.begin_response("resp_4", HERE, after=None, keep=True, **OF)
    store.release(store.begin_response("resp_4", HERE, after=None, keep=False, **OF))
    with pytest.raises(errors.ResponseNotFoundError, match="gave way to newer ones"):
        store.begin_response("resp_5", HERE, after="resp_3", keep=False, **OF)


def test_responses_give_way_to_their_own_tenant_alone():
    store = store_of(max_sessions=3)
    store.set_limit("a", TenantLimits(max_sessions=1))
    for name in ("resp_1", "resp_2"):
        response(store, name, Namespace("a"))
        response(store, name, Namespace("b"))
    assert (names(store, Namespace("a")), names(store, Namespace("b"))) == ({"resp_2"}, {"resp_1", "resp_2"})
    with pytest.raises(errors.SessionLimitError):
        turn(store, "c", [1], space=Namespace("c"))


def test_many_responses_at_once_need_no_room_each():
    store = store_of(max_sessions=1)
    begun = [store.begin_response(f"resp_{at}", HERE, after=None, keep=True, **OF) for at in range(3)]
    for each in begun:
        store.commit(each, [1], [], response={})
    assert names(store) == {"resp_2"}


def test_a_new_sessions_turn_that_fails_costs_no_response_and_one_that_ends_well_the_oldest():
    store = store_of(max_sessions=2)
    response(store, "resp_1")
    response(store, "resp_2")
    store.release(store.begin("chat", HERE, **OF))
    assert names(store) == {"resp_1", "resp_2"}
    for tokens in ([1], [1, 2]):
        turn(store, "chat", tokens)
        assert names(store) == {"resp_2", "chat"}


def test_a_listing_reads_nothing_of_what_was_said():
    store = store_of(max_sessions=50)
    for number in range(50):
        turn(store, f"s{number}", [number] * 10_000, [{"role": "user", "content": "x" * 10_000}])
    tracemalloc.start()
    try:
        listed = store.list(HERE)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [(info.num_tokens, info.num_messages) for info in listed] == [(10_000, 1)] * 50
    assert peak < 250_000, "the tokens of all have 2,000,000 bytes"


def test_others_use_sessions_between_two_pages_of_a_listing(monkeypatch):
    monkeypatch.setattr(stores, "PAGE", 2)
    store = store_of(max_sessions=20)
    spaces = [HERE, MINE, Namespace("acme", "")]
    for number in range(5):
        for space in spaces:
            turn(store, f"s{number}", [1], space=space)
    left, info_of = iter(range(5)), stores.info_of

    def others_work(card):
        """Another thread, as it would wait for a lock that this one holds."""
        if (number := next(left, None)) is not None:
            release = threading.Thread(target=store.delete, args=(f"s{number}", MINE))
            release.start()
            release.join(5)
            assert not release.is_alive()
        return info_of(card)

    assert [info.name for info in store.list(HERE)] == [f"s{number}" for number in reversed(range(5))]
    assert [(info.name, info.space) for info in store.list(None)] == [
        (f"s{number}", space) for number in reversed(range(5)) for space in reversed(spaces)
    ]
    monkeypatch.setattr(stores, "info_of", others_work)
    others = [space for space in spaces if space != MINE]
    assert {info.space for info in store.list(None)} >= {*others}
    assert store.list(MINE) == []


def test_who_begins_waits_for_no_look_at_sessions_whose_turns_run(monkeypatch):
    """Each may have a long conversation, and there may be many."""
    store = store_of(max_sessions=9)
    turn(store, "one", [1])
    store.begin("one", HERE, **OF)
    looked_at = []
    monkeypatch.setattr("pagemill.sessions.store.record_of", looked_at.append)
    store.begin("other", HERE, **OF)
    assert looked_at == []
