"""The checksum that tells one training of a model from another."""

import hashlib
from pathlib import Path

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_FIRST_BYTES = 1 << 20
_PROBES = 16
_PROBE_BYTES = 1 << 16


def weights_checksum(model: Path) -> str | None:
    """A sha256 over sizes and samples of the weight files; quick also for large models.

    Args:
        model: a directory with weight files, or one such file.

    Returns:
        Hexadecimal digits, None where there is no such file here. It takes the beginning of each
        file and probes spread over it: enough to tell trainings of one model apart, not to find a
        single damaged byte.
    """
    if model.is_dir():
        files = sorted({path for pattern in _WEIGHTS for path in model.glob(pattern)})
    else:
        files = [model] if model.is_file() else []
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_FIRST_BYTES))
            for probe in range(1, _PROBES + 1):
                file.seek(max(0, size * probe // _PROBES - _PROBE_BYTES))
                digest.update(file.read(_PROBE_BYTES))
    return digest.hexdigest()
