"""Short form of the attacks on the server; `python -m tests.stress.attack_server` measures latencies."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.stress import attack_server
from tests.stress.attack_server import ATTACKER, ATTACKS, Latencies, Target, ask, attacked, health, resources
from tests.stress.wide_bodies import wide_bodies

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs a second loopback address and /proc")
_NUM_ENTRIES = 5_000


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Target, int]]:
    with attack_server.chosen_server(None) as (target, pid):
        ask(target)
        yield target, pid


@pytest.mark.parametrize(
    "names", [*([name] for name in ATTACKS if name != "wide"), ["many", "unread", "echo"]], ids="+".join
)
def test_client_is_answered_as_before_while_another_one_attacks(server, names):
    target, _ = server
    expected = ask(target)[1]
    with attacked(target, names) as count:
        while count.value < len(names):
            health(target)
        assert [ask(target)[1] for _ in range(3)] == [expected] * 3
        health(target)


def test_bodies_with_many_entries_in_any_field_are_answered_and_leave_the_server_as_it_was(server):
    """Send each body, and check the status and the answer of another client after it."""
    target, pid = server
    expected, before = ask(target)[1], resources(pid)
    statuses = {}
    for name, path, body in wide_bodies(target.model, _NUM_ENTRIES):
        statuses[name] = target.post(ATTACKER, path, body)[0]
        health(target)
    assert len(statuses) > 40 and set(statuses.values()) <= {200, 400, 404, 413, 429}
    assert ask(target)[1] == expected
    assert resources(pid)[1] <= before[1] + 2


def test_report_has_the_ratio_of_the_percentiles():
    found = Latencies([0.1] * 99 + [0.2], [0.1] * 98 + [0.3] * 2, [0.01])
    assert found.report().splitlines()[2].split() == ["attacked", "100", "0.100s", "0.300s", "1.50"]
