#!/usr/bin/env bash
# lm-eval sends all repeats of a sampled request to a server with one seed.
#
# Seen with: lm-eval 0.4.13.
# One would guess: a task with repeats and do_sample, such as humaneval_64, gets that many samples. Over
# an API each of them has the seed 1234. A server that honours seeds, as vLLM does, gives the same answer
# 64 times, so pass@64 or a vote of 64 says no more than one answer does. lm-eval's own cache leaves
# sampled requests out, lest repeats become equal. "seed": null in the task's generation_kwargs goes
# to the server in place of the number.
# Output, of 8 repeats and a server that makes its answer from the seed:
#   no seed: seeds {1234}, answers 989 989 989 989 989 989 989 989
#   "seed": null: seeds {None}, 8 answers
set -euo pipefail
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" 'lm-eval[api]==0.4.13'

cat > repeats.py << 'EOF'
import json
import random
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import datasets
import lm_eval
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.openai_completions import LocalChatCompletion

seeds = []


class Server(BaseHTTPRequestHandler):
    """Honours a request's seed."""

    def do_POST(self):
        seed = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["seed"]
        seeds.append(seed)
        message = {"role": "assistant", "content": str(random.Random(seed).randrange(1000))}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"index": 0, "message": message}]}).encode())

    def log_message(self, *args):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
Thread(target=server.serve_forever, daemon=True).start()
model = LocalChatCompletion(
    base_url=f"http://127.0.0.1:{server.server_port}", model="m", tokenizer_backend=None
)


def answers_of_task(generation_kwargs):
    config = {
        "task": "numbers",
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list([{"text": "A number?"}])},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "1",
        "output_type": "generate_until",
        "repeats": 8,
        "generation_kwargs": {
            "until": ["\n"],
            "do_sample": True,
            "temperature": 1.0,
            **generation_kwargs,
        },
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    results = lm_eval.simple_evaluate(
        model, tasks=[ConfigurableTask(config=config)], apply_chat_template=True, bootstrap_iters=0
    )
    (answers,) = results["samples"]["numbers"][0]["resps"]
    return answers


answers = answers_of_task({})
print(f"no seed: seeds {set(seeds)}, answers {' '.join(answers)}")
assert set(seeds) == {1234} and len(answers) == 8 and len(set(answers)) == 1, "changed: the seeds"
seeds.clear()
answers = answers_of_task({"seed": None})
print(f'"seed": null: seeds {set(seeds)}, {len(answers)} answers')
assert seeds == [None] * 8, "changed: null does not replace the seed"
EOF
python -W ignore repeats.py 2> log || { tail -n 30 log >&2; exit 1; }
