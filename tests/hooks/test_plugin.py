"""The plugin in real processes: options, errors before a model is loaded, no effect if off."""

import dataclasses
import json
import logging
import os
import pickle
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engines import MARS, NGRAM, engine_config
from vllm_mars import MarsConfig
from vllm_mars.hooks.plugin import HOOKS, VARIABLES
from vllm_mars.models.draft_head import PACKAGED_HEAD
from vllm_mars.options.config import config_of


def test_import_is_light():
    code = (
        "import sys; from vllm_mars.hooks.plugin import register; register(); register(); "
        "print([m for m in sys.modules if m.startswith('vllm_mars.')]); "
        "import vllm_mars; vllm_mars.MarsConfig(); "
        "print([m for m in ('vllm', 'triton', 'torch') if m in sys.modules])"
    )
    probe = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert probe.stdout == "['vllm_mars.hooks', 'vllm_mars.hooks.plugin']\n[]\n", probe.stderr


def test_every_hook_exists():
    """Hooks are text, which type checkers do not follow."""
    for hook in HOOKS.values():
        assert callable(pkgutil.resolve_name(hook))


def test_options_reach_the_workers_config(packaged_model):
    # Dashes count as underscores, as in vLLM.
    options = {
        **NGRAM,
        "rejection-sample-method": "mars",
        "mars-theta": 0.8,
        "mars_protected_token_ids": [5, 2],
    }
    before = json.dumps(options)
    config = engine_config(packaged_model, options, additional_config={"other": 1})
    assert config.additional_config["other"] == 1
    expected = MarsConfig(theta=0.8, protected_token_ids=(5, 2), strict_spans=())
    assert config.additional_config["mars"].config == expected
    assert config.speculative_config.rejection_sample_method == "standard"
    assert json.dumps(options) == before


HEAD = {"method": "eagle3", "model": str(PACKAGED_HEAD), "num_speculative_tokens": 3}
IS_MARS = {"rejection_sample_method": "mars"}
PROBABILISTIC = "Drafts are probabilistic where requests sample ("
COULD_BE = 'Drafts are fixed ("draft_sample_method": "probabilistic", the default, gains more'


def test_a_speculators_repository_may_be_the_model(packaged_model, tmp_path):
    """vLLM takes the target, the method and K from the head's config."""
    import vllm

    if not vllm.__version__.startswith("0.32"):
        pytest.skip("since 0.33 the target has to be a repository of the hub")
    config = json.loads((PACKAGED_HEAD / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(packaged_model)
    (tmp_path / "config.json").write_text(json.dumps(config))
    served = engine_config(tmp_path, IS_MARS | {"mars_price": 0.2})
    assert config_of(served).price == 0.2
    assert served.model_config.model == str(packaged_model)
    drafts = served.speculative_config
    assert (drafts.method, drafts.num_speculative_tokens) == ("eagle3", 4)


@pytest.mark.parametrize(
    ("speculative_config", "method", "log"),
    [
        (HEAD | IS_MARS, "probabilistic", PROBABILISTIC),
        (HEAD | IS_MARS | {"mars_price": 0}, "probabilistic", PROBABILISTIC),
        (HEAD | IS_MARS | {"draft_sample_method": "greedy"}, "greedy", COULD_BE),
        # With theta the loss of probabilistic drafts is unknown.
        (HEAD | IS_MARS | {"mars_theta": 0.9}, "greedy", "Drafts are fixed."),
        (HEAD | IS_MARS | {"use_local_argmax_reduction": True}, "greedy", "Drafts are fixed."),
        (MARS, "greedy", "Drafts are fixed."),
        (HEAD, "greedy", None),
        (HEAD | {"draft_sample_method": "probabilistic"}, "probabilistic", None),
    ],
)
def test_draft_sample_method(packaged_model, speculative_config, method, log, caplog, monkeypatch):
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger="vllm")
    options = {"model": str(packaged_model), "dtype": "float32", "max_model_len": 512}
    arguments = EngineArgs(**options, speculative_config=dict(speculative_config))
    for _ in range(2):
        config = arguments.create_engine_config()
        assert config.speculative_config.draft_sample_method == method
    lines = [line for line in caplog.messages if line.startswith("Drafts are")]
    assert lines[0].startswith(log) if log else not lines


def test_xpress_has_no_probabilistic_drafts(packaged_model, tmp_path):
    """XPress drafts argmax tokens, which vLLM would verify as sampled ones."""
    from vllm.config import SpeculativeConfig

    if not hasattr(SpeculativeConfig, "is_xpress"):
        pytest.skip("this vLLM has no XPress")
    config = {
        **json.loads((packaged_model / "config.json").read_text()),
        "architectures": ["Qwen3XPressModel"],
        "model_type": "qwen3",
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": [0]},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    drafts = {"method": "dflash", "model": str(tmp_path), "num_speculative_tokens": 3}
    with pytest.raises(ValueError, match="'probabilistic' .* XPress drafts argmax tokens"):
        engine_config(packaged_model, {**drafts, **IS_MARS, **SET_PROBABILISTIC})


def test_off_adds_nothing(packaged_model):
    config = engine_config(packaged_model, NGRAM)
    assert config.additional_config == {}
    assert engine_config(packaged_model, None).speculative_config is None


def test_a_compiled_model_serves_every_price(packaged_model):
    """The config's hash is the key of vLLM's compile cache."""
    from vllm.config.utils import replace

    hashes = {}
    for price in (0.2, 0.3):
        config = engine_config(packaged_model, {**MARS, "mars_price": price})
        # For the engine core and the workers, and for the drafter.
        for arrived in (pickle.loads(pickle.dumps(config)), replace(config)):
            assert config_of(arrived).price == price
            hashes.setdefault(price, set()).add(arrived.compute_hash())
    assert hashes[0.2] == hashes[0.3] and len(hashes[0.2]) == 1


SET_PROBABILISTIC = {"draft_sample_method": "probabilistic"}
WATERMARK = {"watermark_config": {"algorithm": "gumbel", "key": 1}}


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"mars_theta": 1.7}, {}, r"mars_theta=1.7 is outside \(0, 1\]"),
        (
            {"mars_protected_token_ids": [49152]},
            {},
            r"49152\] is outside .* vocabulary \[0, 49152\)",
        ),
        ({"method": "extract_hidden_states"}, {}, "cannot serve method='extract_hidden_states'"),
        ({}, WATERMARK, "cannot serve a watermark_config"),
        ({"mars_draft_temperature": 0.5}, {}, "mars_draft_temperature=0.5 .* are fixed"),
        (
            SET_PROBABILISTIC,
            {},
            "draft_sample_method='probabilistic' .* 'ngram' drafts .*; drop the key",
        ),
        (
            HEAD | SET_PROBABILISTIC | {"mars_theta": 0.9},
            {},
            "mars_theta=0.9 and draft_sample_method='probabilistic' do not go together",
        ),
        (
            {"mars_logprobs": "sampled"},
            {},
            "mars_logprobs='sampled' needs logprobs of the processed logits, but logprobs_mode is "
            "'raw_logprobs'; add --logprobs-mode processed_logprobs.",
        ),
    ],
)
def test_bad_options_fail_before_a_model_is_loaded(packaged_model, changes, options, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        engine_config(packaged_model, {**MARS, **changes}, **options)
    # Nothing is half patched: the next engine is configured as usual.
    assert engine_config(packaged_model, NGRAM).additional_config == {}


def test_flags_besides_the_json_are_read(packaged_model):
    """vLLM adds them to the speculative config before the checks."""
    flags = {"spec_method": "eagle3", "spec_model": str(PACKAGED_HEAD), "spec_tokens": 3}
    config = engine_config(packaged_model, dict(IS_MARS), **flags)
    assert config.additional_config["mars"].config == MarsConfig(strict_spans=())
    assert config.speculative_config.method == "eagle3"
    assert config.speculative_config.draft_sample_method == "probabilistic"
    with pytest.raises(ValueError, match="draft_sample_method='probabilistic' .* 'ngram' drafts"):
        engine_config(
            packaged_model, IS_MARS | SET_PROBABILISTIC, spec_method="ngram", spec_tokens=3
        )


def test_a_front_end_that_checks_nothing_is_refused(packaged_model, monkeypatch):
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    message = "cannot serve VLLM_USE_RUST_FRONTEND=1: .*no options of.*; unset the variable"
    with pytest.raises(NotImplementedError, match=message):
        engine_config(packaged_model, MARS)
    engine_config(packaged_model, NGRAM)


def test_lock(packaged_model, monkeypatch):
    monkeypatch.setenv("VLLM_MARS_LOCK", "strict")
    engine_config(packaged_model, {**MARS, "mars_theta": 1.0})
    with pytest.raises(RuntimeError, match="VLLM_MARS_LOCK=strict forbids .*, but mars_theta=0.9"):
        engine_config(packaged_model, {**MARS, "mars_theta": 0.9})


def test_vllm_knows_the_variables(packaged_model, monkeypatch):
    """Otherwise vLLM warns about each variable, or does not start."""
    import vllm.envs

    package = Path(sys.modules[MarsConfig.__module__.partition(".")[0]].__file__).parent
    names = {
        name
        for path in package.rglob("*.py")
        for name in re.findall(r"\bVLLM_MARS_[A-Z_]+", path.read_text())
    }
    assert names == set(VARIABLES)
    # The test suite sets one, and vLLM sets some that it does not know.
    for name in [*os.environ]:
        if name.startswith("VLLM_") and name not in vllm.envs.environment_variables:
            monkeypatch.delenv(name)
    for name in VARIABLES:
        monkeypatch.setenv(name, "strict" if name.endswith("LOCK") else "")
    options = {"fail_on_environ_validation": True}
    engine_config(packaged_model, {**MARS, "mars_max_loss": 0}, **options)
    # A path in the compile cache's key would cause another compilation.
    factors = vllm.envs.compile_factors()
    assert {factors[name] for name in VARIABLES} == {None}
    monkeypatch.setenv("VLLM_MARS_LOOK", "strict")
    with pytest.raises(ValueError, match="Unknown .* VLLM_MARS_LOOK"):
        engine_config(packaged_model, NGRAM, **options)


def test_another_sampler_is_refused():
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    from vllm_mars.worker.start import require_own_sampler

    class Other(RejectionSampler):
        pass

    with pytest.raises(RuntimeError, match="already test_plugin.*Other, not vLLM's own"):
        require_own_sampler(Other.__new__(Other), RejectionSampler)


def test_protected_by_default(packaged_model):
    from vllm.tokenizers import cached_tokenizer_from_config

    from vllm_mars.options.protection import protected_token_ids

    vllm_config = engine_config(packaged_model, None)
    # <|endoftext|>, <|im_start|>, <|im_end|> (the end of sequence), <repo_name>, ... of SmolLM2.
    theta = MarsConfig(theta=0.9)
    assert protected_token_ids(theta, vllm_config) == list(range(17))
    # Ordinary tokens that mark a section.
    marked = dataclasses.replace(
        theta, strict_spans=((900, 3),), thinking_start=800, thinking_end=801
    )
    assert protected_token_ids(marked, vllm_config) == [*range(17), 800, 801, 900]
    # Openers of comments and docstrings, which the paper's rule does not protect.
    others = set(protected_token_ids(MarsConfig(), vllm_config)) - set(range(17))
    tokenizer = cached_tokenizer_from_config(vllm_config.model_config)
    assert {tokenizer.decode([token]) for token in others} == {
        *("#", "##", "###", " #", " ##", " ###", "//", " //", "/*"),
        *('"""', ' """', "'''", " '''"),
    }
    assert protected_token_ids(MarsConfig(protected_token_ids=[]), vllm_config) == []
    assert protected_token_ids(MarsConfig(protected_token_ids=[9, 4, 9]), vllm_config) == [4, 9]
