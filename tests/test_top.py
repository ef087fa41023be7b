"""`vllm-mars top` against a stand-in server: what it reads, shows and refuses."""

import io
from contextlib import contextmanager

import pytest
from rich.console import Console

from stand_in.answers import Handler, answering
from vllm_mars import top
from vllm_mars.cli import main
from vllm_mars.top import Snapshot, metrics_url, read_metrics, view

METRICS = """
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 300.0
vllm:generation_tokens_total{engine="1",model_name="m"} 100.0
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 20.0
# TYPE vllm:mars_relaxed_tokens_total counter
vllm:mars_relaxed_tokens_total{engine="0",model_name="m",position="0"} 15.0
vllm:mars_relaxed_tokens_total{engine="0",model_name="m",position="1"} 5.0
# TYPE vllm:mars_verified_positions_total counter
vllm:mars_verified_positions_total{engine="0",model_name="m",position="0"} 100.0
vllm:mars_verified_positions_total{engine="0",model_name="m",position="1"} 60.0
# TYPE vllm:mars_gained_acceptance_total counter
vllm:mars_gained_acceptance_total{engine="0",model_name="m"} 18.0
# TYPE vllm:mars_max_loss_nats_per_token gauge
vllm:mars_max_loss_nats_per_token{engine="0",model_name="m"} 0.02
vllm:mars_max_loss_nats_per_token{engine="1",model_name="m"} 0.02
# TYPE vllm:mars_info gauge
vllm:mars_info{engine="0",lossy="true",model_name="m",rule="mars_max_loss",value="0.02"} 1.0
# TYPE vllm:mars_refused_positions_total counter
vllm:mars_refused_positions_total{engine="0",model_name="m",reason="protected"} 3.0
vllm:mars_refused_positions_total{engine="0",model_name="m",reason="loss"} 11.0
# TYPE vllm:mars_lost_nats_total counter
vllm:mars_lost_nats_total{engine="0",model_name="m"} 6.0
vllm:mars_lost_nats_total{engine="1",model_name="m"} 2.5
# TYPE vllm:mars_drift_up_nats_total counter
vllm:mars_drift_up_nats_total{engine="0",model_name="m"} 9.0
# TYPE vllm:mars_drift_down_nats_total counter
vllm:mars_drift_down_nats_total{engine="0",model_name="m"} 11.0
"""


@contextmanager
def serving(*answers):
    """Serves the answers one after the other, the last one again and again."""
    remaining = list(answers)
    asked = []

    class Server(Handler):
        def do_GET(self):  # noqa: N802
            asked.append(self.path)
            text = remaining.pop(0) if len(remaining) > 1 else remaining[0]
            self.answer(200 if text is not None else 404, text or "")

    with answering(Server) as address:
        yield address, asked


def shown(total, recent=None, seconds=0.0):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(view(total, recent, seconds))
    return console.export_text()


def cells(text, name):
    """The cells of the row that begins with `name`, bars included."""
    (row,) = [line for line in text.splitlines() if line.startswith(f"│ {name} ")]
    return [cell.strip() for cell in row.rstrip().strip("│").split("│")][1:]


def read(text):
    with serving(text) as (address, _):
        return read_metrics(metrics_url(address))


def test_figures_since_the_start():
    text = shown(read(METRICS))
    assert cells(text, "generated tokens") == ["400"]
    assert cells(text, "mean acceptance length") == ["1.80"]
    assert cells(text, "draft tokens gained") == ["18.0"]
    assert cells(text, "gained, of accepted") == ["22.5 %"]
    assert cells(text, "relaxed outright") == ["20"]
    assert cells(text, "nats lost per token") == ["0.0213"]
    assert cells(text, "drift per token") == ["-0.0050"]
    assert cells(text, "nats allowed per token") == ["0.0200"]
    assert "tokens/s" not in text
    assert cells(text, "       0") == ["60.0 %", "█" * 14 + "▍", "15.0 %", "███▌"]
    assert "│   11 │         3 │" in text.split("┃ loss ┃ protected ┃")[1]


def test_ray_serve_has_other_names():
    assert read(METRICS.replace("vllm:", "ray_vllm_")) == read(METRICS)


def test_the_last_interval_beside_it():
    total = read(METRICS)
    later = read(METRICS.replace("} 300.0", "} 350.0"))
    idle = shown(later, later.since(total), 2.5)
    assert cells(idle, "tokens/s") == ["20.0", ""]
    assert cells(idle, "mean acceptance length") == ["-", "1.80"]
    assert cells(idle, "gained, of accepted") == ["-", "22.5 %"]
    assert cells(idle, "nats lost per token") == ["0.0000", "0.0189"]
    assert cells(idle, "nats allowed per token") == ["0.0200", "0.0200"]
    assert "by position (since start)" in idle

    busy = METRICS.replace(
        'drafts_total{engine="0",model_name="m"} 100', 'drafts_total{engine="0",model_name="m"} 110'
    )
    busy = busy.replace('"0"} 60', '"0"} 65')
    later = read(busy)
    text = shown(later, later.since(total), 2.5)
    assert cells(text, "mean acceptance length") == ["1.50", "1.77"]
    assert "by position (last 2.5 s)" in text
    assert cells(text, "       0")[0] == "50.0 %"


def test_a_server_that_has_begun_anew_counts_from_zero():
    old = Snapshot({"a": {"": 5.0}, "b": {"x": 2.0}})
    new = Snapshot({"a": {"": 1.0}, "b": {"x": 3.0}})
    assert new.since(old) is new


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("localhost:8000", "http://localhost:8000/metrics"),
        ("http://a:1/", "http://a:1/metrics"),
        ("https://a/v1", "https://a/metrics"),
        ("https://a/x/metrics", "https://a/x/metrics"),
        ("http://[::1]:8000/v1/", "http://[::1]:8000/metrics"),
    ],
)
def test_addresses(url, expected):
    assert metrics_url(url) == expected


def test_once(capsys):
    with serving(METRICS) as (address, asked):
        assert main(["top", address, "--once"]) == 0
    assert asked == ["/metrics"]
    assert "22.5 %" in capsys.readouterr().out


def test_live_until_ctrl_c(monkeypatch, capsys):
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", sleep)
    with serving(METRICS) as (address, asked):
        top.run(address, interval=0.5)
    assert waits == [0.5] * 3
    assert len(asked) == 3
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "/metrics does not answer: HTTP Error 404: Not Found; give the address of a run"),
        ("<html>hello</html>", "/metrics answers, but not with Prometheus metrics"),
        (
            "# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total 3.0\n",
            "/metrics has no vllm:mars_* metrics; start the server with rejection_sample_method "
            "'mars'",
        ),
    ],
)
def test_other_servers_are_refused(capsys, answer, message):
    with serving(answer) as (address, _):
        assert main(["top", address, "--once"]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ftp://a"], "URL 'ftp://a' is not an HTTP address"),
        (["http://"], "URL 'http://' is not an HTTP address"),
        (["localhost:80o0"], "does not answer: http://localhost:80o0/metrics: InvalidURL("),
        (["a", "--interval", "0"], "interval=0 is not above 0; give seconds, such as 2."),
        (["a", "--interval", "nan"], "interval=nan is not above 0"),
    ],
)
def test_bad_arguments(capsys, arguments, message):
    assert main(["top", *arguments]) == 1
    assert message in capsys.readouterr().err
