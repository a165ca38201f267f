"""The tensors of a checkpoint by name."""

from __future__ import annotations

import torch


class Tensors(dict[str, torch.Tensor]):
    """Tensors by name, in the order of their files; short to print."""

    def __repr__(self) -> str:
        return f"<{len(self)} tensors, {sum(each.numel() for each in self.values())} elements>"
