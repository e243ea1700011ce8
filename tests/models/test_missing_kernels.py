"""`burnish.models.kernels.missing`: what a GPU would use, on a machine that looks as if it had one."""

import importlib.util

import pytest
import torch

from burnish.check import machine
from burnish.distributed import device as devices
from burnish.models.kernels import missing

CUDA = torch.device("cuda", 0)
ALL = {"triton", "liger_kernel", "flash_attn_interface"}


@pytest.fixture
def found(monkeypatch):
    """Return what is missing on a GPU of this capability, with these packages."""

    def look(packages, capability=(9, 0)):
        def find(name):
            return importlib.util.find_spec("torch") if name in packages else None

        monkeypatch.setattr(missing, "is_sm80_or_newer", lambda device: capability >= (8, 0))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        for module in (missing, devices):
            monkeypatch.setattr(module, "find_spec", find)
        devices.missing_compiler.cache_clear()
        try:
            return list(missing.missing_kernels(CUDA))
        finally:
            devices.missing_compiler.cache_clear()

    return look


def test_a_machine_with_everything_lacks_nothing(found, monkeypatch):
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(devices.Path, "exists", lambda path: True)
    assert found(ALL) == []
    assert found(ALL - {"flash_attn_interface"}, (8, 0)) == []  # FlashAttention 3 is for Hopper


def test_each_lack_is_named_with_its_command(found, monkeypatch):
    assert len(found(set())) == 3
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(devices.Path, "exists", lambda path: False)
    assert ["python3-dev" in lack.do for lack in found(ALL)] == [True]
    monkeypatch.delenv("CC")
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    assert ["gcc" in lack.do for lack in found(ALL)] == [True]
    assert found(set(), (7, 5)) == []  # no kernel of these runs there


def test_the_doctor_warns_of_them(found):
    lacking = found(set())
    assert [finding.found for finding in machine._kernels(CUDA)] == [each.found for each in lacking]
    assert {finding.verdict for finding in machine._kernels(CUDA)} == {"warning"}
    assert list(machine._kernels(torch.device("cpu"))) == []
