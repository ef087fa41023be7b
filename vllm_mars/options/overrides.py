"""`VLLM_MARS_OVERRIDES`: a file that makes a running server stricter, read by the front end.

It contains a JSON object such as `{"mars_price": 0}` or `{"mars_max_loss": 0.01}`, or `{}` for
none. When a request arrives, at most once a second, the front end checks whether the file has
changed. The overrides reach the workers with the request, in vLLM's copy of its parameters, so that
parameters which a caller reuses are not modified.
"""

import functools
import json
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from vllm_mars.options.config import MarsConfig
from vllm_mars.options.requests import OVERRIDES, check_overrides

logger = logging.getLogger(f"vllm.{__name__}")

VARIABLE = "VLLM_MARS_OVERRIDES"
# Minimum seconds between checks of the file.
PERIOD = 1.0


class Overrides:
    """Overrides of a file, as last read without an error; the first read raises ValueError."""

    def __init__(self, path: str, config: MarsConfig) -> None:
        self._path = path
        self._config = config
        self._observers: list[Callable[[dict[str, float]], None]] = []
        self._look_again = time.monotonic() + PERIOD
        self._stamp = _stamp(path)
        self._options = self._read()

    def in_force(self) -> dict[str, float]:
        """Returns the overrides for a request that arrives now."""
        now = time.monotonic()
        if now >= self._look_again:
            self._look_again = now + PERIOD
            self._look()
        return self._options

    def observe(self, observer: Callable[[dict[str, float]], None]) -> None:
        """Calls a function with the overrides now and after each change."""
        observer(self._options)
        self._observers.append(observer)

    def _look(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        # Updated first, so that an unreadable file is logged once.
        self._stamp = stamp
        try:
            self._options = self._read()
        except ValueError as error:
            in_force = json.dumps(self._options)
            logger.error("%s Until then this stays in force: %s", error, in_force)
            return
        for observer in self._observers:
            observer(self._options)

    def _read(self) -> dict[str, float]:
        try:
            with open(self._path, encoding="utf-8-sig") as file:
                options = check_overrides(json.load(file), self._config)
        except (OSError, ValueError, RecursionError) as error:
            reason = str(error).rstrip(".")
            raise ValueError(
                f"{VARIABLE}={self._path} cannot be used: {reason}. Write JSON there, such as "
                '{"mars_max_loss": 0}, or {} for no override.'
            ) from error
        logger.info("%s: in force for new requests: %s", VARIABLE, json.dumps(options))
        return options


_overrides = functools.cache(Overrides)


def overrides_of(config: MarsConfig) -> Overrides | None:
    """Returns the server's overrides, or None if the environment names no file."""
    path = os.environ.get(VARIABLE)
    return _overrides(path, config) if path else None


def read_at_start(input_processor: Any, config: MarsConfig) -> None:
    """Raises ValueError if the file is unreadable: it may be there to force strict verification."""
    overrides_of(config)


def override(request: Any, config: MarsConfig) -> None:
    """Adds the overrides to a request, vLLM's new `EngineCoreRequest`."""
    overrides = overrides_of(config)
    params = request.sampling_params
    if overrides is not None and params is not None and (options := overrides.in_force()):
        params.extra_args = {**(params.extra_args or {}), OVERRIDES: options}


def _stamp(path: str) -> tuple[int, ...] | None:
    """Stamp that changes with a file, its permissions or a link to it; None if there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size
