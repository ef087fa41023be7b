"""The loop of an agent and its tools, beside an agent that makes no mistake and one that does."""

import json
import math
import re

import pytest

from benchmarks import tool_loop
from benchmarks.tasks.agent import OPENING, Task, call, first_object, lead, read_task
from benchmarks.tasks.make import write_sets
from stand_in.answers import Handler, answering
from vllm_mars.local.prompts import read_json_lines

KINDS = 7


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return write_sets(tmp_path_factory.mktemp("sets"))[-1]


def script(prompt):
    """The calls of an agent without fault, each for the result of the last, and its answer."""

    def use(tool, **arguments):
        result = yield {"tool": tool, **arguments}
        return result

    if found := re.search(r"What is (.+)\?", prompt):
        answer = yield from use("calculate", expression=found[1])
    elif found := re.search(r"(\d+) pieces of the product (\w+)", prompt):
        price = yield from use("look_up", key=found[2])
        answer = yield from use("calculate", expression=f"{found[1]} * {price}")
    elif found := re.search(r"one (\w+) and one (\w+) cost", prompt):
        one = yield from use("look_up", key=found[1])
        other = yield from use("look_up", key=found[2])
        answer = yield from use("calculate", expression=f"{one} + {other}")
    elif found := re.search(r"manager of (\w+)\?", prompt):
        manager = yield from use("look_up", key=found[1])
        answer = yield from use("look_up", key=manager)
    elif found := re.search(r"cheaper, the (\w+) or the (\w+)", prompt):
        prices = {}
        for product in found.groups():
            price = yield from use("look_up", key=product)
            prices[int(price)] = product
        answer = min(prices)
    else:
        found = re.search(r"key (\w+)\. Add (\d+)", prompt)
        number = yield from use("get", key=found[1])
        answer = yield from use("calculate", expression=f"{number} + {found[2]}")
    if key := re.search(r"under the (?:same )?key (\w+)", prompt):
        kept = prices[answer] if "cheaper" in prompt else answer
        yield from use("put", key=key[1], value=kept)
    yield {"answer": answer}


def says(prompt, results):
    """Its next message."""
    steps = script(prompt)
    message = next(steps)
    for result in results:
        message = steps.send(result)
    return json.dumps(message)


def reply(messages, faulty=False):
    """The answer to a request; the faulty agent loses a turn, and sometimes its way."""
    prompt, *rest = (message["content"] for message in messages[6:])
    results = [text.removeprefix("Result: ") for text in rest[1::2]]
    if faulty and not results:
        return "Let me think."
    if faulty and "manager" in prompt:
        return '{"answer": "nowhere"}'
    return says(prompt, results[faulty:])


def test_an_agent_without_fault_reaches_every_goal(prompts):
    tasks = read_json_lines(prompts, read_task, option="prompts")
    assert len({task.category for task in tasks[:KINDS]}) == KINDS
    for task in tasks:
        found = lead(task, lambda messages: (reply(messages), 5), 8)
        assert found["reached"], (task, found)
        assert found["output_tokens"] == 5 * found["turns"] and found["seconds"] >= 0
        assert len(found["messages"]) == 2 * found["turns"] - 1
        if task.stored:
            # The answer alone is not enough.
            answer = json.dumps({"answer": task.answer})
            assert not lead(task, lambda messages, text=answer: (text, 5), 8)["reached"]


def test_an_agent_that_never_answers_is_ended():
    found = lead(Task("a", "", "?", 3), lambda messages: ("I see.", 2), 4)
    assert (found["reached"], found["turns"], found["output_tokens"]) == (False, 4, 8)
    assert found["messages"][1] == "Result: error: neither a call of a tool nor an answer"


@pytest.mark.parametrize(
    ("request_text", "result"),
    [
        ('{"tool": "calculate", "expression": "(2 + 1) * -4"}', "-12"),
        ('{"tool": "calculate", "expression": "7 / 2"}', "3.5"),
        ('So: {"tool": "calculate", "expression": "6 / 2"} {"answer": 3}', "3"),
        ('{"tool": "calculate", "expression": "1 / 0"}', "error: no expression"),
        ('{"tool": "calculate", "expression": "9 ** 9"}', "error: no expression"),
        ('{"tool": "calculate", "expression": "1e999"}', "error: no expression"),
        ('{"tool": "calculate", "expression": "exit()"}', "error: no expression"),
        pytest.param(
            json.dumps({"tool": "calculate", "expression": "(" * 500}),
            "error: no expression",
            id="open",
        ),
        ('{"tool": "look_up", "key": "pen"}', "3"),
        ('{"tool": "look_up", "key": "pan"}', "error: the table has no such key"),
        ('{"tool": "get", "key": "total"}', "7"),
        ('{"tool": "get", "key": "sum"}', "error: the store has no such key"),
        ('{"tool": "put", "key": "sum", "value": 1}', "done"),
        ('{"tool": "put", "key": ["sum"], "value": 1}', "error: neither a call"),
        ('{"tool": "sing"}', "error: neither a call"),
        ("{'tool': 'get'}", "error: neither a call"),
        pytest.param('{"a":' * 2000, "error: neither a call", id="nested"),
    ],
)
def test_what_tools_answer(request_text, result):
    store = {"total": 7}
    task = Task("a", "", "?", 3, table={"pen": 3})
    assert call(first_object(request_text), task, store).startswith(result)
    assert store == ({"total": 7, "sum": 1} if result == "done" else {"total": 7})


class Model(Handler):
    """Serves the faultless agent, and the faulty one where a price is asked for."""

    asked = []
    most = math.inf

    def do_GET(self):  # noqa: N802
        self.answer(200, json.dumps({"data": [{"id": "some/model"}]}))

    def do_POST(self):  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if len(self.asked) > self.most:
            return self.answer(503, "the server stops")
        if self.path == "/v1/completions":
            return self.answer(200, "{}")
        xargs = body.get("vllm_xargs", {})
        if xargs.get("mars_theta") == 0.1:
            return self.answer(400, "mars_theta=0.1 is below this server's limit")
        text = reply(body["messages"], faulty="mars_price" in xargs)
        choice = {"message": {"content": text}}
        self.answer(200, json.dumps({"choices": [choice], "usage": {"completion_tokens": 10}}))


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(tool_loop, "SETTLE_SECONDS", 0)
    monkeypatch.setattr(Model, "asked", [])
    with answering(Model) as address:
        yield f"http://{address}"


@pytest.fixture
def started(model, monkeypatch):
    """Servers are the stand-in; what they would be started with."""
    commands = []

    class Server:
        base_url = model

        def __init__(self, name, args, **options):
            commands.append([name, *args])

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def wait_until_ready(self):
            pass

    monkeypatch.setattr(tool_loop, "VllmServer", Server)
    return commands


def test_rules_are_compared(prompts, started, tmp_path, capsys):
    output = tmp_path / "loop.json"
    rules = ["strict", "price=0.3,max_loss=0.02"]
    arguments = [str(prompts), "--num-prompts", str(2 * KINDS), "--output", str(output)]
    assert tool_loop.main([*arguments, "--model", "some/model", "--rules", *rules]) == 0
    # One server is strict for whom asks for nothing.
    (command,) = started
    config = json.loads(command[command.index("--speculative-config") + 1])
    assert (config["mars_metric"], config["mars_price"]) == ("price", 0)
    result = json.loads(output.read_text())
    assert result["schema"] == "vllm-mars/tool-loop/1" and result["draft"] == "ngram"
    assert len(result["prompts"]) == 64 and result["versions"]["vllm_mars"]
    strict, priced = (result["rules"][rule] for rule in rules)
    assert strict["reached"]["value"] == 1 and priced["reached"]["value"] == pytest.approx(6 / 7)
    # The faulty agent takes a turn more where it reaches its goal.
    assert priced["turns_to_goal"]["samples"] == 12
    assert priced["turns_to_goal"]["difference"] == pytest.approx(1)
    assert priced["turns_to_goal"]["difference_low"] == pytest.approx(1)
    assert priced["output_tokens_to_goal"]["difference"] == pytest.approx(10)
    assert priced["seconds_to_goal"]["recovery_low"] > 0
    assert [one["rule"] for one in result["episodes"][:4]] == [*rules, *rules[::-1]]
    options = {"mars_price": 0.3, "mars_max_loss": 0.02}
    wake, first, *others = Model.asked
    assert wake["max_tokens"] == 4 and first["messages"][0]["content"] == OPENING[0]
    assert [message["role"] for message in first["messages"]][-2:] == ["assistant", "user"]
    assert [body.get("vllm_xargs") for body in others if "vllm_xargs" in body][0] == options
    assert "strict: 14 of 14 reached" in capsys.readouterr().out


def test_running_servers_are_asked_as_they_are(prompts, model, tmp_path):
    output = tmp_path / "loop.json"
    urls = ["--url", f"one={model}", f"other={model}"]
    arguments = [str(prompts), "--num-prompts", "1", "--output", str(output), *urls]
    assert tool_loop.main(arguments) == 0
    result = json.loads(output.read_text())
    assert result["rules"].keys() == {"one", "other"} and result["model"] == "model"
    assert "draft" not in result
    assert all(body["model"] == "some/model" and "vllm_xargs" not in body for body in Model.asked)


def test_an_interrupted_run_keeps_its_tasks(prompts, model, tmp_path, monkeypatch):
    output = tmp_path / "loop.json"
    first = read_json_lines(prompts, read_task, option="prompts")[0]
    turns = lead(first, lambda messages: (reply(messages), 5), 8)["turns"]
    # One more wakes the server.
    monkeypatch.setattr(Model, "most", 1 + turns)
    with pytest.raises(RuntimeError, match="one: the server stops"):
        tool_loop.main([str(prompts), "--output", str(output), "--url", f"one={model}"])
    result = json.loads(output.read_text())
    assert [episode["task"] for episode in result["episodes"]] == [first.id]
    assert result["rules"]["one"]["reached"]["samples"] == 1


def test_rules_that_are_none(prompts, started, tmp_path):
    output = ["--output", str(tmp_path / "loop.json"), "--model", "some/model"]
    for rule, message in (
        ("theta", "write 'strict', or a theta, gap or price, such as theta=0.9"),
        ("max_loss=0.02", "rules='max_loss=0.02'"),
        ("theta=2", "mars_theta=2 is outside"),
        ("price=0.3,colour=1", "mars_colour is not an option"),
    ):
        with pytest.raises(ValueError, match=message):
            tool_loop.main([str(prompts), *output, "--rules", rule])
    assert not started
    with pytest.raises(RuntimeError, match=r"theta=0\.1: mars_theta=0\.1 is below"):
        tool_loop.main([str(prompts), *output, "--rules", "theta=0.1"])
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"prompt": "?"}\n')
    with pytest.raises(ValueError, match="line 1 has no 'answer'"):
        tool_loop.main([str(wrong), *output])


@pytest.mark.nightly
@pytest.mark.engine
def test_the_packaged_model_is_led_through_tasks(packaged_model, prompts, tmp_path):
    """Whether so small a model reaches a goal is not the subject."""
    output = tmp_path / "loop.json"
    rules = ["strict", "price=0.5", "price=0.3,max_loss=0.02"]
    arguments = ["--model", str(packaged_model), "--num-prompts", "2", "--max-turns", "2"]
    status = tool_loop.main(
        [str(prompts), *arguments, "--max-tokens", "24", "--output", str(output), "--rules", *rules]
    )
    assert status == 0
    result = json.loads(output.read_text())
    assert [one["rule"] for one in result["episodes"][:3]] == rules
    for one in result["episodes"]:
        assert 1 <= one["turns"] <= 2 and 0 < one["output_tokens"] <= 48
    for found in result["rules"].values():
        assert found["seconds"]["samples"] == 2 and found["seconds"]["value"] > 0
