"""The file of `vllm-mars calibrate`, and `"auto:FILE"` in the speculative config that reads it.

The threshold is taken out of the file where vLLM's front end reads its options; the workers get the
number and need no access to the file.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_mars.config import METHOD, OPTION, check_threshold
from vllm_mars.weights import weights_checksum

if TYPE_CHECKING:
    from vllm.config import ModelConfig

AUTO = "auto:"
KIND = "calibration"
SCHEMA = 1

_FACTS = ("architectures", "vocab_size", "hidden_size", "num_hidden_layers")


def resolve_auto(
    speculative_config: Mapping[str, Any], model_config: "ModelConfig"
) -> tuple[dict[str, Any], list[str]]:
    """Replaces `"auto:FILE"` by the threshold in the file.

    Args:
        speculative_config: the user's dict; it is not changed.
        model_config: the target model of the server.

    Returns:
        The dict with numbers, and what the user should know: a draft other than the calibrated one,
        or weights that could not be compared.

    Raises:
        ValueError: the file cannot be read, is not a calibration, is of another metric, or of
            another model.
    """
    config = {key.replace("-", "_"): value for key, value in speculative_config.items()}
    if config.get("rejection_sample_method") != METHOD:
        return dict(speculative_config), []
    notes: list[str] = []
    for metric, option in OPTION.items():
        value = config.get(option)
        if not isinstance(value, str) or not value.startswith(AUTO):
            continue
        given = f"{option}={value!r}"
        calibration = read_calibration(Path(value.removeprefix(AUTO)), given)
        if calibration["metric"] != metric:
            other = calibration["metric"]
            raise ValueError(
                f"{given} is a calibration of metric {other!r}; write "
                f'"mars_metric": "{other}", "{OPTION[other]}": "{value}".'
            )
        notes += _check_model(given, calibration, model_config)
        notes += _compare_draft(given, calibration, config)
        config[option] = calibration["threshold"]
    return config, notes


def read_calibration(path: Path, given: str | None = None) -> dict[str, Any]:
    """Reads and checks a file of `vllm-mars calibrate`.

    Args:
        path: the file.
        given: how errors name it; the path by default.

    Raises:
        ValueError: it cannot be read or is not a calibration of this schema.
    """
    given = given or str(path)
    way_out = "give a file that `vllm-mars calibrate` wrote."
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{given} cannot be read: {error}; {way_out}") from error
    except ValueError as error:
        raise ValueError(f"{given} is not JSON: {error}; {way_out}") from error
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise ValueError(f"{given} is not a calibration; {way_out}")
    if content.get("schema") != SCHEMA:
        raise ValueError(
            f"{given} has schema {content.get('schema')!r}, not {SCHEMA}; calibrate again with "
            "this release."
        )
    missing = [name for name in ("metric", "threshold", "model", "draft") if name not in content]
    if missing:
        raise ValueError(f"{given} lacks {', '.join(missing)}; {way_out}")
    if content["metric"] not in OPTION:
        raise ValueError(
            f"{given} has metric {content['metric']!r}, not one of {', '.join(OPTION)}; {way_out}"
        )
    for name in ("model", "draft"):
        if not isinstance(content[name], dict):
            raise ValueError(f"{given}: {name} is not a JSON object; {way_out}")
    try:
        check_threshold(content["metric"], content["threshold"])
    except ValueError as error:
        raise ValueError(f"{given} holds a bad threshold: {error}") from error
    return content


def identify(model_config: "ModelConfig") -> dict[str, Any]:
    """What a calibration remembers of its model.

    Args:
        model_config: vLLM's configuration of the target.

    Returns:
        `name`, the facts of the architecture, and `weights`: a checksum of the weight files in the
        model's directory, None where the model is no local directory or file.
    """
    hf_config = model_config.hf_text_config
    # As JSON gives them back.
    facts = {name: _plain(getattr(hf_config, name, None)) for name in _FACTS}
    return {
        "name": Path(str(model_config.model)).name,
        **facts,
        "weights": weights_checksum(Path(str(model_config.model))),
    }


def draft_of(speculative_config: Mapping[str, Any]) -> str:
    """The name of a server's draft: its model's last name, or the method without a model."""
    model = speculative_config.get("model")
    return Path(str(model)).name if model else str(speculative_config.get("method"))


def draft_facts(speculative_config: Mapping[str, Any]) -> dict[str, Any]:
    """What a calibration remembers of its draft.

    Args:
        speculative_config: vLLM's dict.

    Returns:
        `name`, `num_speculative_tokens` (None where the dict leaves it to vLLM) and, of ngram
        drafts, the lengths that are looked up; empty where the dict names no draft.
    """
    given = speculative_config.get
    if not (given("model") or given("method")):
        return {}
    facts = {
        "name": draft_of(speculative_config),
        "num_speculative_tokens": given("num_speculative_tokens"),
    }
    if given("method") == "ngram":
        # As vLLM completes them.
        least, most = given("prompt_lookup_min"), given("prompt_lookup_max")
        facts["prompt_lookup_min"] = least or most or 5
        facts["prompt_lookup_max"] = most or least or 5
    return facts


def _check_model(
    given: str, calibration: Mapping[str, Any], model_config: "ModelConfig"
) -> list[str]:
    model, ours = calibration["model"], identify(model_config)
    differing = [
        f"{name} {model.get(name)!r} and not {ours[name]!r}"
        for name in _FACTS
        if model.get(name) != ours[name]
    ]
    are_comparable = None not in (model.get("weights"), ours["weights"])
    if not differing and are_comparable and model["weights"] != ours["weights"]:
        differing = ["weights"]
    if differing:
        raise ValueError(
            f"{given} was calibrated on another model than {ours['name']!r}: "
            f"{model.get('name')!r} differs in {', '.join(differing)}. A threshold fits one model: "
            f"run `vllm-mars calibrate` on this one, or write the number "
            f"{calibration['threshold']:g} if you mean it."
        )
    if are_comparable:
        return []
    return [
        f"{given} was calibrated on {model.get('name')!r}; the weights of this server's "
        f"{ours['name']!r} are not in a local directory, so they were not compared."
    ]


def _compare_draft(
    given: str, calibration: Mapping[str, Any], speculative_config: Mapping[str, Any]
) -> list[str]:
    then, now = calibration["draft"], draft_facts(speculative_config)
    if not now:
        return [f"{given}: the draft was not compared, since options outside the dict name it."]
    # Older files have fewer facts, and some drafts bring their own number of tokens.
    different = [name for name in then if now.get(name) is not None and then[name] != now[name]]
    if not different:
        return []
    had, has = (", ".join(f"{name} {of[name]}" for name in different) for of in (then, now))
    return [
        f"{given} was calibrated with the draft's {had}, but this server has {has}: the loss can "
        "differ; calibrate again with this draft."
    ]


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
