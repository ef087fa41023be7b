"""`vllm-mars doctor` in this environment, and at fake servers."""

import importlib.metadata
import importlib.util
import json
from contextlib import contextmanager

import pytest

from stand_in.answers import Handler, answering
from vllm_mars.cli import doctor
from vllm_mars.cli.__main__ import main
from vllm_mars.cli.doctor import findings_at, findings_here
from vllm_mars.servers.scrape import ALLOWED

# Increase of a server's counters with each answer of more than a token.
GAINS = {"verified": 30, "relaxable": 20, "gained": 2.5, "lost": 0.24, "refused": {"protected": 1}}
COUNTERS = {
    "verified": 'vllm:mars_verified_positions_total{position="0"}',
    "relaxable": "vllm:mars_relaxable_positions_total",
    "gained": "vllm:mars_gained_acceptance_total",
    "lost": "vllm:mars_lost_nats_total",
}
TOKENS = 48
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@contextmanager
def server(
    increase, report, metrics=None, refuses=None, draft_sample_method="probabilistic", info=()
):
    """Runs a fake server; yields its address and a list of the requests' paths and bodies.

    Args:
        increase: of the counters with each answer of more than a token.
        report: of `mars_return`, or a function that makes it from the `vllm_xargs`; None: none.
        refuses: returns from a path why it is refused, if it is.
    """
    requests = []
    drafts = {"draft_sample_method": draft_sample_method, "log_ratios": [0.0]}

    def exported():
        lengths = [min(body["max_tokens"], TOKENS) for _, body in requests]
        num_answers = sum(length > 1 for length in lengths)
        lines = [f"vllm:generation_tokens_total {7 + sum(lengths)}", *info]
        for name, metric in COUNTERS.items():
            # Not from 0, because of earlier requests.
            lines.append(f"{metric} {5 + increase.get(name, 0) * num_answers}")
        for reason, count in increase.get("refused", {}).items():
            value = count * num_answers
            lines.append(f'vllm:mars_refused_positions_total{{reason="{reason}"}} {value}')
        return "\n".join(lines) + "\n"

    class Server(Handler):
        def answer_json(self, content, status=200):
            self.answer(status, json.dumps(content), "application/json")

        def do_GET(self):  # noqa: N802
            if self.path == "/v1/models":
                model = {"id": "m", "object": "model", "created": 0, "owned_by": "x"}
                model["max_model_len"] = 1000
                self.answer_json({"object": "list", "data": [model]})
            else:
                self.answer(200, metrics or exported())

        def do_POST(self):  # noqa: N802
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if refuses and (why := refuses(self.path)):
                self.answer_json({"error": {"message": why}}, 400)
                return
            requests.append((self.path, body))
            length = min(body["max_tokens"], TOKENS)
            usage = {"prompt_tokens": 1, "completion_tokens": length, "total_tokens": length + 1}
            choice = {"index": 0, "finish_reason": "length", "logprobs": None}
            if self.path == CHAT:
                kind = "chat.completion"
                choice["message"] = {"role": "assistant", "content": None}
            else:
                kind = "text_completion"
                choice["text"] = "x"
            answer = {"id": "1", "object": kind, "created": 0, "model": "m"}
            answer |= {"choices": [choice], "usage": usage}
            if report is not None:
                in_force = report(body["vllm_xargs"]) if callable(report) else report
                answer["metrics"] = {"mars": [in_force | drafts]}
            self.answer_json(answer)

    with answering(Server) as address:
        yield address, requests


@pytest.mark.parametrize("rule", [{"theta": 0.9}, {"max_loss": 0.02}])
def test_a_server_that_gains(capsys, rule):
    with server(GAINS, rule) as (address, requests):
        assert main(["doctor", address]) == 0
    # The first request is for the report. The first answer suffices.
    (path, first), (_, second) = requests
    assert path == CHAT
    assert first.keys() == {"model", "messages", "max_tokens", "vllm_xargs"}
    assert first["vllm_xargs"] == {"mars_return": True}
    # An answer has time to think, within the server's context.
    assert (first.pop("max_tokens"), second.pop("max_tokens")) == (1, 1000)
    assert first == second
    lines = " ".join(capsys.readouterr().out.split())
    ((name, value),) = rule.items()
    since = "since its start: 7 tokens, of which MARS gained 71.4%, at a loss of 0.7143 nats per"
    assert f"ok {since}" in lines
    assert f"ok in force: {name} {value}, lossy" in lines
    allowed = " of the 0.02 allowed" if "max_loss" in rule else ""
    where = "at 20 verified positions (stayed strict: protected 1) within 49 tokens"
    lost = f"and lost 0.0049 nats per token{allowed}"
    assert f"ok gained 2.5 draft tokens {where}, {lost}" in lines
    assert lines.endswith("all is well")


def test_late_counts_are_waited_for(monkeypatch):
    """Counts of a GPU arrive later than vLLM's counts of tokens."""
    read, seen = doctor.totals, []

    def late(url, timeout):
        seen.append(url)
        with monkeypatch.context() as patch:
            for name in ("verified", "relaxable", "gained"):
                patch.setitem(GAINS, name, 0 if len(seen) < 4 else 2)
            return read(url, timeout)

    monkeypatch.setattr(doctor, "totals", late)
    with server(GAINS, {"theta": 0.9}) as (address, requests):
        *_, verdict, _ = findings_at(address)
    assert len(requests) == 2 and verdict.state == "ok"
    assert "gained 2.0 draft tokens" in verdict.text


def test_a_server_that_is_strict(capsys):
    for rule in ({"theta": 1.0}, {"price": 0.0}):
        with server({"verified": 20}, rule) as (address, requests):
            assert main(["doctor", address]) == 0
        assert len(requests) == 1
        assert "which is strict by choice" in capsys.readouterr().out


@pytest.mark.parametrize("is_overridden", [False, True])
def test_a_server_that_is_lossy_on_request(capsys, is_overridden):
    option, limit = "mars_max_loss", 0.02

    def report(xargs):
        is_lossy = option in xargs and not is_overridden
        return {"max_loss": xargs[option]} if is_lossy else {"price": 0.0}

    with server(GAINS, report, info=[f"{ALLOWED} {limit}"]) as (address, requests):
        assert main(["doctor", address]) == 0
    lines = " ".join(capsys.readouterr().out.split())
    assert "which is strict by choice" in lines
    assert requests[1][1]["vllm_xargs"] == {"mars_return": True, option: limit}
    assert (f"ok a request may ask for {option} {limit}, lossy" in lines) != is_overridden
    # Gains of other requests are not reported then.
    assert ("gained 2.5 draft tokens" in lines) != is_overridden


@pytest.mark.parametrize(
    ("increase", "message"),
    [
        ({}, "within 193 tokens no draft was verified: the draft method proposes nothing"),
        (
            {"verified": 9, "relaxable": 2, "gained": 0.2},
            "gained 0.8 draft tokens at 8 verified positions (stayed strict: none) within 193 "
            "tokens: where it was not refused, the rule is almost strict",
        ),
        (
            {"verified": 9, "relaxable": 2, "refused": {"protected": 1, "loss": 0}},
            "gained 0.0 draft tokens at 8 verified positions (stayed strict: protected 4) within",
        ),
        (
            {"verified": 9, "relaxable": 9, "refused": {"scope": 7}},
            "(stayed strict: scope 28) within 193 tokens: mars_scope keeps a part of each",
        ),
    ],
)
def test_a_server_that_gains_nothing(monkeypatch, increase, message):
    prompts = doctor.load_prompts()
    monkeypatch.setattr(doctor, "load_prompts", lambda: prompts[:4])
    with server(increase, {"price": 0.5, "scope": "answer"}) as (address, requests):
        *others, verdict, _ = findings_at(address)
    assert len(requests) == 5
    assert {finding.state for finding in others} == {"ok"}
    assert others[-1].text == "in force: price 0.5, mars_scope answer, lossy"
    assert verdict.state == "fault"
    assert message in verdict.text


def test_long_answers_without_a_gain_end_the_test(monkeypatch):
    """A model that thinks at length would take many minutes."""
    monkeypatch.setattr(doctor, "PROBE_TOKENS", 2 * TOKENS)
    with server({"verified": 9, "relaxable": 9}, {"price": 0.5}) as (address, requests):
        *_, verdict, _ = findings_at(address)
    assert len(requests) == 3 and verdict.state == "fault"


def test_completions_are_tested_without_a_chat_template():
    reason = "default chat template is no longer allowed"

    def refuses(path):
        return path == CHAT and reason

    with server(GAINS, {"price": 0.5}, refuses=refuses) as (address, requests):
        texts = {finding.state: finding.text for finding in findings_at(address)}
    assert "completions, not chat, are tested: " in texts["note"] and reason in texts["note"]
    assert "fault" not in texts
    prompt = doctor.load_prompts()[0].turns[0]
    assert [(path, body["prompt"]) for path, body in requests] == [(COMPLETION, prompt)] * 2


@pytest.mark.parametrize(
    ("method", "state", "text"),
    [
        ("greedy", "note", '"draft_sample_method": "probabilistic"'),
        ("probabilistic", "ok", "sample here, and drafts are probabilistic"),
    ],
)
def test_draft_sample_method(method, state, text):
    with server(GAINS, {"price": 0.3}, draft_sample_method=method) as (address, _):
        *_, verdict, drafts = findings_at(address)
    assert verdict.state == "ok"
    assert drafts.state == state and text in drafts.text


def test_sampling_defaults_that_vllm_refuses():
    """A min_p in the model's generation_config.json applies to sampled requests."""
    reason = "The min_p and logit_bias sampling parameters are not yet supported with speculative"
    with server(GAINS, {"price": 0.3}, refuses=lambda _: reason) as (address, _):
        *_, last = findings_at(address)
    assert last.state == "fault"
    assert "a request failed: " in last.text and reason in last.text
    way_out = """start the server with --override-generation-config '{"min_p": 0}'."""
    assert last.text.endswith(way_out)


def test_a_server_without_mars(capsys):
    for metrics, problem in (
        ("<html>hello</html>", "/metrics answers, but not with Prometheus metrics"),
        ("vllm:generation_tokens_total 7\n", "/metrics has no vllm:mars_* metrics; start"),
    ):
        with server(GAINS, None, metrics) as (address, _):
            (last,) = findings_at(address)
        assert last.state == "fault" and problem in last.text
    with server(GAINS, None) as (address, _):
        (*_, last) = findings_at(address)
    assert last.state == "fault" and "the answer lacks mars_return's report" in last.text
    with server(GAINS, None, refuses=lambda _: "refused") as (address, _):
        (*_, last) = findings_at(address)
    assert last.state == "fault" and "a request failed: " in last.text
    for url in ("http://127.0.0.1:1", "https://localhost:80o0/v1/"):
        assert main(["doctor", url]) == 1
        assert "/metrics does not answer: " in " ".join(capsys.readouterr().out.split())
    assert main(["doctor", "ftp://x"]) == 1
    assert "is not an HTTP address" in capsys.readouterr().err


def test_this_environment(capsys):
    assert main(["doctor"]) == 0
    lines = " ".join(capsys.readouterr().out.split())
    assert "ok vllm_mars " in lines
    assert "vLLM finds the plugin (vllm_mars.hooks.plugin:register)" in lines
    assert "has the interfaces that are needed" in lines


@pytest.mark.parametrize(
    ("variable", "value", "state", "message"),
    [
        ("VLLM_PLUGINS", "lora,other", "fault", "VLLM_PLUGINS='lora,other' leaves the plugin out"),
        ("VLLM_PLUGINS", "other,mars", "ok", "vLLM finds the plugin"),
        ("VLLM_MARS_LOCK", "strict", "note", "servers here refuse to be lossy"),
        ("VLLM_MARS_LOCK", "yes", "fault", "VLLM_MARS_LOCK='yes' is not 'strict'"),
        ("VLLM_MARS_LOCK", "", "ok", "VLLM_MARS_LOCK does not say strict: servers here may"),
    ],
)
def test_variables(monkeypatch, variable, value, state, message):
    monkeypatch.setenv(variable, value)
    (finding,) = [finding for finding in findings_here() if message in finding.text]
    assert finding.state == state


def test_faults_of_this_environment(monkeypatch, capsys):
    def too_old(version):
        raise RuntimeError("vLLM 0.1 is not supported")

    def differs(part):
        if part in ("V2", "engine core"):
            raise RuntimeError(f"vLLM has other interfaces than vllm-mars needs ({part})")

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    monkeypatch.setattr(doctor, "check_interfaces", differs)
    assert [finding.text for finding in findings_here() if finding.state == "fault"] == [
        "vLLM does not find the plugin: no package here has the entry point 'mars' in "
        "vllm.general_plugins; install vllm-mars with pip into this environment.",
        "vLLM has other interfaces than vllm-mars needs (engine core)",
    ]
    monkeypatch.setattr(doctor, "check_interfaces", lambda part: None)
    monkeypatch.setattr(doctor, "RELEASES", ("0.1",))
    assert "tests have not run on vLLM" in list(findings_here())[-1].text
    monkeypatch.setattr(doctor, "check_version", too_old)
    assert list(findings_here())[-1] == ("fault", "vLLM 0.1 is not supported")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["doctor"]) == 1
    assert "vLLM is not installed here; run pip install '.[cuda]' in" in capsys.readouterr().out
