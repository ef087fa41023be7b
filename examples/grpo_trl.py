"""Trains the packaged model with TRL's GRPO on rollouts with MARS.

    make install        # with TRL, and vLLM's CUDA build if there is a GPU
    .venv/bin/python examples/grpo_trl.py --rule mars --seed 0 --output build/grpo/mars-0.jsonl

TRL starts vLLM in this process ("colocate"), copies the weights into it before each step, and
weights each token by the trainer's probability over the server's. With `"mars_logprobs": "sampled"`
vLLM reports log m, the log-probability of the served distribution, so TRL needs no change. It has
no option for vLLM's speculative config, so `engine` passes it.

The reward is the share of short words, which 135M parameters learn in minutes. A second call
resumes from the last checkpoint. docs/rollouts.md has measurements, and notes for a GPU.
"""

import argparse
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

# The engine runs in this process, with torch's number of threads.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# GiB.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation
from vllm import LLM, _custom_ops

from vllm_mars.models.draft_head import PACKAGED_HEAD
from vllm_mars.models.drafts import speculative_config
from vllm_mars.models.packaged_model import ensure_model
from vllm_mars.servers.provenance import describe_run

TOPICS = ("rain", "bread", "a bridge", "the moon", "a clock", "honey", "a river", "wool", "tea")


class Rewards:
    """The reward, which also logs the engine's counts of a step."""

    __name__ = "short_words"

    def __init__(self) -> None:
        self.llm: LLM | None = None
        self.before: dict[str, float] = {}

    def __call__(self, completions: list[Any], log_metric: Any, **_: Any) -> list[float]:
        """Returns the share of words with at most four letters of each answer."""
        for name, value in self.of_this_step().items():
            log_metric(name, value)
        texts = [completion[0]["content"].split() for completion in completions]
        return [sum(len(word) <= 4 for word in text) / max(len(text), 1) for text in texts]

    def of_this_step(self) -> dict[str, float]:
        """Returns the engine's counts since the last call."""
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            name = metric.name.removeprefix("vllm:")
            if hasattr(metric, "value"):
                found[name] = found.get(name, 0) + metric.value
            elif name == "e2e_request_latency_seconds":
                found |= {"seconds": metric.sum, "answers": metric.count}
        new = {name: value - self.before.get(name, 0) for name, value in found.items()}
        self.before = found
        drafts, tokens = new["spec_decode_num_drafts"], new["generation_tokens"]
        return {
            "tokens_per_step": 1 + new["spec_decode_num_accepted_tokens"] / drafts,
            "nats_per_token": new["mars_lost_nats"] / tokens,
            "seconds_per_answer": new["seconds"] / new["answers"],
        }


class Keep(TrainerCallback):
    """Writes the run's description and all steps so far after each logged step."""

    def __init__(self, output: Path, run: dict[str, Any]) -> None:
        self.output, self.run = output, run

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        rows = [{"run": self.run}, *(row for row in state.log_history if "reward" in row)]
        self.output.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Trains one rule with one seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rule", choices=("strict", "mars"), default="mars", help="strict is lossless")
    add("--max-loss", type=float, default=0.02, metavar="NATS", help="of rule mars, per token")
    add("--no-weights", action="store_true", help="leave the weights out, to see what goes wrong")
    add("--seed", type=int, default=0)
    add("--steps", type=int, default=30)
    add("--answers", type=int, default=16, metavar="N", help="of a step, in groups of 8")
    add("--max-tokens", type=int, default=32)
    add("--output", type=Path, default=Path("build/grpo/run.jsonl"), metavar="FILE")
    args = parser.parse_args()
    checkpoints = args.output.with_suffix("")
    checkpoints.mkdir(parents=True, exist_ok=True)
    rule = {"mars_price": 0} if args.rule == "strict" else {"mars_max_loss": args.max_loss}

    def engine(**given: Any) -> LLM:
        """Returns vLLM with TRL's options, drafts and a rule."""
        own = {"rejection_sample_method": "mars", "mars_logprobs": "sampled", **rule}
        given |= {
            "speculative_config": speculative_config(str(PACKAGED_HEAD), 3, **own),
            # After sleep level 2 only the target would get new weights.
            "sleep_preserve_parameter_names": ["draft.*"],
            "disable_log_stats": False,
            "dtype": "float32",
            "enforce_eager": True,
            # TRL's seed is the same in every process, so all runs would sample the same tokens.
            "seed": args.seed,
        }
        return LLM(**given)

    vllm_generation.LLM = engine
    if not torch.cuda.is_available():
        # oneDNN caches a packed copy of each weight, which would not be updated.
        _custom_ops._supports_onednn = False

    config = GRPOConfig(
        output_dir=str(checkpoints),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=256,
        # Token weights, truncated at 2. The default, sequence_mask, drops answers above 3.
        vllm_importance_sampling_correction=not args.no_weights,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
        num_generations=8,
        per_device_train_batch_size=args.answers,
        max_completion_length=args.max_tokens,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        max_steps=args.steps,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_steps=5,
        save_total_limit=1,
        report_to="none",
        seed=args.seed,
    )
    rewards = Rewards()
    asked = [f"Tell me about {topic}." for topic in TOPICS]
    data = [{"prompt": [{"role": "user", "content": text}]} for text in asked]
    model = AutoModelForCausalLM.from_pretrained(ensure_model(), dtype=torch.float32)
    # Only the last ten layers learn, so that steps are shorter and checkpoints smaller.
    model.requires_grad_(False)
    model.model.layers[-10:].requires_grad_(True)
    run = describe_run(None if config.use_cpu else torch.cuda.get_device_name())
    run["versions"]["trl"] = importlib.metadata.version("trl")
    keep = Keep(args.output, run)
    trainer = GRPOTrainer(model, rewards, config, Dataset.from_list(data), callbacks=[keep])
    rewards.llm = trainer.vllm_generation.llm
    trainer.train(resume_from_checkpoint=get_last_checkpoint(checkpoints))


if __name__ == "__main__":
    main()
