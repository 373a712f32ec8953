"""LoRA: a low-rank change of the policy's linear layers, which alone is trained and published.

    y = W x + (alpha / r) B A x       W is frozen; A [r, in] starts random, B [out, r] at zero

The trainer's model has peft's layers in the place of its own; their tensors are all that the
optimiser changes, that travels and that a checkpoint must keep. A searcher has no such layers: it
adds the products to the weights of the reference, which are W, whenever adapters arrive
(`tba.engines.merging`), so it generates as fast as without them. peft is imported here alone, and
only where a trainer's model gets adapters.

Source: "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tba.config import Config, LoraConfig
from tba.errors import ConfigError
from tba.policy.loading import Policy, load_policy

_NAME = "default"
_A, _B = (f".lora_{factor}.{_NAME}.weight" for factor in "AB")
_IN_FILES = "base_model.model."
"""What peft puts before each name in its files."""


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that training changes, by name: the adapter's, or all."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def check_installed() -> None:
    """Refuse adapters where the package that makes them is missing.

    Raises:
        ConfigError: It is.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "model.lora is set, but the package peft is not installed: install the extra lora "
            "(pip install -c constraints.txt -e '.[lora]')"
        )


def load_trainable(
    initial: str, config: Config, *, device: torch.device, checkpoint: Path | None = None
) -> Policy:
    """Load the policy as it is trained: in float32, with adapters where there are to be any.

    Args:
        initial: Folder or hub name of the initial policy.
        config: The run's settings.
        device: Where it is put.
        checkpoint: Folder of a checkpoint whose weights it gets; none: the initial ones.

    Raises:
        UserError: The model cannot be loaded, or cannot have these adapters.
    """
    adapted = config.model.lora is not None
    source = initial if adapted or checkpoint is None else checkpoint / "policy"
    policy = load_policy(source, config.model, device=device, dtype=torch.float32)
    if config.model.lora is not None:
        add_adapter(policy.model, config.model.lora, config.seed)
        if checkpoint is not None:
            _restore(policy.model, checkpoint / "adapter")
    return policy


def add_adapter(model: PreTrainedModel, settings: LoraConfig, seed: int) -> None:
    """Freeze the model and give it adapters, in place; at first they change nothing.

    Raises:
        ConfigError: peft is missing, or `target_modules` names what is no linear layer.
    """
    check_installed()
    import peft

    targets = _targets(model, settings)
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=targets,
        fan_in_fan_out=any(_is_transposed(model, name) for name in targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.name_or_path,
    )
    # peft initialises from torch's global generator: borrow it, and put it back.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model, adapter_name=_NAME)


def is_adapted(model: PreTrainedModel) -> bool:
    """Return whether the model has adapters."""
    return hasattr(model, "peft_config")


def save_merged(model: PreTrainedModel, folder: Path) -> None:
    """Write the model as an ordinary Hugging Face folder, its adapters added to its weights."""
    if not is_adapted(model):
        model.save_pretrained(folder)
        return
    config = model.peft_config[_NAME]
    weights = model.state_dict()
    changes = list(changes_of(weights, config.lora_alpha / config.r, model, ".base_layer"))
    merged = {
        name.replace(".base_layer.", "."): weight
        for name, weight in weights.items()
        if not name.endswith((_A, _B))
    }
    merged |= {f"{change.layer}.weight": change.added() for change in changes}
    model.save_pretrained(folder, state_dict=merged)


def save_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write the adapters alone, as `peft.PeftModel.from_pretrained(base, folder)` reads them."""
    config = model.peft_config[_NAME]
    config.save_pretrained(folder)
    tensors = {
        _IN_FILES + name.replace(f".{_NAME}.", "."): weight.contiguous()
        for name, weight in trained_parameters(model).items()
    }
    safetensors.torch.save_file(
        tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"}
    )


@torch.no_grad()
def _restore(model: PreTrainedModel, folder: Path) -> None:
    saved = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    for name, weight in trained_parameters(model).items():
        weight.copy_(saved[_IN_FILES + name.replace(f".{_NAME}.", ".")])


def _targets(model: PreTrainedModel, settings: LoraConfig) -> list[str]:
    """Return the full names of the layers to adapt."""
    head = model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    ]
    if settings.target_modules == "all-linear":
        return linear
    found = {
        asked: [name for name in linear if f".{name}".endswith(f".{asked}")]
        for asked in settings.target_modules
    }
    if unknown := [asked for asked, names in found.items() if not names]:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise ConfigError(
            f"model.lora.target_modules names {unknown[0]}, but the linear layers of "
            f"{type(model).__name__} before its output layer are {known}: choose among these"
        )
    return list(dict.fromkeys(name for names in found.values() for name in names))


@dataclass(frozen=True, slots=True)
class Change:
    """What an adapter adds to one layer; all are live tensors."""

    layer: str
    """Name of the layer."""
    base: Tensor
    """W, [out, in]; transposed where the model keeps it so (GPT-2)."""
    down: Float[Tensor, "rank in"]
    """A."""
    up: Float[Tensor, "out rank"]
    """B."""
    scale: float
    """alpha / r."""
    transposed: bool
    """Whether W is kept as [in, out]."""

    @torch.no_grad()
    def added(self) -> Tensor:
        """Return W + scale B A, in float32, as the model keeps W."""
        left, right = (self.down.T, self.up.T) if self.transposed else (self.up, self.down)
        return torch.addmm(self.base.float(), left.float(), right.float(), alpha=self.scale)


def changes_of(
    tensors: Mapping[str, Tensor], scale: float, base: PreTrainedModel, inner: str = ""
) -> Iterator[Change]:
    """Yield what adapter tensors add to the layers of a model.

    Args:
        tensors: Those of the adapter by name; others are passed over.
        scale: alpha / r.
        base: Has the frozen weights.
        inner: Name of the layer with the frozen weight, within the one that is adapted.
    """
    for name, down in tensors.items():
        if name.endswith(_A):
            layer = name.removesuffix(_A)
            yield Change(
                layer,
                base.get_parameter(f"{layer}{inner}.weight"),
                down,
                tensors[layer + _B],
                scale,
                _is_transposed(base, layer + inner),
            )


def _is_transposed(model: PreTrainedModel, layer: str) -> bool:
    return isinstance(model.get_submodule(layer), Conv1D)
