"""Prints the table of what the installed vLLM has under each name in `engine.interfaces`.

.venv/bin/python tests/interfaces/write.py > tests/interfaces/vllm-0.33.0.json
"""

import json

from vllm_mars.engine.compat import installed_symbol, touches
from vllm_mars.engine.interfaces import INTERFACES

rows = {
    f"{module}:{name}": installed_symbol(module, name, touch)
    for group in INTERFACES
    for module, name, touch in touches(group)
}
# One symbol a line, so that two releases can be compared with diff.
lines = [
    f"{json.dumps(key)}: {json.dumps({k: v for k, v in symbol._asdict().items() if v})}"
    for key, symbol in sorted(rows.items())
    if symbol
]
print("{\n" + ",\n".join(lines) + "\n}")
