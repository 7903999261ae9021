"""The oracle is worth something only if it notices: daemons that break one promise each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import oracle_sabotage
import oracle_world
import pytest
from oracle_machine import OracleMachine
from oracle_model import keys_of
from oracle_world import until

Start = Callable[[Callable[[], None]], OracleMachine]


@pytest.fixture
def sabotaged() -> Iterator[Start]:
    """Return a function that starts a machine whose daemon is sabotaged."""
    started: list[OracleMachine] = []

    def start(sabotage: Callable[[], None]) -> OracleMachine:
        machine = OracleMachine()
        machine.sabotage = sabotage
        started.append(machine)
        machine.begin(policy="through", host=32, disk=64)
        return machine

    yield start
    for machine in started:
        machine.clean_up()


def test_a_flush_that_wrote_no_record(sabotaged: Start) -> None:
    machine = sabotaged(oracle_sabotage.commit_nothing)
    machine.put(0, 0, 0, 5)
    machine.flush()
    with pytest.raises(AssertionError, match="5 blocks must be there"):
        machine.crash()


def test_a_flipped_bit_that_is_served(sabotaged: Start) -> None:
    machine = sabotaged(oracle_sabotage.check_no_digests)
    machine.put(0, 0, 0, 5)
    machine.flush()
    # Somebody may hold a copy a little longer.
    until(lambda: machine.players[0].evict(0, None, "host") == 0, machine.stats)
    with pytest.raises(AssertionError, match="wrong bytes"):
        machine.fault("read flip", [("get", 1, 0, 0, 5)], stays=False)


def test_blocks_of_an_epoch_that_ended(sabotaged: Start) -> None:
    machine = sabotaged(oracle_sabotage.keep_old_epochs)
    machine.put(0, 1, 2, 4)
    machine.bump(0, 1)
    with pytest.raises(AssertionError, match="a block that nobody put"):
        machine.get(2, 1, 2, 4)


def test_slots_that_are_never_free_again(sabotaged: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = sabotaged(oracle_sabotage.keep_granted_slots)

    def granted() -> bool:
        # A pool that is still being made gives fewer slots, or none.
        machine.hold_grant(0, 0, 3)
        return bool(machine.grants)

    until(granted, machine.stats)
    monkeypatch.setattr(oracle_world, "PATIENCE_SECONDS", 1.0)
    with pytest.raises(AssertionError, match="granted_slots: [123]"):
        machine.finish()


def test_a_quota_that_others_pay_for(sabotaged: Start) -> None:
    machine = sabotaged(oracle_sabotage.make_others_pay)
    machine.put(0, 0, 0, 6)
    machine.put(0, 1, 0, 6)
    machine.flush()
    machine.limit(1, 1, "host", 2)
    with pytest.raises(AssertionError, match="6 blocks must be there"):
        machine.look(0, machine.model.spaces[0], keys_of(0, 6))
