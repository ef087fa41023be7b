"""The line that says what the demo is doing and how long it will still take."""

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

# Without a terminal a line of text is printed, at most this often.
PLAIN_SECONDS = 15.0


class Forecast:
    """How long the steps that are left will take, from how long those before them took."""

    def __init__(self, guesses: Mapping[str, float], steps: Mapping[str, int]) -> None:
        """Starts with nothing measured.

        Args:
            guesses: seconds, above 0, of one step of each kind; once a step has been measured only
                their proportions matter.
            steps: number of steps of each kind.
        """
        self._guesses = dict(guesses)
        self._left = dict(steps)
        self._took: dict[str, list[float]] = {kind: [] for kind in steps}

    @property
    def measured(self) -> bool:
        """Whether any step has been measured."""
        return any(self._took.values())

    def took(self, kind: str, seconds: float) -> None:
        """Notes that a step is done."""
        self._left[kind] -= 1
        self._took[kind].append(seconds)

    def seconds_left(self) -> float:
        """Returns the seconds that all steps which are left will take.

        A step takes the mean of its kind so far. Where its kind was not measured it takes the
        guess, times how much longer than guessed the measured steps took.
        """
        took = sum(sum(seconds) for seconds in self._took.values())
        guessed = sum(len(seconds) * self._guesses[kind] for kind, seconds in self._took.items())
        pace = took / guessed if guessed else 1.0
        return sum(
            count * (statistics.mean(self._took[kind] or [self._guesses[kind] * pace]))
            for kind, count in self._left.items()
        )


class ProgressLine:
    """Shows the present activity and the time left: one live line, or now and then a plain one."""

    def __init__(self, console: Any, forecast: Forecast) -> None:
        """Prints nothing yet, to a `rich.console.Console` then."""
        self._console = console
        self._forecast = forecast
        self._activity = ""
        self._until = 0.0
        self._guessed = True
        self._printed = 0.0

    def text(self) -> str:
        """Returns the line."""
        left = max(0.0, self._until - time.monotonic())
        minutes, seconds = divmod(round(left), 60)
        about = "about" if not self._guessed else "at a guess"
        return f"{self._activity}; {about} {minutes}:{seconds:02d} min left"

    def took(self, kind: str, seconds: float) -> None:
        """Notes a step of the forecast that is done."""
        self._forecast.took(kind, seconds)

    def show(self, activity: str, *, since: float | None = None) -> None:
        """Says what is being done now.

        Args:
            activity: a phrase, such as "asking: 3 of 9"; without a terminal another word before
                the colon is printed at once.
            since: `time.monotonic()` at the begin of the present step of the forecast; now if None.
        """
        new_phase = activity.split(":")[0] != self._activity.split(":")[0]
        self._activity = activity
        now = time.monotonic()
        self._until = (now if since is None else since) + self._forecast.seconds_left()
        self._guessed = not self._forecast.measured
        if self._console.is_terminal:
            return
        if new_phase or now - self._printed >= PLAIN_SECONDS:
            self._printed = now
            self._console.print(self.text(), soft_wrap=True)

    @contextlib.contextmanager
    def live(self) -> Iterator["ProgressLine"]:
        """Keeps the line on a terminal until the context ends."""
        from rich.progress import Progress, ProgressColumn, SpinnerColumn, TimeElapsedColumn
        from rich.text import Text

        line = self

        class Line(ProgressColumn):
            def render(self, task: Any) -> Text:
                return Text(line.text())

        with Progress(
            SpinnerColumn(),
            TimeElapsedColumn(),
            Line(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        ) as progress:
            progress.add_task("")
            yield self
