"""Character tokenizers that add a beginning-of-sequence token, with and without a chat template."""

import string

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHAT = (
    "<s>{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    tokens = ["<unk>", "</s>", "<s>", *string.printable]
    model = models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", bos_token="<s>"
    )


@pytest.fixture
def tokenizer():
    return build_tokenizer()


@pytest.fixture
def chat_tokenizer():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT
    return tokenizer
