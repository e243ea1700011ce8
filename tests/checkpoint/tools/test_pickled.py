"""Importing what has to be unpickled: exact, through a child process, and refusing all that is no tensor."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from support.checkpoints.states import bits
from support.models.tiny import tiny_config, tiny_model
from support.ranks.processes import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from burnish.checkpoint.load import StepReader
from burnish.checkpoint.steps import open_step, verify
from burnish.checkpoint.tools import import_pickled as pickled
from burnish.checkpoint.tools.import_pickled import guarded_by, pickled_kind
from burnish.checkpoint.tools.importing import save_foreign
from burnish.checkpoint.tools.unpickle import convert
from burnish.errors import BurnishError, CorruptError, IncompatibleError, MissingError, UsageError
from burnish.files.storage import LocalStorage


def imported(source, assets, root):
    return open_step(save_foreign(opened(source, assets), root, 0), LocalStorage())


def opened(source, assets, **options):
    kind = pickled_kind(source)
    return pickled.pickled(kind, source, assets, **{"without_sandbox": True} | options)


def assert_is_model(step, model, dtype=torch.float32):
    """The step holds exactly the canonical tensors of the model, as `save_pretrained` would write them."""
    assert list(verify(step.path)) == []
    expected = canonical(model)
    with StepReader(step) as tensors:
        assert {key.removeprefix("model/") for key in tensors.tensors} == expected.keys()
        for name, tensor in expected.items():
            found = tensors.read_range(f"model/{name}", 0, tensor.numel()).view(tensor.shape)
            assert torch.equal(bits(found), bits(tensor.to(dtype))), name


def canonical(model):
    from transformers.core_model_loading import revert_weight_conversion

    state = revert_weight_conversion(model, dict(model.state_dict()))
    tied = set(model.all_tied_weights_keys or ())
    return {name: tensor for name, tensor in state.items() if name not in tied}


@pytest.fixture
def assets(tmp_path):
    tiny_config("qwen3").save_pretrained(tmp_path / "assets")
    (tmp_path / "assets/tokenizer.json").write_text("{}")
    return tmp_path / "assets"


@pytest.fixture
def in_process(monkeypatch):
    """Convert in this process: a child with torch takes seconds to start, and is tried below."""

    monkeypatch.setattr(pickled, "_unpickle", lambda *task, sandboxed: convert(*task))


@pytest.fixture
def root(tmp_path):
    return tmp_path / "run/checkpoints"


def save_dcp(state, directory):
    dcp.save(state, checkpoint_id=str(directory), no_dist=True)
    return directory


# torch warns of saving without a process group, which is what these tests mean to do.
alone = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@alone
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("prefix", ["", "model.", "state.app."])
def test_a_dcp_directory(tmp_path, assets, root, prefix):
    model = tiny_model("qwen3")
    state = {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}
    state |= {
        f"optim.state.{name}.exp_avg": tensor + 1 for name, tensor in model.state_dict().items()
    }
    source = save_dcp(state | {"step": 3, "note": "hello"}, tmp_path / "dcp")
    assert pickled_kind(source) == "dcp"
    step = imported(source, assets, root)
    assert_is_model(step, model)
    assert step.state["imported"]["kind"] == "dcp"
    assert (step.path / "model/tokenizer.json").is_file()
    assert sorted(path.name for path in root.iterdir()) == [".lease", step.path.name]


def test_a_hubs_links_to_metadata_are_followed(tmp_path):
    (tmp_path / "blob").write_text('{"sharded_backend": "torch_dist"}')
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/.metadata").write_bytes(b"")
    (tmp_path / "linked/metadata.json").symlink_to(tmp_path / "blob")
    assert pickled_kind(tmp_path / "linked") == "torch_dist"


@pytest.mark.usefixtures("in_process")
@alone
def test_fused_experts_of_a_dcp_directory(tmp_path, root):
    model = tiny_model("qwen3_moe")
    model.config.save_pretrained(tmp_path / "assets")
    source = save_dcp({"model": dict(model.state_dict())}, tmp_path / "dcp")
    assert_is_model(imported(source, tmp_path / "assets", root), model)


@pytest.mark.usefixtures("in_process")
@alone
def test_single_experts_of_a_dcp_directory(tmp_path, root):
    model = tiny_model("qwen3_moe")
    model.config.save_pretrained(tmp_path / "assets")
    source = save_dcp({"model": canonical(model)}, tmp_path / "dcp")
    assert_is_model(imported(source, tmp_path / "assets", root), model)


def save_sharded(layout, directory, mesh_shape, dtype):
    """What verl and DCP write of the tiny model, over the ranks of a mesh."""
    mesh = init_device_mesh("cpu", mesh_shape)
    placements = [Replicate()] * (len(mesh_shape) - 1) + [Shard(0)]
    state = {
        name: distribute_tensor(tensor.to(dtype), mesh, placements)
        for name, tensor in tiny_model("qwen3").state_dict().items()
    }
    name = f"model_world_size_{layout.world}_rank_{layout.rank}.pt"
    torch.save(state, Path(directory) / "verl" / name)
    dcp.save({"model": state}, checkpoint_id=f"{directory}/dcp")


@pytest.mark.usefixtures("in_process")
def test_shards_of_several_ranks(tmp_path, assets):
    """Two copies of two halves; the vocabulary of 97 is not cut evenly."""
    (tmp_path / "verl").mkdir()
    run_ranks(save_sharded, 4, str(tmp_path), (2, 2), torch.bfloat16)
    for kind in ("verl", "dcp"):
        assert pickled_kind(tmp_path / kind) == kind
        step = imported(tmp_path / kind, assets, tmp_path / f"{kind}-run/checkpoints")
        assert_is_model(step, tiny_model("qwen3"), torch.bfloat16)
        assert step.state["imported"]["kind"] == kind


def save_verl(state, source, world=1, rank=0):
    source.mkdir(exist_ok=True)
    torch.save(state, source / f"model_world_size_{world}_rank_{rank}.pt")
    return source


@pytest.fixture
def verl(tmp_path):
    return save_verl(dict(tiny_model("qwen3").state_dict()), tmp_path / "actor")


class Touch:
    """Unpickled without care, makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


@pytest.mark.nightly
def test_code_in_a_verl_checkpoint_is_not_run(tmp_path, assets, root):
    source = save_verl({"w": torch.ones(1), "x": Touch(tmp_path / "touched")}, tmp_path / "actor")
    with pytest.raises(CorruptError) as caught:
        imported(source, assets, root)
    assert "posix.system" in str(caught.value)
    assert not (tmp_path / "touched").exists()
    assert not root.exists()


@alone
@pytest.mark.parametrize("where", ["metadata", "data"])
@pytest.mark.usefixtures("in_process")
def test_code_in_a_dcp_directory_is_not_run(tmp_path, assets, root, where):
    source = save_dcp(dict(tiny_model("qwen3").state_dict()), tmp_path / "dcp")
    touch = Touch(tmp_path / "touched")
    if where == "metadata":
        (source / ".metadata").write_bytes(pickle.dumps(touch))
    else:
        metadata = dcp.FileSystemReader(str(source)).read_metadata()
        with (source / "__0_0.distcp").open("r+b") as file:
            for info in metadata.storage_data.values():
                file.seek(info.offset)
                file.write(pickle.dumps(touch, 2).ljust(info.length, b"\0")[: info.length])
    with pytest.raises(pickle.UnpicklingError):
        imported(source, assets, root)
    assert not (tmp_path / "touched").exists()


@alone
@pytest.mark.nightly
def test_a_child_unpickles_a_dcp_directory(tmp_path, assets, root):
    source = save_dcp(dict(tiny_model("qwen3").state_dict()), tmp_path / "dcp")
    assert_is_model(imported(source, assets, root), tiny_model("qwen3"))


def forge(how, scratch):
    """Change what the child left behind."""
    [path] = scratch.iterdir()
    if how == "a lying header":
        path.write_bytes(path.read_bytes()[:-1])
        return
    tensors = load_file(path)
    key = next(key for key, tensor in tensors.items() if tensor.ndim == 2)
    name, shape, offsets = json.loads(key)
    forged = {
        "too far": [name, shape, [10**9, 0]],
        "negative": [name, shape, [-1, 0]],
        "no numbers": [name, shape, [0.0, 0]],
        "fewer dims": [name, shape[1:], offsets],
        "no name": [3, shape, offsets],
        "no list": {},
    }[how]
    save_file(tensors | {json.dumps(forged): tensors.pop(key)}, path)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    "how",
    ["too far", "negative", "no numbers", "fewer dims", "no name", "no list", "a lying header"],
)
def test_what_the_child_leaves_is_not_believed(verl, assets, root, monkeypatch, how):
    real = pickled._unpickle

    def unpickle(*task, sandboxed):
        real(*task, sandboxed=sandboxed)
        forge(how, task[-1])

    monkeypatch.setattr(pickled, "_unpickle", unpickle)
    with pytest.raises(CorruptError):
        imported(verl, assets, root)
    assert not root.exists()


@pytest.mark.usefixtures("in_process")
def test_a_tensor_of_more_elements_than_its_file_holds(tmp_path, assets, root):
    """A file of 2 kB would take 3 TB; it is refused before memory is."""
    huge = torch.zeros(1).expand(3 << 38)
    source = save_verl({"model.norm.weight": huge}, tmp_path / "actor")
    with pytest.raises(ValueError, match="more elements"):
        imported(source, assets, root)


def without(name, state):
    return {key: value for key, value in state.items() if key != name}


def wider(name, state):
    return state | {name: torch.cat([state[name]] * 2)}


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (partial(without, "model.norm.weight"), MissingError, "1"),
        (partial(wider, "model.norm.weight"), IncompatibleError, "model.norm.weight"),
        (lambda state: {}, MissingError, "model.norm.weight"),
    ],
)
def test_weights_of_another_model(tmp_path, assets, root, change, error, said):
    state = change(dict(tiny_model("qwen3").state_dict()))
    source = save_verl(state, tmp_path / "actor")
    with pytest.raises(error) as caught:
        imported(source, assets, root)
    assert "--assets" in str(caught.value)


def test_files_that_are_missing(tmp_path, assets, verl):
    assert pickled_kind(assets) is None
    shutil.copy(verl / "model_world_size_1_rank_0.pt", verl / "model_world_size_2_rank_0.pt")
    with pytest.raises(IncompatibleError):
        opened(verl, assets)
    (verl / "model_world_size_1_rank_0.pt").unlink()
    with pytest.raises(MissingError):
        opened(verl, assets)
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").write_bytes(b"")
    with pytest.raises(MissingError):
        opened(tmp_path / "dcp", assets)
    with pytest.raises(MissingError):
        opened(save_verl({}, tmp_path / "other"), tmp_path / "other")


@pytest.mark.usefixtures("in_process")
def test_the_step_is_looked_at_before_anything_is_unpickled(verl, assets, root, monkeypatch):
    imported(verl, assets, root)
    monkeypatch.setattr(pickled, "_unpickle", lambda *_, **__: pytest.fail("was unpickled"))
    with pytest.raises(BurnishError):
        imported(verl, assets, root)


@pytest.mark.parametrize(
    ("version", "seccomp", "kept", "left"),
    [
        (0, False, (), ("writing", "programs", "TCP", "other sockets", "signals", "modes")),
        (0, True, ("seccomp", "TCP", "other sockets", "signals", "modes"), ("writing", "programs")),
        (3, False, ("Landlock 3", "writing", "programs"), ("TCP", "signals", "modes")),
        (5, False, ("TCP",), ("other sockets", "signals", "modes")),
        (6, False, ("TCP", "signals"), ("other sockets", "modes")),
        (7, True, ("Landlock 7", "seccomp", "writing", "TCP", "other sockets", "modes"), ()),
    ],
)
def test_it_says_what_guards_it(version, seccomp, kept, left):
    said, _, lacks = guarded_by(version, seccomp=seccomp).partition("could not")
    assert all(word in said for word in kept)
    assert all(word in lacks for word in left)
    assert bool(lacks) == bool(left)


def on_landlock(monkeypatch, version):
    monkeypatch.setattr("burnish.checkpoint.tools.sandbox.landlock_version", lambda: version)


def test_without_a_sandbox_only_when_told(verl, assets, monkeypatch):
    on_landlock(monkeypatch, 0)
    with pytest.raises(UsageError) as caught:
        opened(verl, assets, without_sandbox=False)
    assert "--without-sandbox" in caught.value.do
    assert "could not keep it from: writing" in opened(verl, assets).guard
    on_landlock(monkeypatch, 7)
    assert "Landlock 7" in opened(verl, assets).guard


@pytest.mark.nightly
def test_a_child_unpickles_without_a_sandbox_when_told(verl, assets, root, monkeypatch):
    on_landlock(monkeypatch, 0)
    source = opened(verl, assets)
    step = open_step(save_foreign(source, root, 0), LocalStorage())
    assert step.state["imported"]["kind"] == "verl"
