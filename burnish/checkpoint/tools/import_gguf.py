"""Write the model of a GGUF file, llama.cpp's format, as a Hugging Face directory. transformers reads it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from burnish.checkpoint.tools.export import partial_directory, require_new
from burnish.errors import IncompatibleError, UsageError, install, refusing
from burnish.files.durable import naming_failures
from burnish.files.hub import HubPlace
from burnish.files.storage import LOCAL


def require_importable(target: Path) -> None:
    """Raise `UsageError` without the package `gguf`, or for a `target` that exists."""
    if find_spec("gguf") is None:
        raise UsageError(
            "GGUF files need a package that is not installed", want="gguf", do=install("gguf")
        )
    require_new(target.absolute(), LOCAL)


def import_gguf(file: Path | HubPlace, target: Path) -> dict[str, int]:
    """Write model and tokenizer, dequantized; return the sizes of the files by name.

    Raises `IncompatibleError` for a file that transformers does not read, and as `require_importable` does.
    """
    target = target.absolute()
    require_importable(target)
    where: dict[str, Any]
    if isinstance(file, HubPlace):  # transformers downloads it
        name = file.repo
        where = {"gguf_file": file.path, "revision": file.revision or "main"}
    else:
        name = str(file.parent)
        where = {"gguf_file": file.name}
    with naming_failures(f"{target} could not be written"), partial_directory(target, LOCAL) as new:
        with refusing(
            f"transformers cannot read {where['gguf_file']} of {name}",
            IncompatibleError,
            want="a causal language model of a type that it reads from GGUF",
            do="take the Hugging Face directory that it was made from",
        ):
            full = GgufConfig(dequantize=True)
            model = AutoModelForCausalLM.from_pretrained(name, quantization_config=full, **where)
            tokenizer = AutoTokenizer.from_pretrained(name, **where)
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        sizes = {path.name: path.stat().st_size for path in sorted(new.iterdir())}
        LOCAL.rename(new, target)
        LOCAL.sync_dir(target.parent)
    return sizes
