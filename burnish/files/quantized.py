"""Recognise quantized models and GGUF files by config.json, names and headers alone. Loads no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from burnish.errors import BurnishError, IncompatibleError, few
from burnish.files.hub import HubPlace
from burnish.files.safetensors import SUFFIX, read_header

KEY = "quantization_config"
"""The key of config.json that describes how weights are quantized."""
GGUF = ".gguf"
"""The suffix of llama.cpp's files."""

_PACKED = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|weight_packed|weight_scale(_inv)?|weight_scales|SCB|absmax|quant_map|nested_absmax|codebooks?|qscale)$"
    r"|\.quant_state\."
)
"""Ends of the names of quantized tensors."""
_MXFP4 = re.compile(r"_(blocks|scales)$")
"""Ends of names that Burnish reads itself (`burnish.models.mxfp4`)."""
_MATRICES = frozenset({"F64", "F32", "F16", "BF16"})
_DEQUANTIZERS: Mapping[str, str] = {
    "fp8": "FineGrainedFP8Config",
    "compressed-tensors": "CompressedTensorsConfig",
    "mxfp4": "Mxfp4Config",
}
"""transformers' configuration that dequantizes while it reads, by `quant_method`."""
_BASE = re.compile(r"^base_model:[ \t]*(?:\n[ \t]*-[ \t]*)?[\"']?(\w[\w./-]*)", re.MULTILINE)
_HEADER_LIMIT = 100 << 20


def require_plain_weights(
    place: str, setting: str, fields: Mapping[str, Any], small_file: Callable[[str, str], bytes]
) -> str:
    """Raise `IncompatibleError` for a model whose config.json has `fields` if its weights are quantized.

    Return a remark on a key `quantization_config` that full-precision weights do not need, else "". `small_file` reads the
    place's files.
    """
    described = fields.get(KEY)
    if not isinstance(described, Mapping):
        return ""
    method = str(described.get("quant_method") or _old_name(described))
    tensors = _tensors(place)
    packed = [name for name, dtype in tensors.items() if _is_quantized(name, dtype)]
    if method == "mxfp4" and all(map(_MXFP4.search, packed)):
        return ""
    if tensors and not packed:
        return f"{place}: its weights have full precision, so the {KEY} in config.json ({method}) is left out"
    raise IncompatibleError(
        f"{setting}: {place} is quantized with {method}{_bits(described)}",
        have=few(packed) if packed else f"{KEY} in config.json",
        want="weights in full precision, which training changes",
        do=_way_out(place, setting, method, _base(place, fields, small_file)),
    )


def gguf_problem(place: str, setting: str, names: Collection[str]) -> IncompatibleError | None:
    """Return an error for a GGUF file, or a directory or repository whose only weights are of this kind."""
    path = Path(place).expanduser()
    if place.endswith(GGUF) and not path.is_dir():
        file = place
    else:
        weights = [name for name in names if name.endswith((GGUF, SUFFIX))]
        if not weights or any(name.endswith(SUFFIX) for name in weights):
            return None
        file = f"{place.rstrip('/')}/{min(weights)}"
    return IncompatibleError(
        f"{setting}: {place} holds weights for llama.cpp (GGUF)",
        have=Path(file).name,
        want="a Hugging Face directory",
        do=f"set {setting} to the model that it was made from; or write one with\n"
        f"        burnish ckpt import {file.removeprefix('hf://')} DIRECTORY",
    )


def _old_name(described: Mapping[str, Any]) -> str:
    is_bnb = any(key.startswith(("load_in_", "bnb_")) for key in described)
    return "bitsandbytes" if is_bnb else "a method that it does not name"


def _bits(described: Mapping[str, Any]) -> str:
    bits = described.get("bits") or described.get("w_bit")
    if bits is None:
        bits = {True: 4}.get(described.get("load_in_4bit") is True)
        bits = bits or {True: 8}.get(described.get("load_in_8bit") is True)
    return f", {bits} bits" if isinstance(bits, int) else ""


def _tensors(place: str) -> dict[str, str]:
    """Return dtypes of the tensors by name, of the hub the first file's; nothing where they cannot be seen."""
    path = Path(place).expanduser()
    entries: dict[str, str] = {}
    try:
        if path.is_dir():
            for file in sorted(path.glob(f"*{SUFFIX}")):
                header = read_header(file).entries
                entries |= {name: entry.dtype for name, entry in header.items()}
        elif hub := HubPlace.of(place, "model"):
            entries = _of_hub(hub)
    except (BurnishError, OSError, ValueError):  # other checks name what cannot be read
        return {}
    return entries


def _of_hub(place: HubPlace) -> dict[str, str]:
    from burnish.files.hub_files import HubFiles

    files = HubFiles.of(place)
    names = [name for name in files.names() if name.endswith(SUFFIX)]
    if not names:
        return {}
    name = "/".join(part for part in (place.path, min(names)) if part)
    size = bytearray(8)
    files.read_into(name, memoryview(size), 0)
    length = int.from_bytes(size, "little")
    if length > _HEADER_LIMIT:
        return {}
    text = bytearray(length)
    files.read_into(name, memoryview(text), 8)
    return {key: each["dtype"] for key, each in json.loads(text).items() if key != "__metadata__"}


def _is_quantized(name: str, dtype: str) -> bool:
    is_matrix = name.endswith(".weight") and dtype not in _MATRICES
    return is_matrix or _PACKED.search(name) is not None or _is_packed_mxfp4(name, dtype)


def _is_packed_mxfp4(name: str, dtype: str) -> bool:
    return dtype == "U8" and _MXFP4.search(name) is not None


def _base(place: str, fields: Mapping[str, Any], small_file: Callable[[str, str], bytes]) -> str:
    """Return the model that a quantized one was made from, as its files say; "" if they do not."""
    own = hub.repo if (hub := HubPlace.of(place, "model")) else place
    stated = fields.get("_name_or_path")
    if isinstance(stated, str) and stated not in ("", own) and not Path(stated).is_absolute():
        return stated
    try:
        match = _BASE.search(small_file(place, "README.md").decode(errors="replace"))
    except (BurnishError, OSError):
        return ""
    return match[1] if match and match[1] != own else ""


def _way_out(place: str, setting: str, method: str, base: str) -> str:
    first = f"set {setting}={base}, the model that it was made from"
    if not base:
        first = f"set {setting} to the model that it was made from, which its page names"
    arguments = f'"{place}"'
    names = "AutoModelForCausalLM, AutoTokenizer"
    undo = ""
    if method == "bitsandbytes":
        undo = ".dequantize()"
    elif kind := _DEQUANTIZERS.get(method):
        names += f", {kind}"
        arguments += f", quantization_config={kind}(dequantize=True)"
    else:
        return first
    first = f"{first}; or dequantize it in Python:"
    return _lines(first, names, arguments, undo, f'"{place}"')


def _lines(first: str, names: str, model: str, undo: str, tokenizer: str) -> str:
    """Return advice and the lines of Python that write a model in full precision."""
    return "\n        ".join(
        (
            first,
            f"from transformers import {names}",
            f'AutoModelForCausalLM.from_pretrained({model}){undo}.save_pretrained("FULL")',
            f'AutoTokenizer.from_pretrained({tokenizer}).save_pretrained("FULL")',
        )
    )
