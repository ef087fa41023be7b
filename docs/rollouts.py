"""A step of training on answers that a price changed: behaviour logprobs, truncated token weights.

python docs/rollouts.py --max-loss 0.02 --max-tokens 64
"""

import argparse

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

from vllm_mars.local.draft_head import PACKAGED_HEAD
from vllm_mars.local.drafts import speculative_config
from vllm_mars.local.packaged_model import ensure_model
from vllm_mars.local.prompts import load_prompts


def main() -> None:
    """Samples groups of answers, prints what their weights are worth, and takes one step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-loss", type=float, default=0.02)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("-n", type=int, default=8)
    args = parser.parse_args()
    own = {"rejection_sample_method": "mars", "mars_max_loss": args.max_loss}
    own |= {"mars_logprobs": "sampled"}
    llm = LLM(
        str(ensure_model()),
        speculative_config=speculative_config(str(PACKAGED_HEAD), 3, **own),
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
    )
    model = AutoModelForCausalLM.from_pretrained(ensure_model(), dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    prompts = [[{"role": "user", "content": it.turns[0]}] for it in load_prompts()[: args.groups]]
    # All answers go on to the last token, so that the table has as many at each length.
    params = SamplingParams(
        n=args.n, temperature=1.0, seed=0, max_tokens=args.max_tokens, logprobs=0, ignore_eos=True
    )
    log_weights = []
    for group in llm.chat(prompts, params, use_tqdm=False):
        answers = torch.tensor([answer.token_ids for answer in group.outputs])
        # log m of each token: with mars_logprobs "sampled" a server's logprobs are the behaviour's.
        behaviour = torch.tensor(
            [[step[token].logprob for token, step in zip(it.token_ids, it.logprobs, strict=True)]
             for it in group.outputs]
        )  # fmt: skip
        prompt = torch.tensor(group.prompt_token_ids).expand(len(answers), -1)
        logits = model(torch.cat([prompt, answers], 1)).logits[:, prompt.shape[1] - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, answers[..., None])[..., 0]
        log_weight = logprobs.detach() - behaviour
        # A stand-in for a reward: how many different tokens an answer has.
        reward = torch.tensor([float(len(set(answer.tolist()))) for answer in answers])
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        weight = log_weight.exp().clamp(max=2.0)
        loss = -(weight * advantage[:, None] * logprobs).mean() / args.groups
        loss.backward()
        log_weights.append(log_weight)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    all_weights = torch.cat(log_weights)
    print(f"gradient norm {norm:.3f}; {len(all_weights)} answers")
    print(f"token weights: {(all_weights > 0.693).double().mean():.4f} of them cut to 2")
    for length in (16, 64, 128, 256, 512):
        if length <= args.max_tokens:
            weights = all_weights[:, :length].sum(1).softmax(0)
            share = 1 / weights.square().sum() / len(weights)
            mean = all_weights[:, :length].mean()
            print(f"{length} tokens: {-mean:.4f} nats per token, effective sample {share:.2f}")


if __name__ == "__main__":
    main()
