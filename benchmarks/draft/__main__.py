"""Makes an EAGLE-3 head for a target, measures it without vLLM, and makes worse drafts.

python -m benchmarks.draft make --setting cpu
python -m benchmarks.draft evaluate HEAD --price 0 0.3 --output build/draft.json
python -m benchmarks.draft untrained
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.draft import pipeline
from benchmarks.draft.data import DataOptions, finished_shards
from benchmarks.draft.evaluate import evaluate_heads, tables
from benchmarks.draft.train import TrainOptions
from benchmarks.draft.untrained import write_untrained
from vllm_mars.local.draft_head import PACKAGED_HEAD
from vllm_mars.local.packaged_model import ensure_model
from vllm_mars.local.prompts import PACKAGED

Options = TypeVar("Options", pipeline.Setting, DataOptions, TrainOptions)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0, or 1 after an error."""
    args = _parser().parse_args(argv)
    try:
        run = {"make": _make, "evaluate": _evaluate, "untrained": _untrained}[args.command]
        return run(args)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _make(args: argparse.Namespace) -> int:
    import torch
    from tqdm import tqdm

    setting = pipeline.SETTINGS[args.setting]
    if args.setting == "gpu":
        print("setting gpu has never been run: its sizes are guesses", file=sys.stderr)
    if setting.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("setting=gpu needs CUDA, which torch does not see; take --setting cpu.")
    for name in ("draft_vocab_size", "fed_layers", "intermediate_size"):
        if args.start_from is not None and getattr(args, name) is not None:
            raise ValueError(
                f"{name}={getattr(args, name)} beside start_from={args.start_from}, which has its "
                "own; leave it out."
            )
    if args.threads:
        torch.set_num_threads(args.threads)
    model = args.model or ensure_model()
    setting = pipeline.for_target(setting, model)
    setting = replace(
        _with(args, setting), data=_with(args, setting.data), train=_with(args, setting.train)
    )
    work = args.work or pipeline.work_directory(model)
    output = args.output or work / "head"
    target = pipeline.read_target(model, setting)
    if args.stage in ("all", "data"):
        size, there = setting.data.shard_prompts, len(finished_shards(work / "data"))
        with tqdm(desc="answers", total=size * setting.data.shards, initial=size * there) as bar:
            pipeline.make_data(work, model, setting, target, bar.update, tuple(args.part))
    if args.stage in ("all", "train"):
        with tqdm(desc="steps") as bar:

            def show(figures: dict[str, Any]) -> None:
                bar.total = figures["total"]
                bar.desc = "loss {loss[0]:.2f}, right {accuracy[0]:.2f}".format(**figures)
                bar.update(figures["step"] - bar.n)

            trainer = pipeline.train(work, model, setting, target, show)
        pipeline.write(trainer, output, model, setting)
        megabytes = (output / "model.safetensors").stat().st_size / 1e6
        print(f"wrote {output}, {megabytes:.1f} MB", file=sys.stderr)
    return 0


def _with(args: argparse.Namespace, options: Options) -> Options:
    """Returns options with the fields that the command line names."""
    names = {field.name for field in fields(options)}
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(args).items()
        if name in names and value is not None
    }
    return replace(options, **given)


def _evaluate(args: argparse.Namespace) -> int:
    result = evaluate_heads(
        args.model or ensure_model(),
        args.heads,
        args.prompts or PACKAGED,
        args.output,
        max_tokens=args.max_tokens,
        steps=args.num_speculative_tokens,
        prices=args.price,
        per_category=args.per_category,
    )
    for lines in tables(result).values():
        print(*lines, "", sep="\n")
    return 0


def _untrained(args: argparse.Namespace) -> int:
    model = args.model or ensure_model()
    work = args.work or pipeline.work_directory(model)
    trained = args.head or PACKAGED_HEAD
    for draft in write_untrained(model, trained, work / "data", args.output or work / "untrained"):
        print(draft)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draft", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    make = commands.add_parser("make", help="data, training and export; resumable")
    make.add_argument("--setting", choices=sorted(pipeline.SETTINGS), required=True,
        help="gpu has never been run")  # fmt: skip
    make.add_argument("--stage", choices=("all", "data", "train"), default="all")
    make.add_argument("--model", type=Path, metavar="DIR", help="default: the packaged model")
    make.add_argument("--work", type=Path, metavar="DIR", help="default: in the user's cache")
    make.add_argument("--output", type=Path, metavar="DIR", help="default: WORK/head")
    make.add_argument("--threads", type=int, metavar="N", help="of torch")
    make.add_argument(
        "--part",
        type=int,
        nargs=2,
        default=(0, 1),
        metavar=("I", "N"),
        help="with --stage data: shards I, I + N, ... alone, for N = 2 processes",
    )
    # Each of these is a field of the options, whose docstrings say more.
    data = make.add_argument_group("data")
    data.add_argument("--prompts", dest="prompt_file", metavar="FILE", help="more, as JSON lines")
    data.add_argument("--shards", type=int, metavar="N")
    data.add_argument("--shard-prompts", type=int, metavar="N", help="conversations in a shard")
    data.add_argument("--max-tokens", type=int, metavar="N", help="of an answer")
    data.add_argument("--seed", type=int, metavar="N", help="of data and training")
    data.add_argument("--aux-layers", type=int, nargs="+", metavar="N", help="states to keep")
    data.add_argument("--dtype", choices=("bfloat16", "float32"), help="to compute in")
    head = make.add_argument_group("head")
    head.add_argument("--draft-vocab-size", type=int, metavar="N", help="tokens it can guess")
    head.add_argument("--fed-layers", type=int, nargs="+", metavar="N", help="default: all kept")
    head.add_argument("--intermediate-size", type=int, metavar="N", help="default: the target's")
    head.add_argument("--num-speculative-tokens", type=int, metavar="K", help="of its config")
    head.add_argument("--max-mb", type=float, metavar="MB", help="refuse a larger head; default 20")
    train = make.add_argument_group("training")
    train.add_argument("--epochs", type=float, metavar="N", help="passes over the data")
    train.add_argument("--steps-ahead", type=int, metavar="N", help="drafting steps to train")
    train.add_argument("--start-from", metavar="HEAD",
        help="train this head on, with its draft tokens, layers and width")  # fmt: skip
    train.add_argument("--learning-rate", type=float, metavar="RATE", help="of the matrices")
    train.add_argument("--loss", choices=("distil", "price"))
    train.add_argument("--price", type=float, metavar="NATS", help="of --loss price")

    offline = commands.add_parser("evaluate", help="acceptance and loss of heads, without vLLM")
    offline.add_argument("heads", type=Path, nargs="+", metavar="HEAD", help="their directories")
    offline.add_argument("--output", type=Path, required=True, metavar="FILE",
        help="JSON; what it already holds is not measured again")  # fmt: skip
    offline.add_argument("--price", type=float, nargs="+", default=[0.0], metavar="NATS",
        help="of the price rule; 0, the default, is strict verification")  # fmt: skip
    offline.add_argument("--model", type=Path, metavar="DIR", help="default: the packaged model")
    offline.add_argument("--prompts", type=Path, metavar="FILE", help="default: the demo's")
    offline.add_argument("--per-category", type=int, default=sys.maxsize, metavar="N",
        help="only the first prompts of each; default: all")  # fmt: skip
    offline.add_argument("--max-tokens", type=int, default=128, metavar="N")
    offline.add_argument("--num-speculative-tokens", type=int, default=4, metavar="K")

    worse = commands.add_parser("untrained", help="drafts of low quality, to compare with")
    worse.add_argument("--model", type=Path, metavar="DIR", help="default: the packaged model")
    worse.add_argument("--head", type=Path, metavar="DIR", help="default: the packaged head")
    worse.add_argument("--work", type=Path, metavar="DIR", help="where `make` worked")
    worse.add_argument("--output", type=Path, metavar="DIR", help="default: WORK/untrained")
    return parser


if __name__ == "__main__":
    # `timeout` sends it: an end like that of Ctrl-C, with nothing half-written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
