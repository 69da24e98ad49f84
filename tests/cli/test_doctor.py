"""What `fastfact doctor` says of a machine that lacks something."""

import importlib.util
import json
import pwd

import pytest
import torch
from calls import call

from fastfact.base import machine
from fastfact.cli import doctor
from fastfact.ops.backends import Backend


def found(part):
    return next(finding for finding in doctor.examine() if finding.part == part)


def test_doctor_here(tmp_path):
    code, out, err = call("doctor", "--json", tmp_path / "d.json")
    assert code == 0, out + err
    findings = json.loads((tmp_path / "d.json").read_text())["findings"]
    assert {"PyTorch", "CPU kernels", "C++ compiler", "GPU", "measured choices"} <= {row["part"] for row in findings}
    for row in findings:
        assert row["part"] in out and bool(row["cost"]) == (row["state"] != doctor.RIGHT)


def test_kernels_that_are_not_built(monkeypatch):
    why = "not built: no fastfact/_cpu*.so beside the package; with a C++ compiler …"
    monkeypatch.setattr(doctor, "backends", lambda: dict.fromkeys(("cpu", "cuda", "triton"), Backend(False, why)))
    finding = found("CPU kernels")
    assert finding.state == doctor.WRONG and "2 to 6 times" in finding.cost and "FASTFACT_BUILD=must" in finding.mend
    code, out, _ = call("doctor")
    assert code == 1 and "WRONG" in out and "FASTFACT_BUILD=must" in out


def test_what_was_built_for_another_pytorch(monkeypatch):
    monkeypatch.setattr(doctor, "module_file", lambda: None)
    finding = found("calls of layers")
    assert finding.state == doctor.ABSENT and torch.__version__ in finding.detail and "build_ext" in finding.mend


def test_no_compiler(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/apt-get" if name == "apt-get" else None)
    finding = found("C++ compiler")
    assert finding.state == doctor.ABSENT and finding.mend == "apt-get install g++"
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert not found("C++ compiler").mend


def test_no_ninja(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/g++" if name == "g++" else None)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert found("C++ compiler").mend.endswith("pip install ninja")


@pytest.mark.parametrize("extra", doctor.EXTRAS)
def test_extras_that_are_missing(monkeypatch, extra):
    module = doctor.EXTRAS[extra][0]
    find = importlib.util.find_spec
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == module else find(name))
    finding = found(module.replace("_", "-"))
    assert finding.state == doctor.ABSENT and f"[{extra}]'" in finding.mend and finding.cost


def test_a_gpu_without_kernels(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a device")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    absent = Backend(False, "not built: no fastfact/_cuda*.so beside the package")
    there = {"cpu": Backend(True, "_cpu.so"), "cuda": absent, "triton": Backend(False, "No module named 'triton'")}
    monkeypatch.setattr(doctor, "backends", lambda: there)
    assert found("GPU").detail == "a device" and found("CUDA kernels").state == doctor.WRONG
    assert found("Triton kernels").mend.endswith("pip install triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    assert found("GPU").state == doctor.WRONG and found("GPU").detail == "a device has compute capability 7.5"


def test_choices_that_cannot_be_kept(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASTFACT_CHOICE", str(tmp_path / "file" / "below"))
    assert found("measured choices").state == doctor.WRONG
    monkeypatch.setenv("FASTFACT_CHOICE", "")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    # A container that is run by any user id.
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    finding = found("measured choices")
    assert finding.state == doctor.WRONG and "there is no home directory" in finding.detail
    assert machine.remembered({"q": 1}, dict) is None and "cannot keep what was measured" in caplog.text
    monkeypatch.setenv("FASTFACT_CHOICE", "fixed")
    assert found("measured choices").mend == "unset FASTFACT_CHOICE"
