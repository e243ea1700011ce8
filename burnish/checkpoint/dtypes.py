"""torch's dtypes by the names that safetensors files give them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from burnish.errors import IncompatibleError

BY_NAME: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16,
    "I16": torch.int16, "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64,
    "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "C64": torch.complex64,
}  # fmt: skip
"""Every dtype that both know and whose elements fill whole bytes."""

_NAMES = {dtype: name for name, dtype in BY_NAME.items()}


def dtype_name(dtype: torch.dtype, tensor: str) -> str:
    """The format's name of a dtype. Raises `IncompatibleError` naming the tensor where it has none."""
    if dtype not in _NAMES:
        raise IncompatibleError(
            f"tensor {tensor} has a dtype that safetensors files cannot hold",
            have=dtype,
            want=", ".join(BY_NAME),
            do="convert the tensor to one of them before it is saved",
        )
    return _NAMES[dtype]
