"""Write the model of a GGUF file, llama.cpp's format, as a Hugging Face directory. transformers reads it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from burnish.checkpoint.tools.export import partial_directory, require_new
from burnish.errors import (
    IncompatibleError,
    MissingError,
    UsageError,
    install,
    neighbours,
    refusing,
)
from burnish.files.durable import naming_failures
from burnish.files.storage import LOCAL


def import_gguf(file: Path, target: Path) -> dict[str, int]:
    """Write model and tokenizer, dequantized; return the sizes of the files by name.

    Raises `UsageError` without the package `gguf` or for a `target` that exists, and `IncompatibleError` for a file that
    transformers does not read.
    """
    if not file.is_file():
        have = neighbours(file)
        raise MissingError(f"there is no file {file}", have=have, do="correct the path")
    if find_spec("gguf") is None:
        raise UsageError(
            "GGUF files need a package that is not installed", want="gguf", do=install("gguf")
        )
    target = target.absolute()
    require_new(target, LOCAL)
    with naming_failures(f"{target} could not be written"), partial_directory(target, LOCAL) as new:
        with refusing(
            f"transformers cannot read {file}",
            IncompatibleError,
            want="a causal language model of a type that it reads from GGUF",
            do="take the model's own Hugging Face directory",
        ):
            which = (str(file.parent),)
            model = AutoModelForCausalLM.from_pretrained(
                *which, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True)
            )
            tokenizer = AutoTokenizer.from_pretrained(*which, gguf_file=file.name)
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        sizes = {path.name: path.stat().st_size for path in sorted(new.iterdir())}
        LOCAL.rename(new, target)
        LOCAL.sync_dir(target.parent)
    return sizes
