"""One vLLM engine inside this process: records drafts and answers with any threshold."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_mars.calibration import identify
from vllm_mars.config import OPTION
from vllm_mars.experiments.calibrate.options import CalibrateOptions
from vllm_mars.local.drafts import CHOSEN_BY_REQUESTS
from vllm_mars.local.prompts import Prompt
from vllm_mars.local.server import server_env
from vllm_mars.local.vllm_args import CPU_ARGS

if TYPE_CHECKING:
    from vllm import LLM

RECORDER = "vllm_mars.experiments.calibrate.recording.RecordingWorker"
# Requests at a time; all prompts are sent at once.
CPU_BATCH = ("--max-num-seqs", "16")


@dataclass
class Conversation:
    """One prompt led to its end.

    Attributes:
        texts, requests: the answer of each turn, and vLLM's id of its request.
        tokens: of all answers.
        nll: sum of -log p of these tokens under the target, in nats.
        cost: sum of log p(first choice) - log p(token); 0 where decoding was strict.
        relaxed: tokens that are not the target's first choice.
    """

    prompt: Prompt
    texts: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    tokens: int = 0
    nll: float = 0.0
    cost: float = 0.0
    relaxed: int = 0


class OfflineEngine:
    """A greedy engine whose requests bring their own thresholds; made by `offline_engine`."""

    def __init__(self, llm: "LLM", options: CalibrateOptions) -> None:
        """Starts recording in the workers."""
        self.options = options
        self._llm = llm
        protected = [ids for ids in llm.collective_rpc("mars_record") if ids is not None]
        self.protected: list[int] = protected[0]
        model_config = llm.llm_engine.vllm_config.model_config
        self.model = identify(model_config)
        # What a server applies to the logits of every request unless this one says otherwise;
        # a factor of 1 and a difference of 0 change nothing.
        self.penalties = {
            name: value
            for name, value in model_config.get_diff_sampling_param().items()
            if name.endswith("_penalty") and value != (name == "repetition_penalty")
        }

    def lead(self, prompts: Sequence[Prompt], threshold: float) -> list[Conversation]:
        """Leads conversations, all in one batch, turn after turn, with this threshold."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0,
            max_tokens=self.options.max_tokens,
            # The emitted token's and the best one's.
            logprobs=1,
            extra_args={OPTION[self.options.metric]: threshold},
        )
        conversations = [Conversation(prompt) for prompt in prompts]
        for turn in range(max(len(prompt.turns) for prompt in prompts)):
            still = [item for item in conversations if turn < len(item.prompt.turns)]
            for conversation, output in zip(still, self._answer(still, turn, params), strict=True):
                completion = output.outputs[0]
                conversation.texts.append(completion.text)
                conversation.requests.append(str(output.request_id))
                for token, logprobs in zip(completion.token_ids, completion.logprobs, strict=True):
                    own = logprobs[token].logprob
                    best = max(entry.logprob for entry in logprobs.values())
                    conversation.tokens += 1
                    conversation.nll -= own
                    conversation.cost += best - own
                    conversation.relaxed += own < best
        return conversations

    def take_records(self) -> list[list[Any]]:
        """Stops recording, and returns what the workers recorded (`recording.FIELDS`)."""
        # Every tensor-parallel rank sees the same; one that does not sample has none.
        records: list[list[Any]] = max(self._llm.collective_rpc("mars_take_records"), key=len)
        # Inside the engine vLLM appends a random suffix to the id.
        return [[str(row[0]).rsplit("-", 1)[0], *row[1:]] for row in records]

    def _answer(self, conversations: list[Conversation], turn: int, params: Any) -> list[Any]:
        chats = [_messages(item, turn) for item in conversations]
        outputs: list[Any]
        if getattr(self._llm.get_tokenizer(), "chat_template", None):
            outputs = self._llm.chat(chats, params, use_tqdm=False)
        else:
            # A base model continues the text.
            texts = ["\n".join(message["content"] for message in chat) for chat in chats]
            outputs = self._llm.generate(texts, params, use_tqdm=False)
        return outputs


@contextlib.contextmanager
def offline_engine(options: CalibrateOptions, model: str, device: str) -> Iterator[OfflineEngine]:
    """Starts an engine that is strict unless a request says otherwise, and ends it on exit.

    The environment variables that it needs are set meanwhile.

    Args:
        options: what to calibrate.
        model: directory or name of the target.
        device: vLLM's device type, such as "cpu".
    """
    with _environment(model):
        from vllm import LLM, EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        arguments = EngineArgs.from_cli_args(
            parser.parse_args(
                [
                    *("--model", model, "--no-enable-prefix-caching"),
                    *((*CPU_ARGS, *CPU_BATCH) if device == "cpu" else ()),
                    *options.engine_args,
                ]
            )
        )
        arguments.speculative_config = {
            **options.speculative_config(),
            **CHOSEN_BY_REQUESTS[options.metric],
        }
        arguments.worker_extension_cls = RECORDER
        llm = LLM.from_engine_args(arguments)
        try:
            yield OfflineEngine(llm, options)
        finally:
            llm.llm_engine.engine_core.shutdown()


@contextlib.contextmanager
def _environment(model: str) -> Iterator[None]:
    """Sets what vLLM and its workers read, and puts back what was there."""
    before = dict(os.environ)
    for name, value in {**server_env(model), "VLLM_LOGGING_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)
    # What is recorded is the same on both runners, and V1 shows it at one place.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _messages(conversation: Conversation, turn: int) -> list[dict[str, str]]:
    messages = []
    for text, answer in zip(conversation.prompt.turns, [*conversation.texts, ""], strict=False):
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": answer})
    return messages[: 2 * turn + 1]
