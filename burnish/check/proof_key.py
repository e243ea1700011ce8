"""Name the file of a passed proof after everything that a forward pass depends on.

That is the model's configuration, the code of Burnish, of transformers and of the model, the installed packages, the device, and the
settings of kernels.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.attention import current_flash_attention_impl
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from burnish.distributed.device import device_name
from burnish.distributed.layout import Layout
from burnish.files.cache import cache_root
from burnish.rollout.base import Sampling
from burnish.tracking.rundir import write_atomically

GREEDY = Sampling(8, temperature=0.0)
SAMPLED = Sampling(20, temperature=0.8, top_k=24, top_p=0.9, min_p=0.05)
"""Every filter drops some of 64 tokens."""
# Lower ones magnify rounding.
_LEAST_TEMPERATURE = 0.2
PLAIN = {
    "precision": "fp32",
    "max_grad_norm": 1e30,
    "compile": False,
    "optimizer_offload": False,
    "parameter_offload": False,
    "activation_offload": False,
    "offload_during_rollout": False,
    "router_aux_loss": 0.0,
    "router_bias_update_rate": 0.0,
    "logprob_chunk": None,
}
"""Settings of the engine that a proof overrides."""

_TRANSFORMERS = Path(str(transformers.__file__)).parent
_MODELS = _TRANSFORMERS / "models"
_OTHER_FAMILY = re.compile(r"(?:from \.\.|from \.\.\.models\.|transformers\.models\.)(\w+)")
_NOT_RUN = re.compile(r"^(modular|convert|tokenization|processing)_|_processing_")
"""Names of files in a model's folder that no forward pass runs."""
_ASKED = (
    re.compile(r'_is_package_available\("(\w+)'),
    re.compile(r'_from_hub_with_fallback\(\s*"\w+",\s*"(\w+)'),
)
"""Packages that transformers looks for. These patterns and the next begin with a literal, so the search is fast."""
_IMPORTED = (re.compile(r"from (\w+)(?:\.\w+)* import"), re.compile(r"import (\w+)"))
"""Packages that a source imports."""
_METADATA = (".dist-info", ".egg-info")
_CODE = (".py", ".so", ".pyd", ".cu", ".ptx", ".cubin")
_KERNEL_VARIABLES = re.compile(
    r"^(ATEN|CUBLAS|CUDA_MODULE|CUDNN|DNNL|ONEDNN|MKL|MIOPEN|HIPBLASLT|ROCBLAS|FLA|FLASH|KERNELS|LIGER|MAMBA|NVIDIA_TF32|NVTE"
    r"|PYTORCH|TILELANG|TORCH|TORCHINDUCTOR|TRITON|XFORMERS)_|^(USE_HUB_KERNELS|DISABLE_KERNEL_MAPPING)$"
)
"""Environment variables that choose kernels or their precision, by the libraries' prefixes."""


def keep_proof(place: Path, layout: Layout) -> None:
    """Record a passed proof at its place, once for each machine."""
    if layout.local_rank == 0:
        with suppress(OSError):  # the next run proves it again
            write_atomically(place, b"passed\n")


def proof_place(hf_config: PretrainedConfig, device: torch.device, how: Any) -> Path:
    """Return a proof's file, the same for each copy of a model; `how` is what else was compared."""
    fields = {n: v for n, v in hf_config.to_dict().items() if n != "_name_or_path"}
    sources = _model_sources(hf_config)
    key = [
        json.dumps(fields, sort_keys=True, default=str),
        sys.version,
        own_code(),
        _hash_of(sources),
        installed(),
        _unregistered(sources),
        *_kernel_settings(device),
        how,
    ]
    digest = hashlib.sha256(json.dumps(key, default=str).encode()).hexdigest()
    return cache_root() / "proofs" / digest[:32]


@cache
def own_code() -> str:
    """Hash the code of Burnish."""
    return _hash_of(_python_files(Path(__file__).parents[1]))


def installed() -> list[Any]:
    """Return the name and version of each installed distribution, with a mark of its files.

    Any change counts, because any package may be imported by another one.
    """
    distributions: list[Any] = []
    for place in _import_folders():
        for name in os.listdir(place):
            if name.endswith(_METADATA):
                files = [place / name / each for each in ("RECORD", "PKG-INFO")]
                distributions.append((name, [_mark(each) for each in files if each.is_file()]))
    return sorted(distributions)


def _import_folders() -> list[Path]:
    return [path for path in map(Path, dict.fromkeys(sys.path)) if path.is_dir()]


def _mark(path: Path) -> tuple[int, int]:
    """Return a file's size and time: another build of the same version has other ones."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _unregistered(sources: Iterable[Path]) -> list[Any]:
    """Return packages that `sources` look for and that no distribution beside them describes, with a hash of each.

    Such is a folder on PYTHONPATH, or a package that is installed as its own sources.
    """
    texts = [path.read_text(errors="replace") for path in (*sources, *_own_sources())]
    asked, imported = (
        {name for each in patterns for text in texts for name in each.findall(text)}
        for patterns in (_ASKED, _IMPORTED)
    )
    present = {name.partition(".")[0] for each in _import_folders() for name in os.listdir(each)}
    names = (asked | imported & present) - {"burnish", "transformers", *sys.stdlib_module_names}
    installed = packages_distributions()
    return [
        (name, str(origin), _hash_of(code))
        for name in sorted(names)
        for origin in _origins(name)
        if not (name in installed and _has_metadata(origin.parent))
        and (code := _code_files(origin))
    ]


def _has_metadata(folder: Path) -> bool:
    return any(name.endswith(_METADATA) for name in os.listdir(folder))


def _own_sources() -> list[Path]:
    package = Path(__file__).parents[1]
    return [path for part in ("models", "engines") for path in _python_files(package / part)]


def _kernel_settings(device: torch.device) -> Iterator[Any]:
    """Yield the device, torch's build, and settings that choose kernels or their precision."""
    yield device.type, device_name(device)
    yield torch.__version__, torch.version.git_version, torch.__config__.show()
    yield torch.backends.cpu.get_cpu_capability(), torch.backends.mkldnn.enabled
    yield torch.backends.cudnn.enabled, torch.backends.cuda.matmul.fp32_precision
    yield torch.are_deterministic_algorithms_enabled(), current_flash_attention_impl()
    yield sorted(each for each in os.environ.items() if _KERNEL_VARIABLES.match(each[0]))


def _model_sources(hf_config: PretrainedConfig) -> list[Path]:
    """Return transformers' files that models share, those of this type, and the model's own."""
    configs = {type(hf_config), type(hf_config.get_text_config())}
    models = {MODEL_FOR_CAUSAL_LM_MAPPING.get(each, None) for each in configs} - {None}
    modules = [sys.modules[each.__module__] for each in (*configs, *models)]
    files = [Path(str(module.__file__)) for module in modules if getattr(module, "__file__", None)]
    folders = {path.parent for path in files if path.is_relative_to(_MODELS)}
    own = {path for path in files if not path.is_relative_to(_TRANSFORMERS)}
    if any(module.__name__.startswith("transformers_modules.") for module in modules):
        places = {path.parent for path in own} | {Path(hf_config.name_or_path)}
        own |= {path for place in places for path in place.glob("*.py")}
    for path in own:
        folders |= _families_in(path)
    waiting = list(folders)
    while waiting:
        for path in _family_files(waiting.pop()):
            new = _families_in(path) - folders
            folders |= new
            waiting += new
    shared = _python_files(_TRANSFORMERS, but=_MODELS)
    return sorted({*shared, *own, *(path for each in folders for path in _family_files(each))})


def _families_in(path: Path) -> set[Path]:
    """Return the folders of other families whose code a file imports."""
    names = _OTHER_FAMILY.findall(path.read_text(errors="replace"))
    return {_MODELS / name for name in names if name != "auto" and (_MODELS / name).is_dir()}


def _family_files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.py") if not _NOT_RUN.search(path.name)]


def _origins(name: str) -> list[Path]:
    """Return the file of a package or module, or the folders of one without a file."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):  # something half-installed, or a module without a spec
        return []
    if spec is None:
        return []
    if spec.origin and Path(spec.origin).is_file():
        is_package = spec.submodule_search_locations is not None
        return [Path(spec.origin).parent if is_package else Path(spec.origin)]
    return [Path(each) for each in spec.submodule_search_locations or () if Path(each).is_dir()]


def _python_files(folder: Path, but: Path | None = None) -> list[Path]:
    return sorted(path for path in _walk(folder, but) if path.suffix == ".py")


def _code_files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    return sorted(path for path in _walk(place) if path.suffix in _CODE)


def _walk(folder: Path, but: Path | None = None) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if Path(root, name) != but]
        yield from (Path(root, name) for name in names)


def _hash_of(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def samplings_of(of_run: Sampling | None) -> list[Sampling]:
    """Return greedy sampling, one with every filter, and the run's own."""
    samplings = [GREEDY, SAMPLED]
    if of_run is not None and of_run.temperature > 0:
        samplings.append(
            replace(
                SAMPLED,
                temperature=max(of_run.temperature, _LEAST_TEMPERATURE),
                top_k=of_run.top_k,
                top_p=of_run.top_p,
                min_p=of_run.min_p,
            )
        )
    return list(dict.fromkeys(samplings))
