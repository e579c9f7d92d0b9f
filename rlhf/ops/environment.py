"""What a run ran on: versions, device, threads. No names of people, hosts or folders."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = ("prefloop", "torch", "transformers", "trl", "peft", "accelerate", "deepspeed", "bitsandbytes", "datasets")


def environment() -> dict[str, object]:
    """Versions of what computes, and the devices it computes on."""
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}",
            "packages": {name: _version(name) for name in PACKAGES},
            "devices": devices or ["cpu"], "threads": torch.get_num_threads()}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
