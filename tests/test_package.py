"""The wheel holds what the code reads from beside itself."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_a_wheel_holds_every_file_of_the_packages(tmp_path):
    subprocess.run(
        [
            *(sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", tmp_path),
            *("build", "--build-base", tmp_path / "build"),
            *("bdist_wheel", "--dist-dir", tmp_path),
        ],
        cwd=ROOT,
        check=True,
    )
    wheel = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    for source, package in (("vllm_mars", "vllm_mars"), ("kernels", "vllm_mars/kernels")):
        for path in (ROOT / source).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                name = f"{package}/{path.relative_to(ROOT / source)}"
                assert wheel.read(name) == path.read_bytes(), name
    head = "vllm_mars/local/heads/smollm2-135m-eagle3"
    assert {f"{head}/config.json", f"{head}/model.safetensors"} <= set(wheel.namelist())
