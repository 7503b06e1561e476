"""Turns of clients with many and few waiting requests."""

from __future__ import annotations

import asyncio

import pytest

from paddlenlp_ext.serve.fair_turns import FairTurns, TooManyWaitingError


async def finish(turns: FairTurns, client: str, order: list[str]) -> None:
    async with turns.turn(client):
        order.append(client)
        await asyncio.sleep(0)


def test_turns_of_two_clients_alternate_although_one_came_first_with_many():
    order: list[str] = []

    async def use():
        turns = FairTurns(9)
        await asyncio.gather(*(finish(turns, name, order) for name in "aaaaabb"))

    asyncio.run(use())
    assert "".join(order) == "aababaa"


def test_turn_of_a_request_that_was_cancelled_goes_to_the_next_one():
    """Cancel a waiting request, and one whose turn has just come."""
    order: list[str] = []

    async def use():
        turns = FairTurns(9)
        async with turns.turn("a"):
            waiting = [asyncio.ensure_future(finish(turns, name, order)) for name in "bcde"]
            await asyncio.sleep(0)
            waiting[1].cancel()
        waiting[0].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await finish(turns, "f", order)

    asyncio.run(use())
    assert order == ["d", "e", "f"]


def test_client_with_too_many_waiting_requests_is_refused_and_another_one_is_not():
    async def use():
        turns = FairTurns(2)
        async with turns.turn("a"):
            waiting = [asyncio.ensure_future(finish(turns, name, [])) for name in "aab"]
            await asyncio.sleep(0)
            with pytest.raises(TooManyWaitingError, match=r"^2 requests from this client are waiting; try again"):
                await finish(turns, "a", [])
            waiting[0].cancel()
            await asyncio.sleep(0)
            waiting.append(asyncio.ensure_future(finish(turns, "a", [])))
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(use())
