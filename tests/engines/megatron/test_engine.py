"""The engine's verbs beside the contract: gradients that add up, steps that are skipped, parking, a frozen model beside it, bf16."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from contracts.engine import LR, cut, loss, make_examples, require_learnt
from megatron.core.pipeline_parallel import p2p_communication
from support.models.engines import CPU, make_engine, make_frozen
from support.models.tiny import VOCAB, save_tiny, tiny_config
from support.ranks.processes import run_ranks
from torch import Tensor

from burnish.config.schema import EngineConfig
from burnish.distributed.layout import Layout
from burnish.distributed.processes import process_group
from burnish.engines.base import Engine, Part
from burnish.engines.megatron.host import megatron_called
from burnish.engines.megatron.megatron_engine import MegatronEngine
from burnish.engines.megatron.mesh import MegatronMesh
from burnish.engines.megatron.model import build_stages
from burnish.errors import BurnishError, UsageError
from burnish.records import Batch, MicroBatch, TokenOutputs
from burnish.tracking.stats import Stats

MEGATRON: dict[str, Any] = {"kind": "megatron", "max_skipped_steps": 2}
LAYOUTS: list[dict[str, Any]] = [
    {"pipeline_parallel": 2, "virtual_stages": 2},
    {"tensor_parallel": 2},
    {},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("m"), "qwen3", torch.float32, num_hidden_layers=4)


def poisoned(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
    """A loss that is not finite where there is something to train on."""
    value, stats = loss(outputs, micro)
    return value * (float("nan") if bool(micro.loss_mask.any()) else 1.0), stats


def verbs_rank(layout: Layout, path: Path, layouts: Sequence[Mapping[str, Any]]) -> list[Any]:
    found = []
    for settings in layouts:
        engine = make_engine(layout, path, **MEGATRON, **settings)
        alone = cut(make_examples(VOCAB)[:1], engine.layout, 1)
        value = engine.forward_backward(alone, loss).values_by_name()["loss"]
        engine.forward_backward(alone, loss)
        norm = engine.optim_step(LR).values_by_name()["grad_norm"]
        engine.forward_backward(alone, poisoned)
        before = [shard.tensor.clone() for shard in engine.shards(Part.WEIGHTS)]
        skipped = engine.optim_step(LR).values_by_name()["skipped"]
        kept = all(
            torch.equal(shard.tensor, then)
            for shard, then in zip(engine.shards(Part.WEIGHTS), before, strict=True)
        )
        state = (engine.steps, engine.skipped_in_a_row, kept)
        engine.forward_backward(alone, poisoned)
        with pytest.raises(BurnishError):
            engine.optim_step(LR)
        found.append((value, norm, skipped, *state))
        engine.close()
    return found


def test_gradients_add_up_over_calls_and_a_nan_on_one_share_skips_the_step(model: Path) -> None:
    """With one sequence for all ranks, so that some have nothing but filler."""
    ((value, norm, *_),) = run_ranks(verbs_rank, 1, model, [{}])[0]
    for rank in run_ranks(verbs_rank, 2, model, LAYOUTS):
        for found in rank:
            assert found[:2] == pytest.approx((value, norm), rel=1e-5)
            assert found[2:] == (1.0, 1, 1, True)


def parked_rank(layout: Layout, path: Path, layouts: Sequence[Mapping[str, Any]]) -> None:
    """Two runs of two steps, between whose steps one engine is parked; and a frozen engine beside it."""
    for settings in ({**MEGATRON, **each} for each in layouts):
        runs = []
        for parks in (False, True):
            engine = make_engine(layout, path, **settings)
            frozen = make_frozen(layout, path, engine, **settings)
            assert frozen.mesh is engine.mesh
            batch = cut(make_examples(VOCAB), engine.layout, 2)
            before, beside = said(engine, batch), said(frozen, batch)
            assert torch.equal(before, beside)
            engine.forward_backward(batch, loss)
            engine.optim_step(LR)
            assert torch.equal(beside, said(frozen, batch)), "it follows the other"
            assert not torch.equal(before, said(engine, batch))
            slot = next(iter(engine.shards(Part.TRAINING))).tensor
            if parks:
                with engine.offloaded():
                    assert slot.untyped_storage().nbytes() == 0
            engine.forward_backward(batch, loss)
            norm = engine.optim_step(LR).values_by_name()["grad_norm"]
            runs.append((norm, [s.tensor.clone() for p in Part for s in engine.shards(p)]))
            with pytest.raises(BurnishError):
                frozen.optim_step(LR)
            frozen.close()
            engine.close()
        (norm, parts), (again, others) = runs
        assert norm == again
        assert all(torch.equal(*pair) for pair in zip(parts, others, strict=True))


def said(engine: Engine, batch: Batch) -> Tensor:
    """The log-probs of this rank's micro-batches."""
    return torch.cat([output.logprobs for output in engine.forward(batch)])


@pytest.mark.nightly
def test_parking_changes_no_bit_and_a_frozen_engine_shares_nothing_but_the_groups(
    model: Path,
) -> None:
    run_ranks(parked_rank, 2, model, LAYOUTS[:1])


@pytest.mark.nightly
def test_parking_changes_no_bit_at_other_layouts(model: Path) -> None:
    run_ranks(parked_rank, 2, model, LAYOUTS[1:])


def planned_rank(layout: Layout, path: Path, layouts: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Of each layout: how many micro-batches there are, and how many were planned and not forgotten when another one was, training and asking."""
    found, plan = [], MegatronEngine._planned
    for settings in layouts:
        engine = make_engine(layout, path, **MEGATRON, **settings)
        batch, most = cut(2 * make_examples(VOCAB), engine.layout, 1), []
        for verb in (partial(engine.forward_backward, loss=loss), engine.forward):
            made: list[weakref.ref[Tensor]] = []
            known = [0]

            def planned(self: MegatronEngine, *args: Any, **options: Any) -> Any:
                known.append(sum(each() is not None for each in made))  # noqa: B023
                one = plan(self, *args, **options)
                made.append(weakref.ref(one.plan.input_ids))  # noqa: B023
                return one

            with mock.patch.object(MegatronEngine, "_planned", planned):
                verb(batch)
            assert len(made) == len(batch.microbatches)
            most.append(max(known))
        found.append((len(batch.microbatches), *most))
        engine.close()
    return found


@pytest.mark.nightly
def test_a_micro_batch_is_planned_when_its_turn_comes(model: Path) -> None:
    """Beside those whose backward pass is still to come."""
    ((many, *alone),) = run_ranks(planned_rank, 1, model, [{}])[0]
    assert many == 12
    assert max(alone) <= 1
    for rank in run_ranks(planned_rank, 2, model, LAYOUTS):
        for settings, (many, training, asking) in zip(LAYOUTS, rank, strict=True):
            in_stages = "pipeline_parallel" in settings
            assert training <= (many / 2 if in_stages else 1), settings
            assert asking <= (2 if in_stages else 1), settings


class UnderWay:
    """An exchange that looks, when it is waited for, whether its tensor still is where it was when the exchange began."""

    def __init__(self, request: dist.Work, tensor: Tensor, kept: list[bool]) -> None:
        self.request, self.tensor, self.kept = request, tensor, kept
        self.place = tensor.data_ptr()

    def wait(self) -> None:
        self.kept.append(self.tensor.data_ptr() == self.place)
        self.request.wait()


def exchanging_rank(layout: Layout, path: Path) -> tuple[int, list[bool]]:
    """How many tensors stages exchanged without waiting at once, and whether each stayed meanwhile."""
    begun, kept = [], list[bool]()
    exchange = p2p_communication._p2p_ops

    def watched(**given: Any) -> dict[str, UnderWay]:
        requests = exchange(**given)
        begun.extend(requests)
        return {
            name: UnderWay(request, given[f"tensor_{name}"], kept)
            for name, request in requests.items()
        }

    with mock.patch.object(p2p_communication, "_p2p_ops", watched):
        engine = make_engine(layout, path, **MEGATRON, pipeline_parallel=2, virtual_stages=2)
        batch = cut(make_examples(VOCAB), engine.layout, 1)
        engine.forward_backward(batch, loss)
        engine.forward(batch)
        engine.close()
    return len(begun), kept


def test_what_stages_exchange_stays_until_it_has_been(model: Path) -> None:
    """A tensor freed before it was sent is sent as whatever came to lie there. The last activation's gradient says that it has come."""
    for begun, kept in run_ranks(exchanging_rank, 2, model):
        assert begun > 30
        assert len(kept) >= begun - 1
        assert all(kept)


def losses_rank(layout: Layout, path: Path) -> dict[str, tuple[list[float], set[Any]]]:
    """By precision: the losses of some steps, and the dtypes of what the engine holds."""
    found = {}
    for precision in ("fp32", "bf16"):
        engine = make_engine(layout, path, precision=precision, **MEGATRON)
        batch = cut(make_examples(VOCAB), engine.layout, 3)
        losses = []
        for _ in range(5):
            losses.append(engine.forward_backward(batch, loss).values_by_name()["loss"])
            engine.optim_step(LR)
        kinds = {(part, shard.tensor.dtype) for part in Part for shard in engine.shards(part)}
        kinds |= {("published", shard.tensor.dtype) for shard in engine.published().changing}
        found[precision] = losses, kinds
        engine.close()
    return found


def test_bf16_learns_as_fp32_does_with_fp32_main_weights(model: Path) -> None:
    found = run_ranks(losses_rank, 2, model)[0]
    (exact, _), (rough, kinds) = found["fp32"], found["bf16"]
    require_learnt(rough, exact)
    assert kinds == {
        (Part.WEIGHTS, torch.float32),
        (Part.TRAINING, torch.float32),
        ("published", torch.bfloat16),
    }


def waiting_rank(layout: Layout) -> set[float]:
    mesh = MegatronMesh.of(EngineConfig(kind="megatron", pipeline_parallel=2), CPU)
    waits = {
        group._get_backend(CPU).options._timeout.total_seconds()
        for group in vars(mesh.groups).values()
        if isinstance(group, dist.ProcessGroup)
    }
    mesh.close()
    return waits


def test_all_groups_wait_as_long_as_is_configured() -> None:
    assert run_ranks(waiting_rank, 2, timeout=88.0) == [{88.0}] * 2


def test_a_device_that_megatron_would_leave_idle_is_refused() -> None:
    with pytest.raises(UsageError):
        MegatronMesh.of(EngineConfig(kind="megatron"), torch.device("xpu", 0))


def test_a_frozen_mixture_is_on_the_device() -> None:
    """Megatron leaves a router's weight on the host; `meta` stands for another device."""
    with process_group(CPU, 60):
        config = EngineConfig(kind="megatron", precision="fp32")
        mesh = MegatronMesh.of(config, CPU)
        shape = tiny_config("qwen3_moe")
        with (
            megatron_called(),
            mock.patch.object(torch.cuda, "current_device", return_value="meta"),
        ):
            [stage] = build_stages(shape, config, mesh, CPU)
        mesh.close()
    assert {str(parameter.device) for parameter in stage.parameters()} == {"meta"}


def test_a_run_may_follow_another_in_one_process() -> None:
    """Megatron remembers groups; those of a run that has ended are gone."""
    config = EngineConfig(kind="megatron")
    for _ in range(2):
        with process_group(CPU, 60):
            assert MegatronMesh.of(config, CPU).groups.tp.size() == 1
    with process_group(CPU, 60):
        MegatronMesh.of(config, CPU).close()
