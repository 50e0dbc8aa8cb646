"""Ctrl-C: the first finishes the step and saves; a second stops at once, losing at most the step.

A stop at once must not tear the optimizer's state apart, so from the optimizer's move to the end of a step the request
is on ``hold``: there the second Ctrl-C waits, which is short.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

HANDLED = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether the run was asked to stop. ``requested`` is True from the first signal on."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._num_signals = 0
        self._held = False

    @property
    def requested(self) -> bool:
        """True after the first signal."""
        return self._num_signals > 0

    def handle(self, _signal: int, _frame: FrameType | None) -> None:
        """The signal handler. Raises KeyboardInterrupt at the second signal unless on hold, always at the third."""
        self._num_signals += 1
        if self._num_signals == 1:
            self._say("stopping: finishing this step, then saving (Ctrl-C again to stop at once)")
        elif self._held and self._num_signals == 2:
            self._say("stopping as soon as the weights are consistent and saved (Ctrl-C again to abandon that)")
        else:
            raise KeyboardInterrupt

    def hold(self) -> None:
        """From here on the weights are not those of the last finished step."""
        self._held = True

    def release(self) -> None:
        """The weights are those of the last finished step again."""
        self._held = False


@contextmanager
def stop_on_signals(say: Callable[[str], None]) -> Iterator[StopRequest]:
    """Handle SIGINT and SIGTERM while the block runs (main thread only; elsewhere nothing is installed)."""
    request = StopRequest(say)
    try:
        previous = {number: signal.signal(number, request.handle) for number in HANDLED}
    except ValueError:  # not the main thread: signals can't be handled here
        previous = {}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
