"""Result files: JSON, written complete or not at all."""

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

# A list without a text, object or list in it. A text holds no line's end, so it starts outside one.
_FLAT_LIST = re.compile(r'\[\n([^][{}"]*)\]')


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a file of indented JSON, a list of numbers in one line, complete or not at all."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    text = _FLAT_LIST.sub(lambda found: f"[{' '.join(found[1].split())}]", text)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8"
    ) as file:
        file.write(text + "\n")
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


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
