"""Several trained models in one step: one commit, and each of them whole at any layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints.states import (
    ASSETS,
    SHAPES,
    contents_of,
    fill_and_compare,
    make_state,
    shards_of,
)
from support.faults.bit_flips import flip
from support.ranks.processes import run_ranks

from burnish.checkpoint.load import CheckpointSource, StepReader
from burnish.checkpoint.manager import Checkpoints
from burnish.checkpoint.retention import Retention
from burnish.checkpoint.save import ModelContents
from burnish.checkpoint.steps import newest, verify
from burnish.checkpoint.tools.diff import compare_steps
from burnish.checkpoint.tools.export import StepModel, export
from burnish.checkpoint.write_plan import MAIN, key_parts, path_of, prefix_of, roles_in, set_of
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, CorruptError, MissingError

ROLES = {
    MAIN: (1, SHAPES),
    "critic": (2, {**SHAPES, "score.weight": (1, 16)}),
    "judge_2": (3, {"w": (5, 3)}),
}
"""Seed and shapes of each model; weights of the same names among them."""
SMALL = [
    "model/chat_templates/default.jinja",
    "model/config.json",
    "model/model.safetensors",
    "training/exp_avg.safetensors",
    "training/exp_avg_sq.safetensors",
    "training/residual.safetensors",
]


def contents(layout, **changes):
    models = {}
    for role, (seed, shapes) in ROLES.items():
        weights, slots = make_state(seed, shapes if "embed.weight" in shapes else SHAPES)
        models[role] = ModelContents(shards_of(weights, layout), shards_of(slots, layout), ASSETS)
    return replace(contents_of({}, {}), models=models, **changes)


def state_of(role):
    seed, shapes = ROLES[role]
    return make_state(seed, shapes if "embed.weight" in shapes else SHAPES)


def save_on_ranks(layout, root, background):
    with Checkpoints(Path(root), layout, background_timeout=250 if background else None) as saving:
        if background:
            saving.begin_save(1, contents(layout))
            assert saving.finished(wait=True).error is None
        else:
            saving.save(1, contents(layout))


def load_on_ranks(layout, root, dim):
    source = CheckpointSource(newest(Path(root)), layout)
    for role in ROLES:
        fill_and_compare(source.of(role), *state_of(role), layout, dim)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("roles")
    save_on_ranks(Layout(), root, background=False)
    return root


def test_every_model_has_its_own_directories(root):
    step = newest(root)
    prefixes = ["", "critic/", "judge_2/"]
    wanted = ["state.json", *(prefix + name for prefix in prefixes for name in SMALL)]
    assert sorted(step.manifest.files) == sorted(wanted)
    assert list(verify(step.path)) == []
    assert roles_in(step.manifest.files) == list(ROLES)
    held = load_file(step.path / "critic/model/model.safetensors")
    assert held["score.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("writers", "readers", "dim", "background"),
    [
        (2, 1, 0, False),
        pytest.param(1, 3, 1, True, marks=pytest.mark.nightly),
        pytest.param(2, 2, 1, True, marks=pytest.mark.nightly),
    ],
)
def test_any_layout_in_and_any_out(tmp_path, root, writers, readers, dim, background):
    run_ranks(save_on_ranks, writers, str(tmp_path), background)
    run_ranks(load_on_ranks, readers, str(tmp_path), dim)
    assert newest(tmp_path).manifest.files == newest(root).manifest.files


def test_a_step_without_the_role_that_is_wanted_is_refused_and_stays(tmp_path):
    with Checkpoints(tmp_path, Layout()) as checkpoints:
        checkpoints.save(3, contents_of(*make_state(0)))
        with pytest.raises(MissingError) as caught:
            checkpoints.resume(lambda step, source: source.of("critic"))
        assert newest(tmp_path).step == 3
    error = caught.value
    assert error.exit_code == 5
    assert str(tmp_path / "step-00000003") in error.problem
    for named in ("critic/model", "critic/training"):
        assert named in error.want


def test_a_tensor_that_one_role_has_and_another_lacks(root):
    source = CheckpointSource(newest(root), Layout())
    wanted = shards_of({"score.weight": torch.zeros(1, 16)}, Layout())
    source.of("critic").fill(wanted)
    with pytest.raises(MissingError, match=r"score\.weight"):
        source.fill(wanted)


def test_damage_in_a_role_names_it_and_takes_the_whole_step(tmp_path):
    with Checkpoints(tmp_path, Layout(), retention=Retention(5)) as checkpoints:
        for step in (1, 2):
            path = checkpoints.save(step, contents(Layout()))
        damaged = path / "critic/training/exp_avg.safetensors"
        flip(damaged)
        [error] = verify(path)
        assert isinstance(error, CorruptError)
        assert "critic/training/exp_avg.safetensors" in error.problem

        def load(step, source):
            for role in ROLES:
                fill_and_compare(source.of(role), *state_of(role), Layout())

        resumed = checkpoints.resume(load)
    assert resumed.step.step == 1
    assert "critic/training/exp_avg.safetensors" in resumed.skipped[0]


def test_one_role_that_is_not_finite_makes_the_step_unhealthy(tmp_path):
    with Checkpoints(tmp_path, Layout()) as checkpoints:
        weights = {"w": torch.tensor([1.0, torch.nan])}
        models = {
            MAIN: ModelContents(shards_of({"w": torch.ones(2)}, Layout()), [], ASSETS),
            "critic": ModelContents(shards_of(weights, Layout()), [], ASSETS),
        }
        step = replace(contents_of({}, {}), models=models, check_finite=True)
        checkpoints.save(1, step)
        with pytest.raises(CorruptError):
            checkpoints.resume(lambda step, source: None)


def test_export_of_a_role(tmp_path, root):
    step = newest(root)
    with pytest.raises(MissingError) as caught:
        export(StepModel(step, "actor"), tmp_path / "out", torch.bfloat16, 1 << 30)
    assert "critic, judge_2" in caught.value.have
    for role in ROLES:
        target = tmp_path / f"out{role}"
        assert "config.json" in export(StepModel(step, role), target, torch.float32, 1 << 30)
        held, wanted = load_file(target / "model.safetensors"), state_of(role)[0]
        assert held.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(held[name], tensor, rtol=0, atol=0, equal_nan=True)
        assert json.loads((target / "config.json").read_text())["dtype"] == "float32"


def test_steps_are_compared_role_by_role(root):
    with StepReader(newest(root)) as a, StepReader(newest(root)) as b:
        found = list(compare_steps(a, b))
    assert {each.verdict for each in found} == {"equal"}
    keys = {each.key for each in found}
    assert {"model/scale", "critic/model/scale", "critic/exp_avg/scale"} <= keys
    assert not any("residual" in key for key in keys)


@pytest.mark.parametrize("name", ["model", "training", "residual", "a/b", "Critic", "0", ".."])
def test_what_cannot_name_a_role(tmp_path, name):
    model = ModelContents([], [], ASSETS)
    with (
        Checkpoints(tmp_path, Layout()) as checkpoints,
        pytest.raises((ValueError, BurnishError), match="role"),
    ):
        checkpoints.save(1, replace(contents_of({}, {}), models={name: model}))


def test_a_slot_cannot_have_the_name_of_a_role(tmp_path):
    slots = shards_of({"critic/w": torch.zeros(2)}, Layout())
    models = {MAIN: ModelContents([], slots, ASSETS)}
    models["critic"] = ModelContents([], [], ASSETS)
    with Checkpoints(tmp_path, Layout()) as checkpoints, pytest.raises(ValueError, match="slot"):
        checkpoints.save(1, replace(contents_of({}, {}), models=models))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", ["model", "residual", "exp_avg", "training"])
def test_names_of_sets_and_their_files_are_inverse(role, kind):
    tensor_set = f"{prefix_of(role)}{kind}"
    for number in ("", "-00002-of-00010"):
        assert set_of(f"{path_of(tensor_set)}{number}.safetensors") == tensor_set
    assert key_parts(f"{tensor_set}/a.b", ROLES) == (tensor_set, "a.b")


@pytest.mark.parametrize(
    "path", ["state.json", "model/config.json", "model/a/b.json", "x.safetensors"]
)
def test_files_that_hold_no_tensors(path):
    assert set_of(path) is None
