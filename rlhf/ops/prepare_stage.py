"""A stage that runs a Python script of the recipe: it makes data or a model in a folder that becomes visible when it is complete."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from rlhf.config import PrepareConfig
from rlhf.errors import ConfigError, DataError


def run_prepare(config: PrepareConfig, *, script: Path, folder: Path, console: Console) -> dict[str, Any]:
    """Call SCRIPT FOLDER --key value ...; its output goes to the console, its files into the stage's folder."""
    if not script.is_file():
        raise ConfigError(f"stage {config.name}: there is no script {script}; `script` is relative to the recipe")
    partial = folder / ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    options = [text for key, value in config.args.items() for text in (f"--{key}", str(value))]
    with subprocess.Popen([sys.executable, str(script), str(partial), *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, encoding="utf-8", errors="replace") as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                console.print(line.rstrip("\n"), markup=False, highlight=False)
        except BaseException:
            process.kill()    # an interrupt reaches this process alone; the script would go on writing
            raise
    if process.returncode != 0:
        raise DataError(f"stage {config.name}: {script.name} ended with exit code {process.returncode}; what it said is above. "
                        f"Call it by hand: python {script} FOLDER {' '.join(options)}")
    made = sorted(partial.iterdir())
    if not made:
        raise DataError(f"stage {config.name}: {script.name} ended without an error but wrote nothing into its folder")
    for item in made:
        remains = folder / item.name    # of an attempt that was killed here
        shutil.rmtree(remains, ignore_errors=True) if remains.is_dir() else remains.unlink(missing_ok=True)
        item.replace(remains)
    partial.rmdir()
    return {"made": [item.name for item in made]}
