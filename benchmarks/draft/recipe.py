"""What makes a head."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """Data and training, for a GPU."""

    # Of questions, answers, the head's random weights and the order of the batches.
    seed: int = 0
    # Parts of the data, and how many conversations each asks for; a few questions are dropped.
    parts: int = 17
    part_size: int = 4096
    # Longer questions are dropped, longer answers cut.
    max_question_tokens: int = 384
    max_answer_tokens: int = 256
    # Tokens that the head can guess.
    draft_vocab_size: int = 8192
    # Tokens in a step of training, padding included.
    batch_tokens: int = 24_000
    # Passes over the data.
    epochs: int = 1
    # Drafting steps that are trained; more or fewer may be drafted.
    steps_ahead: int = 4
    # Share of the steps, at the start, that train two drafting steps by cross-entropy; then come
    # all, by acceptance.
    ramp: float = 0.35
    # Peaks for Muon, which trains the matrices but lm_head, and for AdamW, which trains the rest.
    learning_rate: float = 2e-3
    adam_learning_rate: float = 3e-4
    weight_decay: float = 0.01
    # Steps until the peak, and the share of them, at the end, in which the rate falls to zero.
    warm_up: int = 10
    cool_down: float = 0.5
    # A drafting step's loss weighs this power of it.
    step_decay: float = 0.8


# Without a GPU.
CPU_RECIPE = Recipe(parts=2, batch_tokens=4000)
