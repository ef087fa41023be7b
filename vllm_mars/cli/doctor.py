"""`vllm-mars doctor`: checks an install, or whether a running server really relaxes.

A patch of an inference engine usually fails silently: it is installed but has no effect. So the
doctor not only checks the parts, but also sends requests to a server and measures the gain.
"""

import importlib.metadata
import importlib.util
import os
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

from vllm_mars.hooks.compat import check_interfaces
from vllm_mars.kernels.rules import RULES
from vllm_mars.lab.prompts import load_prompts
from vllm_mars.options.lock import check_lock, lock_is_on
from vllm_mars.releases import RELEASES, check_version
from vllm_mars.requirements import INSTALL_VLLM
from vllm_mars.servers.provenance import versions
from vllm_mars.servers.scrape import (
    ALLOWED,
    GAINED,
    GENERATED_TOKENS,
    LOST_NATS,
    REFUSED,
    RELAXABLE,
    VERIFIED,
    openai_client,
    totals,
)

NEEDED = ()
PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN = "mars"
# Limit of one answer, so that a model can think and then answer, and of all before the last one.
PROBE_TOKENS = 2048
REQUEST_TIMEOUT = 600.0
METRICS_TIMEOUT = 5.0

State = Literal["ok", "note", "fault"]
_STYLES: dict[State, str] = {"ok": "green", "note": "yellow", "fault": "bold red"}


class Finding(NamedTuple):
    """Result of one check, with the way out of a fault in the text."""

    # "note" is information; "fault" is a problem, or something that could not be shown.
    state: State
    text: str


_fault = partial(Finding, "fault")
_FIXED_DRAFTS = (
    "requests that give no temperature sample here, and drafts are fixed, as of ngram and with "
    'theta: a head or draft model gains more with "draft_sample_method": "probabilistic", at the '
    "same loss."
)
_PROBABILISTIC_DRAFTS = (
    "requests that give no temperature sample here, and drafts are probabilistic"
)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check the install, or whether a running server really relaxes",
        description="Without URL: whether vLLM, this package and its plugin fit together here. "
        "With URL: whether the server there verifies by the margin, by which rule, and, with a few "
        "questions, whether it relaxes tokens. Exit status 0 if all is well, 1 if something is "
        "wrong or could not be shown.",
    )
    parser.add_argument("url", nargs="?", metavar="URL",
        help="a server, such as http://localhost:8000; its API key is taken from "
        "OPENAI_API_KEY")  # fmt: skip


def run(url: str | None = None) -> int:
    """Prints findings about this environment or a server; returns 1 if there is a fault, else 0."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    faults = 0
    for state, text in findings_here() if url is None else findings_at(url):
        line = Table.grid(padding=(0, 2))
        # Text, not markup, in which the extra in `pip install '.[cuda]'` would be a style.
        line.add_row(f"[{_STYLES[state]}]{state:5}[/]", Text(text))
        console.print(line)
        faults += state == "fault"
    console.print(f"{faults} fault{'s' * (faults != 1)}" if faults else "all is well")
    return int(faults > 0)


def findings_here() -> Iterator[Finding]:
    """Checks this environment; imports vLLM, which takes some seconds."""
    installed = [f"{name} {version}" for name, version in versions().items() if version]
    yield Finding("ok", ", ".join(installed))
    if importlib.util.find_spec("vllm") is None:
        yield _fault(f"vLLM is not installed here; {INSTALL_VLLM}")
        return
    yield _plugin()
    yield _lock()
    try:
        import vllm

        check_version(vllm.__version__)
    except (ImportError, RuntimeError) as error:
        yield _fault(str(error))
        return
    yield from _interfaces(vllm.__version__)


def _interfaces(version: str) -> Iterator[Finding]:
    from vllm.platforms import current_platform

    fits = True
    runner = "V1" if current_platform.is_cpu() else "V2"
    for part in ("front end", "API server", "engine core", runner):
        try:
            check_interfaces(part)
        except RuntimeError as error:
            yield _fault(str(error))
            fits = False
    if not fits:
        return
    yield Finding("ok", f"vLLM {version} has the interfaces that are needed")
    if not version.startswith(tuple(f"{release}." for release in RELEASES)):
        yield Finding(
            "note",
            f"this project's tests have not run on vLLM {version}, only on "
            f"{' and '.join(RELEASES)}; run them with `make test`.",
        )


def _plugin() -> Finding:
    """Checks whether vLLM will load the plugin in all of its processes on this machine."""
    entries = importlib.metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN)
    if not entries:
        return _fault(
            f"vLLM does not find the plugin: no package here has the entry point {PLUGIN!r} in "
            f"{PLUGIN_GROUP}; install vllm-mars with pip into this environment.",
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        return _fault(
            f"VLLM_PLUGINS={allowed!r} leaves the plugin out; add {PLUGIN!r} or unset it.",
        )
    return Finding("ok", f"vLLM finds the plugin ({next(iter(entries)).value})")


def _lock() -> Finding:
    try:
        check_lock(None)
    except ValueError as error:
        return _fault(str(error))
    if lock_is_on():
        return Finding("note", "VLLM_MARS_LOCK=strict: servers here refuse to be lossy.")
    return Finding("ok", "VLLM_MARS_LOCK does not say strict: servers here may be lossy")


def findings_at(url: str) -> Iterator[Finding]:
    """Checks a running server with requests; ValueError if `url` is not an HTTP address."""
    address = _metrics_url(url)
    try:
        probe = _Probe(address)
        yield Finding("ok", f"{address} has the metrics of margin-aware verification")
        yield probe.spent()
        yield from probe.findings()
    except RuntimeError as error:
        yield _fault(str(error))


class _Probe:
    """Sends requests to a server and reads the increase of its metrics."""

    def __init__(self, metrics_url: str) -> None:
        self._metrics_url = metrics_url
        self._before = _read(metrics_url)
        # Bound of the requests, if the server is strict by default.
        self._bound: dict[str, float] = {}
        api_key = os.environ.get("OPENAI_API_KEY", "none")
        base_url = metrics_url.removesuffix("/metrics")
        self._client = openai_client(base_url, REQUEST_TIMEOUT, api_key)
        # Why the server refuses chat, if it does, such as for want of a chat template.
        self._no_chat = ""

    def spent(self) -> Finding:
        """Reports the gain and the loss of the server's answers before this probe."""
        tokens = _total(self._before, GENERATED_TOKENS)
        if not tokens:
            return Finding("note", "it has answered nothing yet")
        gained = _total(self._before, GAINED)
        lost = _total(self._before, LOST_NATS)
        return Finding(
            "ok",
            f"since its start: {tokens:.0f} tokens, of which MARS gained {gained / tokens:.1%}, "
            f"at a loss of {lost / tokens:.4f} nats per token",
        )

    def findings(self) -> Iterator[Finding]:
        """Sends one prompt after another until the rule has gained a token."""
        prompts = [prompt.turns[0] for prompt in load_prompts()]
        report, tokens = self._ask(prompts[0], max_tokens=1)
        if report is None:
            raise RuntimeError(
                "the answer lacks mars_return's report, though it was asked for: the "
                "server that answers is not the one whose metrics were read."
            )
        if self._no_chat:
            yield Finding("note", f"completions, not chat, are tested: {self._no_chat}")
        yield _rule(report)
        if _is_strict(report):
            self._bound = self._loosest_bound()
            if not self._bound:
                return
            report, num_tokens = self._ask(prompts[0], max_tokens=1)
            tokens += num_tokens
            # An overrides file may force strict verification.
            if report is None or _is_strict(report):
                return
            (bound,) = (f"{option} {value:g}" for option, value in self._bound.items())
            yield Finding("ok", f"a request may ask for {bound}, lossy")
        for prompt in prompts:
            tokens += self._ask(prompt)[1]
            increase = self._increase(tokens)
            if _total(increase, GAINED) >= 1 or tokens >= PROBE_TOKENS:
                break
        yield _verdict(increase, tokens, report)
        # Requests that give no temperature have the model's default, which is seldom 0.
        method = report.get("draft_sample_method")
        if method == "greedy":
            yield Finding("note", _FIXED_DRAFTS)
        elif method is not None:
            yield Finding("ok", _PROBABILISTIC_DRAFTS)

    def _loosest_bound(self) -> dict[str, float]:
        """Returns the largest bound that a request may set; empty if it can only be strict."""
        named = ((key.partition("{")[0], value) for key, value in self._before.items())
        allowed = max((value for name, value in named if name == ALLOWED), default=0.0)
        return {"mars_max_loss": allowed} if allowed else {}

    @cached_property
    def _model(self) -> Any:
        return self._client.models.list().data[0]

    def _ask(
        self, prompt: str, max_tokens: int = PROBE_TOKENS
    ) -> tuple[dict[str, Any] | None, int]:
        """Asks as users do; returns mars_return's report and the number of tokens."""
        import openai

        try:
            model = self._model
            # vLLM refuses more tokens than its context has.
            context = (model.model_extra or {}).get("max_model_len") or max_tokens
            body: dict[str, Any] = {
                "model": model.id,
                "max_tokens": min(max_tokens, context),
                "extra_body": {"vllm_xargs": {"mars_return": True, **self._bound}},
            }
            try:
                messages: Any = [{"role": "user", "content": prompt}]
                answer: Any = self._client.chat.completions.create(messages=messages, **body)
            except openai.BadRequestError as error:
                self._no_chat = str(error)
                answer = self._client.completions.create(prompt=prompt, **body)
        except openai.OpenAIError as error:
            way_out = "give the address of a server for text, and its API key in OPENAI_API_KEY."
            if "min_p" in str(error):
                way_out = (
                    "vLLM takes no min_p with speculation, and requests have that of the model's "
                    "generation_config.json: start the server with --override-generation-config "
                    "'{\"min_p\": 0}'."
                )
            raise RuntimeError(f"a request failed: {str(error).rstrip('.')}; {way_out}") from error
        metrics = (answer.model_extra or {}).get("metrics") or {}
        tokens = answer.usage.completion_tokens if answer.usage else 0
        return next(iter(metrics.get("mars") or ()), None), tokens

    def _increase(self, tokens: int) -> dict[str, float]:
        """Returns the increase of the metrics since the start, once they include these tokens."""
        # The counts of verification come later: a GPU reports them about once a second.
        deadline = time.monotonic() + METRICS_TIMEOUT
        last = 0.0
        while True:
            now = _read(self._metrics_url)
            increase = {key: value - self._before.get(key, 0.0) for key, value in now.items()}
            has_tokens = _total(increase, GENERATED_TOKENS) >= tokens
            verified = _total(increase, VERIFIED)
            if (has_tokens and 0 < verified == last) or time.monotonic() > deadline:
                return increase
            last = verified
            time.sleep(0.1)


def _metrics_url(url: str) -> str:
    """Returns the address of a server's metrics; `url` may lack the scheme or end in `/v1`."""
    full = url if "://" in url else f"http://{url}"
    parts = urllib.parse.urlsplit(full)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"URL {url!r} is not an HTTP address; give the server's, such as http://localhost:8000."
        )
    return full.rstrip("/").removesuffix("/metrics").removesuffix("/v1") + "/metrics"


def _read(url: str) -> dict[str, float]:
    """Reads a server's metrics; RuntimeError if they lack those of margin-aware verification."""
    try:
        metrics = totals(url, METRICS_TIMEOUT)
    except OSError as error:
        raise RuntimeError(
            f"{url} does not answer: {error}; give the address of a running vLLM server."
        ) from error
    except ValueError as error:
        raise RuntimeError(
            f"{url} answers, but not with Prometheus metrics ({error}); give the address of a "
            "running vLLM server."
        ) from error
    if not any(key.startswith("vllm:mars_") for key in metrics):
        raise RuntimeError(
            f"{url} has no vllm:mars_* metrics; start the server with rejection_sample_method "
            "'mars' and without --disable-log-stats."
        )
    return metrics


def _total(values: Mapping[str, float], name: str) -> float:
    return sum(value for key, value in values.items() if key.partition("{")[0] == name)


def _is_strict(report: dict[str, Any]) -> bool:
    return any(report.get(name) == rule.strict for name, rule in RULES.items())


def _rule(report: dict[str, Any]) -> Finding:
    """Reports the rule in force for a request with default options."""
    (rule,) = (f"{name} {report[name]:g}" for name in (*RULES, "max_loss") if name in report)
    if "scope" in report:
        rule += f", mars_scope {report['scope']}"
    if _is_strict(report):
        return Finding(
            "note",
            f"in force: {rule}, which is strict by choice: nothing is relaxed "
            "for a request that chooses nothing; mars_max_loss, such as 0.02, is lossy.",
        )
    return Finding("ok", f"in force: {rule}, lossy")


def _verdict(increase: Mapping[str, float], tokens: int, report: Mapping[str, Any]) -> Finding:
    """Reports whether the rule gained a token, and if not, why."""
    gained = _total(increase, GAINED)
    verified = _total(increase, RELAXABLE)
    if not verified:
        return _fault(
            f"within {tokens} tokens no draft was verified: the draft method proposes nothing for "
            "these prompts, so neither speculation nor MARS has any effect."
        )
    refused = {key.split('"')[1]: n for key, n in increase.items() if key.startswith(REFUSED)}
    reasons = ", ".join(f"{reason} {count:.0f}" for reason, count in refused.items() if count)
    found = (
        f"gained {gained:.1f} draft tokens at {verified:.0f} verified positions (stayed strict: "
        f"{reasons or 'none'}) within {tokens} tokens"
    )
    if gained >= 1:
        allowed = f" of the {report['max_loss']:g} allowed" if "max_loss" in report else ""
        lost = _total(increase, LOST_NATS) / tokens
        return Finding("ok", f"{found}, and lost {lost:.4f} nats per token{allowed}")
    if refused.get("scope"):
        return _fault(
            f"{found}: mars_scope keeps a part of each answer strict, perhaps most of these. See "
            "the gain since the server's start after real requests."
        )
    return _fault(f"{found}: where it was not refused, the rule is almost strict for this model.")
