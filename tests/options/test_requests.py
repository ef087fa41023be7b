"""Options of a request: values, refusals, the record that they make."""

import dataclasses
import logging
import math
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_mars import MarsConfig
from vllm_mars.hooks.arguments import check_request
from vllm_mars.hooks.pickled import PickledConfig
from vllm_mars.kernels.budget import (
    MAX_LOSS,
    MAX_PRICE_UNITS,
    NO_BOUND,
    NO_LIMIT,
    floor_units,
    loss_rate,
    price_units,
)
from vllm_mars.kernels.constraints.markers import IN_ANSWER, IN_THINKING
from vllm_mars.kernels.interface import MAX_STOP_IDS, RECORD_SIZE, Column, Records, encode_value
from vllm_mars.kernels.rules import PRICE as PRICE_RULE
from vllm_mars.kernels.rules import RULES
from vllm_mars.options import config as config_module
from vllm_mars.options import requests
from vllm_mars.options.config import DRAWN_PRICE, FIXED_PRICE, split_speculative_config
from vllm_mars.options.requests import (
    OVERRIDES,
    RequestOptions,
    in_force,
    options_of,
)
from vllm_mars.worker import records

THETA = MarsConfig(theta=0.8)
PRICE = MarsConfig(price=0.5)
# The price follows from the remaining budget.
BOUND = MarsConfig(max_loss=0.5)
# Strict by default, lossy on request.
OPT_IN = MarsConfig(max_loss=0, limit=0.5)
OPT_IN_THETA = MarsConfig(theta=0.8, max_loss=0, limit=0.5)
# Servers that know the markers of the thinking section.
THINKS = MarsConfig(max_loss=0.5, thinking_start=7, thinking_end=8)
STRICT_ANSWER = MarsConfig(max_loss=0.5, thinking_start=7, thinking_end=8, scope="thinking")
GRAMMAR = StructuredOutputsParams(regex="a+")
ANOTHER = "names another rule than this server's; choose"


def params(**extra_args):
    return SamplingParams(temperature=0, extra_args=extra_args or None)


def record_of(request, config, is_probabilistic=False, max_tokens=99, num_produced=0):
    options = options_of(request, config)
    return records.record_of(options, request, config, is_probabilistic, max_tokens, num_produced)


def served_with(config):
    """The part of vLLM's config that carries the options."""
    return SimpleNamespace(additional_config={"mars": PickledConfig(config)})


@pytest.mark.parametrize(
    ("config", "extra_args", "expected"),
    [
        (THETA, {}, 0.8),
        (THETA, {"mars_theta": 1}, 1.0),
        (THETA, {"mars_theta": 0.8}, 0.8),
        (THETA, {"mars_theta": 0.95}, 0.95),
        (THETA, {"other": "x"}, 0.8),
        (PRICE, {}, 0.5),
        (PRICE, {"mars_price": 0}, 0.0),
        (PRICE, {"mars_price": 0.25}, 0.25),
        (PRICE, {"mars_price": 0.5}, 0.5),
        (BOUND, {}, math.inf),
        (BOUND, {"mars_max_loss": 0.1}, math.inf),
        (BOUND, {"mars_price": 3}, 3.0),
        (BOUND, {"mars_price": 3, "mars_max_loss": 0}, 0.0),
        (OPT_IN, {}, 0.0),
        (OPT_IN, {"mars_max_loss": 0.1}, math.inf),
        (OPT_IN, {"mars_max_loss": 0.1, "mars_price": 3}, 3.0),
        (OPT_IN, {"mars_price": 3}, 0.0),
        (OPT_IN_THETA, {}, 1.0),
        (OPT_IN_THETA, {"mars_max_loss": 0.5}, 0.8),
        # A bound of 0 is strict.
        (THETA, {"mars_max_loss": 0}, 1.0),
        (PRICE, {"mars_max_loss": 0}, 0.0),
        (MarsConfig(price=0.5, max_loss=0), {}, 0.0),
        # From a file of overrides.
        (BOUND, {OVERRIDES: {"mars_max_loss": 0}}, 0.0),
    ],
)
def test_values(config, extra_args, expected):
    request, constrained = params(**extra_args), params(**extra_args)
    constrained.structured_outputs = GRAMMAR
    value = options_of(request, config).value
    assert value == expected and isinstance(value, float)
    table = torch.tensor([record_of(request, config), record_of(constrained, config)])
    assert Records(table).relaxes.tolist() == [value != config.rule.strict, False]


@pytest.mark.parametrize(
    ("config", "extra_args", "message"),
    [
        (THETA, {"mars_theta": 0}, r"mars_theta=0 is outside \(0, 1\]; 1 switches the relaxation"),
        (THETA, {"mars_theta": 2**63}, r"mars_theta=9223372036854775808 is outside \(0, 1\]"),
        (THETA, {"mars_theta": None}, "mars_theta=None is a NoneType, but must be a number"),
        (THETA, {"mars_tehta": 0.9}, "mars_tehta is not an option of a request; .* mars_theta?"),
        (BOUND, {"mars-max-loss": 0}, "mars-max-loss is not an option .* mean mars_max_loss?"),
        (THETA, {"mars_return": "yes"}, "mars_return='yes' is not true or false"),
        (
            OPT_IN,
            {"mars_price": 0.3},
            "mars_price=0.3 is given, but this server's mars_max_loss=0 is strict; name a "
            r"mars_max_loss as well, up to 0\.5, or leave mars_price out",
        ),
        (
            MarsConfig(price=0.5, max_loss=0),
            {"mars_price": 0.3},
            "mars_price=0.3 is given, but this server's mars_max_loss=0 is strict; leave it out",
        ),
        (THETA, {"mars_price": 1}, f"mars_price=1 {ANOTHER} mars_theta or leave"),
        (PRICE, {"mars_theta": 0.9}, f"mars_theta=0.9 {ANOTHER} mars_price or leave it out"),
        (BOUND, {"mars_theta": 0.9}, f"mars_theta=0.9 {ANOTHER} mars_max_loss or leave it out"),
        (
            MarsConfig(theta=0.9),
            {"mars_theta": 0.89},
            r"mars_theta=0.89 is below this server's own 0.9, but a request may only be stricter "
            r"than its server; choose a value in \[0.9, 1\] or leave it out",
        ),
        (MarsConfig(price=0.5), {"mars_price": 0.6}, "0.6 is above this server's own 0.5, "),
        (MarsConfig(theta=1.0), {"mars_theta": 0.99}, r"this server's own 1.0, .* in \[1.0, 1\]"),
        (BOUND, {"mars_price": "x" * 65536}, r"mars_price='x{79}\.\.\. \(65538 characters\) is a"),
        (
            BOUND,
            {"mars_" + "x" * 65536: 1},
            r"mars_x{75}\.\.\. \(65541 characters\) is not an option",
        ),
        (BOUND, {"mars_max_loss": 0.75}, r"mars_max_loss=0.75 is above this server's bound of 0.5"),
        (
            THETA,
            {"mars_max_loss": -1},
            r"mars_max_loss=-1 is outside \[0, 1024\]; 0 is strict, 0.02",
        ),
        (THINKS, {"mars_scope": "some"}, "mars_scope='some' is not one of all, thinking, answer"),
        (THINKS, {"mars_scope": 1}, "mars_scope=1 is not one of all, thinking, answer"),
        (
            STRICT_ANSWER,
            {"mars_scope": "answer"},
            "mars_scope='answer' relaxes what this server's own 'thinking' does not, but a request "
            "may only be stricter than its server; leave it out",
        ),
        (STRICT_ANSWER, {"mars_scope": "all"}, "mars_scope='all' relaxes what this server's own"),
        (
            BOUND,
            {"mars_scope": "thinking"},
            "mars_scope='thinking' needs the markers of the thinking section, but this server does "
            "not know them; leave it out, or .* with --reasoning-parser",
        ),
        (THETA, {"mars_strict_opening": 1}, "mars_strict_opening is not an option of a request"),
        (OPT_IN, {"mars_max_loss": 0.75}, "above this server's limit of 0.5; choose a value in "),
        (OPT_IN_THETA, {"mars_max_loss": 0.75}, "above this server's limit of 0.5; choose a value"),
        (MarsConfig(max_loss=0), {"mars_max_loss": 0.1}, "above this server's bound of 0.0; "),
    ],
)
def test_refused(config, extra_args, message):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=message) as raised:
        check_request(params(**extra_args), served_with(config))
    assert raised.value.parameter == "vllm_xargs"


@pytest.mark.parametrize(
    ("temperature", "is_probabilistic", "expected"),
    [
        (0, True, FIXED_PRICE),
        (1, False, FIXED_PRICE),
        (1, True, DRAWN_PRICE),
        (0.25, True, 2 * DRAWN_PRICE),
    ],
)
def test_a_bound_sets_a_price_by_the_kind_of_request(temperature, is_probabilistic, expected):
    """The price grows with the root of bound / temperature."""

    def price(**extra_args):
        request = params(**extra_args)
        request.temperature = temperature
        server = MarsConfig(max_loss=0.04)
        return record_of(request, server, is_probabilistic)[Column.VALUE] / 2**16

    assert price() == pytest.approx(expected * 0.2, abs=2**-15)
    assert price(mars_max_loss=0.01) == pytest.approx(price() / 2, abs=2**-15)
    assert price(mars_price=0.125) == 0.125
    assert price(mars_max_loss=0) == 0


def test_a_requested_bound_equals_that_of_a_server():
    request = params(mars_max_loss=0.02)
    server = MarsConfig(max_loss=0.02)
    assert options_of(request, OPT_IN) == options_of(params(), server)
    assert record_of(request, OPT_IN) == record_of(params(), server)
    assert in_force(options_of(request, OPT_IN), OPT_IN) == {"max_loss": 0.02}
    strict = options_of(params(), OPT_IN)
    assert strict == options_of(params(mars_max_loss=0), server)
    assert in_force(strict, OPT_IN) == {"price": 0.0}


VALUES = st.recursive(
    st.sampled_from([0, 0.02, 1, 5e-324, 8192, 8193, 1e39, 1e308, 10**400, "x" * 65536])
    | st.sampled_from([True, False, "0.1", None, "strict", "reasoning", "sampled"])
    | st.floats()
    | st.integers(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=2),
    max_leaves=4,
)
NAMES = [f"mars_{field.name}" for field in dataclasses.fields(MarsConfig)]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3),
    st.dictionaries(
        st.sampled_from([*(rule.option for rule in RULES.values()), "mars_max_loss", OVERRIDES])
        | st.sampled_from(["mars_" + "x" * 65536, "mars_return"]),
        VALUES,
        max_size=2,
    ),
    st.integers(0, 2**20),
    st.booleans(),
    st.booleans(),
)
def test_a_record_holds_every_accepted_request(
    server, extra_args, produced, is_greedy, is_probabilistic
):
    from vllm.exceptions import VLLMValidationError

    mars = {"rejection_sample_method": "mars"}
    try:
        config, _ = split_speculative_config(mars | server)
        request = params(**extra_args)
    except (ValueError, VLLMValidationError) as error:
        assert len(str(error)) < 1000
        return
    try:
        check_request(request, served_with(config))
    except VLLMValidationError as error:
        # A front end that checks nothing would pass it on.
        assert len(str(error)) < 1000
    request.temperature = float(not is_greedy)
    record = record_of(request, config, is_probabilistic, 2**20, produced)
    value, rate, lost = record[: Column.MAX_TOKENS]
    loosest = 0 if config.rule.strict else config.rule.most
    assert 0 <= value <= encode_value(config.rule, loosest) and 0 <= rate <= NO_BOUND
    assert 0 <= lost <= NO_LIMIT
    # Raises if a number does not fit.
    torch.tensor(record, dtype=torch.int64)


@pytest.mark.parametrize("config", [THETA, BOUND])
@pytest.mark.parametrize("bad", [9, "x", {"mars_price": "x"}])
def test_an_unchecked_request_is_strict(config, bad, caplog, monkeypatch):
    monkeypatch.setattr(requests, "_SAID", [])
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    for key in (OVERRIDES, "mars_max_loss" if config is BOUND else "mars_theta"):
        request = params(mars_return=True, **{key: bad})
        assert options_of(request, config) == RequestOptions(config.rule.strict)
    text = r"A bad request came past the front end: .*\. All such requests are verified strictly; "
    assert re.search(text + "vLLM's own front end in Python refuses them with", caplog.text)
    assert len({id(record) for record in caplog.records}) == 1


def test_options_fit_the_records():
    assert price_units(PRICE_RULE.most) == MAX_PRICE_UNITS
    assert loss_rate(config_module.MOST_MAX_LOSS) == NO_BOUND - 1
    assert MAX_STOP_IDS == RECORD_SIZE - Column.STOP_IDS
    for units, most in (
        (price_units, MAX_PRICE_UNITS),
        (floor_units, MAX_LOSS),
        (loss_rate, NO_BOUND - 1),
    ):
        for value in (1e39, 1e308, 10**400):
            assert units(value) == most
        assert [units(value) for value in (-1, -math.inf, math.nan)] == [0, 0, 0]
    assert price_units(math.inf) == MAX_PRICE_UNITS and loss_rate(math.inf) == NO_BOUND


def test_the_lock_holds_for_requests(monkeypatch):
    from vllm.exceptions import VLLMValidationError

    monkeypatch.setenv("VLLM_MARS_LOCK", "strict")
    strict = MarsConfig(theta=1.0)
    assert options_of(params(mars_theta=1), strict).value == 1
    lossy = {"mars_max_loss": 0.1}
    for config in (OPT_IN_THETA, OPT_IN):
        message = "mars_max_loss=0.1 is lossy, but this server is locked"
        with pytest.raises(VLLMValidationError, match=message):
            check_request(params(**lossy), served_with(config))
        # In an engine whose front end is not locked.
        assert options_of(params(**lossy), config).value == config.rule.strict
    check_request(params(mars_theta=1), served_with(strict))
    for strict in ({}, {"mars_max_loss": 0}):
        check_request(params(**strict), served_with(OPT_IN))


def test_changed_options_are_parsed_again():
    request = params(mars_theta=0.85)
    assert options_of(request, THETA).value == 0.85
    request.extra_args["mars_theta"] = 0.95
    assert options_of(request, THETA).value == 0.95
    request.structured_outputs = GRAMMAR
    assert options_of(request, THETA).strict == "structured_outputs"
    assert options_of(request, MarsConfig(theta=0.97)).value == 1


def test_scopes():
    for config, extra_args, expected in (
        (BOUND, {}, "all"),
        (BOUND, {"mars_scope": "all"}, "all"),
        (THINKS, {"mars_scope": "answer"}, "answer"),
        (STRICT_ANSWER, {}, "thinking"),
        (STRICT_ANSWER, {"mars_scope": "thinking"}, "thinking"),
    ):
        options = options_of(params(**extra_args), config)
        assert options.scope == expected
        reported = {} if expected == "all" else {"scope": expected}
        assert in_force(options, config) == {"max_loss": 0.5, **reported}
        number = {"all": 0, "thinking": IN_THINKING, "answer": IN_ANSWER}[expected]
        assert record_of(params(**extra_args), config)[Column.SCOPE] == number


@pytest.mark.parametrize(
    ("config", "sampling", "expected"),
    [
        (THETA, {}, {"theta": 0.8}),
        (PRICE, {}, {"price": 0.5}),
        (BOUND, {}, {"max_loss": 0.5}),
        (BOUND, {"extra_args": {"mars_max_loss": 0.1}}, {"max_loss": 0.1}),
        (BOUND, {"extra_args": {"mars_price": 1}}, {"price": 1.0}),
        (THETA, {"structured_outputs": GRAMMAR}, {"theta": 1.0, "strict": "structured_outputs"}),
        (PRICE, {"stop_token_ids": [*range(MAX_STOP_IDS - 1)]}, {"price": 0.5}),
        (
            PRICE,
            {"stop_token_ids": [*range(MAX_STOP_IDS)]},
            {"price": 0.0, "strict": "stop_token_ids"},
        ),
    ],
)
def test_options_in_force(config, sampling, expected):
    assert in_force(options_of(SamplingParams(**sampling), config), config) == expected
