"""A Ray Serve application with margin-aware verification.

    serve run vllm_mars.ray_serve:app
    serve run vllm_mars.ray_serve:app model=MODEL min_replicas=2 max_replicas=8

`ray.serve.llm` does the work: replicas and their autoscaling, routing, streaming, health checks and
metrics. This module fills in its configuration, by default with the packaged model and MARS, and
rejects at once what would otherwise fail inside a replica. Options that are not words or numbers
are JSON. docs/operating.md has the file for `serve deploy`.
"""

import contextlib
import json
import logging
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import click
import ray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from ray.serve import Application
from ray.serve.config import AutoscalingConfig
from ray.serve.llm import LLMConfig, build_openai_app
from ray.serve.llm.deployment import LLMServer

from vllm_mars.models.drafts import NGRAM, RECOMMENDED, speculative_config
from vllm_mars.models.packaged_model import ensure_model
from vllm_mars.options.config import SERVER_ARGUMENTS, split_speculative_config
from vllm_mars.releases import require_served_by_ray
from vllm_mars.servers.provenance import versions
from vllm_mars.servers.ray_nodes import check_nodes
from vllm_mars.servers.vllm_args import CPU_ENGINE_ARGS

require_served_by_ray(versions()["vllm"])

PACKAGED_MODEL = "SmolLM2-135M-Instruct"
SPECULATION = speculative_config(NGRAM, 4, **RECOMMENDED)
PREFIX_ROUTER = "ray.serve.llm.request_router.PrefixCacheAffinityRouter"
# Interval of Ray's health checks of a replica, and their timeout.
HEALTH_PERIOD_SECONDS = 5.0
HEALTH_TIMEOUT_SECONDS = 30.0


def _parsed(value: Any) -> Any:
    """Parses JSON: the command line gives every value as text."""
    return json.loads(value) if isinstance(value, str) else value


Json = Annotated[dict[str, Any], BeforeValidator(_parsed)]


class Options(BaseModel):
    """Options for `serve run vllm_mars.ray_serve:app NAME=VALUE ...` or `args:` of a YAML file.

    Attributes:
        model: directory or name of the model; the packaged model if left out.
        model_id: name of the model for clients; the last component of `model` if left out.
        speculative_config: vLLM's, with the `mars_*` keys.
        engine_kwargs: further arguments of vLLM's `AsyncEngineArgs`, such as
            `tensor_parallel_size`.
        min_replicas: fewest replicas; at 0 the first request waits for one.
        max_replicas: most replicas; `min_replicas`, but at least 1, if left out.
        target_ongoing_requests: requests per replica at which Ray adds another one.
        autoscaling: further keys of Ray's `AutoscalingConfig`, such as `downscale_delay_s`.
        max_ongoing_requests: requests per replica beyond which Ray's router queues them.
        graceful_shutdown_timeout_s: seconds for a replica to finish its answers when it is replaced
            or no longer needed; unfinished answers are then cut off.
        routing: "prefix" sends requests with a common prefix to the same replica while the load is
            even, for its prefix cache; "load" takes the less loaded of two replicas.
        accelerator_type: Ray's name of the GPU, such as "H100"; any if left out.
        runtime_env: Ray's, for the replicas and their workers.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str | None = None
    model_id: str | None = None
    speculative_config: Json = Field(default_factory=lambda: dict(SPECULATION))
    engine_kwargs: Json = Field(default_factory=dict)
    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int | None = Field(default=None, ge=1)
    target_ongoing_requests: float = Field(default=32, gt=0)
    autoscaling: Json = Field(default_factory=dict)
    max_ongoing_requests: int = Field(default=256, ge=1)
    graceful_shutdown_timeout_s: float = Field(default=600, ge=0)
    routing: Literal["prefix", "load"] = "prefix"
    accelerator_type: str | None = None
    runtime_env: Json = Field(default_factory=dict)


class PackagedModelServer(LLMServer):
    """Ray's server of one replica, which first builds the packaged model on its node."""

    async def __init__(self, llm_config: LLMConfig, **kwargs: Any) -> None:  # type: ignore[misc]
        source = getattr(llm_config.model_loading_config, "model_source", None)
        if (path := str(ensure_model())) != source:
            raise RuntimeError(
                f"the packaged model is at {path} on this node, but at {source} where the "
                "application was built; set XDG_CACHE_HOME alike on all nodes."
            )
        await super().__init__(llm_config, **kwargs)


def app(options: Options) -> Application:
    """Builds the application; RuntimeError if a node has another version of Ray, vLLM or MARS."""
    from vllm.platforms import current_platform

    engine_kwargs = _engine_kwargs(options)
    autoscaling = _autoscaling_config(options)
    on_cpu = bool(current_platform.is_cpu())
    with _connected():
        check_nodes(node for node in ray.nodes() if node["Alive"])  # type: ignore[no-untyped-call]
    model = options.model or str(ensure_model())
    name = model.rstrip("/").rsplit("/", 1)[-1] if options.model else PACKAGED_MODEL
    deployment: dict[str, Any] = {
        "max_ongoing_requests": options.max_ongoing_requests,
        "graceful_shutdown_timeout_s": options.graceful_shutdown_timeout_s,
        "health_check_period_s": HEALTH_PERIOD_SECONDS,
        "health_check_timeout_s": HEALTH_TIMEOUT_SECONDS,
        "autoscaling_config": autoscaling,
    }
    if options.routing == "prefix":
        deployment["request_router_config"] = {"request_router_class": PREFIX_ROUTER}
    config = LLMConfig(
        model_loading_config={"model_id": options.model_id or name, "model_source": model},
        engine_kwargs={**(CPU_ENGINE_ARGS if on_cpu else {}), **engine_kwargs},
        accelerator_config={"kind": "cpu"} if on_cpu else None,  # type: ignore[arg-type]
        accelerator_type=options.accelerator_type,
        runtime_env=options.runtime_env or None,
        deployment_config=deployment,
        server_cls=None if options.model else PackagedModelServer,
        # Exports vLLM's metrics, including this project's, on Ray's metrics port of each node.
        log_engine_metrics=True,
    )
    # Streams pass through the ingress, which is also replaced if the application changes.
    ingress = {"graceful_shutdown_timeout_s": options.graceful_shutdown_timeout_s}
    return build_openai_app({"llm_configs": [config], "ingress_deployment_config": ingress})


def _engine_kwargs(options: Options) -> dict[str, Any]:
    """Returns the checked engine arguments of the replicas."""
    kwargs = {**options.engine_kwargs, "speculative_config": options.speculative_config}
    is_mars = split_speculative_config(options.speculative_config)[0] is not None
    # Ray passes these only to vLLM's API server, but the spans of tool calls depend on them.
    arguments = {key: kwargs[name] for name, key in SERVER_ARGUMENTS.items() if kwargs.get(name)}
    if is_mars and arguments:
        kwargs["additional_config"] = kwargs.get("additional_config", {}) | arguments
    return kwargs


def _autoscaling_config(options: Options) -> dict[str, Any]:
    """Returns Ray's autoscaling config after checking its keys: Ray ignores unknown ones."""
    from_options = {
        "min_replicas": options.min_replicas,
        "max_replicas": options.max_replicas or max(options.min_replicas, 1),
        "target_ongoing_requests": options.target_ongoing_requests,
    }
    further = AutoscalingConfig.model_fields.keys() - from_options.keys()
    if unknown := sorted(options.autoscaling.keys() - further):
        raise ValueError(
            f"autoscaling has {unknown[0]!r}; it may have {', '.join(sorted(further))}. "
            f"{', '.join(from_options)} are options of their own."
        )
    config = {**options.autoscaling, **from_options}
    AutoscalingConfig(**config)  # raises if a value is bad
    return config


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    """Connects to the cluster that will run the application, if this process is not connected."""
    if ray.is_initialized():
        yield
        return
    # `serve run` builds the application before it connects, so its address is used here.
    command = click.get_current_context(silent=True)
    address = command.params.get("address") if command else None
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()
