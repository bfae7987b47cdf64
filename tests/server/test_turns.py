"""Turns: what many clients do at once leaves the event loop to others in between."""

import asyncio
import contextlib
import socket
import threading

from pagemill.server.access.limits import ServerLimits
from pagemill.server.access.turns import ACCEPTS_AT_ONCE, EVENTS_AT_ONCE, ListeningServer, Turns
from pagemill.server.run import server_config
from server.test_connections import HEAD, app, connect, listening, read_all


def test_a_few_are_called_in_each_turn_of_the_loop_and_in_order():
    async def run():
        turns, called, counts = Turns(), [], []
        for number in range(3 * EVENTS_AT_ONCE + 1):
            turns.add(lambda number=number: called.append(number))
        while len(called) < 3 * EVENTS_AT_ONCE + 1:
            counts.append(len(called))
            await asyncio.sleep(0)
        return called, counts

    called, counts = asyncio.run(run())
    assert called == [*range(3 * EVENTS_AT_ONCE + 1)]
    assert counts == [0, EVENTS_AT_ONCE, 2 * EVENTS_AT_ONCE, 3 * EVENTS_AT_ONCE]


def test_what_fails_holds_nobody_up_and_what_is_added_meanwhile_has_its_turn():
    async def run():
        turns, called, failures, done = Turns(), [], [], asyncio.Event()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))

        def fail():
            turns.add(done.set)
            raise RuntimeError("it fails")

        turns.add(fail)
        turns.add(lambda: called.append(1))
        await asyncio.wait_for(done.wait(), 5)
        turns.add(lambda: called.append(2))
        await asyncio.sleep(0.01)
        return called, [str(failure) for failure in failures]

    assert asyncio.run(run()) == ([1, 2], ["it fails"])


def test_a_burst_is_answered_although_few_are_accepted_at_once():
    with listening() as (port, _):
        count, answers = 20 * ACCEPTS_AT_ONCE, []

        def ask():
            for connection in [connect(port) for _ in range(count // 4)]:
                with connection:
                    connection.sendall(HEAD + b"Connection: close\r\n\r\n")
                    answers.append(read_all(connection).split()[1])

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert answers == [b"200"] * count


def test_many_connections_may_wait_to_be_accepted():
    async def run():
        with socket.create_server(("127.0.0.1", 0)) as sock:
            server = ListeningServer(server_config(app, ServerLimits(), print))
            server.config.load()
            server.lifespan = server.config.lifespan_class(server.config)
            await server.startup([sock])
            with contextlib.ExitStack() as stack:
                for _ in range(5 * ACCEPTS_AT_ONCE):  # in the loop's thread, which accepts none meanwhile
                    stack.enter_context(socket.create_connection(sock.getsockname(), timeout=2))
            for each in server.servers:
                each.close()

    asyncio.run(run())
