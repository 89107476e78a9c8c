"""New weights for a transformers model that is in use."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import nn


@torch.no_grad()
def copy_weights(model: nn.Module, tensors: Iterable[tuple[str, np.ndarray]]) -> list[str]:
    """Copies arrays into the parameters of the same name, in place; says what was wrong, one sentence a fault.

    All parameters must arrive. Tied parameters (lm_head and the embedding) arrive under either name, or under both
    with equal values. After a fault the model holds a mixture and must not be used.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    arrived: set[int] = set()
    faults: list[str] = []
    for name, array in tensors:
        parameter = parameters.get(name)
        if parameter is None:
            faults.append(f"{name} is not a parameter of the model")
        elif tuple(array.shape) != tuple(parameter.shape):
            faults.append(f"{name} must have shape {tuple(parameter.shape)}, got {tuple(array.shape)}")
        else:
            tensor = torch.tensor(array).to(parameter)  # a copy: arrays from an object store are read-only
            if id(parameter) in arrived and not torch.equal(parameter, tensor):
                faults.append(f"{name} differs from the parameter that it is tied to")
            arrived.add(id(parameter))
            parameter.copy_(tensor)
    missing = [n for n, p in model.named_parameters() if id(p) not in arrived]
    return faults + [f"{name} did not arrive" for name in missing]
