"""The options: defaults, both metrics, and a clear error for everything else."""

import json
import math
from types import SimpleNamespace

import pytest

from vllm_mars import MarsConfig
from vllm_mars.config import config_of, lossy_reason, split_speculative_config
from vllm_mars.lock import check_lock

MARS = {"method": "ngram", "num_speculative_tokens": 4, "rejection_sample_method": "mars"}


def test_default_is_the_papers():
    config, rest = split_speculative_config(MARS)
    assert config == MarsConfig(theta=0.9, metric="ratio", protected_token_ids=None)
    assert config.threshold == (0.9, 0.0, 0.0)
    assert rest == {**MARS, "rejection_sample_method": "standard"}
    assert "rejection_sample_method" in MARS, "the user's dict stays as it is"


def test_dashes_count_as_underscores():
    config, _ = split_speculative_config(
        {"method": "ngram", "rejection-sample-method": "mars", "mars-theta": 0.8}
    )
    assert config is not None
    assert config.theta == 0.8


def test_gap_metric():
    config, _ = split_speculative_config({**MARS, "mars_metric": "gap", "mars_gap": 0.5})
    assert config is not None
    assert config.threshold == (1.0, 0.5, 0.0)
    assert config.lossy


@pytest.mark.parametrize("method", [None, "standard", "block", "synthetic"])
def test_other_methods_are_left_alone(method):
    given = {"method": "ngram"} | ({"rejection_sample_method": method} if method else {})
    assert split_speculative_config(given) == (None, given)


def test_options_travel_as_json():
    config = MarsConfig(theta=0.7, protected_token_ids=(1, 2))
    assert MarsConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mars_theta": 1.7}, r"mars_theta=1.7 is outside \(0, 1\]; 1 switches the relaxation off"),
        ({"mars_theta": 0}, r"mars_theta=0 is outside \(0, 1\]"),
        ({"mars_theta": -0.1}, r"mars_theta=-0.1 is outside"),
        ({"mars_theta": math.nan}, "mars_theta=nan is outside"),
        ({"mars_theta": math.inf}, "mars_theta=inf is outside"),
        ({"mars_theta": "0.9"}, "mars_theta='0.9' is a str, but must be a number"),
        ({"mars_theta": True}, "mars_theta=True is a bool"),
        ({"mars_theta": None}, "mars_theta=None is a NoneType"),
        ({"mars_theta": [0.9]}, "is a list, but must be a number"),
        ({"mars_client_control": 1}, "mars_client_control=1 is not true or false"),
        ({"mars_theta_min": 1.5}, r"mars_theta_min=1.5 is outside \[0, 1\]; 0 sets no limit"),
        ({"mars_theta_min": "x"}, "mars_theta_min='x' is a str, but must be a number"),
        (
            {"mars_gap_max": 1},
            "mars_gap_max=1 belongs to metric 'gap', but .* set mars_theta_min instead",
        ),
        (
            {"mars_metric": "gap", "mars_gap": 1, "mars_gap_max": -1},
            r"mars_gap_max=-1 is outside \[0, inf\)",
        ),
        (
            {"mars_metric": "gap", "mars_gap": 1, "mars_theta_min": 0.5},
            "mars_theta_min=0.5 belongs to metric 'ratio', but .* set mars_gap_max instead",
        ),
        ({"mars_structured": True}, "mars_structured=True is not one of strict, relaxed"),
        ({"mars_gap": 10**400, "mars_metric": "gap"}, r"mars_gap=10+ is outside \[0, inf\)"),
        ({"mars_metric": "entropy"}, "mars_metric='entropy' is not one of ratio, gap, price"),
        ({"mars_metric": "price"}, "mars_metric='price' needs mars_price .* e.g. 0.25"),
        ({"mars_price": 0.5}, "mars_price=0.5 belongs to metric 'price'; add mars_metric='price'"),
        ({"mars_metric": "price", "mars_price": -1}, r"mars_price=-1 is outside \[0, inf\)"),
        (
            {"mars_metric": "price", "mars_price": 1, "mars_theta": 0.9},
            "mars_theta=0.9 belongs to metric 'ratio', but mars_metric is 'price'; drop one",
        ),
        (
            {"mars_metric": "price", "mars_price": 1, "mars_price_max": -1},
            r"mars_price_max=-1 is outside \[0, inf\)",
        ),
        (
            {"mars_metric": "price", "mars_price": 1, "mars_gap_max": 1},
            "mars_gap_max=1 belongs to metric 'gap', but .* set mars_price_max instead",
        ),
        (
            {"mars_metric": "price", "mars_shadow": True, "mars_shadow_thetas": [0.9]},
            "mars_shadow_thetas.* belongs to metric 'ratio', but .* set mars_shadow_prices instead",
        ),
        (
            {"mars_metric": "price", "mars_shadow": True, "mars_shadow_prices": [-1]},
            r"mars_shadow_prices=-1 is outside \[0, inf\)",
        ),
        ({"mars_shadow_gaps": [1]}, r"mars_shadow_gaps=\[1\] belongs to the shadow mode; add"),
        ({"mars_metric": "gap"}, "mars_metric='gap' needs mars_gap"),
        ({"mars_metric": "gap", "mars_gap": -1}, r"mars_gap=-1 is outside \[0, inf\)"),
        ({"mars_metric": "gap", "mars_gap": math.inf}, "mars_gap=inf is outside"),
        (
            {"mars_metric": "gap", "mars_gap": 1, "mars_theta": 0.9},
            "mars_theta=0.9 belongs to metric 'ratio'",
        ),
        ({"mars_gap": 0.5}, "mars_gap=0.5 belongs to metric 'gap'"),
        ({"mars_tetha": 0.9}, "mars_tetha is not an option .* did you mean mars_theta"),
        ({"mars_repeat_guard": 1}, r"mars_repeat_guard=1 is neither 0 nor in \[2, 16\]; 4 relaxes"),
        ({"mars_repeat_guard": 17}, "mars_repeat_guard=17 is neither .* 0 switches the guard off"),
        ({"mars_repeat_guard": 4.0}, "mars_repeat_guard=4.0 is a float, but must be an integer"),
        ({"mars_repeat_guard": True}, "mars_repeat_guard=True is a bool, but must be an integer"),
        ({"mars_protected_token_ids": 7}, "mars_protected_token_ids=7 is not a list of token ids"),
        ({"mars_protected_token_ids": [1, -1]}, "is not a list of token ids"),
        ({"mars_protected_token_ids": [True]}, "is not a list of token ids"),
    ],
)
def test_bad_option_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        split_speculative_config({**MARS, **options})


def test_options_without_the_method():
    with pytest.raises(ValueError, match="mars_theta=0.9 is given, but rejection_sample_method is"):
        split_speculative_config({"method": "ngram", "mars_theta": 0.9})


@pytest.mark.parametrize(
    ("config", "method", "lossy"),
    [
        (MarsConfig(theta=1.0), "standard", False),
        (MarsConfig(metric="gap"), "standard", False),
        (MarsConfig(theta=0.99), "standard", True),
        (MarsConfig(metric="gap", gap=0.1), "standard", True),
        (MarsConfig(metric="price"), "standard", False),
        (MarsConfig(metric="price", price=0.1), "standard", True),
        (None, "standard", False),
        (None, "block", False),
        (None, "fly", True),
    ],
)
def test_lock(monkeypatch, config, method, lossy):
    reason = lossy_reason(config, method)
    monkeypatch.delenv("VLLM_MARS_LOCK", raising=False)
    check_lock(reason)
    monkeypatch.setenv("VLLM_MARS_LOCK", "strict")
    if lossy:
        message = (
            r"VLLM_MARS_LOCK=strict forbids lossy verification, .*\(or mars_gap or mars_price to "
        )
        with pytest.raises(RuntimeError, match=message):
            check_lock(reason)
    else:
        check_lock(reason)


def test_unknown_lock(monkeypatch):
    monkeypatch.setenv("VLLM_MARS_LOCK", "yes")
    with pytest.raises(ValueError, match="VLLM_MARS_LOCK='yes' is not 'strict'"):
        check_lock(None)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"theta": 1.0}, False),
        ({"theta": 1.0, "theta_min": 0.5}, True),
        ({"theta_min": 1}, False),
        ({"client_control": False}, False),
        ({"metric": "gap", "gap": 0.5}, True),
        ({"metric": "gap", "gap": 0.5, "gap_max": 0}, False),
        ({"metric": "gap"}, False),
        ({"metric": "gap", "gap_max": 0.5}, True),
        ({"metric": "price"}, False),
        ({"metric": "price", "price_max": 0.5}, True),
    ],
)
def test_whether_clients_may_relax(options, expected):
    assert MarsConfig(**options).clients_may_relax is expected


@pytest.mark.parametrize(
    ("options", "ngram"),
    [
        ({}, 0),
        ({"metric": "gap", "gap": 1.0}, 0),
        ({"metric": "price", "price": 0.5}, 4),
        ({"metric": "price", "price": 0.5, "repeat_guard": 0}, 0),
        ({"metric": "price", "price": 0.5, "repeat_guard": 2}, 2),
        ({"theta": 0.9, "repeat_guard": 16}, 16),
    ],
)
def test_the_guard_is_on_by_default_for_a_price(options, ngram):
    config = MarsConfig(**options)
    assert config.repeat_ngram == ngram
    assert MarsConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def carrying(config):
    return SimpleNamespace(additional_config={"mars": config.to_json()})


def test_options_are_read_once_per_configuration(monkeypatch):
    first, second = carrying(MarsConfig(theta=0.7)), carrying(MarsConfig(theta=0.8))
    assert config_of(SimpleNamespace(additional_config={})) is None
    read = config_of(first)
    assert read == MarsConfig(theta=0.7)
    assert config_of(first) is read
    assert config_of(second) == MarsConfig(theta=0.8)
    assert config_of(first) == read
    # The lock is looked at each time.
    monkeypatch.setenv("VLLM_MARS_LOCK", "strict")
    with pytest.raises(RuntimeError, match="forbids lossy verification, but mars_theta=0.7"):
        config_of(first)
