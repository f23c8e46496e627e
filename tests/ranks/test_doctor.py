"""The doctor: a complete report, valid JSON, faked GPUs, and a failure that is reported rather than raised."""

from __future__ import annotations

import json

import torch

from isotron.train import doctor


def test_json_and_table(capsys):
    assert doctor.run(json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["torch"] == torch.__version__
    assert report["devices"][0]["dtypes"]["bfloat16"] == "native"
    assert report["collectives"]["bytes_per_s"] > 1e6 and 0 < report["collectives"]["latency_s"] < 5
    assert report["disk"]["free_bytes"] > 0
    versions = {row["name"]: row["version"] for row in report["packages"]}
    assert versions["safetensors"] and "flash-attn" in versions


def test_table_names_what_is_there(capsys, monkeypatch):
    broken = {"backend": "gloo", "processes": 2, "error": "rank 1 died", "latency_s": None, "bytes_per_s": None}
    monkeypatch.setattr(doctor, "collectives", lambda: broken)
    assert doctor.run() == 1
    out = capsys.readouterr().out
    own = [line for line in out.splitlines() if "disk at" not in line and "isotron" not in line]
    assert max(map(len, own)) <= 80 and "  bfloat16            yes\n" in out
    assert "safetensors" in out and "FAILED" in out and "rank 1 died" in out and "GiB free" in out


def test_faked_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: type("P", (), {"total_memory": 16}))
    found = doctor.devices()
    assert [row["device"] for row in found] == ["cpu", "cuda:0", "cuda:1"]
    assert found[1]["generation"] == "Turing" and found[1]["dtypes"]["bfloat16"] == "refused"
    assert found[1]["backend"] == "nccl" and found[1]["peak_flops"]["float16"] == 65e12


def test_processes_that_cannot_talk(monkeypatch):
    def fail(self, fn, *args, timeout):
        raise RuntimeError("rank 0: no loopback")

    monkeypatch.setattr(doctor.Pool, "run", fail)
    assert doctor.collectives()["error"] == "rank 0: no loopback"
