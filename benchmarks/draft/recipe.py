"""What makes a head."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """Data and training."""

    # Of prompts, answers, the head's random weights and the order of the batches.
    seed: int = 0
    # Conversations in a shard; a shard depends on the seed and its number alone.
    shards: int = 9
    shard_prompts: int = 512
    # Longer conversations are drawn again.
    max_prompt_tokens: int = 384
    max_tokens: int = 160
    # Of answers at temperature 0; the others are at 0.6 to 1.
    greedy_share: float = 0.7
    # Tokens that the head can guess.
    draft_vocab_size: int = 4096
    # Passes over the shards; may be a fraction.
    epochs: float = 3.4
    # Drafting steps that are trained; more or fewer may be drafted.
    steps_ahead: int = 3
    # Conversations in a step of training.
    batch: int = 16
    # Peaks for Muon, which trains the matrices but lm_head, and for AdamW, which trains the rest.
    learning_rate: float = 2e-3
    adam_learning_rate: float = 3e-4
    weight_decay: float = 0.01
    # Steps until the peak, and the share of them, at the end, in which the rate falls to zero.
    warm_up: int = 10
    cool_down: float = 0.5
    # A drafting step's loss weighs this power of it.
    step_decay: float = 0.8
    # Share of the steps, at the start, that train two drafting steps only, which is faster.
    ramp: float = 0.5
