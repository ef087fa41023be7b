"""The checksum of weights."""

from vllm_mars.weights import weights_checksum


def test_checksum_sees_sizes_begins_and_middles(tmp_path):
    path = tmp_path / "model.safetensors"
    content = bytearray(5_000_000)
    seen = set()
    for change in (None, 0, 2_490_000, 4_999_999):
        if change is not None:
            content[change] ^= 1
        path.write_bytes(content)
        seen.add(weights_checksum(tmp_path))
    path.write_bytes(content + b"\0")
    seen.add(weights_checksum(path))
    assert len(seen) == 5
    assert weights_checksum(tmp_path / "none") is None
