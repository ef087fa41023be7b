"""How result files are written."""

import json
import math

from vllm_mars.local.result_file import write_json

CONTENT = {
    "runs": [1.5, -2, 3e-7, None, True],
    "lists": [[1, 2], [], [3]],
    "texts": ["a", "[\n1,\n2\n]", "]", "ü"],
    "objects": [{"a": [1, 2]}, {}],
    "[": {"]": [0]},
}


def test_what_is_read_is_what_was_written(tmp_path):
    write_json(tmp_path / "new" / "a.json", CONTENT)
    assert json.loads((tmp_path / "new/a.json").read_text()) == CONTENT
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]


def test_a_list_of_numbers_is_one_line(tmp_path):
    write_json(tmp_path / "a.json", {**CONTENT, "not_a_number": [math.inf, 1]})
    lines = (tmp_path / "a.json").read_text().splitlines()
    assert '  "runs": [1.5, -2, 3e-07, null, true],' in lines
    assert "    [1, 2]," in lines and '      "a": [1, 2]' in lines
    assert '    "a",' in lines and '  "not_a_number": [Infinity, 1]' in lines
