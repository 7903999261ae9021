"""`Admin.Doctor`: the machine's checks with this daemon's settings, and its own tiers' state."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Final

from kvstore.doctor import Examination, Finding, Level, Setup
from kvstore.proto import kvstore_pb2 as pb

if TYPE_CHECKING:
    from kvstore.config import ServeConfig
    from kvstore.engine import Engine

__all__ = ["Doctor"]

_log = logging.getLogger(__name__)

# Shorter than what clients wait.
_WAIT_SECONDS: Final = 20.0


class Doctor:
    """Examines off the event loop, once at a time: who asks meanwhile gets the same findings."""

    def __init__(
        self, config: ServeConfig, engine: Engine, wait_seconds: float = _WAIT_SECONDS
    ) -> None:
        """Describe what is examined.

        Args:
            config: what the daemon runs with.
            engine: started.
            wait_seconds: after which an answer names what hangs instead of waiting for it.
        """
        self._config = config
        self._engine = engine
        self._wait_seconds = wait_seconds
        self._examination: Examination | None = None
        self._done: asyncio.Future[None] | None = None

    async def examine(self) -> pb.DoctorResponse:
        """Return the findings; waits for files and directories, at most `wait_seconds`."""
        if self._done is None or self._done.done():
            self._begin()
        assert self._done is not None
        assert self._examination is not None
        done, examination = self._done, self._examination
        await asyncio.wait([done], timeout=self._wait_seconds)
        found = [*self._tiers(), *examination.found]
        if not done.done():
            found.append(
                Finding(
                    examination.at,
                    Level.ERROR,
                    f"no answer within {self._wait_seconds:g} s; nothing was looked at after it",
                    "see the kernel's log: a file system or device hangs",
                )
            )
        return pb.DoctorResponse(
            findings=[
                pb.DoctorFinding(subject=f.subject, level=f.level, text=f.text, advice=f.advice)
                for f in found
            ]
        )

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        done = self._done = loop.create_future()
        examination = self._examination = Examination(self._setup())

        def finish() -> None:
            if not done.done():
                done.set_result(None)

        def run() -> None:
            try:
                examination.run()
            except Exception as error:  # noqa: BLE001 - thread boundary: the answer says so
                _log.exception("the examination failed at %s", examination.at)
                examination.found.append(
                    Finding(
                        examination.at, Level.ERROR, f"the check failed: {error!r}", "report it"
                    )
                )
            try:
                loop.call_soon_threadsafe(finish)
            except RuntimeError:
                _log.debug("an examination ended after its event loop")

        # A daemon thread: one that hangs on a dead device must not keep the process from ending.
        threading.Thread(target=run, name="doctor", daemon=True).start()

    def _setup(self) -> Setup:
        disk = self._engine.disk
        return Setup(
            state=self._config.state,
            host_pool_bytes=self._engine.host.usage().capacity_bytes,
            disk=self._config.disk,
            disk_capacity_bytes=None if disk is None else disk.usage().capacity_bytes,
            io_threads=self._config.io_threads,
        )

    def _tiers(self) -> list[Finding]:
        """Say how the tiers are: what the daemon alone knows."""
        engine = self._engine
        states = [("host tier", engine.host.state, "")]
        if engine.gpu is not None:
            names = ", ".join(device.name for device in engine.gpu.devices)
            way = "host" if engine.gpu_reader is None else engine.gpu_reader.name
            by = "through host memory" if way == "host" else f"by {way}"
            states.append(("gpu tier", engine.gpu.state, f" on {names}; from disk {by}"))
        if engine.disk is not None:
            states.append(("disk tier", engine.disk_state, f", {engine.disk.io_engine}"))
        found = []
        for subject, state, how in states:
            if state == "ok":
                found.append(Finding(subject, Level.OK, f"works{how}"))
            else:
                advice = "see the daemon's log and the findings below; it recovers by itself"
                found.append(Finding(subject, Level.ERROR, state, advice))
        if engine.reservations.closed:
            text = "drained: nothing is stored until the next start"
            found.append(Finding("storing", Level.WARNING, text, "restart the daemon to go on"))
        return found
