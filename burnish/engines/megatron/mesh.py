"""Megatron's process groups, made and destroyed here.

Megatron keeps its groups in module variables, so all models of a run share one set. Ranks are a grid as in
`burnish.distributed.layout.Layout`; experts have their own grid in pipeline × data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from burnish.config.schema import EngineConfig
from burnish.distributed.host_memory import Arena
from burnish.distributed.processes import wait_as_all
from burnish.engines.megatron.host import megatron_called
from burnish.errors import UsageError

_ORDER = "tp-cp-ep-dp-pp"


@dataclass(frozen=True, slots=True, eq=False)
class MegatronMesh:
    """The groups that this rank is in, and host memory."""

    groups: ProcessGroupCollection
    """Megatron's groups, by Megatron's names."""
    arena: Arena
    """Host memory for tensors that leave the device."""

    @classmethod
    def of(cls, config: EngineConfig, device: torch.device) -> MegatronMesh:
        """Make the only groups. The degrees must divide the processes. Collective. Raises `UsageError` for other devices."""
        if device.type not in ("cpu", "cuda"):
            raise UsageError(
                "Megatron needs CUDA", have=device.type, want="cuda", do="set engine.kind=torch"
            )
        _forget_ended_run()
        virtual = config.virtual_stages if config.virtual_stages > 1 else None
        with megatron_called():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=config.tensor_parallel,
                pipeline_model_parallel_size=config.pipeline_parallel,
                virtual_pipeline_model_parallel_size=virtual,
                context_parallel_size=config.sequence_parallel,
                expert_model_parallel_size=config.expert_parallel,
                expert_tensor_parallel_size=config.expert_tensor_parallel,
                order=_ORDER,
                create_gloo_process_groups=False,
            )
            for group in _groups():
                wait_as_all(group)
            # Some layers save and restore random state, so it must exist; nothing is drawn from it.
            model_parallel_cuda_manual_seed(0, force_reset_rng=True)
        return cls(ProcessGroupCollection.use_mpu_process_groups(), Arena(device))

    def close(self) -> None:
        """Destroy the groups. Collective."""
        groups = _groups()
        _forget()
        for group in groups:
            dist.destroy_process_group(group)


def _groups() -> list[dist.ProcessGroup]:
    listed = parallel_state._global_process_group_list or ()
    return [group for group in listed if isinstance(group, dist.ProcessGroup)]


def _forget() -> None:
    parallel_state.destroy_model_parallel()
    parallel_state._global_process_group_list = None


def _forget_ended_run() -> None:
    try:
        for group in _groups():
            dist.get_process_group_ranks(group)
    except KeyError:
        _forget()
