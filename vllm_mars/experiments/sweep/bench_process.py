"""`vllm bench serve` for many cells in one process, which imports vLLM once instead of each time.

    python -m vllm_mars.experiments.sweep.bench_process

Each line on standard input is a JSON list of the command's arguments; each answer on standard
output is {"error": null} or what went wrong. What the command prints goes to standard error. The
end of the input ends the process.
"""

import json
import os
import sys


def main() -> int:
    """Serves requests until the input ends; returns 0."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from vllm_mars.vllm_cli import answer_for_vllm_cpu

    answer_for_vllm_cpu()
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    for line in sys.stdin:
        error = None
        try:
            serve.main(parser.parse_args(json.loads(line)))
        except (Exception, SystemExit) as problem:
            error = f"{type(problem).__name__}: {problem}"
        print(json.dumps({"error": error}), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
