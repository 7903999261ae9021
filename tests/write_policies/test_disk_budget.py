"""The budget of bytes a day: what it counts, and what clocks and crashes do to it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvstore.engine.budget import DiskBudget
from kvstore.engine.steady_clock import SteadyClock
from kvstore.units import GIB, MIB

HOUR = 3600.0


class Machine:
    """Clocks as a test wants them, and budgets of daemon runs on it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "disk-budget"
        self.boot, self.up, self.unix = "boot-1", 1000.0, 1.7e9

    def budget(self, day_bytes: int = GIB) -> DiskBudget:
        return DiskBudget(
            self.path,
            day_bytes,
            SteadyClock(clock=lambda: self.up, wall=lambda: self.unix, boot=self.boot),
        )

    def passes(self, seconds: float) -> None:
        self.up += seconds
        self.unix += seconds

    def reboot(self, seconds: float) -> None:
        self.boot, self.up = self.boot + "+", 5.0
        self.unix += seconds


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def write(budget: DiskBudget, wanted_bytes: int) -> int:
    """Write as much of it as there is, in steps of 1 MiB."""

    async def work() -> int:
        written = 0
        while written < wanted_bytes:
            await budget.charge(MIB)
            if not budget.affordable(MIB):
                break
            budget.spend(MIB)
            written += MIB
        return written

    return asyncio.run(work())


def close(budget: DiskBudget) -> None:
    asyncio.run(budget.close())


def test_no_day_takes_more_whenever_it_begins(machine: Machine) -> None:
    budget = machine.budget()
    log: list[tuple[float, int]] = []
    for _ in range(100):
        log.append((machine.up, write(budget, 100 * MIB)))
        machine.passes(0.7 * HOUR)
    for begin, _ in log:
        day = sum(count for at, count in log if begin <= at < begin + 24 * HOUR)
        assert day <= GIB
    # It is not stingy either: of 70 hours' worth most was there.
    assert sum(count for _, count in log) >= 2.5 * GIB


def test_a_restart_gives_nothing_and_takes_nothing(machine: Machine) -> None:
    budget = machine.budget()
    assert write(budget, 600 * MIB) == 600 * MIB
    close(budget)
    machine.passes(10)
    budget = machine.budget()
    assert budget.left_bytes == GIB - 600 * MIB
    assert write(budget, GIB) == GIB - 600 * MIB
    close(budget)
    machine.passes(25 * HOUR)
    assert machine.budget().left_bytes == GIB


def test_a_crash_loop_writes_no_more_than_the_budget(machine: Machine) -> None:
    """Each run is killed soon after it wrote: what it charged ahead counts as written."""
    written = sum(write(machine.budget(), 10 * MIB) for _ in range(200))
    assert 100 * MIB <= written <= GIB
    assert machine.budget().left_bytes == 0


def test_a_clock_that_jumps_ahead_gives_nothing(machine: Machine) -> None:
    budget = machine.budget()
    assert write(budget, GIB) == GIB
    machine.unix += 365 * 24 * HOUR
    assert budget.left_bytes == 0
    close(budget)
    # Nor over a restart, as long as the machine runs.
    machine.unix += 365 * 24 * HOUR
    assert machine.budget().left_bytes == 0


def test_a_clock_that_jumps_back_does_not_stop_time(machine: Machine) -> None:
    budget = machine.budget()
    assert write(budget, GIB) == GIB
    machine.unix -= 365 * 24 * HOUR
    close(budget)
    machine.unix -= 1e9
    budget = machine.budget()
    machine.passes(25 * HOUR)
    assert budget.left_bytes == GIB
    close(budget)
    # A machine that wakes up in 1970 has not gone back in time.
    assert write(budget, GIB) == GIB
    close(budget)
    machine.reboot(-1e9)
    budget = machine.budget()
    assert budget.left_bytes == 0
    machine.passes(25 * HOUR)
    assert budget.left_bytes == GIB


def test_a_night_switched_off_counts(machine: Machine) -> None:
    budget = machine.budget()
    assert write(budget, GIB) == GIB
    close(budget)
    machine.reboot(12 * HOUR)
    assert machine.budget().left_bytes == 0
    machine.reboot(14 * HOUR)
    assert machine.budget().left_bytes == GIB


@pytest.mark.parametrize("damage", ["", "nonsense", "{}", "[]", '{"version": 1}', "flip", "later"])
def test_a_damaged_record_costs_a_day_not_the_disk(
    machine: Machine, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    budget = machine.budget()
    write(budget, MIB)
    close(budget)
    whole = machine.path.read_text()
    flipped = whole.replace("1000.0", "1001.0")
    later = whole.replace('"version": 1', '"version": 2')
    machine.path.write_text({"flip": flipped, "later": later}.get(damage, damage))
    budget = machine.budget()
    assert budget.left_bytes == 0
    assert len(caplog.records) == 1
    assert str(machine.path) in caplog.text
    machine.passes(25 * HOUR)
    assert write(budget, MIB) == MIB


def test_a_record_that_cannot_be_written_is_told_once(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.path.with_name("disk-budget.tmp").mkdir()
    budget = machine.budget()
    assert write(budget, 2 * GIB) == GIB
    assert len(caplog.records) == 1
    assert "cannot save" in caplog.text


def test_a_smaller_budget_holds_at_once(machine: Machine) -> None:
    budget = machine.budget()
    write(budget, 600 * MIB)
    close(budget)
    assert machine.budget(500 * MIB).left_bytes == 0
    assert machine.budget(700 * MIB).left_bytes == 100 * MIB
