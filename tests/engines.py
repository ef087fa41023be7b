"""Engines and servers for tests, as small as the subject allows."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from vllm_mars.models.drafts import NGRAM_CONFIG
from vllm_mars.options.config import config_of
from vllm_mars.servers.server import VllmServer

if TYPE_CHECKING:
    from vllm import LLM

NGRAM = {**NGRAM_CONFIG, "num_speculative_tokens": 4}
MARS = {**NGRAM, "rejection_sample_method": "mars"}
# Cached prefills round differently, and tests compare tokens.
PACKAGED = {"max_model_len": 1024, "max_num_seqs": 8, "enable_prefix_caching": False}
LOSSY = {**MARS, "mars_theta": 0.3}
# Answers of tests are short, so none of their tokens may be an opening.
BOUNDED = {**MARS, "mars_max_loss": 0.02, "mars_strict_opening": 0}
OPT_IN = {"rejection_sample_method": "mars", "mars_max_loss": 0, "mars_limit": 0.02}

PET = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "dog", "bird"]},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
PET_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "pet", "schema": PET, "strict": True},
}


def engine_config(model, speculative_config, **options):
    """vLLM's config of an engine."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        speculative_config=speculative_config,
        **options,
    ).create_engine_config()


def resolved(model, options, arguments=(), **engine_options):
    """The workers' config, with arguments of the command line and of the engine."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    given = argparse.Namespace(
        model=str(model),
        dtype="float32",
        max_model_len=512,
        speculative_config={**MARS, **options},
        **dict(arguments),
        **engine_options,
    )
    return config_of(EngineArgs.from_cli_args(given).create_engine_config())


@contextlib.contextmanager
def engine_in_process(model: Path, speculative_config: dict | None, **options) -> Iterator[LLM]:
    """An engine that shares this process with its worker, unless it has several ranks."""
    from llvmlite.binding import ffi
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    # vLLM inspects all modules when an engine starts on a CPU, and would take a function of LLVM
    # for this object's __dict__ after ngram drafts have loaded llvmlite.
    ffi.lib._fntab["__dict__"] = {}
    engine_options = {
        "skip_tokenizer_init": True,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "dtype": "float32",
        "enforce_eager": True,
        **options,
    }
    # vLLM sets environment variables for child processes.
    with mock.patch.dict(os.environ):
        try:
            llm = LLM(
                str(model),
                disable_log_stats=False,
                speculative_config=speculative_config,
                **engine_options,
            )
            try:
                yield llm
            finally:
                llm.llm_engine.engine_core.shutdown()
                # Waits for ranks that have ended.
                multiprocessing.active_children()
        finally:
            cleanup_dist_env_and_memory()


def counters(llm: LLM) -> dict[str, float]:
    """Counters and gauges of an engine."""
    return {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}


def greedy_tokens(llm: LLM, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """Answers, by default greedy, to prompts of token ids."""
    from vllm import SamplingParams

    params = SamplingParams(
        **{"temperature": 0, "detokenize": False, "ignore_eos": True, **options}
    )
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def packaged_server(
    model: Path, speculative_config: dict, directory: Path, *arguments: str, **env: str
):
    """`vllm serve` of the packaged model as "model"; logs metrics each second."""
    return VllmServer(
        model,
        [
            *("--enforce-eager", "--dtype", "float32", "--max-model-len", "1024"),
            *("--max-num-seqs", "16", "--served-model-name", "model"),
            *("--speculative-config", json.dumps(speculative_config)),
            *arguments,
        ],
        log_path=directory / "server.log",
        env={"VLLM_LOG_STATS_INTERVAL": "1", **env},
    )


def open_server(model: Path, speculative_config: dict | None, directory: Path, *arguments: str):
    """A small server with all routes, including those of vLLM's development mode and of `kept`."""
    speculation = ["--speculative-config", json.dumps(speculative_config)]
    tests = str(Path(__file__).parent)
    return VllmServer(
        model,
        [
            *("--enforce-eager", "--dtype", "float32", "--max-model-len", "256"),
            *("--max-num-seqs", "16", "--served-model-name", "model"),
            *("--worker-extension-cls", "kept.Engine", "--middleware", "kept.Api"),
            *(speculation if speculative_config else ()),
            *arguments,
        ],
        log_path=directory / "server.log",
        # A request for thousands of samples would crowd out the others.
        env={"VLLM_SERVER_DEV_MODE": "1", "VLLM_MAX_N_SEQUENCES": "8", "PYTHONPATH": tests},
    )
