"""The model as Transformers loads it, and a comparison of another model with it, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DeepseekV3ForCausalLM
from transformers.utils import logging

PROMPT_LENGTH = 96  # long enough that every expert of every layer is chosen for some token


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was compared, and the names of everything that is not equal bit for bit (or is on one side only)."""

    num_parameters: int
    num_buffers: int
    num_elements: int
    different_parameters: tuple[str, ...]
    different_buffers: tuple[str, ...]
    num_logits: int
    logits_are_equal: bool

    @property
    def is_equal(self) -> bool:
        return self.logits_are_equal and not self.different_parameters and not self.different_buffers


def load_reference(folder: Path, *, dtype: torch.dtype) -> DeepseekV3ForCausalLM:
    """Return the model that `from_pretrained` reads from `folder` as a model of `dtype`, in evaluation mode.

    Asserts that every parameter was read from the folder, and every tensor of it but the multi-token-prediction layers'.
    """
    with quiet_transformers():
        loaded: Any = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    model: DeepseekV3ForCausalLM = loaded[0].eval()
    found: dict[str, set[str]] = loaded[1]
    num_layers, num_drafts = model.config.num_hidden_layers, model.config.num_nextn_predict_layers
    drafts = tuple(f"model.layers.{layer}." for layer in range(num_layers, num_layers + num_drafts))
    unread = sorted(name for name in found["unexpected_keys"] if not name.startswith(drafts))
    assert not found["missing_keys"], f"from_pretrained found no tensor for {sorted(found['missing_keys'])}"
    assert not found["mismatched_keys"], f"from_pretrained found other shapes for {sorted(found['mismatched_keys'])}"
    assert not unread, f"from_pretrained did not read {unread}"
    return model


def compare_models(ours: nn.Module, reference: nn.Module) -> Comparison:
    """Compare every parameter and buffer by name, and the logits of one prompt."""
    parameters, buffers = dict(reference.named_parameters()), dict(reference.named_buffers())
    expected, found = logits_of(reference), logits_of(ours)
    return Comparison(
        num_parameters=len(parameters),
        num_buffers=len(buffers),
        num_elements=sum(tensor.numel() for tensor in (*parameters.values(), *buffers.values())),
        different_parameters=_different(ours.named_parameters(), parameters),
        different_buffers=_different(ours.named_buffers(), buffers),
        num_logits=expected.numel(),
        logits_are_equal=torch.equal(found, expected),
    )


def logits_of(model: nn.Module) -> torch.Tensor:
    """Return the logits of a fixed prompt, [1, PROMPT_LENGTH, vocabulary]."""
    vocab_size: Any = model.get_parameter("model.embed_tokens.weight").shape[0]
    prompt = (torch.arange(PROMPT_LENGTH) * 389 % vocab_size).unsqueeze(0)
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=prompt, use_cache=False).logits
    return logits


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the progress bar and the reports of Transformers inside the block."""
    verbosity, has_progress_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_progress_bar:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _different(ours: Iterable[tuple[str, torch.Tensor]], reference: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    found = dict(ours)
    names = dict.fromkeys((*reference, *found))
    return tuple(name for name in names if not _is_same(found.get(name), reference.get(name)))


def _is_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Say whether both are there with one shape, dtype and bytes: unlike torch.equal, NaN is itself and -0.0 is not 0.0."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_raw(one), _raw(other))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8)
