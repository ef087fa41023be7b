"""Result file of a sweep, in JSON lines.

Each call that measures something appends a `RunHeader` and a `Record` per turn. Lines are written
completely or not at all. If a turn was measured again, its last line counts.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vllm_mars.lab.plan import Cell, Key


@dataclass(frozen=True)
class Piece:
    """A relaxed token of an answer, or the text between two of them."""

    text: str
    lost: float | None = None  # loss of a relaxed token in nats


@dataclass(frozen=True)
class Answer:
    prompt: str
    text: str
    tokens: int  # counted by the server
    ttft: float  # seconds to the first token
    seconds: float  # seconds to the last token
    pieces: tuple[Piece, ...] = ()  # of the text, if examples were requested

    @property
    def lost(self) -> list[float]:
        return [piece.lost for piece in self.pieces if piece.lost is not None]


@dataclass(frozen=True)
class Measured:
    """Measurements of a turn; None if the server has no such counter."""

    seconds: float  # from the first request to the last token
    drafts: int  # one per step of a request
    accepted: int  # draft tokens
    lost_nats: float | None
    answers: tuple[Answer, ...]
    drift_nats: float | None = None


@dataclass(frozen=True)
class Record:
    """A turn in the file; if it failed, `measured` is None and `reason` says why."""

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
        return Key(self.name, self.temperature, self.concurrency, self.repeat, self.block)

    @property
    def problem(self) -> str:
        """First line of the reason of a failure, else ""."""
        first, *_ = [*self.reason.splitlines(), "no reason is given"]
        return "" if self.measured else first

    @property
    def cell(self) -> Cell:
        return Cell(self.name, self.config, self.temperature, self.concurrency)


@dataclass(frozen=True)
class RunHeader:
    settings: dict[str, Any]  # options that all turns of a file share
    baseline: str  # rule in the denominator of ratios
    run: dict[str, Any]  # from `provenance.describe_run`
    schema: Literal[2] = 2
    kind: Literal["sweep"] = "sweep"


@dataclass(frozen=True)
class SweepFile:
    """Content of a file: at least one header, and each turn once."""

    heads: Sequence[RunHeader]
    records: Sequence[Record]


def read_sweep(path: Path) -> SweepFile:
    """Reads the file of a sweep, or raises ValueError; an incomplete last line is ignored."""
    from pydantic import TypeAdapter, ValidationError

    line_type: TypeAdapter[RunHeader | Record] = TypeAdapter(RunHeader | Record)
    heads: list[RunHeader] = []
    records: dict[Key, Record] = {}
    try:
        # splitlines would also split at characters that JSON allows in strings.
        lines = path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines[:-1], 1):  # noqa: B007 - named by the error below
            content = line_type.validate_json(line)
            if isinstance(content, RunHeader):
                heads.append(content)
            else:
                records[content.key] = content
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


def append_line(path: Path, content: dict[str, Any]) -> None:
    """Appends a line of JSON after removing an incomplete last line."""
    line = json.dumps(content, ensure_ascii=False) + "\n"
    with path.open("ab+") as file:
        file.seek(0)
        complete = file.read().rpartition(b"\n")
        file.truncate(len(complete[0]) + len(complete[1]))
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def require_writable(output: Path) -> None:
    """Creates the directory of a result file, or raises RuntimeError if it is not writable."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeError(f"output={output} cannot be written: {error}; name another.") from error
    if output.is_dir() or not os.access(output.parent, os.W_OK):
        raise RuntimeError(f"output={output} cannot be written; name a file in another directory.")
