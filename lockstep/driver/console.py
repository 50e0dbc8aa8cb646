"""What a person sees while a run goes on: one line per step on stderr; with ``--json`` one object per row on stdout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import rich.console

from lockstep.driver.rows import Row, step_line
from lockstep.metrics.sinks import dump_row
from lockstep.records import IntArray


class Console:
    """``say`` for sentences, ``step`` for rows. Logs go to stderr, results (``result``) to stdout."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self._stderr = rich.console.Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)

    def say(self, text: str) -> None:
        """A sentence for the person who watches; text from outside is neither markup nor an emoji's name."""
        self._stderr.print(text)

    def step(self, row: Row, num_steps: int) -> None:
        """The step's line, its verdict's sentence if it is not a pass, and the held-out result if there is one."""
        if self.as_json:
            self.result(dump_row(row))
        self._stderr.print(step_line(row, num_steps), markup=True)  # its styles are our own
        if row["verdict/status"] != "pass":
            self.say(f"  {row['verdict/sentence']}")
        if "idle/why" in row:
            self.say(f"  no weight moved: {row['idle/why']}")
        if row.get("rollout/failed"):
            self.say(f"  {row['rollout/failed']} samples have no score, first: {row['rollout/first_error']}")
        if "eval/problems" in row:
            self.say(f"  held-out: {heldout_text(row)}")

    def result(self, text: str) -> None:
        """A line of the command's result."""
        print(text, flush=True)

    @staticmethod
    def token_texts(decode: Callable[[Seq[int]], str]) -> Callable[[IntArray], list[str]]:
        """Texts of single tokens, for the sample browser."""
        return lambda tokens: [decode([int(token)]) for token in tokens]


def heldout_text(row: Mapping[str, object]) -> str:
    """An evaluation in words: correctness and form apart, or the mean reward where nothing says what is correct."""
    words = {"eval/accuracy": "correct", "eval/format": "in the asked form", "eval/truncated": "cut off"}
    told = [f"{row[key]:.3f} {word}" for key, word in words.items() if key in row]
    if "eval/accuracy" not in row and "eval/reward" in row:  # a reward without a notion of correct
        told.insert(0, f"reward {row['eval/reward']:.3f}")
    if row.get("eval/unscored"):
        why = row.get("eval/first_error", "every reward abstained")
        told.append(f"{row['eval/unscored']} of {row['eval/problems']} without a score: {why}")
    return ", ".join(told or ["no score"])
