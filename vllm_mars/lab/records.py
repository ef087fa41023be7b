"""The file of a sweep: JSON lines, of which the first says what is measured, the others what was.

Each call that measures something adds a head, and each turn one line, complete or not at all. A
turn that was measured again stands twice; the later line counts.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from vllm_mars.lab.plan import Cell, Key


@dataclass(frozen=True)
class Piece:
    """A relaxed token of an answer, or the text between two of them.

    Attributes:
        lost: what the token lost, in nats; None of text that was not relaxed.
    """

    text: str
    lost: float | None = None


@dataclass(frozen=True)
class Answer:
    """One request.

    Attributes:
        tokens: of the answer, as the server counts them.
        ttft, seconds: until the first token, and until the last one.
        pieces: the text with its relaxed tokens, where examples were asked for.
    """

    prompt: str
    text: str
    tokens: int
    ttft: float
    seconds: float
    pieces: tuple[Piece, ...] = ()

    @property
    def lost(self) -> list[float]:
        """What each relaxed token lost, in nats."""
        return [piece.lost for piece in self.pieces if piece.lost is not None]


@dataclass(frozen=True)
class Measured:
    """What a turn gave.

    Attributes:
        seconds: from its first request to its last token.
        drafts, accepted: by vLLM's counters of speculative decoding; a draft is a step of one
            request, accepted are its tokens.
        lost_nats, drift_nats: by the server's counters; None where it has none.
    """

    seconds: float
    drafts: int
    accepted: int
    lost_nats: float | None
    answers: tuple[Answer, ...]
    drift_nats: float | None = None


@dataclass(frozen=True)
class Record:
    """A turn in the file; `measured` is None where it failed, and `reason` says why."""

    name: str
    config: dict[str, Any] | None
    temperature: float
    concurrency: int
    repeat: int
    block: int
    measured: Measured | None
    reason: str = ""
    node: str = ""
    hardware: dict[str, Any] = field(default_factory=dict)
    created: str = ""
    kind: Literal["turn"] = "turn"

    @property
    def key(self) -> Key:
        """The turn's name."""
        return Key(self.name, self.temperature, self.concurrency, self.repeat, self.block)

    @property
    def problem(self) -> str:
        """Why it failed, in a line; "" where it did not."""
        first, *_ = [*self.reason.splitlines(), "no reason is given"]
        return "" if self.measured else first

    @property
    def cell(self) -> Cell:
        """What it belongs to."""
        return Cell(self.name, self.config, self.temperature, self.concurrency)


@dataclass(frozen=True)
class Head:
    """What a call measured.

    Attributes:
        settings: what all turns of a file have in common.
        baseline: the rule that ratios are over.
        run: as `vllm_mars.servers.provenance.describe_run` gives it.
    """

    settings: dict[str, Any]
    baseline: str
    run: dict[str, Any]
    schema: Literal[2] = 2
    kind: Literal["sweep"] = "sweep"


@dataclass(frozen=True)
class SweepFile:
    """What a file holds: at least one head, and each turn once."""

    heads: Sequence[Head]
    records: Sequence[Record]


def read_sweep(path: Path) -> SweepFile:
    """Reads a file of `vllm-mars sweep`; a last line that was not written to its end is left out.

    Raises:
        ValueError: the file cannot be read, or is no such file.
    """
    from pydantic import TypeAdapter, ValidationError

    line_type: TypeAdapter[Head | Record] = TypeAdapter(Head | Record)
    heads: list[Head] = []
    records: dict[Key, Record] = {}
    try:
        # Not splitlines, which also cuts at characters that JSON allows within a text.
        lines = path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines[:-1], 1):  # noqa: B007 - named by the error below
            found = line_type.validate_json(line)
            if isinstance(found, Head):
                heads.append(found)
            else:
                records[found.key] = found
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}; give the file of a sweep.") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(
            f"{path}, line {number}, is not of `vllm-mars sweep` of this release: "
            f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from error
    if not heads:
        raise ValueError(f"{path} says nothing of its sweep; give the file of a sweep.")
    return SweepFile(heads, list(records.values()))


def append(path: Path, record: Head | Record) -> None:
    """Adds a line, as `append_line` does."""
    append_line(path, asdict(record))


def append_line(path: Path, content: dict[str, Any]) -> None:
    """Adds a line of JSON, complete or not at all; a broken last line is removed first."""
    line = json.dumps(content, ensure_ascii=False) + "\n"
    with path.open("ab+") as file:
        file.seek(0)
        complete = file.read().rpartition(b"\n")
        file.truncate(len(complete[0]) + len(complete[1]))
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def require_writable(output: Path) -> None:
    """Makes the directory of a result file, before anything expensive runs.

    Raises:
        RuntimeError: the file could not be written.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeError(f"output={output} cannot be written: {error}; name another.") from error
    if output.is_dir() or not os.access(output.parent, os.W_OK):
        raise RuntimeError(f"output={output} cannot be written; name a file in another directory.")
