"""How result files are written."""

import json

from vllm_mars.lab.result_file import write_json

CONTENT = {
    "runs": [1.5, -2, 3e-7, None, True],
    "lists": [[1, 2], [], [3]],
    "texts": ["a", "[\n1,\n2\n]", "]", "ü"],
    "objects": [{"a": [1, 2]}, {}],
    "[": {"]": [0]},
}


def test_what_is_written(tmp_path):
    """Complete, and a list of numbers in one line."""
    write_json(tmp_path / "new" / "a.json", CONTENT)
    text = (tmp_path / "new/a.json").read_text()
    assert json.loads(text) == CONTENT
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]
    lines = text.splitlines()
    assert '  "runs": [1.5, -2, 3e-07, null, true],' in lines
    assert "    [1, 2]," in lines and '      "a": [1, 2]' in lines and '    "a",' in lines
