"""Where the cells of a sweep are measured and judged: here, or on a Ray cluster (`ray_cells`)."""

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path

from vllm_mars.experiments.quality.judge import Judge
from vllm_mars.experiments.quality.target_scores import TargetScorer
from vllm_mars.experiments.sweep.group import Job, Sweep, measure, server_of
from vllm_mars.experiments.sweep.methods_here import ask_platform
from vllm_mars.experiments.sweep.plan import SweepOptions
from vllm_mars.experiments.sweep.records import Cell, CellKey, Quality


class LocalRunner:
    """Measures on this machine, one group after the other.

    Attributes:
        side_by_side: servers that a group may hold; 0 sets no limit.
    """

    def __init__(self, options: SweepOptions, log_dir: Path) -> None:
        """Asks vLLM what it can do here.

        Args:
            options: of the sweep.
            log_dir: directory for the logs of servers and client.

        Raises:
            RuntimeError: vLLM cannot be imported.
        """
        self._platform = ask_platform()
        self._log_dir = log_dir
        self.side_by_side = options.side_by_side or (0 if self._platform.device == "cpu" else 1)

    def run(self, jobs: Sequence[Job]) -> Generator[Cell]:
        """Measures the jobs' cells and yields each as soon as it is measured."""
        for job in jobs:
            with contextlib.closing(measure(job, self._log_dir, self._platform)) as cells:
                yield from cells

    def judge(self, sweep: Sweep, cells: Sequence[Cell]) -> Generator[tuple[CellKey, Quality]]:
        """Judges cells, with a server of the target where the prompts are at hand.

        The server ends with the iterator: close it where it may be left early.

        Args:
            sweep: of the cells.
            cells: all of the file; those with a quality are left as they are.

        Yields:
            Key and quality of each other cell.

        Raises:
            RuntimeError: the server does not start or fails.
        """
        options = sweep.options
        with contextlib.ExitStack() as stack:
            scorer = None
            if any(dataset.items for dataset in sweep.datasets):
                on_cpu = self._platform.device == "cpu"
                server = server_of(sweep, on_cpu, self._log_dir / "judge.log")
                scorer = TargetScorer(stack.enter_context(server).base_url, sweep.model)
            judge = Judge(
                sweep.datasets, margin=options.margin, nll_margin=options.nll_margin, scorer=scorer
            )
            yield from judge.judge(cells)
