"""A few seconds of the attack: the long one is `make attack`."""

from attack import run


def test_a_server_withstands_an_attack():
    found = run(seconds=8, seed=1, num_threads=4)
    assert not found["failed"], found
