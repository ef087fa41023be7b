"""Options of a server: defaults, rules, errors, the lock."""

import math
from types import SimpleNamespace

import pytest

from vllm_mars import MarsConfig
from vllm_mars.hooks.pickled import PickledConfig
from vllm_mars.kernels.rules import PRICE
from vllm_mars.options.config import config_of, lossy_reason, split_speculative_config
from vllm_mars.options.lock import check_lock

MARS = {"method": "ngram", "num_speculative_tokens": 4, "rejection_sample_method": "mars"}


def test_default_is_the_recommended_bound():
    config, rest = split_speculative_config(MARS)
    assert config == MarsConfig(max_loss=0.02)
    assert (config.rule, config.value, config.most_max_loss) == (PRICE, math.inf, 0.02)
    assert rest == {**MARS, "rejection_sample_method": "standard"}
    assert "rejection_sample_method" in MARS, "the user's dict is not changed"
    assert config.sets_price and config.lossy and config.clients_may_relax
    assert split_speculative_config({**MARS, "mars_max_loss": 0.02})[0] == config
    assert lossy_reason(config, "mars") == "mars_max_loss=0.02"


@pytest.mark.parametrize("method", [None, "standard", "block", "synthetic"])
def test_other_methods_are_not_changed(method):
    config = {"method": "ngram"} | ({"rejection_sample_method": method} if method else {})
    assert split_speculative_config(config) == (None, config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mars_theta": 1.7}, r"mars_theta=1.7 is outside \(0, 1\]; 1 switches the relaxation off"),
        ({"mars_theta": 0}, r"mars_theta=0 is outside \(0, 1\]"),
        ({"mars_theta": math.nan}, "mars_theta=nan is outside"),
        ({"mars_theta": "0.9"}, "mars_theta='0.9' is a str, but must be a number"),
        ({"mars_theta": True}, "mars_theta=True is a bool"),
        ({"mars_theta": [0.9]}, "is a list, but must be a number"),
        ({"mars_price": -1}, r"mars_price=-1 is outside \[0, 8192\]; 0 switches the relaxation"),
        ({"mars_price": math.inf}, "mars_price=inf is outside"),
        (
            {"mars_price": 10**400},
            r"mars_price=10+\.\.\. \(401 characters\) is outside \[0, 8192\]",
        ),
        (
            {"mars_max_loss": 1025},
            r"mars_max_loss=1025 is outside \[0, 1024\]; 0 is strict, 0.02 lets an answer",
        ),
        (
            {"mars_theta": 0.9, "mars_price": 0.3},
            "mars_theta=0.9 and mars_price=0.3 name 2 rules; give one of mars_theta, ",
        ),
        (
            {"rejection_sample_method": None, "mars_price": 1},
            "is given, but rejection_sample_method is",
        ),
        ({"mars_limit": "x"}, "mars_limit='x' is a str, but must be a number"),
        ({"mars_price": 1, "mars_limit": -1}, r"mars_limit=-1 is outside \[0, 1024\]"),
        (
            {"mars_theta": 0.9, "mars_limit": 0.02},
            "mars_limit=0.02 is given, but without mars_max_loss a request may choose any bound; "
            "also give mars_max_loss, or leave it out",
        ),
        (
            {"mars_limit": 0.01},
            "mars_limit=0.01 is below mars_max_loss=0.02, which each request may use; leave it "
            "out, or lower mars_max_loss",
        ),
        (
            {"mars_max_loss": 0, "mars_limit": 1025},
            r"mars_limit=1025 is outside \[0, 1024\]; it is the largest mars_max_loss that a req",
        ),
        ({"mars_logprobs": "raw"}, "mars_logprobs='raw' is not one of target, sampled; 'sampled'"),
        ({"mars_scope": "think"}, "mars_scope='think' is not one of all, thinking, answer; 'think"),
        ({"mars_scope": ["all"]}, r"mars_scope=\['all'\] is not one of all, thinking, answer"),
        ({"mars_tetha": 0.9}, "mars_tetha is not an option .* did you mean mars_theta"),
        ({"mars_thinking_end": 1}, "mars_thinking_end is not an option"),
        ({"mars_repeat_guard": 0}, "mars_repeat_guard is not an option of margin"),
        ({"mars_max_relaxed_share": 0.1}, "mars_max_relaxed_share is not .* mars_max_loss?"),
        ({"mars_draft_temperature": 0}, r"=0 is outside \[0.01, 2\]; 1 samples drafts"),
        ({"mars_draft_temperature": 2.1}, r"mars_draft_temperature=2.1 is outside \[0.01, 2\]"),
        ({"mars_strict_opening": 4.0}, "mars_strict_opening=4.0 is a float, but must be"),
        ({"mars_protected_token_ids": 7}, "mars_protected_token_ids=7 is not a list of token ids"),
        ({"mars_protected_token_ids": [1, -1]}, "is not a list of token ids"),
        ({"mars_protected_token_ids": [True]}, "is not a list of token ids"),
    ],
)
def test_bad_option_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        split_speculative_config({**MARS, **options})


@pytest.mark.parametrize("lock", ["yes", "Strict", "strict,yes"])
def test_an_unknown_lock_is_refused(monkeypatch, lock):
    monkeypatch.setenv("VLLM_MARS_LOCK", lock)
    message = f"VLLM_MARS_LOCK='{lock}' is not 'strict', which forbids .*; unset it to lock nothing"
    with pytest.raises(ValueError, match=message):
        check_lock(None)


@pytest.mark.parametrize(
    ("options", "lossy", "may_relax"),
    [
        ({}, True, True),
        ({"theta": 0.99}, True, True),
        ({"theta": 1.0}, False, False),
        ({"theta": 1.0, "max_loss": 0, "limit": 0.5}, False, False),
        ({"price": 0}, False, False),
        ({"price": 0.3, "max_loss": 0}, False, False),
        ({"price": 0.3, "max_loss": 0, "limit": 0.5}, False, True),
        ({"max_loss": 0}, False, False),
        ({"max_loss": 0, "limit": 0.02}, False, True),
    ],
)
def test_whether_a_server_is_lossy_and_clients_may_relax(options, lossy, may_relax):
    config = MarsConfig(**options)
    assert (config.lossy, config.clients_may_relax) == (lossy, may_relax)


@pytest.mark.parametrize(("options", "ngram"), [({}, 4), ({"theta": 0.9}, 0), ({"price": 0.5}, 4)])
def test_the_guard_is_on_with_a_price(options, ngram):
    assert MarsConfig(**options).repeat_ngram == ngram


def test_the_lock_is_checked_whenever_options_are_read(monkeypatch):
    config = MarsConfig(theta=0.7)
    vllm_config = SimpleNamespace(additional_config={"mars": PickledConfig(config)})
    assert config_of(SimpleNamespace(additional_config={})) is None
    assert config_of(vllm_config) is config
    monkeypatch.setenv("VLLM_MARS_LOCK", "strict")
    message = (
        "VLLM_MARS_LOCK=strict forbids lossy verification, but mars_theta=0.7; choose a lossless "
        "rejection_sample_method, such as 'mars' with mars_max_loss=0, or unset VLLM_MARS_LOCK"
    )
    with pytest.raises(RuntimeError, match=message):
        config_of(vllm_config)
